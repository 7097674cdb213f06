"""Steps that only decode, as CUDA graphs: to start the hundreds of kernels of a step takes longer than they run.

A graph is captured when the first step of its shape comes: so many sequences with so many keys, both rounded up to
powers of two. It reads its inputs from one tensor that stays where it is. Rows that fill up repeat the first sequence,
so they write the same keys and values to the same slot.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from dynamo.engine.native.attention import MIN_SPAN, KvCache
from dynamo.engine.native.models import Decoder
from dynamo.engine.native.sequence import Chunk

# keys and values of all sequences in one layer; larger steps run without a graph
_MAX_GATHERED_BYTES = 2**28
_NUM_WARM_UPS = 2  # which let libraries allocate what they keep


class Shape(NamedTuple):
    """The size of the batches that one captured graph computes."""

    num_rows: int
    span: int  # keys of each row


class FixedBatch:
    """A batch of one new token each, whose inputs are changed in place; a `models.AttentionBatch`."""

    def __init__(self, cache: KvCache, shape: Shape) -> None:
        self._cache, self._span = cache, shape.span
        self._blocks_per_row = -(-shape.span // cache.block_size)
        size = shape.num_rows, 3 + self._blocks_per_row
        self._inputs = torch.zeros(size, dtype=torch.int64, device=cache.device)
        self._all_keys = torch.arange(shape.span, device=cache.device)

    def fill(self, chunks: Sequence[Chunk]) -> None:
        """Set token, position, slot and blocks of each row."""
        rows = [self._row_of(chunk) for chunk in chunks]
        rows += rows[:1] * (len(self._inputs) - len(rows))
        self._inputs.copy_(torch.tensor(rows))

    def begin(self) -> None:
        """Derive from the inputs what all layers use. Called at the beginning of the graph."""
        self.token_ids, self.positions, self._slots = (self._inputs[:, i].clone() for i in range(3))
        self._blocks = self._inputs[:, 3:].flatten()
        is_later = self._all_keys > self.positions.unsqueeze(1)
        mask = torch.zeros(is_later.shape, dtype=self._cache.dtype, device=self._cache.device)
        self._mask = mask.masked_fill(is_later, -torch.inf).view(-1, 1, 1, self._span)

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Store kv, and let q attend; see `models.AttentionBatch`."""
        self._cache.write(layer, self._slots, kv)
        num_rows, num_kv_heads = len(q), kv.shape[1] // 2
        gathered = self._cache.gather(layer, self._blocks)
        keys, values = self._cache.by_head(gathered, num_rows)
        attended = F.scaled_dot_product_attention(
            q.unflatten(1, (num_kv_heads, -1)),
            keys[:, :, : self._span],
            values[:, :, : self._span],
            attn_mask=self._mask,
        )
        return attended.reshape(num_rows, -1)

    def _row_of(self, chunk: Chunk) -> list[int]:
        position, size = chunk.start, self._cache.block_size
        blocks = chunk.sequence.block_ids[: position // size + 1]  # those that are written
        slot = blocks[position // size] * size + position % size
        filling = blocks[:1] * (self._blocks_per_row - len(blocks))
        return [chunk.sequence.token_ids[position], position, slot, *blocks, *filling]


class DecodeGraphs:
    """The captured graphs of one model. Used by the engine's thread only."""

    def __init__(
        self, decoder: Decoder, cache: KvCache, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        """`cos` and `sin` are the tables of the rotary embedding."""
        self._decoder, self._cache, self._cos, self._sin = decoder, cache, cos, sin
        self._graphs: dict[Shape, tuple[FixedBatch, torch.cuda.CUDAGraph, torch.Tensor]] = {}
        token_bytes = 2 * cache.config.num_kv_heads * cache.config.head_dim * cache.dtype.itemsize
        self._max_keys = _MAX_GATHERED_BYTES // token_bytes  # of all rows

    def logits(self, chunks: Sequence[Chunk]) -> torch.Tensor | None:
        """Compute a step; return its logits [chunks, vocabulary], valid until the next call; None without a graph."""
        shape = choose_shape(chunks)
        if shape is None or shape.num_rows * shape.span > self._max_keys:
            return None
        if shape not in self._graphs:
            self._graphs[shape] = self._capture(shape, chunks)
        batch, graph, logits = self._graphs[shape]
        batch.fill(chunks)
        graph.replay()
        return logits[: len(chunks)]

    def _capture(
        self, shape: Shape, chunks: Sequence[Chunk]
    ) -> tuple[FixedBatch, torch.cuda.CUDAGraph, torch.Tensor]:
        batch = FixedBatch(self._cache, shape)
        batch.fill(chunks)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_NUM_WARM_UPS):
                self._compute(batch)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        pool = next((other.pool() for _, other, _ in self._graphs.values()), None)
        # other threads copy blocks and allocate memory meanwhile
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            logits = self._compute(batch)
        return batch, graph, logits

    def _compute(self, batch: FixedBatch) -> torch.Tensor:
        batch.begin()
        cos, sin = (table.index_select(0, batch.positions) for table in (self._cos, self._sin))
        hidden = self._decoder.hidden(batch.token_ids, cos, sin, batch)
        return self._decoder.logits(hidden).float()


def choose_shape(chunks: Sequence[Chunk]) -> Shape | None:
    """Return the shape for a step; None if it does more than to decode."""
    if not all(chunk.num_tokens == 1 and chunk.samples for chunk in chunks):
        return None
    if any(chunk.sequence.wants_prompt_logprobs for chunk in chunks):
        return None
    num_keys = max(chunk.start for chunk in chunks) + 1
    return Shape(_round_up(len(chunks)), max(MIN_SPAN, _round_up(num_keys)))


def _round_up(number: int) -> int:
    """Return the least power of two that is not less."""
    return 1 << (number - 1).bit_length()
