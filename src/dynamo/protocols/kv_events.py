"""What a worker tells about its KV blocks, so that others know which prefixes it holds.

A worker numbers the events of each of its data-parallel ranks from 0, without holes; who sees a hole, or comes late,
asks the worker for what is missing (`ReplayRequest`, at the endpoint `kv_events_replay`).
Blocks are named twice: `block_hash` is the engine's own name (used to find and remove a block) and `tokens_hash` is the
local hash of the block's tokens (`blocks.local_hashes`), by which prefixes are matched.
"""

from enum import StrEnum

import msgspec


class Tier(StrEnum):
    """Where a block lies."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class StoredBlock(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A block that can now be reused."""

    block_hash: int
    tokens_hash: int


class Stored(msgspec.Struct, frozen=True, tag="stored", kw_only=True, omit_defaults=True):
    """Consecutive blocks were filled; the first follows `parent_hash` (None: it begins a sequence)."""

    parent_hash: int | None
    blocks: tuple[StoredBlock, ...]
    tier: Tier = Tier.DEVICE


class Removed(msgspec.Struct, frozen=True, tag="removed", kw_only=True, omit_defaults=True):
    """Blocks were evicted."""

    block_hashes: tuple[int, ...]
    tier: Tier = Tier.DEVICE


class Cleared(msgspec.Struct, frozen=True, tag="cleared"):
    """All blocks of the worker are gone."""


KvEvent = Stored | Removed | Cleared


class EventBatch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The events of one engine step of one rank; without events, a sign of life that says where the numbers are."""

    worker_id: int
    epoch: int  # one life of the worker; numbers begin anew in the next
    first_event_id: int
    events: tuple[KvEvent, ...] = ()
    dp_rank: int = 0


class Position(msgspec.Struct, frozen=True, array_like=True):
    """How far somebody has heard a rank of a worker."""

    epoch: int
    next_event_id: int


class ReplayRequest(msgspec.Struct, frozen=True):
    """Tell me what I have not heard; of ranks that are not named, all that you hold."""

    positions: dict[int, Position] = {}  # by dp_rank


class ReplayPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A piece of the answer for one rank.

    Either the events that were missed, where the worker still has them; or all that it holds now: then the first piece
    `begins_anew`, and only the last says the `position` that is reached with it.
    """

    dp_rank: int
    events: tuple[KvEvent, ...] = ()
    begins_anew: bool = False
    position: Position | None = None
