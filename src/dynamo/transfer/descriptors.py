"""Layouts, regions and metadata: what two processes must know of each other's memory before bytes can move.

A pool is one flat buffer. The part of a block that belongs to one layer is contiguous and the same at every worker of a
model: `block_size` tokens in order, each with its key heads and then its value heads. This is a *slab*. Each worker
decides where the slabs lie:

    layer_major   [layers, blocks, slab]: a tensor per layer, as in the native engine
    block_major   [blocks, layers, slab]: a block is one piece, as tiers of a cache like it

With tensor parallelism a rank holds an equal share of the heads, in order. Ranks of unequal counts share the heads in
which they overlap, and only these are moved (`plan`). Block size, dtype and model shape must be equal: to convert
them is to compute, and then the worker may as well prefill.
"""  # decider

import enum
from dataclasses import dataclass

import msgspec

from dynamo.base import errors
from dynamo.protocols import wire

METADATA_VERSION = 1
MAX_METADATA_BYTES = 16 * 1024  # NIXL's address names each network card of its host
_MAX = 2**32  # of any count in a layout; larger values are invalid
_BYTES_BY_DTYPE = {"float8_e4m3fn": 1, "float16": 2, "bfloat16": 2, "float32": 4}


class Order(enum.StrEnum):
    """The order of the slabs in a pool."""

    LAYER_MAJOR = "layer_major"
    BLOCK_MAJOR = "block_major"


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Where a pool keeps the keys and values of its blocks."""

    num_blocks: int
    block_size: int  # tokens
    num_layers: int
    num_kv_heads: int  # of the whole model, over all ranks
    head_dim: int
    dtype: str  # as torch names it: bfloat16
    order: Order = Order.LAYER_MAJOR
    tp_size: int = 1
    tp_rank: int = 0

    @property
    def heads(self) -> range:
        """The model's heads that this rank holds."""
        share = self.num_kv_heads // self.tp_size
        return range(self.tp_rank * share, (self.tp_rank + 1) * share)

    @property
    def head_bytes(self) -> int:
        """Size of one head of one token, keys or values."""
        return self.head_dim * _BYTES_BY_DTYPE[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Size of the keys and values of one token in one layer, at this rank."""
        return 2 * len(self.heads) * self.head_bytes

    @property
    def slab_bytes(self) -> int:
        """Size of a block's part in one layer."""
        return self.block_size * self.token_bytes

    @property
    def block_bytes(self) -> int:
        """Size of a block in all layers."""
        return self.num_layers * self.slab_bytes

    @property
    def num_bytes(self) -> int:
        """Size of the whole pool."""
        return self.num_blocks * self.block_bytes

    @property
    def layer_stride(self) -> int:
        """Bytes from a slab to that of the next layer."""
        num_between = self.num_blocks if self.order is Order.LAYER_MAJOR else 1
        return num_between * self.slab_bytes

    @property
    def block_stride(self) -> int:
        """Bytes from a slab to that of the next block."""
        return self.slab_bytes if self.order is Order.LAYER_MAJOR else self.block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Registered memory: `memory` is writable, contiguous bytes, at least as long as its layout says."""

    memory: memoryview
    layout: Layout


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """An agent's description of itself for other agents. Small, and without secrets."""

    version: int = METADATA_VERSION
    name: str
    epoch: str  # random, new with each start: a restarted worker of the same name is another agent
    host: str  # equal for processes that can share memory: boot id, user and network namespace
    layout: Layout
    addresses: dict[str, str]  # by backend


def encode(metadata: Metadata) -> bytes:
    return msgspec.msgpack.encode(metadata)


def decode(body: bytes) -> Metadata:
    """Decode metadata. Raises TransferError for another version, or a layout that is impossible."""
    if len(body) > MAX_METADATA_BYTES:
        raise errors.TransferError(
            f"expected metadata of at most {MAX_METADATA_BYTES} bytes, got {len(body)}"
        )
    try:
        metadata = msgspec.msgpack.decode(body, type=Metadata)
    except wire.DECODE_ERRORS as error:
        raise errors.TransferError(f"expected a transfer agent's metadata: {error}") from error
    if metadata.version != METADATA_VERSION:
        raise errors.TransferError(
            f"{metadata.name} speaks version {metadata.version} of the transfer protocol, we speak {METADATA_VERSION}"
        )
    if fault := find_fault(metadata.layout):
        raise errors.TransferError(f"{metadata.name} has an impossible layout: {fault}")
    return metadata


def find_fault(layout: Layout) -> str | None:
    """Return a description of what is wrong with a layout; None if it is possible."""
    for name in ("num_blocks", "block_size", "num_layers", "num_kv_heads", "head_dim", "tp_size"):
        if not 0 < getattr(layout, name) < _MAX:
            return f"{name} is {getattr(layout, name)}"
    if layout.dtype not in _BYTES_BY_DTYPE:
        return f"dtype is {layout.dtype}, expected one of {', '.join(_BYTES_BY_DTYPE)}"
    if layout.num_kv_heads % layout.tp_size:
        return f"{layout.num_kv_heads} heads cannot be shared equally by {layout.tp_size} ranks"
    if not 0 <= layout.tp_rank < layout.tp_size:
        return f"tp_rank is {layout.tp_rank} of {layout.tp_size}"
    return None


def choose_backend(local: Metadata, peer: Metadata) -> str:
    """Return the best backend that reaches the peer. Raises TransferError if there is none.

    That is local within a process, shm on one host, else NIXL or TCP. NIXL goes before TCP because it must be
    requested: then the network supports it. Local addresses begin with the id of their process.
    """
    if _process(local) is not None and _process(local) == _process(peer):
        return "local"
    shared = local.addresses.keys() & peer.addresses.keys()
    if "shm" in shared and local.host == peer.host:
        return "shm"
    for name in ("nixl", "tcp"):
        if name in shared:
            return name
    raise errors.TransferError(
        f"no way to {peer.name}: it offers {', '.join(sorted(peer.addresses)) or 'nothing'}"
        f" {'on this host' if local.host == peer.host else 'on another host'}, we have"
        f" {', '.join(sorted(local.addresses)) or 'nothing'}; let both have tcp"
    )


def _process(metadata: Metadata) -> str | None:
    address = metadata.addresses.get("local")
    return address and address.partition("/")[0]
