"""The blocks of one cache tier below the engine's memory: slots, the index by content, users, and eviction.

A block of a tier is in one of these states:

    WRITING   a copy fills its slot: it cannot be found yet
    READY     it can be found, read, and evicted while nothing reads it
    DROPPED   it cannot be found any more; its slot is free as soon as no copy uses it

    reserve ──▶ WRITING ──confirm──▶ READY ──evict──▶ (the slot is free)
                   │                   │
                   └──────drop─────────┴──▶ DROPPED ──last copy ends──▶ (the slot is free)

Eviction takes the lowest priority, and of these the block that was used longest ago. A chain is touched from its end,
so that it loses its tail before its head. The tier knows slots and hashes, no bytes.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from dynamo.kvbm import pool as pools
from dynamo.protocols import kv_events

MAX_QUEUED = 4096  # blocks that wait to be copied to one tier


class CachedBlock(NamedTuple):
    """The content of a block, by its names (`protocols.blocks`)."""

    sequence_hash: int
    local_hash: int
    parent_hash: int | None


class SlotState(StrEnum):
    """A state of a block in a tier."""

    WRITING = "writing"
    READY = "ready"
    DROPPED = "dropped"


@dataclass(slots=True, eq=False)
class TierBlock:
    """A block in a slot of a tier. Only its tier changes it."""

    block: CachedBlock
    slot: int
    priority: int
    state: SlotState = SlotState.WRITING
    num_users: int = 1  # copies that read or write the slot
    was_read: bool = False


class Tier:
    """The slots of one tier. Mutable; one thread owns it."""

    def __init__(
        self,
        name: kv_events.Tier,
        num_slots: int,
        events: pools.EventLog,
        *,
        num_usable: int | None = None,
    ) -> None:
        """`events` is the log of the engine's own blocks too, so that routers see one order of events.

        Only the first `num_usable` slots are used until `add_slots` (None: all).
        """
        self.name = name
        self.num_slots = num_slots
        self.num_usable = num_slots if num_usable is None else num_usable
        self.num_evicted = 0
        self.num_evicted_unread = 0
        self.on_dropped: Callable[[int], None] = (
            _ignore  # called with the hash of each block that leaves
        )
        self._events = events
        self._free = list(range(self.num_usable - 1, -1, -1))
        self._by_hash: dict[int, TierBlock] = {}  # WRITING and READY
        self._idle: dict[
            int, OrderedDict[int, TierBlock]
        ] = {}  # by priority; used longest ago first

    @property
    def num_used(self) -> int:
        """Slots that hold something."""
        return self.num_usable - len(self._free)

    def __contains__(self, sequence_hash: int) -> bool:
        """Return whether the tier has this block, or is about to."""
        return sequence_hash in self._by_hash

    def find(self, sequence_hash: int) -> TierBlock | None:
        """Return the block if it can be read."""
        entry = self._by_hash.get(sequence_hash)
        return entry if entry is not None and entry.state is SlotState.READY else None

    def add_slots(self, num_slots: int) -> None:
        """Let more slots be used."""
        first = self.num_usable
        self.num_usable = min(first + num_slots, self.num_slots)
        self._free[:0] = range(self.num_usable - 1, first - 1, -1)

    def reserve(self, block: CachedBlock, priority: int) -> TierBlock | None:
        """Return a slot to copy a new block to; None if all are in use, or hold blocks of higher priority."""
        if not self._free and not self._evict(priority):
            return None
        reserved = TierBlock(block, self._free.pop(), priority)
        self._by_hash[block.sequence_hash] = reserved
        return reserved

    def restore(self, slots: Mapping[int, CachedBlock]) -> None:
        """Enter blocks that lie in these slots from an earlier run, used longest ago first."""
        self._free = [slot for slot in self._free if slot not in slots]
        for slot, block in slots.items():
            entered = self._by_hash[block.sequence_hash] = TierBlock(block, slot, priority=0)
            self.confirm(entered)

    def confirm(self, reserved: TierBlock) -> bool:
        """Make a block findable: its copy has ended well. Return False if it was dropped meanwhile."""
        is_kept = reserved.state is SlotState.WRITING
        if is_kept:
            reserved.state = SlotState.READY
            block = reserved.block
            stored = kv_events.StoredBlock(block.sequence_hash, block.local_hash)
            self._events.add_stored(stored, block.parent_hash, self.name)
        self.release(reserved)
        return is_kept

    def acquire(self, entry: TierBlock, *, is_read: bool = True) -> TierBlock:
        """Keep a block in its slot while a copy uses it; `release` follows. `is_read`: it is for a request."""
        if not entry.num_users:
            self._remove_idle(entry)
        entry.num_users += 1
        entry.was_read |= is_read
        return entry

    def release(self, used: TierBlock) -> None:
        """End a use of a block's slot."""
        used.num_users -= 1
        if used.num_users:
            return
        if used.state is SlotState.READY:
            self._idle.setdefault(used.priority, OrderedDict())[used.block.sequence_hash] = used
        else:
            self._free.append(used.slot)

    def drop(self, dropped: TierBlock) -> None:
        """Let nothing find this block any more: its copy has failed, or its content is wrong.

        Its users still release it.
        """
        if dropped.state is SlotState.DROPPED:
            return
        if dropped.state is SlotState.READY:
            self._events.add_removed(dropped.block.sequence_hash, self.name)
            if not dropped.num_users:
                self._remove_idle(dropped)
                self._free.append(dropped.slot)
        dropped.state = SlotState.DROPPED
        self.on_dropped(dropped.block.sequence_hash)
        del self._by_hash[dropped.block.sequence_hash]

    def touch(self, sequence_hashes: Iterable[int]) -> None:
        """Mark blocks as used now, in this order."""
        for sequence_hash in sequence_hashes:
            entry = self._by_hash.get(sequence_hash)
            if entry is not None and not entry.num_users:
                self._idle[entry.priority].move_to_end(sequence_hash)

    def clear(self) -> None:
        """Drop all blocks, without events: the caller records that everything is gone."""
        for entry in self._by_hash.values():
            entry.state = SlotState.DROPPED
            if not entry.num_users:
                self._free.append(entry.slot)
        self._by_hash.clear()
        self._idle.clear()

    def _evict(self, priority: int) -> bool:
        """Free the slot of the block that is worth least; return False if none of at most this priority is idle."""
        lowest = min((p for p, blocks in self._idle.items() if blocks), default=None)
        if lowest is None or lowest > priority:
            return False
        oldest = next(iter(self._idle[lowest].values()))
        self.num_evicted += 1
        self.num_evicted_unread += not oldest.was_read
        self.drop(oldest)
        return True

    def _remove_idle(self, entry: TierBlock) -> None:
        idle = self._idle[entry.priority]
        del idle[entry.block.sequence_hash]
        if not idle:
            del self._idle[entry.priority]


class OffloadQueue:
    """Blocks that wait to be copied to one tier: the highest priority first, then the one offered first."""

    def __init__(self) -> None:
        self._by_priority: dict[int, OrderedDict[int, CachedBlock]] = {}
        self._num_blocks = 0

    def __len__(self) -> int:
        """Return the number of blocks that wait."""
        return self._num_blocks

    def add(self, block: CachedBlock, priority: int) -> bool:
        """Add a block, once. Return False if the queue is full."""
        queue = self._by_priority.setdefault(priority, OrderedDict())
        if block.sequence_hash not in queue:
            if self._num_blocks >= MAX_QUEUED:
                return False
            queue[block.sequence_hash] = block
            self._num_blocks += 1
        return True

    def pop(self) -> tuple[CachedBlock, int] | None:
        """Remove and return the first block with its priority; None if there is none."""
        while self._by_priority:
            priority = max(self._by_priority)
            queue = self._by_priority[priority]
            if queue:
                self._num_blocks -= 1
                return queue.popitem(last=False)[1], priority
            del self._by_priority[priority]
        return None

    def clear(self) -> None:
        """Remove all blocks."""
        self._by_priority.clear()
        self._num_blocks = 0


def _ignore(sequence_hash: int) -> None:
    """Do nothing with the hash of a block that leaves."""
