"""KV events: what a worker publishes about its KV blocks, so that routers know the prefixes that it holds, by tier.

A worker numbers the events of each of its data-parallel ranks from 0, without gaps. A subscriber that sees a gap, or
joins late, asks the worker for the missing events (`ReplayRequest`, at the endpoint `kv_events_replay`).
A block has two hashes: `block_hash` is the engine's own name of the block (used to find and remove it), `tokens_hash`
is the local hash of the block's tokens (`blocks.local_hashes`), by which prefixes are matched.
"""

from typing import NewType

import msgspec

# The memory that a block lies in. An open set: a subscriber accepts names that it does not know. Comments: what vLLM
# calls the tier (`medium`), and what Dynamo calls it.
Tier = NewType("Tier", str)
DEVICE = Tier("device")  # GPU; G1
HOST = Tier("host")  # CPU; G2
DISK = Tier("disk")  # DISK; G3
REMOTE = Tier("remote")  # REMOTE, an object store; G4
# no tier of a worker's own: the cache of another, which blocks were copied from
PEER = Tier("peer")
TIERS = (DEVICE, HOST, DISK, REMOTE)  # the usual ones, fastest first; all others follow by name


class StoredBlock(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A block that can now be reused."""

    block_hash: int
    tokens_hash: int


class Stored(msgspec.Struct, frozen=True, tag="stored", kw_only=True, omit_defaults=True):
    """Consecutive blocks became reusable in a tier; the first follows `parent_hash` (None: it begins a sequence)."""

    parent_hash: int | None
    blocks: tuple[StoredBlock, ...]
    tier: Tier = DEVICE


class Removed(msgspec.Struct, frozen=True, tag="removed", kw_only=True, omit_defaults=True):
    """Blocks were evicted from a tier."""

    block_hashes: tuple[int, ...]
    tier: Tier = DEVICE


class Cleared(msgspec.Struct, frozen=True, tag="cleared"):
    """The worker dropped all its blocks, in every tier."""


KvEvent = Stored | Removed | Cleared


class EventBatch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The events of one engine step of one rank; a batch without events is a heartbeat that carries the next number."""

    worker_id: int
    epoch: int  # one life of the worker process; the next one numbers its events from 0 again
    first_event_id: int
    events: tuple[KvEvent, ...] = ()
    dp_rank: int = 0


class Position(msgspec.Struct, frozen=True, array_like=True):
    """The next event that a subscriber expects from one rank of a worker."""

    epoch: int
    next_event_id: int


class ReplayRequest(msgspec.Struct, frozen=True):
    """Ask a worker for the events after these positions; for a rank without one, for all its blocks."""

    positions: dict[int, Position] = {}  # by dp_rank


class ReplayPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A piece of the answer to a `ReplayRequest`, for one rank.

    The pieces carry either the missing events, where the worker still has them, or all blocks that it holds now: then
    the first piece `begins_anew`. Only the last piece carries the `position` that the subscriber has reached.
    """

    dp_rank: int
    events: tuple[KvEvent, ...] = ()
    begins_anew: bool = False
    position: Position | None = None
