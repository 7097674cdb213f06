"""The block table of each sequence, from its admission to its end.

At admission a sequence gets blocks for all the tokens that it has: those of the longest known prefix, and empty ones
for the rest. So a prefill that has begun never waits for memory; only decoding asks for more, one block at a time. At
least the last token is always computed, because the step that computes it brings the logits for the next one.
"""  # decider

from dynamo.engine.native.sequence import Sequence
from dynamo.kvbm import pool, tiered_cache
from dynamo.kvbm import tiers as tier_blocks
from dynamo.protocols import blocks, kv_events


class Paging:
    """Allocates KV blocks of the pool to sequences."""

    def __init__(self, *, num_blocks: int, block_size: int, prefix_caching: bool) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.pool = pool.BlockPool(num_blocks)
        self.tiers: tiered_cache.TieredCache | None = None  # set before the first sequence

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks of the pool."""
        return self.pool.num_blocks

    @property
    def num_active(self) -> int:
        """Return the number of blocks that sequences hold."""
        return self.pool.num_active

    def admit(self, sequence: Sequence, *, keep_free: int) -> bool:
        """Allocate blocks for all tokens of a sequence; return False if fewer than `keep_free` would remain free."""
        cached: list[int] = []
        if self._may_load(sequence):
            self._hash(sequence)
            cached = self.pool.match_prefix(self._usable(sequence))
        num_fresh = -(-len(sequence.token_ids) // self.block_size) - len(cached)
        num_available = self.pool.num_free - keep_free
        fresh = self.pool.allocate(num_fresh) if num_fresh <= num_available else None
        if fresh is None:
            self.pool.release(cached)
            return False
        sequence.block_ids.extend(cached + fresh)
        sequence.num_computed = len(cached) * self.block_size
        sequence.num_committed = len(cached)
        if cached:
            self._offer(sequence, range(len(cached)))
        return True

    def prepare(self, sequence: Sequence) -> None:
        """Begin to copy blocks of a sequence that queues from slow tiers to faster ones."""
        if self.tiers is not None and self._may_load(sequence):
            self._hash(sequence)
            self.tiers.prepare(sequence, self._usable(sequence))

    def is_preparing(self, sequence: Sequence) -> bool:
        """Return whether `prepare` has begun copies that are worth waiting for."""
        return self.tiers is not None and self.tiers.is_preparing(sequence)

    def load(self, sequence: Sequence, *, is_engine_busy: bool) -> bool:
        """Begin to load blocks that an admitted sequence lacks; return whether it has to wait for them."""
        if self.tiers is None or not self._may_load(sequence):
            return False
        first, usable = sequence.num_committed, self._usable(sequence)
        num_loading = self.tiers.load(
            sequence,
            usable[first:],
            sequence.block_ids[first : len(usable)],
            is_engine_busy=is_engine_busy,
        )
        return num_loading > 0

    def admit_cached(self, sequence: Sequence) -> bool:
        """Give a sequence the blocks of its prompt that are cached, and begin to load those that host memory has.

        Return whether it has to wait for them.
        """
        self._hash(sequence)
        usable = self._usable(sequence)
        sequence.block_ids.extend(self.pool.match_prefix(usable))
        first = sequence.num_committed = len(sequence.block_ids)
        sequence.num_computed = first * self.block_size
        if self.tiers is None:
            return False
        missing = usable[first:]
        num_loadable = self.tiers.count_loadable(missing, is_engine_busy=False)
        fresh = self.pool.allocate(min(num_loadable, self.pool.num_free // 2))
        if not fresh:
            return False
        sequence.block_ids.extend(fresh)
        return self.tiers.load(sequence, missing[: len(fresh)], fresh, is_engine_busy=False) > 0

    def end_load(
        self, sequence: Sequence, copy: tiered_cache.TierCopy, failed: frozenset[int]
    ) -> None:
        """Record the blocks that were loaded: those before the first that failed."""
        num_blocks = min(failed, default=len(copy.blocks))
        sequence.num_computed += num_blocks * self.block_size
        self.commit(sequence)

    def grow(self, sequence: Sequence) -> bool:
        """Ensure a block for the last token of a sequence; return False if none is free."""
        if len(sequence.token_ids) <= len(sequence.block_ids) * self.block_size:
            return True
        fresh = self.pool.allocate(1)
        if fresh is None:
            return False
        sequence.block_ids += fresh
        return True

    def commit(self, sequence: Sequence) -> None:
        """Add the blocks of a sequence that are now full to the prefix cache."""
        num_full = sequence.num_computed // self.block_size
        if not self.prefix_caching or num_full == sequence.num_committed:
            return
        self._hash(sequence)
        new = range(sequence.num_committed, num_full)
        self.pool.commit_chain(
            sequence.block_ids, sequence.sequence_hashes, sequence.local_hashes, new
        )
        sequence.num_committed = num_full
        self._offer(sequence, new)

    def release(self, sequence: Sequence) -> None:
        """Free all blocks of a sequence. Its tokens must be computed again, unless the prefix cache still has them."""
        if self.tiers is not None:
            self.tiers.forget(sequence)
            self.tiers.touch(sequence.sequence_hashes[: sequence.num_committed])
        self.pool.release(sequence.block_ids)
        sequence.block_ids.clear()
        sequence.num_computed = sequence.num_committed = 0

    def clear(self) -> None:
        """Clear the prefix cache in every tier."""
        self.pool.clear()
        if self.tiers is not None:
            self.tiers.clear()

    def take_events(self) -> list[kv_events.KvEvent]:
        """Return the KV events since the last call."""
        return self.pool.take_events()

    def _may_load(self, sequence: Sequence) -> bool:
        return self.prefix_caching and not sequence.wants_prompt_logprobs

    def _usable(self, sequence: Sequence) -> list[int]:
        """Return the hashes of the blocks that a sequence may find: the last token is always computed."""
        return sequence.sequence_hashes[: (len(sequence.token_ids) - 1) // self.block_size]

    def _offer(self, sequence: Sequence, positions: range) -> None:
        """Offer blocks of a sequence to the tiers below."""
        if self.tiers is None:
            return
        hashes, local = sequence.sequence_hashes, sequence.local_hashes
        offered = [
            tier_blocks.CachedBlock(hashes[i], local[i], hashes[i - 1] if i else None)
            for i in positions
        ]
        self.tiers.offer(offered, sequence.request.priority, sequence.request.cache_hint)

    def _hash(self, sequence: Sequence) -> None:
        """Compute the hashes of full blocks that were added to the sequence."""
        hashes = sequence.sequence_hashes
        added = blocks.pack(sequence.token_ids[len(hashes) * self.block_size :])
        local = blocks.local_hashes(added, self.block_size, sequence.request.hash_seed)
        sequence.local_hashes += local
        hashes += blocks.sequence_hashes(local, hashes[-1] if hashes else None)
