"""The blocks of one cache tier below the engine's memory: slots, the index by content, users, and eviction.

A block of a tier is in one of these states:

    WRITING   a copy fills its slot: it cannot be found yet
    READY     it can be found, read, and evicted while nothing reads it
    DROPPED   it cannot be found any more; its slot is free as soon as no copy uses it

    reserve ──▶ WRITING ──confirm──▶ READY ──evict──▶ (the slot is free)
                   │                   │
                   └──────drop─────────┴──▶ DROPPED ──last copy ends──▶ (the slot is free)

Eviction takes the lowest priority, and of these the block that was used longest ago. A chain is touched from its end,
so that it loses its tail before its head. Blocks with a time to live are evicted after all others while it lasts, and
pinned ones not at all; at most half of the slots have one. The tier knows slots and hashes, no bytes.

A slot of an object store holds several blocks, a segment (`segments`): they have one state, and come and go together.
Each can be found by its own hash. Chains that part within a segment have their common blocks in several slots.
"""  # decider

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from dynamo.kvbm import pool as pools
from dynamo.protocols import generate, kv_events

MAX_QUEUED = 4096  # blocks that wait to be copied to one tier
PRIORITY_S = 600.0  # after a block's last use, its priority above 0 counts no more


class CachedBlock(NamedTuple):
    """The content of a block, by its names (`protocols.blocks`)."""

    sequence_hash: int
    local_hash: int
    parent_hash: int | None


Segment = tuple[CachedBlock, ...]
"""The blocks of one slot: consecutive ones of a chain, in its order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSlots:
    """The slots of a tier that this process writes, and what an earlier run has left in them, oldest first."""

    first: int = 0
    num: int
    segment_blocks: int = 1  # of each slot
    can_renumber: bool = False  # what is stored can be given other slots (`Storage.renumber`)
    stored: Mapping[int, Segment] = field(default_factory=dict)


class SharedChanges(NamedTuple):
    """What other processes have changed in a tier: blocks by slot. `removed` comes before `stored`."""

    stored: dict[int, CachedBlock]
    removed: list[int]
    is_cleared: bool  # before that: no block of any process is left


class SlotState(StrEnum):
    """A state of a block in a tier."""

    WRITING = "writing"
    READY = "ready"
    DROPPED = "dropped"


@dataclass(slots=True, eq=False)
class TierBlock:
    """The block or segment in a slot of a tier. Only its tier changes it."""

    segment: Segment
    slot: int
    priority: int
    state: SlotState = SlotState.WRITING
    num_users: int = 1  # copies that read or write the slot
    was_read: bool = False
    is_foreign: bool = False  # another process owns the slot
    used_at: float = 0.0
    ttl_s: int = 0  # after `used_at`
    is_pinned: bool = False
    is_memory_only: bool = False
    ends_segment: bool = False  # of the tier below

    @property
    def block(self) -> CachedBlock:
        """The last block, whose hash names the blocks before it as well."""
        return self.segment[-1]

    @property
    def hint(self) -> generate.CacheHint | None:
        """The hint that a copy of this block in another tier inherits."""
        if not self.ttl_s:
            return None
        return generate.CacheHint(ttl_s=self.ttl_s, is_pinned=self.is_pinned)

    @property
    def group(self) -> tuple[int, int, bool]:
        """The blocks that are evicted in the order of their last use."""
        return self.priority, self.ttl_s, self.is_pinned


class Tier:
    """The slots of one tier. Mutable; one thread owns it."""

    def __init__(
        self,
        name: kv_events.Tier,
        num_slots: int,
        events: pools.EventLog,
        *,
        first_slot: int = 0,
        num_usable: int | None = None,
        segment_blocks: int = 1,
    ) -> None:
        """`events` is the log of the engine's own blocks too, so that routers see one order of events.

        Only the first `num_usable` slots are used until `add_slots` (None: all). The first one is `first_slot`.
        Each holds `segment_blocks` blocks.
        """
        self.name = name
        self.num_slots = num_slots
        self.segment_blocks = segment_blocks
        self._first_slot = first_slot
        # By hash: blocks that other processes have stored, one entry for each slot.
        self._foreign: dict[int, list[TierBlock]] = {}
        self._foreign_slots: dict[int, TierBlock] = {}
        self.num_usable = num_slots if num_usable is None else num_usable
        self.now = 0.0  # seconds of a clock that only goes forward; set by the owner
        self.num_kept = 0  # blocks with a time to live, also if it has ended
        self.num_hints_refused = 0
        self.num_evicted = 0  # blocks
        # of these: that no request has read, and the tier below has not
        self.num_evicted_unread = 0
        self.is_below: Callable[[int], bool] = lambda _: False  # set by the owner of both tiers
        # called with the hash of each block that leaves
        self.on_dropped: Callable[[int], None] = _ignore
        self._events = events
        self._free = list(range(first_slot + self.num_usable - 1, first_slot - 1, -1))
        self._restored: frozenset[int] = frozenset()
        self._by_hash: dict[int, TierBlock] = {}  # WRITING and READY, by the last block
        self._by_inner: dict[int, list[TierBlock]] = {}  # the same, by the other blocks of segments
        # by group; used longest ago first
        self._idle: dict[tuple[int, int, bool], OrderedDict[int, TierBlock]] = {}

    @property
    def num_used(self) -> int:
        """Slots that hold something, or are about to."""
        return len(self._by_hash)

    def __contains__(self, sequence_hash: int) -> bool:
        """Return whether the tier has this block as the last one of a slot, or is about to."""
        return sequence_hash in self._by_hash or sequence_hash in self._foreign

    def find(self, sequence_hash: int) -> TierBlock | None:
        """Return the block, or a segment with it, if it can be read."""
        entry = self._by_hash.get(sequence_hash)
        if entry is not None and entry.state is SlotState.READY:
            return entry
        for entry in self._by_inner.get(sequence_hash, ()):
            if entry.state is SlotState.READY:
                return entry
        return next(iter(self._foreign.get(sequence_hash, ())), None)

    def add_slots(self, num_slots: int) -> None:
        """Let more slots be used."""
        first = self._first_slot + self.num_usable
        self.num_usable = min(self.num_usable + num_slots, self.num_slots)
        added = range(self._first_slot + self.num_usable - 1, first - 1, -1)
        self._free[:0] = [slot for slot in added if slot not in self._restored]

    def reserve(
        self,
        segment: Segment,
        priority: int,
        hint: generate.CacheHint | None = None,
        *,
        ends_segment: bool = False,
    ) -> TierBlock | None:
        """Return a slot to copy new blocks to; None if all are in use, or hold blocks of higher priority.

        `ends_segment`: the block is the last one of a segment of the tier below.
        """
        if not self._free and not self._evict(priority):
            return None
        slot = self._free.pop()
        reserved = TierBlock(segment, slot, priority, used_at=self.now, ends_segment=ends_segment)
        self._enter(reserved)
        self.keep(reserved.block.sequence_hash, hint)
        return reserved

    def restore(self, slots: Mapping[int, Segment]) -> None:
        """Enter blocks that lie in these slots from an earlier run, used longest ago first."""
        self._free = [slot for slot in self._free if slot not in slots]
        self._restored = frozenset(slots)
        for slot, segment in slots.items():
            entered = TierBlock(segment, slot, priority=0)
            self._enter(entered)
            self.confirm(entered)

    def confirm(self, reserved: TierBlock) -> bool:
        """Make a block findable: its copy has ended well. Return False if it was dropped meanwhile."""
        is_kept = reserved.state is SlotState.WRITING
        if is_kept:
            added = [block for block in reserved.segment if self.find(block.sequence_hash) is None]
            reserved.state = SlotState.READY
            for block in added:
                self._record_stored(block)
        self.release(reserved)
        return is_kept

    def acquire(self, entry: TierBlock, *, is_read: bool = True) -> TierBlock:
        """Keep a block in its slot while a copy uses it; `release` follows. `is_read`: it is for a request."""
        if not entry.num_users and not entry.is_foreign:
            self._remove_idle(entry)
        entry.num_users += 1
        entry.was_read |= is_read
        return entry

    def release(self, used: TierBlock) -> None:
        """End a use of a block's slot."""
        used.num_users -= 1
        if used.num_users or used.is_foreign:
            return
        if used.state is SlotState.READY:
            used.used_at = self.now
            self._idle.setdefault(used.group, OrderedDict())[used.block.sequence_hash] = used
        else:
            self._free.append(used.slot)

    def drop(self, dropped: TierBlock) -> None:
        """Let nothing find these blocks any more: their copy has failed, or the content of one is wrong.

        Their users still release them.
        """
        if dropped.state is SlotState.DROPPED:
            return
        if dropped.is_foreign:
            self._drop_foreign(dropped)
            return
        name = dropped.block.sequence_hash
        was_ready = dropped.state is SlotState.READY
        if was_ready and not dropped.num_users:
            self._remove_idle(dropped)
            self._free.append(dropped.slot)
        self.num_kept -= dropped.ttl_s > 0
        dropped.state = SlotState.DROPPED
        del self._by_hash[name]
        for block in dropped.segment[:-1]:
            self._by_inner[block.sequence_hash].remove(dropped)
            if not self._by_inner[block.sequence_hash]:
                del self._by_inner[block.sequence_hash]
        for block in dropped.segment if was_ready else ():
            if self.find(block.sequence_hash) is None:
                self._events.add_removed(block.sequence_hash, self.name)
        self.on_dropped(name)

    def apply_changes(self, changes: SharedChanges) -> None:
        """Record what other processes have changed in their slots."""
        if changes.is_cleared:
            for entry in [*self._foreign_slots.values(), *self._by_hash.values()]:
                self.drop(entry)
            self._foreign_slots.clear()
        for slot in changes.removed:
            self.remove_foreign(slot)
        for slot, block in changes.stored.items():
            self.add_foreign(slot, (block,))

    def add_foreign(self, slot: int, segment: Segment) -> None:
        """Enter blocks that another process has stored, and that can be read from this slot."""
        entry = TierBlock(segment, slot, 0, SlotState.READY, num_users=0, is_foreign=True)
        self._foreign_slots[slot] = entry
        for block in segment:
            if self.find(block.sequence_hash) is None:
                self._record_stored(block)
            self._foreign.setdefault(block.sequence_hash, []).append(entry)

    def remove_foreign(self, slot: int) -> None:
        """Forget what another process had stored in this slot, if anything."""
        if slot in self._foreign_slots:
            self.drop(self._foreign_slots.pop(slot))

    @property
    def num_foreign(self) -> int:
        """Blocks that other processes have stored and this one can read."""
        return len(self._foreign)

    def touch(self, sequence_hashes: Iterable[int]) -> None:
        """Mark blocks as used now, in this order."""
        for sequence_hash in sequence_hashes:
            entry = self._by_hash.get(sequence_hash)
            if entry is not None and not entry.num_users:
                entry.used_at = self.now
                self._idle[entry.group].move_to_end(sequence_hash)

    def keep(self, sequence_hash: int, hint: generate.CacheHint | None) -> None:
        """Give a block a time to live, or a longer one; refused and counted when half of the slots have one."""
        entry = self._by_hash.get(sequence_hash)
        if entry is None or hint is None:
            return
        entry.is_memory_only |= hint.is_memory_only
        if hint.ttl_s <= entry.ttl_s and entry.is_pinned >= hint.is_pinned:
            return
        if not entry.ttl_s:
            if self.num_kept >= self.num_slots // 2:
                self._end_times_to_live()
            if self.num_kept >= self.num_slots // 2:
                self.num_hints_refused += 1
                return
            self.num_kept += 1
        if not entry.num_users:
            self._remove_idle(entry)
        entry.ttl_s = max(entry.ttl_s, hint.ttl_s)
        entry.is_pinned |= hint.is_pinned
        entry.num_users += 1
        self.release(entry)

    def clear(self) -> None:
        """Drop all blocks, without events: the caller records that everything is gone."""
        for entry in self._by_hash.values():
            entry.state = SlotState.DROPPED
            if not entry.num_users:
                self._free.append(entry.slot)
        self._by_hash.clear()
        self._by_inner.clear()
        self._idle.clear()
        self._foreign.clear()
        self._foreign_slots.clear()
        self.num_kept = 0

    def _enter(self, entry: TierBlock) -> None:
        self._by_hash[entry.block.sequence_hash] = entry
        for block in entry.segment[:-1]:
            self._by_inner.setdefault(block.sequence_hash, []).append(entry)

    def _drop_foreign(self, dropped: TierBlock) -> None:
        dropped.state = SlotState.DROPPED
        for block in dropped.segment:
            entries = self._foreign.get(block.sequence_hash, [])
            if dropped not in entries:
                continue
            entries.remove(dropped)
            if not entries:
                del self._foreign[block.sequence_hash]
            if self.find(block.sequence_hash) is None:
                self._events.add_removed(block.sequence_hash, self.name)
                self.on_dropped(block.sequence_hash)

    def _record_stored(self, block: CachedBlock) -> None:
        stored = kv_events.StoredBlock(block.sequence_hash, block.local_hash)
        self._events.add_stored(stored, block.parent_hash, self.name)

    def _evict(self, priority: int) -> bool:
        """Free the slot of the block that is worth least; return False if none of at most this priority may go."""
        first_of_groups = [next(iter(blocks.values())) for blocks in self._idle.values()]
        evictable = [
            entry
            for entry in first_of_groups
            if self._urgency(entry) <= priority and not (entry.is_pinned and self._is_kept(entry))
        ]
        if not evictable:
            return False
        oldest = min(evictable, key=lambda e: (self._is_kept(e), self._urgency(e), e.used_at))
        self.num_evicted += len(oldest.segment)
        if not oldest.was_read and not self.is_below(oldest.block.sequence_hash):
            self.num_evicted_unread += len(oldest.segment)
        self.drop(oldest)
        return True

    def _urgency(self, entry: TierBlock) -> int:
        """Return the priority; once no request uses the block, it must not bar others for ever."""
        return entry.priority if self.now < entry.used_at + PRIORITY_S else min(entry.priority, 0)

    def _is_kept(self, entry: TierBlock) -> bool:
        return entry.used_at + entry.ttl_s > self.now

    def _end_times_to_live(self) -> None:
        """Make blocks ordinary after the end of their time to live."""
        for priority, ttl_s, is_pinned in [group for group in self._idle if group[1]]:
            kept = self._idle[priority, ttl_s, is_pinned]
            ended = list(itertools.takewhile(lambda e: not self._is_kept(e), kept.values()))
            ordinary = self._idle.setdefault((priority, 0, False), OrderedDict())
            for entry in reversed(ended):  # used longest ago comes first
                self._remove_idle(entry)
                entry.ttl_s, entry.is_pinned = 0, False
                ordinary[entry.block.sequence_hash] = entry
                ordinary.move_to_end(entry.block.sequence_hash, last=False)
            self.num_kept -= len(ended)
            if not ordinary:
                del self._idle[priority, 0, False]

    def _remove_idle(self, entry: TierBlock) -> None:
        idle = self._idle[entry.group]
        del idle[entry.block.sequence_hash]
        if not idle:
            del self._idle[entry.group]


class QueuedBlock(NamedTuple):
    """A block that waits to be copied to a tier."""

    block: CachedBlock
    priority: int
    hint: generate.CacheHint | None = None
    ends_segment: bool = False  # of the tier below the one that it waits for


class OffloadQueue:
    """Blocks that wait to be copied to one tier: the highest priority first, then the one offered first."""

    def __init__(self) -> None:
        self._by_priority: dict[int, OrderedDict[int, QueuedBlock]] = {}
        self._num_blocks = 0

    def __len__(self) -> int:
        """Return the number of blocks that wait."""
        return self._num_blocks

    def add(self, entry: QueuedBlock) -> bool:
        """Add a block, once; the hints of all offers count. Return False if the queue is full."""
        queue = self._by_priority.setdefault(entry.priority, OrderedDict())
        name = entry.block.sequence_hash
        if name in queue:
            hint = _join_hints(queue[name].hint, entry.hint)
            queue[name] = queue[name]._replace(hint=hint)
            return True
        if self._num_blocks >= MAX_QUEUED:
            return False
        queue[name] = entry
        self._num_blocks += 1
        return True

    def pop(self) -> QueuedBlock | None:
        """Remove and return the first block; None if there is none."""
        while self._by_priority:
            priority = max(self._by_priority)
            queue = self._by_priority[priority]
            if queue:
                self._num_blocks -= 1
                return queue.popitem(last=False)[1]
            del self._by_priority[priority]
        return None

    def clear(self) -> None:
        """Remove all blocks."""
        self._by_priority.clear()
        self._num_blocks = 0


def _join_hints(
    first: generate.CacheHint | None, second: generate.CacheHint | None
) -> generate.CacheHint | None:
    """Return the hint that has what either asks for."""
    if first is None or second is None:
        return first or second
    return generate.CacheHint(
        ttl_s=max(first.ttl_s, second.ttl_s),
        is_pinned=first.is_pinned or second.is_pinned,
        is_memory_only=first.is_memory_only or second.is_memory_only,
    )


def _ignore(sequence_hash: int) -> None:
    """Do nothing with the hash of a block that leaves."""
