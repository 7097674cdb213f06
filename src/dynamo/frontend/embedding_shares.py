"""Who of several workers embeds which inputs of a request, and whether vectors can be as short as was asked."""

from collections.abc import Sequence

from dynamo.base import errors
from dynamo.protocols import model_card

MIN_SHARE_TOKENS = 512  # less is not worth a worker of its own


def deal(lengths: Sequence[int], num_workers: int) -> list[list[int]]:
    """Numbers of the inputs in each share, at most one share for each worker; of like work, as long inputs go first."""
    num_shares = max(1, min(num_workers, len(lengths), sum(lengths) // MIN_SHARE_TOKENS))
    longest_first = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    return [sorted(longest_first[first::num_shares]) for first in range(num_shares)]


def check_dimensions(asked: int | None, facts: model_card.EmbeddingFacts) -> None:
    """Raises InvalidRequest if the model makes no vectors of so many numbers."""
    if asked in (None, facts.dimensions) or (
        facts.can_shorten and asked in (facts.lengths or range(1, facts.dimensions))
    ):
        return
    if not facts.can_shorten:
        wanted = f"{facts.dimensions} or nothing, as this model's vectors cannot be shortened"
    elif facts.lengths:
        wanted = f"one of {', '.join(map(str, facts.lengths))}"
    else:
        wanted = f"from 1 to {facts.dimensions}"
    raise errors.InvalidRequest(f"dimensions: expected {wanted}, got {asked}", param="dimensions")
