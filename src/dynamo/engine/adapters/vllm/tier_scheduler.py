"""The scheduler's half of the tier connector: `kvbm.tiered_cache` over the block pool of vLLM.

    match       a request waits: how many blocks to load, or "ask again" while the disk is read
    allocate    it has blocks: begin the load
    plan        a step begins: offer the blocks that it fills, and begin copies
    record      a step has ended: some copies have, too
    finish      a request has ended

While a copy reads a block of vLLM, the block has a user more in vLLM's pool, so nothing overwrites it, whatever becomes
of its request. A block's name here is the low half of vLLM's hash, which is what vLLM's own KV events call it.

Nothing here waits, reads a clock but the given one, or imports vLLM: requests and the pool are vLLM's objects, of which
only the attributes are used that `tier_connector` checks.
"""  # decider

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from dynamo.engine.adapters.vllm.tier_plan import (
    CACHE_HINT,
    IS_TRACED,
    EndedCopy,
    OpenedStorage,
    TierPlan,
    TierResults,
)
from dynamo.kvbm import pool as pools
from dynamo.kvbm import tier_jobs, tier_report, tier_setup, tiered_cache, tiers
from dynamo.protocols import generate, kv_events

MAX_UNOPENED = 100  # steps after which nothing waits for the workers' first report
_NAME_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOrigin:
    """What vLLM knows of a block: its whole hash, and the contents that its KV event names."""

    block_hash: bytes
    parent: int | None
    token_ids: Sequence[int]
    lora_name: str | None
    extra_keys: tuple[str, ...] | None  # that the hash covers: the adapter's name, the cache salt
    is_published: bool  # whether its content is known from tokens, adapter and salt


@dataclass(frozen=True, slots=True, kw_only=True)
class TierEvent:
    """A block that a tier has stored, or removed (without `origin`)."""

    name: int
    tier: kv_events.Tier
    origin: BlockOrigin | None = None


class TierEvents(pools.EventLog):
    """The log of events of the tiers below vLLM's memory, whose own events vLLM publishes."""

    def __init__(self, origins: Mapping[int, BlockOrigin]) -> None:
        super().__init__()
        self._origins = origins
        self._tier_events: list[TierEvent] = []

    def add_stored(
        self, block: kv_events.StoredBlock, parent_hash: int | None, tier: kv_events.Tier
    ) -> None:
        """Record a stored block; not one from an earlier run, of which nobody knows the tokens yet."""
        origin = self._origins.get(block.block_hash)
        if origin is not None and origin.is_published:
            self._tier_events.append(TierEvent(name=block.block_hash, tier=tier, origin=origin))

    def add_removed(self, sequence_hash: int, tier: kv_events.Tier) -> None:
        """Record a block that left a tier."""
        self._tier_events.append(TierEvent(name=sequence_hash, tier=tier))

    def take_tier_events(self) -> list[TierEvent]:
        """Return the events since the last call."""
        events, self._tier_events = self._tier_events, []
        return events


class EnginePool:
    """vLLM's block pool as a `pools.DevicePool`."""

    def __init__(self, block_pool: Any, origins: Mapping[int, BlockOrigin]) -> None:
        self.events = TierEvents(origins)
        self.num_blocks: int = block_pool.num_gpu_blocks
        self.on_evicted: Callable[[int], None] | None = None  # vLLM does not say it
        self._pool, self._origins = block_pool, origins

    @property
    def num_free(self) -> int:
        """Blocks that no request uses."""
        num_free: int = self._pool.get_num_free_blocks()
        return num_free

    @property
    def num_used(self) -> int:
        """Blocks that requests use; vLLM does not count those that are only remembered."""
        return self.num_blocks - self.num_free

    @property
    def num_registered(self) -> int:
        """An upper bound of the blocks that can be found."""
        return self.num_blocks

    def __contains__(self, sequence_hash: int) -> bool:
        """Return whether vLLM can find a block."""
        return self._find(sequence_hash) is not None

    def match_prefix(self, sequence_hashes: Iterable[int]) -> list[int]:
        """Return the blocks of the longest prefix of this chain that vLLM has, acquired for the caller."""
        found = []
        for name in sequence_hashes:
            block = self._find(name)
            if block is None:
                break
            found.append(block)
        self._pool.touch(found)
        return [block.block_id for block in found]

    def release(self, blocks: Sequence[int]) -> None:
        """Release blocks that the caller acquired."""
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in reversed(blocks)])

    def _find(self, name: int) -> Any:
        origin = self._origins.get(name)
        found = origin and self._pool.get_cached_block(origin.block_hash, [0])
        return found[0] if found else None


@dataclass(slots=True, kw_only=True)
class _Request:
    """A request of vLLM, and how far the tiers have come with it."""

    request: Any
    hint: generate.CacheHint | None
    added_at: int  # in plans
    names: list[int] = field(default_factory=list)
    num_offered: int = 0  # blocks
    first: int = 0  # block of the last match
    is_prepared: bool = False
    is_declined: bool = False  # it was counted that nothing is loaded
    has_failed: bool = False  # a load: vLLM would ask for the same again, and for ever
    tokens_by_tier: dict[kv_events.Tier, int] = field(default_factory=dict)  # that were loaded
    sources: dict[kv_events.Tier, int] = field(default_factory=dict)  # tokens of the last load
    reads: list[tier_report.TierRead] | None = None  # from tiers; None if it is not traced


class TierScheduler:
    """Mutable; used by vLLM's scheduler only."""

    def __init__(
        self,
        settings: tier_setup.TierConfig,
        *,
        block_size: int,
        num_ranks: int,
        now: Callable[[], float],
    ) -> None:
        """`now` returns seconds of a clock that only goes forward."""
        self.cache: tiered_cache.TieredCache | None = None
        self._settings, self._block_size, self._num_ranks = settings, block_size, num_ranks
        self._now = now
        self._origins: OrderedDict[int, BlockOrigin] = OrderedDict()
        self._max_origins = 4 * tiers.MAX_QUEUED
        self._pool: EnginePool | None = None
        self._requests: dict[str, _Request] = {}
        self._copies: dict[int, tier_jobs.TierCopy] = {}  # that run, by number
        self._ended: dict[int, EndedCopy] = {}  # that have ended at some ranks
        self._late_at: dict[tier_jobs.TierCopy, float] = {}
        self._num_copies = self._num_plans = self._num_step_tokens = 0
        self._has_new_room = self._is_disk_cleared = False
        self._is_shared = False
        self._slots: Mapping[int, tiers.Segment] | None = None  # for the next plan

    # --- requests ---

    def add(self, request: Any) -> None:
        """Add a request of vLLM."""
        extra = getattr(request.sampling_params, "extra_args", None) or {}
        fields = extra.get(CACHE_HINT)
        hint = msgspec.convert(fields, generate.CacheHint) if fields else None
        if request.lora_request is not None:  # after a restart another adapter may have its name
            hint = msgspec.structs.replace(hint or generate.CacheHint(), is_memory_only=True)
        self._requests[request.request_id] = _Request(
            request=request,
            hint=hint,
            added_at=self._num_plans,
            reads=[] if extra.get(IS_TRACED) else None,
        )

    def match(self, request: Any, num_computed: int) -> tuple[int | None, bool]:
        """Return how many tokens after `num_computed` can be loaded, and whether beside the steps.

        None: ask again with the next step.
        """
        cache, state = self.cache, self._requests.get(request.request_id)
        comes_from_peer = (request.kv_transfer_params or {}).get("do_remote_prefill")
        if (
            comes_from_peer
            or state is None
            or state.has_failed
            or num_computed % self._block_size
            or self._is_foreign(request)
        ):
            return 0, False
        if cache is None:
            return (None if self._num_plans < MAX_UNOPENED else 0), False
        if self._is_shared and state.added_at == self._num_plans:
            return None, False  # with the next step's results comes what others have stored
        cache.record_time(self._now())
        names = self._name_blocks(state)
        state.first = num_computed // self._block_size
        usable = names[state.first : (request.num_tokens - 1) // self._block_size]
        request_id: str = request.request_id
        if not state.is_prepared:
            state.is_prepared = True
            is_asked = cache.asks_store and request.lora_request is None
            chain = self._list_blocks(names, range(len(names))) if is_asked else ()
            cache.prepare(request_id, usable, chain, state.first)
        self._stop_late()
        if cache.is_preparing(request_id):
            return None, False
        is_busy = self._num_step_tokens > 0
        num_blocks = cache.count_loadable(usable, is_engine_busy=is_busy)
        if not num_blocks and not state.is_declined:
            state.is_declined = True
            cache.load(request_id, usable, (), is_engine_busy=is_busy)  # counts what it lacked
        is_beside = num_blocks > 0 and not cache.is_quick(num_blocks)
        return num_blocks * self._block_size, is_beside

    def allocate(self, request_id: str, block_ids: Sequence[int], num_tokens: int) -> None:
        """Begin to load what `match` has promised; `block_ids` are all blocks of the request."""
        if not num_tokens or self.cache is None:
            return
        state = self._requests[request_id]
        first, end = state.first, state.first + num_tokens // self._block_size
        num_loading = self.cache.load(
            request_id,
            # What follows is counted as missing.
            state.names[first : (state.request.num_tokens - 1) // self._block_size],
            block_ids[first:end],
            is_engine_busy=self._num_step_tokens > 0,
        )
        assert num_loading == end - first, "a match is loaded before anything else happens"
        origins = self.cache.new_copies[-1].origins
        state.is_prepared = state.is_declined = False  # for the time after a preemption
        state.sources = {tier: origins.count(tier) * self._block_size for tier in set(origins)}

    def sources(self, request_id: str) -> dict[kv_events.Tier, int]:
        """Return the tokens of the load that just began, by the tier that they come from."""
        return self._requests[request_id].sources

    def reads(self, request_id: str) -> Sequence[tier_report.TierRead]:
        """Return the reads from tiers for which a traced request waited; none of one that is not traced."""
        state = self._requests.get(request_id)
        return () if state is None else state.reads or ()

    def finish(self, request_id: str) -> dict[kv_events.Tier, int]:
        """Forget a request that has ended. Return how many of its tokens were loaded from which tier."""
        state = self._requests.pop(request_id, None)
        if state is None:
            return {}
        if self.cache is not None:
            self.cache.forget(request_id)
            self.cache.touch(state.names[: state.num_offered])
        return state.tokens_by_tier

    # --- steps ---

    def plan(self, scheduled: Iterable[tuple[str, int]], num_tokens: int) -> TierPlan:
        """Return the plan of a step that computes `num_tokens`.

        `scheduled` are its requests, each with the tokens that will have been computed after the step.
        """
        self._num_plans += 1
        self._num_step_tokens = num_tokens
        self._has_new_room = False
        cache = self.cache
        if cache is None:
            return TierPlan(num_tokens=num_tokens)
        cache.record_time(self._now())
        for request_id, num_computed in scheduled:
            state = self._requests.get(request_id)
            if state is not None and not self._is_foreign(state.request):
                self._offer(cache, state, num_computed // self._block_size)
        self._stop_late()
        copies, loads = [], {}
        for copy in cache.take_copies():
            number, self._num_copies = self._num_copies, self._num_copies + 1
            self._copies[number] = copy
            if copy.path[1] is not kv_events.DEVICE and copy.limit_s is not None:
                self._late_at[copy] = self._now() + copy.limit_s
            if copy.path[1] is kv_events.DEVICE and not copy.is_quick:
                loads[number] = str(copy.waiting)
            copies.append(replace(copy, sources=(), targets=(), origins=(), waiting=number))
        is_cleared, self._is_disk_cleared = self._is_disk_cleared, False
        slots, self._slots = self._slots, None
        return TierPlan(
            copies=tuple(copies),
            request_by_load=loads,
            num_tokens=num_tokens,
            slots=slots,
            is_disk_cleared=is_cleared,
        )

    def record(self, results: TierResults) -> None:
        """Record what the workers report of a step."""
        if results.opened is not None:
            self._open(results.opened)
        cache = self.cache
        if cache is None:
            return
        cache.record_time(self._now())
        cache.apply_changes(results.changes)
        cache.host.add_slots(results.num_usable - cache.host.num_usable)
        if results.step_s is not None:
            cache.cost.record_step(self._num_step_tokens, results.step_s)
        for number, ended in results.ended.items():
            before = self._ended.pop(number, None)
            joined = ended if before is None else before.join(ended)
            if joined.num_ranks < self._num_ranks:
                self._ended[number] = joined
                continue
            self._end(cache, self._copies.pop(number), joined)

    @property
    def has_work(self) -> bool:
        """Whether steps are needed though vLLM has no requests: copies run, or others can begin."""
        can_clear = self.cache is not None or self._num_plans < MAX_UNOPENED
        return bool(self._copies) or self._has_new_room or (self._is_disk_cleared and can_clear)

    def clear(self) -> None:
        """Drop the blocks of all tiers, those on disk with the next step, or with the first one of open tiers."""
        if self.cache is not None:
            self.cache.clear()
        self._is_disk_cleared = True

    def bind(self, block_pool: Any) -> None:
        """Set vLLM's block pool."""
        self._pool = EnginePool(block_pool, self._origins)
        self._max_origins += 2 * self._pool.num_blocks

    def report(self) -> tier_report.TierReport | None:
        """Return the report on the tiers; None before the workers have opened them."""
        if self.cache is None or self._pool is None:
            return None
        return tier_report.make_report(self._pool, self.cache)

    def take_events(self) -> list[TierEvent]:
        """Return the events of the tiers since the last call."""
        return [] if self._pool is None else self._pool.events.take_tier_events()

    def _open(self, opened: OpenedStorage) -> None:
        assert self._pool is not None, "vLLM binds its pool before the first step"
        self._is_shared = opened.is_shared
        self.cache = tier_setup.make_cache(
            self._settings,
            self._pool,
            host=opened.host,
            disk=opened.disk,
            block_size=self._block_size,
            block_bytes=opened.block_bytes,
            # When a load before a step fails, vLLM has one request compute its blocks again over several steps, and
            # others that share them may read them already. So only loads that cannot fail are made there: a block may
            # vanish from memory that other workers share.
            loads_before_steps=not opened.is_shared,
        )
        if self._num_ranks > 1 and opened.disk is not None and opened.disk.can_renumber:
            self._slots = opened.disk.stored
        if self._is_disk_cleared:
            self.cache.clear()

    def _end(
        self, cache: tiered_cache.TieredCache, copy: tier_jobs.TierCopy, ended: EndedCopy
    ) -> None:
        self._late_at.pop(copy, None)
        read = tier_report.describe_read(
            copy, ended.began_at, ended.ended_at, num_failed=len(ended.failed)
        )
        self._record_read(cache, copy, read)
        cache.end_copy(copy, ended.failed, ended.seconds)
        self._has_new_room |= any(cache.num_queued.values())
        if copy.path[1] is kv_events.DEVICE:
            # It copies memory of this process alone (`_open`).
            assert not (copy.is_quick and ended.failed), "a load before a step cannot fail"
            num_blocks = min(ended.failed, default=len(copy.blocks))
            loaded = cache.count_tokens_by_tier(copy, num_blocks * self._block_size)
            state = self._requests.get(str(copy.waiting))
            if state is not None:
                state.has_failed = bool(ended.failed)
                state.tokens_by_tier.update(loaded)

    def _stop_late(self) -> None:
        assert self.cache is not None
        now = self._now()
        for copy in [copy for copy, late_at in self._late_at.items() if late_at <= now]:
            del self._late_at[copy]
            self._record_read(self.cache, copy, tier_report.describe_late_read(copy, now))
            self.cache.stop_waiting(copy)

    def _record_read(
        self,
        cache: tiered_cache.TieredCache,
        copy: tier_jobs.TierCopy,
        read: tier_report.TierRead,
    ) -> None:
        """Note a read from a tier for the traced requests that wait for it."""
        for waiting in cache.waiting_for(copy):
            state = self._requests.get(str(waiting))
            if state is not None and state.reads is not None:
                state.reads.append(read)

    def _is_foreign(self, request: Any) -> bool:
        """Return whether other workers may mean something else by the names of its blocks: that of its adapter."""
        return self._is_shared and request.lora_request is not None

    def _offer(self, cache: tiered_cache.TieredCache, state: _Request, num_full: int) -> None:
        """Offer the full blocks of a request that were not offered yet."""
        names = self._name_blocks(state)
        first, end = state.num_offered, min(num_full, len(names))
        offered = self._list_blocks(names, range(first, end))
        cache.offer(first, offered, -state.request.priority, state.hint)  # vLLM: the lower first
        state.num_offered = max(first, end)

    @staticmethod
    def _list_blocks(names: Sequence[int], positions: range) -> list[tiers.CachedBlock]:
        return [tiers.CachedBlock(names[i], 0, names[i - 1] if i else None) for i in positions]

    def _name_blocks(self, state: _Request) -> list[int]:
        """Return the names of the full blocks of a request, the new ones included, and remember their origins."""
        request, names, size = state.request, state.names, self._block_size
        lora = request.lora_request.lora_name if request.lora_request is not None else None
        # vLLM's hashes have the name only, which another adapter may have had; each load has a number.
        load_number = request.lora_request.lora_int_id if request.lora_request is not None else 0
        is_published = not request.mm_features and request.prompt_embeds is None
        for i in range(len(names), len(request.block_hashes)):
            block_hash: bytes = request.block_hashes[i]
            keys = (lora, request.cache_salt if i == 0 else None)
            name = (int.from_bytes(block_hash, "big") ^ load_number) & _NAME_MASK
            self._origins.pop(name, None)
            self._origins[name] = BlockOrigin(
                block_hash=block_hash,
                parent=names[-1] if names else None,
                token_ids=request.all_token_ids[i * size : (i + 1) * size],
                lora_name=lora,
                extra_keys=tuple(key for key in keys if key) or None,
                is_published=is_published,
            )
            names.append(name)
            if len(self._origins) > self._max_origins:
                self._origins.popitem(last=False)
        return names
