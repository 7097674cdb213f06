"""Attention for texts that are computed at once and then forgotten: no cache, no padding.

A batch is flat, [tokens, hidden], one text after the other, so that matrix products compute nothing in vain. Only
attention looks at one text at a time; texts of equal length that stand beside each other attend in one product,
which is why batches are sorted by length.
"""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F


class Batch:
    """Texts of these lengths, in this order; `is_causal` if a token looks only at those before it."""

    def __init__(self, lengths: Sequence[int], *, is_causal: bool, device: str) -> None:
        self._is_causal = is_causal
        self._groups: list[tuple[slice, int]] = []  # rows, texts in them
        first = 0
        for length, group in itertools.groupby(lengths):
            count = len(list(group))
            self._groups.append((slice(first, first + count * length), count))
            first += count * length
        self.lengths = torch.tensor(lengths, device=device)
        ends = self.lengths.cumsum(0)
        self.first_rows, self.last_rows = ends - self.lengths, ends - 1
        self.owners = torch.repeat_interleave(self.lengths)  # token → text
        self.positions = torch.arange(first, device=device) - self.first_rows[self.owners]

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """q [tokens, heads, head_dim] and kv [tokens, 2 * KV heads, head_dim] to [tokens, heads * head_dim]."""
        del layer
        keys, values = kv.chunk(2, 1)
        found = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for rows, count in self._groups:
            attended = F.scaled_dot_product_attention(
                _by_text(q[rows], count),
                _by_text(keys[rows], count),
                _by_text(values[rows], count),
                is_causal=self._is_causal,
                enable_gqa=q.shape[1] != keys.shape[1],
            )
            found[rows] = attended.transpose(1, 2).flatten(0, 1)
        return found.flatten(1)


def _by_text(x: torch.Tensor, count: int) -> torch.Tensor:
    """[tokens, heads, head_dim] of `count` texts of equal length to [texts, heads, tokens of one, head_dim]."""
    return x.unflatten(0, (count, -1)).transpose(1, 2)
