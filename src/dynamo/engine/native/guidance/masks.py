"""From what grammars allow to logits: what may not come has none."""

from collections.abc import Mapping, Sequence

import torch

from dynamo.engine.native.sequence import Guide

_POWERS = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8)  # of the bits in a byte


def masked(
    logits: torch.Tensor, guides: Mapping[int, Guide], may_end: Sequence[bool]
) -> torch.Tensor:
    """A copy of logits [rows, vocabulary] in which, in each row that has a guide, only what it allows is finite."""
    size = logits.shape[1]
    words = -(-size // 32)  # the library writes 32 bits at a time
    bits = torch.zeros((len(guides), words * 4), dtype=torch.uint8)
    for row, guide, may in zip(bits, guides.values(), may_end, strict=True):
        guide.fill(memoryview(row.numpy()), may_end=may)
    bits = bits.to(logits.device).unsqueeze(-1)
    is_banned = ((bits & _POWERS.to(logits.device)) == 0).flatten(1)[:, :size]
    if len(guides) == len(logits):
        return logits.masked_fill(is_banned, -torch.inf)
    rows = torch.tensor(list(guides), device=logits.device)
    return logits.index_copy(0, rows, logits[rows].masked_fill_(is_banned, -torch.inf))
