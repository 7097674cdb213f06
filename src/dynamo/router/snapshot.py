"""The content of a prefix index as bytes: for a restarted router, or a replica that joins.

A snapshot has, for each rank of a worker, its blocks by tier and the position in its KV events up to which they are
known, so that the worker can replay the events since. Workers with engines that have block hashes of their own are left
out: without the map of these hashes, their next events could not be understood.
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


class BlockRun(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive blocks in one tier; `names` are their sequence hashes as little-endian u64."""

    tier: kv_events.Tier
    names: bytes


class RankSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of one rank of a worker, and the position of its next KV event."""

    instance_id: int
    dp_rank: int
    position: kv_events.Position
    runs: list[BlockRun]

    def restore(self, index: prefix_index.PrefixIndex) -> None:
        """Add the blocks to the index."""
        worker = api.Worker(self.instance_id, self.dp_rank)
        for run in self.runs:
            index.add_blocks(worker, run.tier, _unpack(run.names))


class _Snapshot(msgspec.Struct, frozen=True):
    version: int
    ranks: list[RankSnapshot]


def encode(
    index: prefix_index.PrefixIndex, positions: Mapping[api.Worker, kv_events.Position]
) -> bytes:
    """Encode the blocks of all workers that have a position."""
    runs: dict[api.Worker, list[BlockRun]] = {
        worker: [] for worker in positions if not index.has_engine_hashes(worker)
    }
    for worker, tier, names in index.cached_runs():
        if worker in runs:
            runs[worker].append(BlockRun(tier, _pack(names)))
    ranks = [RankSnapshot(*worker, positions[worker], runs[worker]) for worker in runs]
    return msgspec.msgpack.encode(_Snapshot(_VERSION, ranks))


def decode(saved: bytes) -> list[RankSnapshot]:
    """Decode what `encode` returned. Raises ConfigError."""
    try:
        snapshot = msgspec.msgpack.decode(saved, type=_Snapshot)
    except msgspec.DecodeError as error:
        raise errors.ConfigError(f"expected a snapshot of a prefix index: {error}") from error
    if snapshot.version != _VERSION:
        raise errors.ConfigError(
            f"expected a snapshot of version {_VERSION}, got {snapshot.version}: start without it"
        )
    if any(len(run.names) % _NAME_BYTES for rank in snapshot.ranks for run in rank.runs):
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
