"""What a prefix index knows, as bytes: for a router that starts anew, or a replica that joins.

A snapshot says of each rank of a worker what it holds and up to which of its events that is known, so that the
worker can tell what has happened since. Of engines with block names of their own it says nothing: what these
tell next could not be understood without the names.
"""

import sys
from array import array
from collections.abc import Mapping, Sequence

import msgspec

from dynamo.base import errors
from dynamo.protocols import kv_events
from dynamo.router import api, prefix_index

_VERSION = 1
_NAME_BYTES = 8


class Stretch(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive blocks in one tier; their names as little-endian u64."""

    tier: kv_events.Tier
    names: bytes


class RankSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """One rank of a worker."""

    instance_id: int
    dp_rank: int
    position: kv_events.Position
    held: list[Stretch]

    def restore(self, index: prefix_index.PrefixIndex) -> None:
        """Have the index know it."""
        worker = api.Worker(self.instance_id, self.dp_rank)
        for stretch in self.held:
            index.hold(worker, stretch.tier, _unpack(stretch.names))


class _Snapshot(msgspec.Struct, frozen=True):
    version: int
    ranks: list[RankSnapshot]


def encode(
    index: prefix_index.PrefixIndex, positions: Mapping[api.Worker, kv_events.Position]
) -> bytes:
    """What the index knows of the workers whose position is known."""
    held: dict[api.Worker, list[Stretch]] = {
        worker: [] for worker in positions if not index.is_foreign(worker)
    }
    for worker, tier, names in index.holdings():
        if worker in held:
            held[worker].append(Stretch(tier, _pack(names)))
    ranks = [RankSnapshot(*worker, positions[worker], held[worker]) for worker in held]
    return msgspec.msgpack.encode(_Snapshot(_VERSION, ranks))


def decode(saved: bytes) -> list[RankSnapshot]:
    """The inverse of `encode`. Raises ConfigError."""
    try:
        snapshot = msgspec.msgpack.decode(saved, type=_Snapshot)
    except msgspec.DecodeError as error:
        raise errors.ConfigError(f"expected a snapshot of a prefix index: {error}") from error
    if snapshot.version != _VERSION:
        raise errors.ConfigError(
            f"expected a snapshot of version {_VERSION}, got {snapshot.version}: start without it"
        )
    if any(len(held.names) % _NAME_BYTES for rank in snapshot.ranks for held in rank.held):
        raise errors.ConfigError(
            f"expected block names of {_NAME_BYTES} bytes in a snapshot: it is damaged, start without it"
        )
    return snapshot.ranks


def _pack(names: Sequence[int]) -> bytes:
    packed = array("Q", names)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpack(packed: bytes) -> list[int]:
    names = array("Q")
    names.frombytes(packed)
    if sys.byteorder == "big":
        names.byteswap()
    return names.tolist()
