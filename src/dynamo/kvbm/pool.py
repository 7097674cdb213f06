"""The block pool: a fixed number of equal blocks, their users, and the index that finds blocks again by content.

It pages the engine's memory. It knows block ids and hashes, no bytes. A block is always in exactly one of three places:

    empty     it holds nothing that can be asked for (RESET, in the words of Dynamo's KVBM)
    active    sequences read or write it: not full (PARTIAL), full (COMPLETE), or full and registered (REGISTERED)
    inactive  registered, without users: its content waits to be found again, least recently released first

    empty ──allocate──▶ active ──release──▶ inactive (if it was registered) or empty
    inactive ──match_prefix──▶ active       inactive ──allocate, when nothing is empty──▶ active (evicted)

A full block is registered (`commit`) under its sequence hash (`protocols.blocks`), which covers the tokens before it
too; so equal hashes mean equal content. When two sequences compute the same content at the same time, the first
block that is committed can be found; the other one stays private to its sequence and is empty afterwards.
A block stays private as well if its parent cannot be found: a match walks from the head and would never reach it.

Eviction takes the block that was released longest ago.
`release` frees a sequence's blocks from its tail, so a chain loses its tail before its head.
KV events are collected in order (`take_events`).
"""  # decider

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from dynamo.protocols import kv_events


class EventLog:
    """Collects events; neighbours that continue one another in one tier become one event.

    All tiers of a rank write to one log, so that a block which moves down is stored there before it is removed here.
    """

    def __init__(self) -> None:
        self._events: list[kv_events.KvEvent] = []
        self._tier = kv_events.DEVICE  # of the open event
        self._parent: int | None = None
        self._stored: list[kv_events.StoredBlock] = []
        self._removed: list[int] = []

    def add_stored(
        self, block: kv_events.StoredBlock, parent_hash: int | None, tier: kv_events.Tier
    ) -> None:
        """Record that a block became reusable in a tier."""
        if (
            self._removed
            or tier != self._tier
            or (self._stored and self._stored[-1].block_hash != parent_hash)
        ):
            self._close_event()
        if not self._stored:
            self._parent, self._tier = parent_hash, tier
        self._stored.append(block)

    def add_removed(self, sequence_hash: int, tier: kv_events.Tier) -> None:
        """Record that a block was evicted from a tier."""
        if self._stored or tier != self._tier:
            self._close_event()
            self._tier = tier
        self._removed.append(sequence_hash)

    def add_cleared(self) -> None:
        """Record that all blocks of the worker are gone."""
        self._close_event()
        self._events.append(kv_events.Cleared())

    def take_events(self) -> list[kv_events.KvEvent]:
        """Return the events since the last call."""
        self._close_event()
        events, self._events = self._events, []
        return events

    def _close_event(self) -> None:
        if self._stored:
            self._events.append(
                kv_events.Stored(
                    parent_hash=self._parent, blocks=tuple(self._stored), tier=self._tier
                )
            )
        if self._removed:
            self._events.append(
                kv_events.Removed(block_hashes=tuple(self._removed), tier=self._tier)
            )
        self._stored, self._removed = [], []


class DevicePool(Protocol):
    """The engine's own blocks, as far as the tiers need them: `BlockPool`, or those of another engine."""

    num_blocks: int
    on_evicted: Callable[[int], None] | None

    @property
    def events(self) -> "EventLog":
        """The log of the tiers' events."""

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can return."""

    @property
    def num_used(self) -> int:
        """Blocks that are not empty."""

    @property
    def num_registered(self) -> int:
        """Blocks that can be found."""

    def __contains__(self, sequence_hash: int) -> bool:
        """Return whether a block can be found."""

    def match_prefix(self, sequence_hashes: Iterable[int]) -> list[int]:
        """Return the blocks of the longest registered prefix of this chain, acquired for the caller."""

    def release(self, blocks: Sequence[int]) -> None:
        """Release blocks that the caller acquired, in the order of its sequence."""


class BlockPool:
    """The blocks of one rank, each empty, active or inactive. One thread or event loop owns it."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.events = EventLog()  # of the tiers below, too
        self._empty = list(range(num_blocks - 1, -1, -1))  # a stack; the lowest id on top
        self._inactive: OrderedDict[int, None] = OrderedDict()  # released longest ago first
        self._num_references = [0] * num_blocks
        self._stored: list[kv_events.StoredBlock | None] = [None] * num_blocks  # if registered
        self._block_by_hash: dict[int, int] = {}
        self.on_evicted: Callable[[int], None] | None = None  # called with each evicted hash

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._inactive)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._empty)

    @property
    def num_registered(self) -> int:
        return len(self._block_by_hash)

    def __contains__(self, sequence_hash: int) -> bool:
        return sequence_hash in self._block_by_hash

    @property
    def num_active(self) -> int:
        """Blocks that sequences use now."""
        return self.num_blocks - self.num_free

    def match_prefix(self, sequence_hashes: Iterable[int]) -> list[int]:
        blocks = []
        for sequence_hash in sequence_hashes:
            block = self._block_by_hash.get(sequence_hash)
            if block is None:
                break
            if not self._num_references[block]:
                del self._inactive[block]
            self._num_references[block] += 1
            blocks.append(block)
        return blocks

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Return blocks to write to, acquired for the caller; None, and nothing acquired, if too few are free."""
        if num_blocks > self.num_free:
            return None
        blocks = [
            self._empty.pop() if self._empty else self._evict_oldest() for _ in range(num_blocks)
        ]
        for block in blocks:
            self._num_references[block] = 1
        return blocks

    def commit(
        self, block: int, *, sequence_hash: int, local_hash: int, parent_hash: int | None
    ) -> None:
        """Complete an active block that is full and will not change; register it, unless it has to stay private."""
        assert self._num_references[block] > 0, f"block {block} is committed but not active"
        registered = self._block_by_hash
        if sequence_hash in registered or (
            parent_hash is not None and parent_hash not in registered
        ):
            return
        assert self._stored[block] is None, f"block {block} is registered with other content"
        registered[sequence_hash] = block
        stored = self._stored[block] = kv_events.StoredBlock(sequence_hash, local_hash)
        self.events.add_stored(stored, parent_hash, kv_events.DEVICE)

    def commit_chain(
        self,
        blocks: Sequence[int],
        sequence_hashes: Sequence[int],
        local_hashes: Sequence[int],
        new: range,
    ) -> None:
        """Commit the blocks of a sequence at the positions `new`; all three lists begin with its first block."""
        for i in new:
            self.commit(
                blocks[i],
                sequence_hash=sequence_hashes[i],
                local_hash=local_hashes[i],
                parent_hash=sequence_hashes[i - 1] if i else None,
            )

    def release(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            assert self._num_references[block] > 0, f"block {block} is released twice"
            self._num_references[block] -= 1
            if self._num_references[block]:
                continue
            if self._stored[block] is None:
                self._empty.append(block)
            else:
                self._inactive[block] = None

    def retain(self, blocks: Iterable[int]) -> None:
        """Acquire active blocks once more, for a second user that will release them too."""
        for block in blocks:
            assert self._num_references[block] > 0, f"block {block} is retained but not active"
            self._num_references[block] += 1

    def clear(self) -> None:
        """Deregister all blocks. Active blocks stay with their sequences, and are empty once released."""
        for block in self._block_by_hash.values():
            self._stored[block] = None
        self._block_by_hash.clear()
        self._empty.extend(reversed(self._inactive))
        self._inactive.clear()
        self.events.add_cleared()

    def take_events(self) -> list[kv_events.KvEvent]:
        """Return the KV events since the last call."""
        return self.events.take_events()

    def _evict_oldest(self) -> int:
        block, _ = self._inactive.popitem(last=False)
        stored = self._stored[block]
        assert stored is not None, f"block {block} is inactive but not registered"
        self._stored[block] = None
        del self._block_by_hash[stored.block_hash]
        self.events.add_removed(stored.block_hash, kv_events.DEVICE)
        if self.on_evicted is not None:
            self.on_evicted(stored.block_hash)
        return block
