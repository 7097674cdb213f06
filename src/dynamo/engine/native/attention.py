"""Attention: over a paged KV cache for a flat batch of prompt chunks and single tokens, and over whole texts.

The cache keeps keys and values in blocks of `block_size` tokens; `sequence` knows which sequence uses which block.

A step first writes the new keys and values to their slots. Then each part of the batch copies its sequences' blocks to
a staging area, where they lie in order, and attends there. Two rules keep it fast on a CPU: query heads that share a
KV head become rows of one matrix (`enable_gqa` would copy the cache for each of them), and no step allocates memory of
the cache's size. Views and masks do not depend on the layer and are made once per step.

**An answer must not depend on what else is in the batch**, nor on how its prompt was cut into chunks. Floating-point
sums depend on their order, and matrix kernels choose the order by the shapes they are given. In 32 bits they were found
to choose by the length of the sum and by whether there are fewer than four rows, but not by how many rows there are
beyond. So here

- a query attends to a number of keys that follows from its position alone (`key_span`; the surplus is masked):
  chunks are cut into tiles at the edges of spans, and single tokens are grouped by span;
- no matrix has a remainder of fewer than `MIN_ROWS` rows: it is filled up with zeros, or with rows of another part,
  and the results of these rows are dropped;
- no query sees what others have left in memory, masked or not: a value that has overflowed, times zero, is no number.
  So a block is zeroed when a sequence begins it (`KvCache.clear_begun`), and none is read before that.
"""

import itertools
import math
import mmap
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F

from dynamo.base import errors
from dynamo.engine.native.config import ModelConfig
from dynamo.engine.native.device_memory import DeviceBlocks
from dynamo.engine.native.sequence import Chunk

MIN_ROWS = 4
MIN_SPAN = 64
# How many keys of single tokens' sequences are copied at once: few enough to stay in the processor's cache.
STAGED_TOKENS = 4096
Allocate = Callable[[int], memoryview]  # number of bytes → memory


class KvCache:
    """Slot s of a layer holds one token: its key heads and then its value heads. Block b is slots b * block_size on."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: str,
        allocate: Allocate | None = None,
    ) -> None:
        """`allocate` returns zeroed memory that other engines can map. Raises ConfigError.

        On a CPU it is the cache; on a GPU blocks are copied there for other engines, and from there.
        """
        self.config, self.block_size = config, block_size
        self.dtype, self.device = dtype, device
        self._token_shape = 2 * config.num_kv_heads, config.head_dim
        self.device_blocks: DeviceBlocks | None = None  # those that are not in host memory
        shape = config.num_layers, num_blocks * block_size, *self._token_shape
        try:
            self.memory = (allocate or _allocate_private)(math.prod(shape) * dtype.itemsize)
            if device == "cpu":
                cache = torch.frombuffer(self.memory, dtype=dtype).view(shape)
            else:
                cache = torch.zeros(shape, dtype=dtype, device=device)
                self.device_blocks = DeviceBlocks(cache.unflatten(1, (num_blocks, block_size)))
        except (RuntimeError, OSError) as error:
            size = math.prod(shape) * dtype.itemsize / 2**30
            raise errors.ConfigError(
                f"a KV cache of {num_blocks} blocks takes {size:.1f} GiB, more than {device} has; ask for fewer"
            ) from error
        self._layers = cache.unbind()
        self._whole_blocks = cache.view(config.num_layers, num_blocks, -1)
        self._blocks = [layer.view(num_blocks, -1) for layer in self._layers]
        self._staging = self._blocks[0].new_empty(0)

    def write(self, layer: int, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Store kv [slots, 2 * KV heads, head_dim]."""
        self._layers[layer].index_copy_(0, slots, kv)

    def clear_begun(self, chunks: Sequence[Chunk]) -> None:
        """Zero the blocks that these chunks begin and do not fill, before the step writes to them."""
        size, begun = self.block_size, list[int]()
        for chunk in chunks:
            end = chunk.start + chunk.num_tokens
            if end % size and end - end % size >= chunk.start:
                begun.append(chunk.sequence.block_ids[end // size])
        if begun:
            self._whole_blocks.index_fill_(1, torch.tensor(begun, device=self.device), 0)

    def stage(self, num_blocks: int) -> torch.Tensor:
        """Return a buffer of `num_blocks` rows, one block each, to which blocks are copied. All callers share it."""
        width = self._blocks[0].shape[1]
        if len(self._staging) < num_blocks * width:
            self._staging = self._staging.new_empty(num_blocks * width)
        return self._staging[: num_blocks * width].view(num_blocks, width)

    def by_head(
        self, staged: torch.Tensor, num_sequences: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """View staged blocks of equally long sequences as keys and values, [sequences, heads, tokens, head_dim]."""
        keys, values = (
            staged.view(num_sequences, -1, *self._token_shape).transpose(1, 2).chunk(2, 1)
        )
        return keys, values

    def read(self, layer: int, blocks: torch.Tensor, staged: torch.Tensor) -> None:
        """Copy these blocks to the staging buffer."""
        torch.index_select(self._blocks[layer], 0, blocks, out=staged)

    def gather(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """Return copies of these blocks in memory of their own, one in each row."""
        return self._blocks[layer].index_select(0, blocks)


def _allocate_private(num_bytes: int) -> memoryview:
    """Allocate pages that the system provides when they are first written: torch would write all of them now."""
    return memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def key_span(position: int) -> int:
    """Return how many keys the query at this position attends to: position + 1, and up to 64 or a quarter more."""
    step = max(MIN_SPAN, 1 << max(0, position.bit_length() - 3))
    return (position // step + 1) * step


def padded_rows(num_rows: int) -> int:
    """Round up to a number of rows without a remainder that matrix kernels would compute in another order."""
    return -(-num_rows // MIN_ROWS) * MIN_ROWS


class DecodeGroup:
    """Sequences of one new token each, with the same span: rows first .. first + len(chunks) - 1 of the batch."""

    def __init__(self, cache: KvCache, chunks: Sequence[Chunk], first: int, span: int) -> None:
        self._cache, count = cache, len(chunks)
        config = cache.config
        self._rows = slice(first, first + count)
        self.end = padded_rows(first + count)
        self._group = config.num_heads // config.num_kv_heads
        shape = count, config.num_kv_heads, padded_rows(self._group), config.head_dim
        self._q = torch.zeros(shape, dtype=cache.dtype, device=cache.device)
        self._q_filled = self._q[:, :, : self._group]
        blocks = [block for chunk in chunks for block in _spanned_blocks(cache, chunk, span)]
        self._blocks = torch.tensor(blocks, device=cache.device)
        self._staged = cache.stage(len(blocks))
        keys, values = cache.by_head(self._staged, count)
        self._keys, self._values = keys[:, :, :span], values[:, :, :span]
        positions = torch.tensor([chunk.start for chunk in chunks], device=cache.device)
        self._mask = _mask(cache, positions, span).view(count, 1, 1, span)

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """Attend, and write the rows of this part to `out`; q and out are [rows, KV heads, group, head_dim]."""
        self._cache.read(layer, self._blocks, self._staged)
        self._q_filled.copy_(q[self._rows])
        attended = F.scaled_dot_product_attention(
            self._q, self._keys, self._values, attn_mask=self._mask
        )
        out[self._rows] = attended[:, :, : self._group]


class PrefillChunk:
    """Consecutive new tokens of one sequence, in tiles of equal span."""

    def __init__(self, cache: KvCache, chunk: Chunk, first: int) -> None:
        self._cache = cache
        start, end = chunk.start, chunk.start + chunk.num_tokens
        blocks = _spanned_blocks(cache, chunk, key_span(end - 1))
        self._blocks = torch.tensor(blocks, device=cache.device)
        self._staged = cache.stage(len(blocks))
        keys, values = cache.by_head(self._staged, 1)
        group = cache.config.num_heads // cache.config.num_kv_heads
        self._keys, self._values = (x.expand(group, -1, -1, -1) for x in (keys, values))
        self._tiles: list[tuple[int, int, torch.Tensor]] = []  # first row, count, mask
        while start < end:
            span = key_span(start)
            count = min(end, span) - start
            positions = torch.arange(start, start + padded_rows(count), device=cache.device)
            self._tiles.append((first, count, _mask(cache, positions, span)))
            first, start = first + count, start + count
        self.end = max(first + len(mask) for first, _, mask in self._tiles)

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """Attend tile by tile; as `DecodeGroup.attend`."""
        self._cache.read(layer, self._blocks, self._staged)
        for first, count, mask in self._tiles:
            num_rows, span = mask.shape
            attended = F.scaled_dot_product_attention(
                q[first : first + num_rows].permute(2, 1, 0, 3),
                self._keys[:, :, :span],
                self._values[:, :, :span],
                attn_mask=mask,
            )
            out[first : first + count] = attended[:, :, :count].permute(2, 1, 0, 3)


class PagedBatch:
    """A step's tokens in one flat batch, and which keys each attends to. Made once per step, used by every layer.

    Prefill chunks come first, so that the rows which fill up their last tile mostly belong to other chunks; then single
    tokens by span. Rows after the last token only fill up.
    """

    def __init__(self, cache: KvCache, chunks: Sequence[Chunk]) -> None:
        self._cache = cache
        order = sorted(range(len(chunks)), key=lambda i: _decode_span(chunks[i]))
        self.last_rows = [0] * len(chunks)  # where each chunk ends
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for i in order:
            chunk = chunks[i]
            chunk_positions = range(chunk.start, chunk.start + chunk.num_tokens)
            token_ids += chunk.sequence.token_ids[chunk_positions.start : chunk_positions.stop]
            positions += chunk_positions
            block_ids, size = chunk.sequence.block_ids, cache.block_size
            slots += [block_ids[p // size] * size + p % size for p in chunk_positions]
            self.last_rows[i] = len(positions) - 1
        self._parts = list(_parts(cache, [chunks[i] for i in order]))
        filling = [0] * (max(part.end for part in self._parts) - len(positions))
        self.token_ids = torch.tensor(token_ids + filling, device=cache.device)
        self.positions = torch.tensor(positions + filling, device=cache.device)
        self._slots = torch.tensor(slots, device=cache.device)
        config = cache.config
        shape = len(self.positions), config.num_kv_heads, -1, config.head_dim
        width = config.num_heads * config.head_dim
        self._flat = torch.zeros(shape[0], width, dtype=cache.dtype, device=cache.device)
        self._out = self._flat.view(shape)

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Store kv [rows, 2 * KV heads, head_dim], and let q [rows, heads, head_dim] attend.

        The returned tensor [rows, heads * head_dim] is valid until the next call.
        """
        self._cache.write(layer, self._slots, kv[: len(self._slots)])
        q = q.unflatten(1, self._out.shape[1:3])
        for part in self._parts:
            part.attend(layer, q, self._out)
        return self._flat


def _parts(cache: KvCache, chunks: Sequence[Chunk]) -> Iterator[PrefillChunk | DecodeGroup]:
    row = 0
    for span, group in itertools.groupby(chunks, key=_decode_span):
        grouped = list(group)
        max_chunks = max(1, STAGED_TOKENS // span) if span else 1
        for i in range(0, len(grouped), max_chunks):
            part = grouped[i : i + max_chunks]
            yield DecodeGroup(cache, part, row, span) if span else PrefillChunk(cache, part[0], row)
            row += sum(chunk.num_tokens for chunk in part)


def _decode_span(chunk: Chunk) -> int:
    """Return the span of a single token, or 0 for a prefill chunk."""
    return key_span(chunk.start) if chunk.num_tokens == 1 else 0


def _spanned_blocks(cache: KvCache, chunk: Chunk, span: int) -> list[int]:
    """Return the sequence's blocks up to the span: those that are written, filled up with its own first block."""
    num_blocks = -(-span // cache.block_size)
    num_written = -(-(chunk.start + chunk.num_tokens) // cache.block_size)
    blocks = chunk.sequence.block_ids[:num_written]
    return blocks + blocks[:1] * (num_blocks - len(blocks))


def _mask(cache: KvCache, positions: torch.Tensor, span: int) -> torch.Tensor:
    """Return [positions, span]: zero for keys up to each position, minus infinity beyond."""
    keys = torch.arange(span, device=cache.device)
    mask = torch.zeros(len(positions), span, dtype=cache.dtype, device=cache.device)
    return mask.masked_fill_(keys > positions.unsqueeze(1), -torch.inf)


class PackedTexts:
    """Texts that are computed at once and then forgotten, as embeddings are: no cache, no padding.

    The batch is flat, [tokens, hidden], one text after the other. Only attention looks at one text at a time; adjacent
    texts of equal length attend in one product, which is why the caller sorts texts by length.
    """

    def __init__(self, lengths: Sequence[int], *, is_causal: bool, device: str) -> None:
        """`lengths` are in tokens; with `is_causal` a token attends only to those before it."""
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
        self.text_of_token = torch.repeat_interleave(self.lengths)
        self.positions = torch.arange(first, device=device) - self.first_rows[self.text_of_token]

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Let q [tokens, heads, head_dim] attend to kv [tokens, 2 * KV heads, head_dim].

        Returns [tokens, heads * head_dim].
        """
        del layer
        return self.attend_near(q, kv, reach=None)

    def attend_near(self, q: torch.Tensor, kv: torch.Tensor, *, reach: int | None) -> torch.Tensor:
        """Attend as `attend`, to tokens that are at most `reach` positions away; None: to all."""
        keys, values = kv.chunk(2, 1)
        output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for rows, count in self._groups:
            length = (rows.stop - rows.start) // count
            is_cut = reach is not None and length > reach + 1
            attended = F.scaled_dot_product_attention(
                _by_text(q[rows], count),
                _by_text(keys[rows], count),
                _by_text(values[rows], count),
                attn_mask=_band(length, reach, q.device) if is_cut and reach is not None else None,
                is_causal=self._is_causal,
                enable_gqa=q.shape[1] != keys.shape[1],
            )
            output[rows] = attended.transpose(1, 2).flatten(0, 1)
        return output.flatten(1)


def _band(length: int, reach: int, device: torch.device) -> torch.Tensor:
    """Return which keys each query may attend to, bool [length, length]: those at most `reach` away."""
    positions = torch.arange(length, device=device)
    return (positions[:, None] - positions).abs_() <= reach


def _by_text(x: torch.Tensor, count: int) -> torch.Tensor:
    """Reshape [tokens, heads, head_dim] of `count` equally long texts to [texts, heads, tokens of one, head_dim]."""
    return x.unflatten(0, (count, -1)).transpose(1, 2)
