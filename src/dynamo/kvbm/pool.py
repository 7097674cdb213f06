"""The block pool: a fixed number of equal blocks, who uses them, and which can be found again by content.

It pages the engine's memory, and every tier of the KV cache is one of these. It knows block ids and names, no bytes.
A block is always in exactly one of three places:

    empty       it holds nothing that anyone could ask for
    active      `num_references > 0`: sequences read or write it
    reusable    nobody uses it, but it is full and has a name: content waits here to be found again, oldest first

    empty ──allocate──▶ active ──release──▶ reusable (if it was committed) or empty
    reusable ──match_prefix──▶ active       reusable ──allocate, when nothing is empty──▶ active (evicted: name lost)

A block is named when it is full (`commit`), by its sequence hash (`protocols.blocks`), which says what lies before it
too; so equal names mean equal content. When two sequences compute the same content at the same time, the first
block that is committed is the one that can be found; the other stays private to its sequence and is empty afterwards.
A block whose parent cannot be found stays private as well: a match walks from the head and would never reach it.

Eviction takes what was released longest ago. `release` lets go of a sequence's blocks from its tail, so a chain
loses its tail before its head.

What became findable, and what no longer is, is collected as KV events in order (`take_events`).
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from dynamo.protocols import kv_events


class BlockPool:
    """Mutable; one thread or loop owns it."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))  # a stack; the lowest id on top
        self._reusable: OrderedDict[int, None] = OrderedDict()  # released longest ago first
        self._num_references = [0] * num_blocks
        self._name_by_block: list[int | None] = [None] * num_blocks
        self._block_by_name: dict[int, int] = {}
        self._events = _EventLog()

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._empty) + len(self._reusable)

    @property
    def num_active(self) -> int:
        """Blocks that sequences use now."""
        return self.num_blocks - self.num_free

    def match_prefix(self, names: Iterable[int]) -> list[int]:
        """The blocks of the longest known prefix of this chain of sequence hashes, acquired for the caller."""
        found = []
        for name in names:
            block = self._block_by_name.get(name)
            if block is None:
                break
            if not self._num_references[block]:
                del self._reusable[block]
            self._num_references[block] += 1
            found.append(block)
        return found

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Blocks to write to, acquired for the caller; None (and nothing taken) if there are not so many."""
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
        """This active block is full and will not change: let it be found, unless it has to stay private."""
        assert self._num_references[block] > 0, f"block {block} is committed but not active"
        known = self._block_by_name
        if sequence_hash in known or (parent_hash is not None and parent_hash not in known):
            return
        known[sequence_hash] = block
        self._name_by_block[block] = sequence_hash
        self._events.stored(sequence_hash, local_hash, parent_hash)

    def commit_chain(
        self,
        blocks: Sequence[int],
        sequence_hashes: Sequence[int],
        local_hashes: Sequence[int],
        new: range,
    ) -> None:
        """Commit those blocks of a sequence that are newly full; all three lists begin with its first block."""
        for i in new:
            self.commit(
                blocks[i],
                sequence_hash=sequence_hashes[i],
                local_hash=local_hashes[i],
                parent_hash=sequence_hashes[i - 1] if i else None,
            )

    def release(self, blocks: Sequence[int]) -> None:
        """The caller uses these blocks, in the order of its sequence, no more."""
        for block in reversed(blocks):
            assert self._num_references[block] > 0, f"block {block} is released twice"
            self._num_references[block] -= 1
            if self._num_references[block]:
                continue
            if self._name_by_block[block] is None:
                self._empty.append(block)
            else:
                self._reusable[block] = None

    def retain(self, blocks: Iterable[int]) -> None:
        """One more user of these active blocks, who releases them too."""
        for block in blocks:
            assert self._num_references[block] > 0, f"block {block} is retained but not active"
            self._num_references[block] += 1

    def clear(self) -> None:
        """Forget all content. Active blocks stay with their sequences, and are empty once released."""
        for block in self._block_by_name.values():
            self._name_by_block[block] = None
        self._block_by_name.clear()
        self._empty.extend(reversed(self._reusable))
        self._reusable.clear()
        self._events.cleared()

    def take_events(self) -> list[kv_events.KvEvent]:
        """What happened since the last call."""
        return self._events.take()

    def _evict_oldest(self) -> int:
        block, _ = self._reusable.popitem(last=False)
        name = self._name_by_block[block]
        assert name is not None, f"block {block} is reusable without a name"
        self._name_by_block[block] = None
        del self._block_by_name[name]
        self._events.removed(name)
        return block


class _EventLog:
    """Events in order; neighbours that continue one another become one event."""

    def __init__(self) -> None:
        self._events: list[kv_events.KvEvent] = []
        self._parent: int | None = None
        self._stored: list[kv_events.StoredBlock] = []
        self._removed: list[int] = []

    def stored(self, name: int, local_hash: int, parent: int | None) -> None:
        if self._removed or (self._stored and self._stored[-1].block_hash != parent):
            self._close()
        if not self._stored:
            self._parent = parent
        self._stored.append(kv_events.StoredBlock(name, local_hash))

    def removed(self, name: int) -> None:
        if self._stored:
            self._close()
        self._removed.append(name)

    def cleared(self) -> None:
        self._close()
        self._events.append(kv_events.Cleared())

    def take(self) -> list[kv_events.KvEvent]:
        self._close()
        events, self._events = self._events, []
        return events

    def _close(self) -> None:
        if self._stored:
            self._events.append(
                kv_events.Stored(parent_hash=self._parent, blocks=tuple(self._stored))
            )
        if self._removed:
            self._events.append(kv_events.Removed(block_hashes=tuple(self._removed)))
        self._stored, self._removed = [], []
