"""The tiered cache of one engine: which blocks are copied between its memory, host memory and disk, and when.

    a block of the engine is registered ──offer──▶ queue ──▶ copy to host ──▶ queue ──▶ copy to disk
    a prompt arrives ──prepare──▶ copies from disk to host, while the request queues (`preparations`)
    it is admitted   ──load──▶    a copy from host to the engine's blocks, while other sequences run

It decides; `tier_copies` copies. `take_copies` returns what to copy, and `end_copy` says how each copy ended: a block
can be found in a tier only after its copy has ended well. A queue holds names only: a block that was evicted before its
turn is skipped. Queues and copies that run are bounded, and nothing waits for room: what finds none is skipped and
counted. While a copy reads a block of the engine, the block has a user more, and so is not evicted.

A request waits for its copies at most as long as computing would make it wait too: `copy.limit_s` says how long, and
`stop_waiting` ends the wait of a late copy, which goes on by itself.
"""  # decider

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from dynamo.kvbm import pool as pools
from dynamo.kvbm import segments, tier_jobs, tier_policy
from dynamo.kvbm.preparations import Preparations, leading
from dynamo.kvbm.tier_jobs import RunningCopies, TierCopy
from dynamo.kvbm.tiers import CachedBlock, OffloadQueue, QueuedBlock, SharedChanges, Tier, TierBlock
from dynamo.protocols import generate, kv_events

MIN_OFFLOADS = 2  # copies to one tier that may run at once, however small the tier above it
COPIED_SHARE = 8  # of that tier, at most one block in so many is being copied
# Beyond it in either direction all count alike: a client may give each request one of its own, such as its deadline.
MAX_PRIORITY = 8
EXPLORED_SHARE = 16  # turned down, one block in so many is still offloaded
# The engine's thread makes a load itself before its step, if that takes no longer than to hand it to a thread (0.3 ms),
# or if all such loads take a small share of that step: a load beside it is noticed only when it ends.
QUICK_BYTES = 2 * 2**20
QUICK_SHARE = 1 / 32
DEVICE, HOST, DISK, REMOTE = kv_events.TIERS


class TieredCache:
    """Mutable; the thread that owns the pool owns it."""

    def __init__(
        self,
        pool: pools.DevicePool,
        host: Tier,
        disk: Tier | None,
        *,
        block_size: int,
        block_bytes: int,
        options: tier_policy.TierOptions | None = None,
        loads_before_steps: bool = True,
    ) -> None:
        """`block_size` is in tokens, `block_bytes` the size of a block over all layers.

        Without `loads_before_steps` every load is made beside the engine's steps.
        """
        options = options or tier_policy.TierOptions()
        self.host, self.disk = host, disk  # the second may be an object store
        self._tiers = [tier for tier in (host, disk) if tier is not None]
        self._below = DISK if disk is None else disk.name
        self.cost = tier_policy.LoadCost()
        self.guard = tier_policy.ChurnGuard(max(host.num_slots, 1))
        self.counts: Counter[str] = Counter()
        self.num_copied: Counter[tier_policy.Path] = Counter()  # blocks of copies that ended well
        self._loads_before_steps = loads_before_steps
        self._pool = pool
        self._block_size, self.block_bytes = block_size, block_bytes
        self._ratio = options.offload_ratio
        max_counts = 4 * (pool.num_blocks + host.num_slots)
        self._host_filter = tier_policy.OffloadFilter(options.host_filter, max_counts=max_counts)
        disk_filter = tier_policy.OffloadFilter(options.disk_filter, max_counts=max_counts)
        self._to_host = OffloadQueue()
        self._to_disk = (
            None if disk is None else segments.SegmentQueue(host, disk, disk_filter, self.counts)
        )
        self._copies = RunningCopies(self.cost, block_bytes)
        self._preparations = (
            None
            if disk is None
            else Preparations(
                pool, host, disk, self._copies, self.cost, self.counts, block_size=block_size
            )
        )
        self._in_both: set[int] = set()  # blocks of the engine that host memory has too
        self._num_quick_bytes = self._num_quick_tokens = 0  # of loads before the next step
        self._explored = itertools.count(1)
        # A copy must not take much of the memory from sequences that need blocks.
        self._batch_blocks = max(1, min(tier_jobs.BATCH_BLOCKS, pool.num_blocks // 16))
        # Copies begin before a step, and a long one computes more blocks than a few copies have.
        self._max_to_host = _max_offloads(pool.num_blocks, self._batch_blocks)
        self._max_to_disk = _max_offloads(host.num_slots, tier_jobs.BATCH_BLOCKS)
        pool.on_evicted = host.on_dropped = self._in_both.discard
        if disk is not None:
            host.is_below = lambda name: disk.find(name) is not None

    @property
    def new_copies(self) -> list[TierCopy]:
        """The copies that `take_copies` will return."""
        return self._copies.new

    @property
    def num_queued(self) -> dict[kv_events.Tier, int]:
        """Blocks that wait to be copied, by the tier that they are copied to."""
        return {HOST: len(self._to_host), self._below: len(self._to_disk or ())}

    def record_time(self, now: float) -> None:
        """Set the time, in seconds of a clock that only goes forward, from which times to live count."""
        for tier in self._tiers:
            tier.now = now

    def apply_changes(self, changes: Mapping[kv_events.Tier, SharedChanges]) -> None:
        """Record what other processes have changed in the tiers that they share."""
        for tier in self._tiers:
            if tier.name in changes:
                tier.apply_changes(changes[tier.name])

    # --- offload ---

    def offer(
        self,
        first: int,
        blocks: Sequence[CachedBlock],
        priority: int,
        hint: generate.CacheHint | None = None,
    ) -> None:
        """Offer blocks that the engine has registered, or that a prompt has found there, in the order of the chain.

        `first` is the position of the first one in its chain.
        """
        priority = max(-MAX_PRIORITY, min(priority, MAX_PRIORITY))
        for position, block in enumerate(blocks, first):
            name = block.sequence_hash
            ends_segment = self.disk is not None and not (position + 1) % self.disk.segment_blocks
            if hint is not None:
                for tier in self._tiers:
                    tier.keep(name, hint)
            if name in self.host:
                if self._host_filter.kind is tier_policy.FilterKind.PASS_ALL:
                    self.host.touch((name,))
                self._in_both.add(name)
                if self._to_disk is not None and ends_segment and (found := self.host.find(name)):
                    self._to_disk.offer(found)
                continue
            is_worth = self._host_filter.admits(name)
            if is_worth and self.guard.is_down and next(self._explored) % EXPLORED_SHARE:
                self.guard.record_skipped(name)
                is_worth = False
            queued = QueuedBlock(block, priority, hint, ends_segment)
            if is_worth and not self._to_host.add(queued):
                self.counts["skipped_queue_full"] += 1

    def take_copies(self) -> list[TierCopy]:
        """Return the copies to begin now."""
        num_running = self._copies.num_running
        while num_running[DEVICE, HOST] < self._max_to_host and self._begin_offload_to_host():
            pass
        while num_running[HOST, self._below] < self._max_to_disk and self._begin_offload_to_disk():
            pass
        self._num_quick_bytes = self._num_quick_tokens = 0
        return self._copies.take_new()

    def end_copy(
        self, copy: TierCopy, failed: frozenset[int] = frozenset(), seconds: float | None = None
    ) -> None:
        """Record that a copy has ended: all but the blocks at the positions `failed` are what their names say.

        `seconds` is the time that it took, None if that says nothing of its speed.
        """
        preparations, path = self._preparations, copy.path
        if preparations is not None and copy.is_question:
            preparations.end_question(copy, is_there=not failed, seconds=seconds)
            return
        self._copies.end(copy)
        num_copied = len(copy.blocks) - len(failed)
        self.num_copied[path] += num_copied
        self.counts["failed_blocks"] += len(failed)
        if num_copied and seconds is not None:
            self.cost.record_copy(path, num_copied * self.block_bytes, seconds)
        if path[0] is DEVICE:
            self._pool.release(copy.from_slots)
        failed_from = {copy.from_slots[position] for position in failed}
        failed_to = {copy.to_slots[position] for position in failed}
        for source in copy.sources:
            tier = self.host if path[0] is HOST else self.disk
            assert tier is not None
            may_be_wrong = path[0] is self._below or (source.is_foreign and path[1] is DEVICE)
            if may_be_wrong and source.slot in failed_from:
                tier.drop(source)
            tier.release(source)
        for target in copy.targets:
            self._end_target(copy, target, is_failed=target.slot in failed_to)
        if preparations is not None and path == (self._below, HOST):
            preparations.end_read(copy)

    def _end_target(self, copy: TierCopy, target: TierBlock, *, is_failed: bool) -> None:
        tier = self.host if copy.path[1] is HOST else self.disk
        assert tier is not None
        if is_failed:
            tier.drop(target)
            tier.release(target)
            return
        if self._preparations is not None:
            self._preparations.keep(copy, target)
        is_new = tier.confirm(target) and copy.path == (DEVICE, HOST)
        if is_new and target.ends_segment and self._to_disk is not None:
            self._to_disk.offer(target)

    def _begin_offload_to_host(self) -> bool:
        """Begin one copy of queued blocks that the engine still has. Return whether there was any."""
        sources: list[int] = []
        targets: list[TierBlock] = []
        max_both = self._ratio * self._pool.num_registered if self._ratio < 1 else math.inf
        while len(targets) < self._batch_blocks and len(self._in_both) + 1 <= max_both:
            if self._pool.num_free < self._batch_blocks:
                break
            queued = self._to_host.pop()
            if queued is None:
                break
            block = queued.block
            if block.sequence_hash in self.host:
                self.host.keep(block.sequence_hash, queued.hint)
                continue
            source = self._pool.match_prefix((block.sequence_hash,))
            if not source:  # evicted meanwhile
                continue
            target = self.host.reserve(
                (block,), queued.priority, queued.hint, ends_segment=queued.ends_segment
            )
            if target is None:
                self._pool.release(source)
                self.counts["skipped_tier_full"] += 1
                break
            self._in_both.add(block.sequence_hash)
            sources += source
            targets.append(target)
        self._record_evictions()
        if targets:
            self._copies.begin((DEVICE, HOST), targets, sources)
        return bool(targets)

    def _record_evictions(self) -> None:
        """Count what host memory gave up since the last time, and what was in vain: no request will find it.

        A block that the disk has is given up in vain only when the disk gives it up, too.
        """
        host = self.host
        if not host.num_evicted:
            return
        num_unread = sum(tier.num_evicted_unread for tier in self._tiers)
        if self.guard.record_evictions(host.num_evicted, num_unread):
            self.counts["turned_down"] += 1
        self.counts["evicted"] += host.num_evicted
        for tier in self._tiers:
            tier.num_evicted = tier.num_evicted_unread = 0

    def _begin_offload_to_disk(self) -> bool:
        if self._to_disk is None:
            return False
        sources, targets = self._to_disk.take(tier_jobs.BATCH_BLOCKS)
        if targets:
            slots = [target.slot for target in targets for _ in target.segment]
            self._copies.begin((HOST, self._below), sources, slots, targets)
        return bool(targets)

    # --- onboard ---

    @property
    def asks_store(self) -> bool:
        """Whether `prepare` asks an object store for what other workers have stored."""
        return self._preparations is not None and self._preparations.questions is not None

    def prepare(
        self,
        waiting: Hashable,
        sequence_hashes: Sequence[int],
        chain: Sequence[CachedBlock] = (),
        first: int = 0,
    ) -> None:
        """Begin to copy the blocks of a prompt that only the disk has to host memory, if that pays.

        `waiting` is the sequence, which may be admitted as soon as `is_preparing` is false. A store is asked for what
        follows in `chain`, the prompt's blocks from its beginning, in which the first hash stands at `first`.
        """
        if self._preparations is not None:
            self._preparations.begin(waiting, sequence_hashes, chain, first)

    def is_preparing(self, waiting: Hashable) -> bool:
        """Return whether a sequence that queues has something to wait for."""
        return self._preparations is not None and self._preparations.is_running(waiting)

    def waiting_for(self, copy: TierCopy) -> list[Hashable]:
        """Return the sequences that wait for a copy which reads from a tier."""
        if copy.waiting is None and self._preparations is not None:
            return self._preparations.waiting_for(copy)
        return [] if copy.waiting is None else [copy.waiting]

    def stop_waiting(self, copy: TierCopy) -> None:
        """Let the sequences that wait for a late copy from disk, or for a late answer, go on without it."""
        if self._preparations is not None:
            self._preparations.stop_waiting(copy)

    def count_loadable(self, sequence_hashes: Sequence[int], *, is_engine_busy: bool) -> int:
        """Return how many leading blocks of this chain `load` would load now; changes nothing."""
        num_blocks = len(leading(map(self.host.find, sequence_hashes)))
        return num_blocks if self._pays(num_blocks, 0, is_engine_busy=is_engine_busy) else 0

    def is_quick(self, num_blocks: int, num_new: int = 0) -> bool:
        """Return whether the engine's thread should load so many blocks before a step with `num_new` more tokens."""
        if not self._loads_before_steps:
            return False
        before_step_s = QUICK_SHARE * self.cost.least_step_s(self._num_quick_tokens + num_new)
        num_left = before_step_s * self.cost.bytes_per_s((HOST, DEVICE)) - self._num_quick_bytes
        return num_blocks * self.block_bytes <= max(QUICK_BYTES, num_left)

    def load(
        self,
        waiting: Hashable,
        sequence_hashes: Sequence[int],
        block_ids: Sequence[int],
        *,
        is_engine_busy: bool,
        max_new: int = 0,
    ) -> int:
        """Begin to copy the leading blocks of this chain from host memory to the engine's blocks, if that pays.

        Return their number; `waiting` goes on when the copy has ended. If the engine is busy, a sequence misses the
        step that begins now, unless its load is quick; of all sequences with such loads it computes `max_new` tokens.
        """
        released = [] if self._preparations is None else self._preparations.release(waiting)
        from_disk = set(released)
        entries = leading(map(self.host.find, sequence_hashes))
        self.counts["host_lookups"] += len(sequence_hashes)
        missing = sequence_hashes[len(entries) :]
        if missing and self.guard.record_miss(missing[0]):
            self.counts["turned_up"] += 1
        if not entries:
            return 0
        num_new = min(len(missing) * self._block_size, max(0, max_new - self._num_quick_tokens))
        if not self._pays(len(entries), num_new, is_engine_busy=is_engine_busy):
            self.counts["not_worth_loading"] += 1
            self.cost.record_declined((HOST, DEVICE))
            return 0
        if is_quick := self.is_quick(len(entries), num_new):
            self._num_quick_bytes += len(entries) * self.block_bytes
            self._num_quick_tokens += num_new
        sources = [self.host.acquire(source) for source in entries]
        self._copies.begin(
            (HOST, DEVICE),
            sources,
            block_ids[: len(entries)],
            # The engine itself makes a quick one, which is a copy of memory: it ends, and may not fail for the time.
            limit_s=None if is_quick else self.cost.max_wait_s(len(entries) * self._block_size),
            waiting=waiting,
            origins=tuple([self._below if each in from_disk else HOST for each in entries]),
            is_quick=is_quick,
        )
        return len(entries)

    def count_tokens_by_tier(self, copy: TierCopy, num_tokens: int) -> dict[kv_events.Tier, int]:
        """Return how many of the tokens of an ended load came from each tier, and count them as hits."""
        num_loaded = num_tokens // self._block_size
        num_blocks = Counter(copy.origins[:num_loaded])
        self.counts["shared_blocks"] += sum(block.is_foreign for block in copy.sources[:num_loaded])
        self.counts["matched_tokens"] += num_tokens
        self.counts["disk_hits"] += num_blocks[self._below]
        return {tier: count * self._block_size for tier, count in num_blocks.items()}

    def forget(self, waiting: Hashable) -> None:
        """Drop what was prepared for a sequence that was aborted; copies that run end by themselves."""
        if self._preparations is not None:
            self._preparations.release(waiting)

    def touch(self, sequence_hashes: Sequence[int]) -> None:
        """Mark the blocks of a sequence as used now: its end first, so that it is evicted first."""
        for tier in self._tiers:
            tier.touch(reversed(sequence_hashes))

    def clear(self) -> None:
        """Drop the blocks of all tiers. The pool records the event."""
        self._to_host.clear()
        if self._to_disk is not None:
            self._to_disk.clear()
        self._in_both.clear()
        if self._preparations is not None:
            self._preparations.clear()
        for tier in self._tiers:
            tier.clear()

    def _pays(self, num_blocks: int, num_new: int, *, is_engine_busy: bool) -> bool:
        """Return whether blocks of host memory are worth loading."""
        load_s = self._copies.load_s((HOST, DEVICE), num_blocks)
        if is_engine_busy and not self.is_quick(num_blocks, num_new):
            load_s += self.cost.step_s
        return self.cost.pays(load_s, num_blocks * self._block_size)


def _max_offloads(num_blocks: int, num_copied: int) -> int:
    """Return how many copies of `num_copied` blocks each may run at once from a tier of `num_blocks`."""
    return max(MIN_OFFLOADS, num_blocks // COPIED_SHARE // num_copied)
