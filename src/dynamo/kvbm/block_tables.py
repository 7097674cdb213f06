"""The block tables of an engine's sequences, over its block pool and the cache tiers below: what the native and the
simulated engine have in common.

At admission a sequence gets blocks for all the tokens that it has: those of the longest known prefix, and empty ones
for the rest. At least its last token is always computed, because the step that computes it brings the logits for the
next one.
"""  # decider

import abc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Self, TypeVar

from dynamo.kvbm import pool as pools
from dynamo.kvbm import tiered_cache, tiers
from dynamo.protocols import generate, kv_events, kv_transfer


@dataclass(slots=True, kw_only=True, eq=False)
class PagedSequence(abc.ABC):
    """One choice of one request, with its block table. An engine adds its tokens."""

    request: generate.Request
    index: int  # which of the request's choices
    prompt_len: int
    # the request's first choice, which reports the cached tokens; this one waits to share its prompt's blocks
    leader: Self | None = None
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0  # tokens
    # prompt tokens that were cached when it was first admitted, or were copied to the engine's memory then
    num_cached: int | None = None
    # of these, by origin, those from tiers below the engine's memory and from other engines
    num_loaded: dict[kv_events.Tier, int] = field(default_factory=dict)
    num_committed: int = 0  # full blocks that were committed to the pool
    num_clears: int = 0  # of the cache, before it was admitted
    local_hashes: list[int] = field(default_factory=list)  # of its full blocks (protocols.blocks)
    sequence_hashes: list[int] = field(default_factory=list)
    # its prompt at another engine, until the import begins
    remote: kv_transfer.RemoteBlocks | None = None

    @property
    @abc.abstractmethod
    def num_tokens(self) -> int:
        """Return the number of tokens of the prompt and of the answer so far."""

    @property
    def tier_tokens(self) -> tuple[tuple[str, int], ...] | None:
        """Return `num_loaded` as outputs report it."""
        return tuple(sorted(self.num_loaded.items())) or None


S = TypeVar("S", bound=PagedSequence)


class BlockTables(abc.ABC, Generic[S]):
    """Allocates KV blocks of the pool to sequences. An engine adds how its sequences are hashed."""

    def __init__(self, *, num_blocks: int, block_size: int, prefix_caching: bool) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.pool = pools.BlockPool(num_blocks)
        self.tiers: tiered_cache.TieredCache | None = None  # set before the first sequence
        self._num_clears = 0
        self._num_prompt_tokens = self._num_cached_tokens = 0  # of admitted sequences

    @property
    def hit_rate(self) -> float:
        """Return the share of the prompt tokens of admitted sequences that were cached, 0 to 1."""
        return self._num_cached_tokens / max(1, self._num_prompt_tokens)

    def admit(self, sequence: S, *, keep_free: int, max_new: int | None = None) -> bool:
        """Allocate blocks for all tokens of a sequence, those of known prefixes first.

        Return False if fewer than `keep_free` would remain free, or more than `max_new` tokens are to be computed.
        """
        cached: list[int] = []
        if self._may_load(sequence):
            self._hash(sequence)
            cached = self.pool.match_prefix(self._usable(sequence))
        num_fresh = -(-sequence.num_tokens // self.block_size) - len(cached)
        num_new = sequence.num_tokens - len(cached) * self.block_size
        fits = num_fresh <= self.pool.num_free - keep_free
        fits = fits and (max_new is None or num_new <= max_new)
        fresh = self.pool.allocate(num_fresh) if fits else None
        if fresh is None:
            self.pool.release(cached)
            return False
        self._begin(sequence, cached)
        if cached:
            self._offer(sequence, range(len(cached)))
        sequence.block_ids += fresh
        if sequence.num_cached is None:  # not admitted before
            sequence.num_cached = sequence.num_computed
            self._num_prompt_tokens += sequence.prompt_len
            self._num_cached_tokens += sequence.num_cached
        return True

    def prepare(self, sequence: S) -> None:
        """Begin to copy blocks of a sequence that queues from slow tiers to faster ones, if that pays."""
        if self.tiers is not None and self._may_load(sequence):
            self._hash(sequence)
            num_asked = len(sequence.sequence_hashes) if self.tiers.asks_store else 0
            chain = _blocks(sequence, range(num_asked))
            self.tiers.prepare(sequence, self._usable(sequence), chain)

    def is_preparing(self, sequence: S) -> bool:
        """Return whether `prepare` has begun copies that are worth waiting for."""
        return self.tiers is not None and self.tiers.is_preparing(sequence)

    def load(self, sequence: S, *, is_engine_busy: bool, max_new: int = 0) -> bool:
        """Begin to load blocks that an admitted sequence lacks; return whether it has to wait for them.

        The step that begins now computes at most `max_new` tokens of all sequences that are loaded before it.
        """
        if self.tiers is None or not self._may_load(sequence):
            return False
        first, usable = sequence.num_committed, self._usable(sequence)
        block_ids = sequence.block_ids[first : len(usable)]
        num_loading = self.tiers.load(
            sequence, usable[first:], block_ids, is_engine_busy=is_engine_busy, max_new=max_new
        )
        return num_loading > 0

    def admit_cached(self, sequence: S) -> bool:
        """Give a sequence the blocks of its prompt that are cached, and begin to load those that host memory has.

        Return whether it has to wait for them.
        """
        self._hash(sequence)
        usable = self._usable(sequence)
        self._begin(sequence, self.pool.match_prefix(usable))
        if self.tiers is None:
            return False
        missing = usable[sequence.num_committed :]
        num_loadable = self.tiers.count_loadable(missing, is_engine_busy=False)
        fresh = self.pool.allocate(min(num_loadable, self.pool.num_free // 2))
        if not fresh:
            return False
        sequence.block_ids += fresh
        return self.tiers.load(sequence, missing[: len(fresh)], fresh, is_engine_busy=False) > 0

    def count_loaded(
        self, sequence: S, num_tokens: int, by_origin: dict[kv_events.Tier, int]
    ) -> None:
        """Count tokens of a prompt that were copied to the engine's memory as cached."""
        sequence.num_cached = (sequence.num_cached or 0) + num_tokens
        sequence.num_loaded = by_origin
        self._num_cached_tokens += num_tokens

    def count_import(self, sequence: S) -> bool:
        """Count the tokens of an imported prefix as cached; return False if a whole prompt was imported."""
        remote = kv_transfer.remote_blocks(sequence.request.kv_transfer_params)
        if remote is None or not remote.is_prefix:
            return False
        num_imported = sequence.num_computed - (sequence.num_cached or 0)
        self.count_loaded(sequence, num_imported, {kv_events.PEER: num_imported})
        return True

    def add_block(self, sequence: S) -> bool:
        """Allocate one more block; return False if none is free."""
        fresh = self.pool.allocate(1)
        sequence.block_ids += fresh or ()
        return fresh is not None

    def commit(self, sequence: S, num_computed: int) -> range:
        """Register the blocks that so many tokens fill, so that others find them. Return the new positions."""
        num_full = num_computed // self.block_size
        if not self.prefix_caching or num_full == sequence.num_committed:
            return range(0)
        self._hash(sequence)
        new = range(sequence.num_committed, num_full)
        # What was loaded, imported or computed before the cache was cleared must not be found.
        if sequence.num_clears == self._num_clears:
            self.pool.commit_chain(
                sequence.block_ids, sequence.sequence_hashes, sequence.local_hashes, new
            )
        sequence.num_committed = num_full
        self._offer(sequence, new)
        return new

    def release(self, sequence: S) -> None:
        """Free all blocks of a sequence. Its tokens must be computed again, unless the prefix cache still has them."""
        if self.tiers is not None:
            self.tiers.forget(sequence)
            self.tiers.touch(sequence.sequence_hashes[: sequence.num_committed])
        self.pool.release(sequence.block_ids)
        self._begin(sequence, [])

    def clear(self) -> None:
        """Clear the prefix cache in every tier."""
        self._num_clears += 1
        self.pool.clear()
        if self.tiers is not None:
            self.tiers.clear()

    def _may_load(self, sequence: S) -> bool:
        return self.prefix_caching

    @abc.abstractmethod
    def _hash(self, sequence: S) -> None:
        """Compute the hashes of full blocks that were added to the sequence."""

    def _begin(self, sequence: S, cached: list[int]) -> None:
        sequence.block_ids = list(cached)
        sequence.num_committed, sequence.num_clears = len(cached), self._num_clears
        sequence.num_computed = len(cached) * self.block_size

    def _usable(self, sequence: S) -> list[int]:
        """Return the hashes of the blocks that a sequence may find: its last token is always computed."""
        return sequence.sequence_hashes[: (sequence.num_tokens - 1) // self.block_size]

    def _offer(self, sequence: S, positions: range) -> None:
        """Offer blocks of a sequence to the tiers below."""
        if self.tiers is None:
            return
        priority, hint = sequence.request.priority, sequence.request.cache_hint
        self.tiers.offer(positions.start, _blocks(sequence, positions), priority, hint)


def pass_lead(ended: S, remaining: Sequence[S]) -> None:
    """Let the first of the remaining choices lead, because the leader ended without an output."""
    for choice in remaining:
        choice.leader = None if choice is remaining[0] else remaining[0]
    if remaining:
        remaining[0].remote = remaining[0].remote or ended.remote


def _blocks(sequence: PagedSequence, positions: range) -> list[tiers.CachedBlock]:
    """Return the names of full blocks of a sequence."""
    hashes, local = sequence.sequence_hashes, sequence.local_hashes
    return [tiers.CachedBlock(hashes[i], local[i], hashes[i - 1] if i else None) for i in positions]
