"""The block pool: a fixed number of equal blocks, their users, and the index that finds blocks again by content.

It pages the engine's memory. It knows block ids and hashes, no bytes. A block is always in exactly one of three places:

    empty     state RESET: it holds nothing that can be asked for
    active    `num_references > 0`: sequences read or write it
    inactive  state REGISTERED, without users: its content waits to be found again, least recently released first

    empty ──allocate──▶ active ──release──▶ inactive (if it was registered) or empty
    inactive ──match_prefix──▶ active       inactive ──allocate, when nothing is empty──▶ active (evicted)

A full block is registered (`commit`) under its sequence hash (`protocols.blocks`), which covers the tokens before it
too; so equal hashes mean equal content. When two sequences compute the same content at the same time, the first
block that is committed can be found; the other one stays private to its sequence and is empty afterwards.
A block stays private as well if its parent cannot be found: a match walks from the head and would never reach it.

Eviction takes the block that was released longest ago, and asks the eviction policy where its content goes (`tiers`).
`release` frees a sequence's blocks from its tail, so a chain loses its tail before its head.

States and their transitions are in `lifecycle`. KV events are collected in order (`take_events`).
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from dynamo.kvbm import events as event_logs
from dynamo.kvbm import tiers
from dynamo.kvbm.lifecycle import BlockState, RegisteredBlock
from dynamo.protocols import kv_events


class BlockPool:
    """Mutable; one thread or loop owns it."""

    def __init__(
        self,
        num_blocks: int,
        *,
        tier: kv_events.Tier = kv_events.DEVICE,
        eviction: tiers.EvictionPolicy | None = None,
        events: event_logs.EventLog | None = None,
    ) -> None:
        """`eviction` decides where evicted blocks go (None: they are dropped); tiers may share one log of `events`."""
        self.num_blocks = num_blocks
        self._tier = tier
        self._eviction = eviction
        self._events = events or event_logs.EventLog()
        self._empty = list(range(num_blocks - 1, -1, -1))  # a stack; the lowest id on top
        self._inactive: OrderedDict[int, None] = OrderedDict()  # released longest ago first
        self._num_references = [0] * num_blocks
        self._private: set[int] = set()  # active blocks that are complete, but not registered
        self._stored: list[kv_events.StoredBlock | None] = [None] * num_blocks  # if registered
        self._parents: list[int | None] = [None] * num_blocks  # parent hashes of those
        self._block_by_hash: dict[int, int] = {}
        # How many blocks the eviction policy sent to each tier; None: dropped.
        self.num_evicted_to: Counter[kv_events.Tier | None] = Counter()

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can return."""
        return len(self._empty) + len(self._inactive)

    @property
    def num_active(self) -> int:
        """Blocks that sequences use now."""
        return self.num_blocks - self.num_free

    def state_of(self, block: int) -> BlockState:
        """Return the block's state in its life cycle.

        It follows from the other fields, so that steps of the engine do not pay for it.
        """
        if self._stored[block] is not None:
            return BlockState.REGISTERED
        if block in self._private:
            return BlockState.COMPLETE
        return BlockState.PARTIAL if self._num_references[block] else BlockState.RESET

    def match_prefix(self, sequence_hashes: Iterable[int]) -> list[int]:
        """Return the blocks of the longest registered prefix of this chain, acquired for the caller."""
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
            if self._stored[block] is None:
                self._private.add(block)
            return
        assert self._stored[block] is None, f"block {block} is registered with other content"
        self._private.discard(block)
        registered[sequence_hash] = block
        stored = self._stored[block] = kv_events.StoredBlock(sequence_hash, local_hash)
        self._parents[block] = parent_hash
        self._events.add_stored(stored, parent_hash, self._tier)

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
        """Release blocks that the caller acquired, in the order of its sequence."""
        for block in reversed(blocks):
            assert self._num_references[block] > 0, f"block {block} is released twice"
            self._num_references[block] -= 1
            if self._num_references[block]:
                continue
            if self._stored[block] is None:
                self._private.discard(block)
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
            if self._num_references[block]:
                self._private.add(block)
        self._block_by_hash.clear()
        self._empty.extend(reversed(self._inactive))
        self._inactive.clear()
        self._events.add_cleared()

    def take_events(self) -> list[kv_events.KvEvent]:
        """Return the KV events since the last call."""
        return self._events.take_events()

    def _evict_oldest(self) -> int:
        block, _ = self._inactive.popitem(last=False)
        stored = self._stored[block]
        assert stored is not None, f"block {block} is inactive but not registered"
        if self._eviction is not None:
            content = RegisteredBlock(stored.block_hash, stored.tokens_hash, self._parents[block])
            self.num_evicted_to[self._eviction.place_evicted(block, content)] += 1
        self._stored[block] = None
        del self._block_by_hash[stored.block_hash]
        self._events.add_removed(stored.block_hash, self._tier)
        return block
