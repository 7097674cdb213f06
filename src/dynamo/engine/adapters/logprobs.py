"""Log probabilities, from the shape that vLLM and TensorRT-LLM have in common: a map of token id to one, per token."""

from collections.abc import Iterable, Mapping
from typing import Any

from dynamo.protocols import generate

Alternatives = Mapping[int, Any]  # token id → what has `logprob` and `rank`


def each(
    steps: Iterable[Alternatives] | None, num_top: int | None
) -> tuple[generate.TokenLogprobs, ...] | None:
    """None if there are none, or nobody asked."""
    if steps is None or num_top is None:
        return None
    return tuple(_token(step, num_top) for step in steps)


def of(chosen: Any, alternatives: Alternatives, num_top: int) -> generate.TokenLogprobs:
    """The chosen one and the likeliest, best first."""
    ranked = sorted(alternatives.items(), key=lambda item: item[1].rank)[:num_top]
    top = tuple(generate.TopLogprob(token, one.logprob) for token, one in ranked)
    return generate.TokenLogprobs(chosen.logprob, top)


def _token(alternatives: Alternatives, num_top: int) -> generate.TokenLogprobs:
    """The chosen token stands before the likeliest ones."""
    return of(next(iter(alternatives.values())), alternatives, num_top)
