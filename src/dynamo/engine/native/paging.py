"""Which blocks a sequence holds, from its admission to its end.

At admission a sequence gets blocks for all the tokens that it has: those of the longest known prefix, and empty ones
for the rest. So a prefill that has begun never waits for memory; only decoding asks for more, one block at a time. At
least the last token is always computed, because the step that computes it brings the logits for the next one.
"""

from dynamo.engine.native.sequence import Sequence
from dynamo.kvbm import pool
from dynamo.protocols import blocks, kv_events


class Paging:
    """The engine's memory, as sequences see it."""

    def __init__(self, *, num_blocks: int, block_size: int, prefix_caching: bool) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.pool = pool.BlockPool(num_blocks)

    @property
    def num_blocks(self) -> int:
        """All blocks there are."""
        return self.pool.num_blocks

    @property
    def num_active(self) -> int:
        """Blocks that sequences hold."""
        return self.pool.num_active

    def admit(self, sequence: Sequence, *, keep_free: int) -> bool:
        """Give it blocks for all its tokens, if `keep_free` others remain; else nothing happens."""
        found = self._match(sequence)
        num_fresh = -(-len(sequence.token_ids) // self.block_size) - len(found)
        room = self.pool.num_free - keep_free
        fresh = self.pool.allocate(num_fresh) if num_fresh <= room else None
        if fresh is None:
            self.pool.release(found)
            return False
        sequence.block_ids.extend(found + fresh)
        sequence.num_computed = len(found) * self.block_size
        sequence.num_committed = len(found)
        return True

    def grow(self, sequence: Sequence) -> bool:
        """See that there is a block for its last token; False if none is left."""
        if len(sequence.token_ids) <= len(sequence.block_ids) * self.block_size:
            return True
        fresh = self.pool.allocate(1)
        if fresh is None:
            return False
        sequence.block_ids += fresh
        return True

    def commit(self, sequence: Sequence) -> None:
        """Let its blocks that are now full be found by others."""
        num_full = sequence.num_computed // self.block_size
        if not self.prefix_caching or num_full == sequence.num_committed:
            return
        self._hash(sequence)
        new = range(sequence.num_committed, num_full)
        self.pool.commit_chain(
            sequence.block_ids, sequence.sequence_hashes, sequence.local_hashes, new
        )
        sequence.num_committed = num_full

    def release(self, sequence: Sequence) -> None:
        """Take all its blocks; what it computed is lost to it, unless it finds it again."""
        self.pool.release(sequence.block_ids)
        sequence.block_ids.clear()
        sequence.num_computed = sequence.num_committed = 0

    def clear(self) -> None:
        """Forget what could be found."""
        self.pool.clear()

    def take_events(self) -> list[kv_events.KvEvent]:
        """What became findable, and what no longer is, since the last call."""
        return self.pool.take_events()

    def _match(self, sequence: Sequence) -> list[int]:
        if not self.prefix_caching or sequence.wants_prompt_logprobs:
            return []
        self._hash(sequence)
        num_usable = (len(sequence.token_ids) - 1) // self.block_size
        return self.pool.match_prefix(sequence.sequence_hashes[:num_usable])

    def _hash(self, sequence: Sequence) -> None:
        """Name the full blocks that were added to the sequence."""
        names = sequence.sequence_hashes
        added = blocks.pack(sequence.token_ids[len(names) * self.block_size :])
        local = blocks.local_hashes(added, self.block_size)
        sequence.local_hashes += local
        names += blocks.sequence_hashes(local, names[-1] if names else None)
