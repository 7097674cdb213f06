"""The seam to the tiers of the KV cache below device memory: host memory, local disk, object stores, peers.

A pool that has to evict a block asks its `EvictionPolicy` where the block goes. The policy returns the tier that keeps
the content from now on, or None if the content is dropped; the pool itself knows no tier but its own. A policy answers
at once, on the thread of the pool's owner: it has copied the content when it returns, or knows that the tier below has
it already (because it is written through when a block is registered).

`MemoryTier` is a complete tier in this process: it is what tests use, and the model for others. Tiers form a chain,
because each asks a policy of its own when it is full.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

from dynamo.kvbm.events import EventLog
from dynamo.kvbm.lifecycle import RegisteredBlock
from dynamo.protocols import kv_events


class EvictionPolicy(Protocol):
    """Decides where evicted blocks of one tier go."""

    def place_evicted(self, block_id: int, block: RegisteredBlock) -> kv_events.Tier | None:
        """Return the tier that keeps this block, None to drop it.

        The memory of `block_id` holds the content until this returns, and is written over afterwards.
        """
        ...


ReadBlock = Callable[[int], bytes]


class MemoryTier:
    """A tier that keeps the content of up to `num_blocks` blocks as bytes; an `EvictionPolicy` of the tier above.

    The block that was stored or read longest ago is evicted first. Mutable; the owner of the pool above owns it.
    """

    def __init__(
        self,
        tier: kv_events.Tier,
        num_blocks: int,
        events: EventLog,
        *,
        read_above: ReadBlock,
        below: EvictionPolicy | None = None,
    ) -> None:
        """`read_above` returns the content of a block id of the tier above; `below` decides of what leaves this one."""
        self.tier = tier
        self._events, self._read_above, self._below = events, read_above, below
        self._free_ids = list(range(num_blocks - 1, -1, -1))
        self._id_by_hash: OrderedDict[int, int] = OrderedDict()  # least recently used first
        self._blocks: dict[int, tuple[RegisteredBlock, bytes]] = {}  # by id

    def place_evicted(self, block_id: int, block: RegisteredBlock) -> kv_events.Tier | None:
        """Copy an evicted block of the tier above; drop it if this tier has no memory at all."""
        if block.sequence_hash in self._id_by_hash:
            self._id_by_hash.move_to_end(block.sequence_hash)
            return self.tier
        if not self._free_ids and not self._evict_oldest():
            return None
        own_id = self._free_ids.pop()
        self._blocks[own_id] = block, self._read_above(block_id)
        self._id_by_hash[block.sequence_hash] = own_id
        stored = kv_events.StoredBlock(block.sequence_hash, block.local_hash)
        self._events.add_stored(stored, block.parent_hash, self.tier)
        return self.tier

    def count_prefix(self, sequence_hashes: Iterable[int]) -> int:
        """Return how many leading blocks of this chain the tier holds."""
        num_blocks = 0
        for name in sequence_hashes:
            if name not in self._id_by_hash:
                break
            num_blocks += 1
        return num_blocks

    def read_block(self, block_id: int) -> bytes:
        """Return the content of a block of this tier: the `read_above` of the tier below."""
        return self._blocks[block_id][1]

    def read_content(self, sequence_hash: int) -> bytes | None:
        """Return a block's content, and keep it longer; None if the tier does not hold it."""
        block_id = self._id_by_hash.get(sequence_hash)
        if block_id is None:
            return None
        self._id_by_hash.move_to_end(sequence_hash)
        return self._blocks[block_id][1]

    def _evict_oldest(self) -> bool:
        if not self._id_by_hash:
            return False
        sequence_hash, block_id = next(iter(self._id_by_hash.items()))
        block, _ = self._blocks[block_id]
        if self._below is not None:
            self._below.place_evicted(block_id, block)
        del self._id_by_hash[sequence_hash], self._blocks[block_id]
        self._events.add_removed(sequence_hash, self.tier)
        self._free_ids.append(block_id)
        return True
