"""The plan of a transfer: from two layouts and two lists of blocks to contiguous copies, neighbours merged.

Few long copies are what makes a transfer fast, so blocks that follow one another on both sides are found first, as
*runs*; a run is then one copy where both pools keep blocks whole, one per layer where both keep layers whole, and one
per slab otherwise. Runs are made at once, pieces as they are used: a thousand scattered blocks of a large model are
tens of thousands of pieces, and the planning caller should not wait for them.

Ranks of unequal tensor parallelism share only some heads. Heads lie innermost but one, so then every token of every
slab is two pieces, keys and values. It is the price of unequal sizes, and still far below that of computing.
"""  # decider

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dynamo.base import errors
from dynamo.transfer.descriptors import Layout, Order

Piece = tuple[int, int, int]
"""One contiguous copy: where it begins in the local and in the remote pool, and how many bytes."""
Origin = tuple[int, int]
"""A place in the local pool and one in the remote."""


class Pattern(NamedTuple):
    """The copies of a transfer: the pieces of `stencil` from each of `origins`."""

    origins: Sequence[Origin]
    stencil: Sequence[Piece]

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces one by one; their order has no meaning."""
        for local_origin, remote_origin in self.origins:
            for local, remote, length in self.stencil:
                yield local_origin + local, remote_origin + remote, length

    def turned(self) -> "Pattern":
        """Return the pattern with the two pools swapped."""
        return Pattern(
            [(remote, local) for local, remote in self.origins],
            [(remote, local, length) for local, remote, length in self.stencil],
        )


class Run(NamedTuple):
    """Blocks that follow one another in both pools."""

    local: int
    remote: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All copies of one transfer, before they are laid out."""

    local: Layout
    remote: Layout
    heads: range  # the shared ones
    runs: tuple[Run, ...]

    @property
    def num_blocks(self) -> int:
        return sum(run.num_blocks for run in self.runs)

    @property
    def num_bytes(self) -> int:
        per_token = 2 * len(self.heads) * self.local.head_bytes
        return self.num_blocks * self.local.num_layers * self.local.block_size * per_token

    @property
    def num_pieces(self) -> int:
        """Pieces in the `pattern`."""
        num_layers, num_slabs = self.local.num_layers, self.num_blocks * self.local.num_layers
        if self._is_split:
            return 2 * num_slabs * self.local.block_size
        if self._has_order(Order.BLOCK_MAJOR):
            return len(self.runs)
        return len(self.runs) * num_layers if self._has_order(Order.LAYER_MAJOR) else num_slabs

    def pattern(self) -> Pattern:
        """Return the pattern of pieces; in most plans the stencil is one layer, repeated for each."""
        if self._is_split:
            slabs = self._run_pieces(self._single_blocks(), self.local.slab_bytes)
            by_layer = Pattern(self._layer_origins(), slabs).pieces()
            return Pattern([(local, remote) for local, remote, _ in by_layer], self._head_pieces())
        if self._has_order(Order.BLOCK_MAJOR):
            return Pattern([(0, 0)], self._run_pieces(self.runs, self.local.block_bytes))
        can_join = self._has_order(Order.LAYER_MAJOR)
        runs = self.runs if can_join else self._single_blocks()
        return Pattern(self._layer_origins(), self._run_pieces(runs, self.local.slab_bytes))

    @property
    def _is_split(self) -> bool:
        return self.local.heads != self.remote.heads

    def _has_order(self, order: Order) -> bool:
        return self.local.order is order and self.remote.order is order

    def _single_blocks(self) -> Iterator[Run]:
        for local, remote, num_blocks in self.runs:
            for i in range(num_blocks):
                yield Run(local + i, remote + i, 1)

    def _run_pieces(self, runs: Iterable[Run], num_bytes: int) -> list[Piece]:
        """Return the pieces of the runs in the first layer, with `num_bytes` of each block."""
        local_stride, remote_stride = self.local.block_stride, self.remote.block_stride
        return [
            (local * local_stride, remote * remote_stride, num_blocks * num_bytes)
            for local, remote, num_blocks in runs
        ]

    def _head_pieces(self) -> list[Piece]:
        """Return the pieces of a slab: keys, then values, of the shared heads of each token."""
        length, first = len(self.heads) * self.local.head_bytes, self.heads.start
        offsets = zip(
            _head_offsets(self.local, first), _head_offsets(self.remote, first), strict=True
        )
        return [(local, remote, length) for local, remote in offsets]

    def _layer_origins(self) -> list[Origin]:
        return list(zip(_layer_offsets(self.local), _layer_offsets(self.remote), strict=True))


def make(
    local: Layout, remote: Layout, local_blocks: Sequence[int], remote_blocks: Sequence[int]
) -> Plan:
    """Plan the copy of each block to or from the one at the same position in the other list.

    Raises LocalProtocolError for lists of different length and blocks outside their pool, TransferError if the
    two ranks share no heads.
    """
    if len(local_blocks) != len(remote_blocks):
        raise errors.LocalProtocolError(
            f"expected as many local blocks as remote ones, got {len(local_blocks)} and {len(remote_blocks)}"
        )
    _check_inside(local_blocks, local, "local")
    _check_inside(remote_blocks, remote, "remote")
    heads = range(
        max(local.heads.start, remote.heads.start), min(local.heads.stop, remote.heads.stop)
    )
    if not heads:
        raise errors.TransferError(
            f"rank {remote.tp_rank} of {remote.tp_size} has no heads of our rank {local.tp_rank} of {local.tp_size}"
        )
    return Plan(
        local=local, remote=remote, heads=heads, runs=tuple(merge(local_blocks, remote_blocks))
    )


def merge(local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> Iterator[Run]:
    """Yield pairs of blocks as runs, as few as possible without changing their order."""
    start, num_blocks = (0, 0), 0
    for pair in zip(local_blocks, remote_blocks, strict=True):
        if pair == (start[0] + num_blocks, start[1] + num_blocks):
            num_blocks += 1
            continue
        if num_blocks:
            yield Run(*start, num_blocks)
        start, num_blocks = pair, 1
    if num_blocks:
        yield Run(*start, num_blocks)


def check_fit(local: Layout, remote: Layout, peer: str) -> None:
    """Check that blocks of one layout are blocks of the other. Raises TransferError that names each difference."""
    names = ("dtype", "block_size", "num_layers", "num_kv_heads", "head_dim")
    differences = [
        f"{name} is {getattr(local, name)} here and {getattr(remote, name)} at {peer}"
        for name in names
        if getattr(local, name) != getattr(remote, name)
    ]
    if differences:
        raise errors.TransferError(f"the pools do not fit: {'; '.join(differences)}")


def _check_inside(blocks: Sequence[int], layout: Layout, side: str) -> None:
    if blocks and not (min(blocks) >= 0 and max(blocks) < layout.num_blocks):
        outside = next(block for block in blocks if not 0 <= block < layout.num_blocks)
        raise errors.LocalProtocolError(
            f"{side} block {outside} is outside its pool of {layout.num_blocks}"
        )


def _layer_offsets(layout: Layout) -> range:
    return range(0, layout.num_layers * layout.layer_stride, layout.layer_stride)


def _head_offsets(layout: Layout, first_head: int) -> Iterator[int]:
    """Return the offsets of keys and values from this head on in a slab, token by token."""
    before = (first_head - layout.heads.start) * layout.head_bytes
    half = layout.token_bytes // 2  # keys, then values
    return iter(range(before, before + layout.slab_bytes, half))
