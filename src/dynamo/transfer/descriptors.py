"""What two processes must know of each other's memory before bytes can move: layouts, regions, metadata.

A pool is one flat buffer. The part of a block that belongs to one layer is contiguous and the same at every worker of a
model: `block_size` tokens in order, each with its key heads and then its value heads. This is a *slab*:

    slab of block b in layer l = bytes [l * layer_stride + b * block_stride, + slab_bytes)

Where the slabs lie is each worker's own affair. The native engine has a tensor per layer (`layer_major`: neighbours in a
layer are adjacent); a tier of a cache keeps a block in one piece (`block_major`). Two strides say both.

With tensor parallelism a rank holds an equal share of the heads, in order. Ranks of unequal counts share the heads in
which they overlap, and only these are moved (`plan`). Block size, dtype and model shape must be equal: to convert them
is to compute, and whoever has to compute may as well prefill.
"""

from dataclasses import dataclass

import msgspec

from dynamo.base import errors

METADATA_VERSION = 1
MAX_METADATA_BYTES = 4096
_BYTES_BY_DTYPE = {"float8_e4m3fn": 1, "float16": 2, "bfloat16": 2, "float32": 4}


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a pool keeps the keys and values of its blocks. Strides are in bytes; make one by `layer_major` or `block_major`."""

    num_blocks: int
    block_size: int  # tokens
    num_layers: int
    num_kv_heads: int  # of the whole model, over all ranks
    head_dim: int
    dtype: str  # as torch names it: bfloat16
    layer_stride: int
    block_stride: int
    tp_size: int = 1
    tp_rank: int = 0

    @property
    def heads(self) -> range:
        """Which of the model's heads this rank holds."""
        share = self.num_kv_heads // self.tp_size
        return range(self.tp_rank * share, (self.tp_rank + 1) * share)

    @property
    def head_bytes(self) -> int:
        """One head of one token, keys or values."""
        return self.head_dim * _BYTES_BY_DTYPE[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in one layer, at this rank."""
        return 2 * len(self.heads) * self.head_bytes

    @property
    def slab_bytes(self) -> int:
        """A block's part in one layer."""
        return self.block_size * self.token_bytes

    @property
    def block_bytes(self) -> int:
        """A block in all layers."""
        return self.num_layers * self.slab_bytes

    @property
    def num_bytes(self) -> int:
        """The pool."""
        return self.num_blocks * self.block_bytes

    def slab_at(self, layer: int, block: int) -> int:
        """Its first byte's offset."""
        return layer * self.layer_stride + block * self.block_stride


def layer_major(
    *,
    num_blocks: int,
    block_size: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
    tp_size: int = 1,
    tp_rank: int = 0,
) -> Layout:
    """[layers, blocks, tokens, 2 * heads, head_dim], as the native engine has it. Raises ConfigError."""


def block_major(layout: Layout) -> Layout:
    """The same pool as [blocks, layers, ...]: each block in one piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Registered memory: `memory` is writable and contiguous, and at least as long as its layout says."""

    memory: memoryview
    layout: Layout


class Metadata(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an agent tells others of itself. Small, and without anything secret."""

    version: int = METADATA_VERSION
    name: str
    epoch: str  # random, new with each start: a restarted worker of the same name is another agent
    host: str  # who shares it can share memory: boot id, user and network namespace
    layout: Layout
    addresses: dict[str, str]  # by backend


def encode(metadata: Metadata) -> bytes:
    """As msgpack."""
    return msgspec.msgpack.encode(metadata)


def decode(body: bytes) -> Metadata:
    """Raises TransferError for anything that is not metadata of this version, with a layout that is possible."""
    raise errors.TransferError("not yet")
