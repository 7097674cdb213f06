"""An engine without a model: the seam, the memory, the timing and the events of a real one, for tests and benchmarks.

It lives on the caller's event loop, as one task for each data-parallel rank. Ranks share nothing but the loop: each has
its scheduler, its cache, its events and its load, as if it were a GPU of its own.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.engine import api, refusal
from dynamo.engine.mock import kv_link
from dynamo.engine.mock.answers import Cycle
from dynamo.engine.mock.batch import Batch, Limits
from dynamo.engine.mock.memory import Choice, Memory
from dynamo.engine.mock.profile import Profile
from dynamo.engine.mock.rank import Rank
from dynamo.engine.mock.settings import MockConfig
from dynamo.engine.mock.timing import Timing
from dynamo.kvbm import exchange, local_agent, sharing
from dynamo.protocols import generate, load
from dynamo.transfer import descriptors
from dynamo.transfer import memory as transfer_memory
from dynamo.transfer.backends import local

_GIVEN_BACK = frozenset(("weights", "kv_cache"))


class MockEngine(exchange.ExchangesKv):
    """An `api.Engine` whose answers repeat the tokens of `cycle`, which should decode to words."""

    def __init__(
        self,
        settings: MockConfig,
        *,
        cycle: Cycle,
        context_length: int,
        profile: Profile | None = None,
        clock: clocks.Clock | None = None,
        room: local.Room | None = None,
    ) -> None:
        settings.check()
        self._startup_s = settings.startup_time
        self._facts = _facts(settings, context_length)
        self._clock = clock or clocks.SystemClock()
        self._exchange = exchange.KvExchange(
            functools.partial(local_agent.make_agent, "mocker", settings, room),
            timeout_s=settings.kv_transfer_timeout_s,
            lease_s=settings.kv_hold_s,
            before_copy=_link(settings, self._clock).wait,
        )
        timing = _timing(settings, profile)
        share_ids = itertools.count(1)  # of leases and imports
        self._memories = [_memory(settings, cycle) for _ in range(settings.data_parallel_size)]
        self._ranks = [
            Rank(
                number,
                _batch(settings, self._facts, cycle, memory, number, share_ids),
                timing,
                self._clock,
                self._exchange,
            )
            for number, memory in enumerate(self._memories)
        ]
        self._tasks = tasks.Tasks()
        self._death: errors.EngineFailed | None = None
        self._asleep: frozenset[str] = frozenset()  # what has been given back

    @property
    def capabilities(self) -> api.EngineCapabilities:
        """Return itself for each of them."""
        return api.EngineCapabilities(
            kv_transfer=self, kv_exports=self, sleep=self, lora_adapters=self
        )

    async def start(self, sink: api.EngineSink) -> api.EngineFacts:
        """Nothing to load, but it may be told to take its time."""
        self._sink = sink
        if self._startup_s:
            await self._clock.sleep(self._startup_s)
        await self._exchange.start(self._region(), self)
        for rank in self._ranks:
            self._tasks.start(f"mock engine, rank {rank.number}", self._live(rank))
        return self._facts

    def submit(self, request: generate.Request) -> None:
        """Begin it with the next step of the rank it names, or of the one with the fewest requests."""
        if self._death is not None:
            raise self._death
        if self._asleep:
            raise errors.Conflict(f"the engine sleeps: it misses {', '.join(sorted(self._asleep))}")
        refusal.check(request, self._facts, vocab_size=None)
        if any(request.id in rank.batch for rank in self._ranks):
            raise errors.InvalidRequest(f"a request with the id {request.id!r} runs already")
        if request.kv_transfer_params is not None:
            self._exchange.accept_request(request)
        self._rank_for(request).submit(request)

    def abort(self, request_id: str) -> None:
        """Free its blocks now, or when a copy to them has ended."""
        self._exchange.abort_import(request_id)
        for rank in self._ranks:
            rank.batch.abort(request_id)

    def abort_choice(self, request_id: str, index: int) -> None:
        """Free its blocks now."""
        for rank in self._ranks:
            rank.batch.abort_choice(request_id, index)
        if not any(request_id in rank.batch for rank in self._ranks):
            self._exchange.abort_import(request_id)

    def load(self) -> Sequence[load.ForwardPassMetrics]:
        """As of now, of each rank."""
        return [rank.batch.load(rank.number) for rank in self._ranks]

    async def clear_kv_blocks(self) -> None:
        """Forget all reusable prefixes now."""
        for rank in self._ranks:
            rank.batch.clear()
            rank.tell_events(self._sink)

    async def sleep(self, level: int) -> None:
        """See `api.SleepController`. There is nothing to give back, but it takes no requests."""
        del level
        self._asleep = _GIVEN_BACK

    async def wake_up(self, tags: Sequence[str]) -> bool:
        """See `api.SleepController`."""
        self._asleep -= frozenset(tags) or _GIVEN_BACK
        return not self._asleep

    @property
    def lora_names(self) -> tuple[str, ...]:
        """See `api.LoraAdapterStore`."""
        return self._facts.lora_names

    async def load_lora(self, name: str, directory: Path) -> None:
        """See `api.LoraAdapterStore`. Nothing is read, but it takes none while it sleeps."""
        del directory
        if self._asleep:
            raise errors.Conflict("the engine sleeps")
        self._facts = dataclasses.replace(self._facts, lora_names=(*self.lora_names, name))

    async def unload_lora(self, name: str) -> None:
        """See `api.LoraAdapterStore`."""
        names = tuple(one for one in self.lora_names if one != name)
        self._facts = dataclasses.replace(self._facts, lora_names=names)

    async def stop(self) -> None:
        """End the tasks."""
        await self._exchange.close()
        await self._tasks.close()

    def end_import(self, import_id: int, *, is_copied: bool) -> None:
        """See `sharing.BlockOwner`."""
        for rank in self._ranks:
            rank.end_import(import_id, is_copied=is_copied)

    def release_lease(self, lease_id: int) -> None:
        """See `sharing.BlockOwner`."""
        for rank in self._ranks:
            rank.release_lease(lease_id)

    def _region(self) -> descriptors.Region:
        """Memory for the names of all ranks' blocks; they are written only if somebody may read them."""
        size, num_blocks = self._facts.kv_block_size, self._facts.total_kv_blocks
        shape = kv_link.layout(num_blocks * len(self._ranks), size)
        allocate = self._exchange.allocate
        memory = (allocate or transfer_memory.private)(shape.num_bytes)
        names = memory.cast("Q")
        for number, rank_memory in enumerate(self._memories):
            mine = names[number * num_blocks * size :]
            rank_memory.lie_in(mine, is_read=allocate is not None)
        return descriptors.Region(memory=memory, layout=shape)

    def _rank_for(self, request: generate.Request) -> Rank:
        if request.data_parallel_rank is not None:
            return self._ranks[request.data_parallel_rank]
        return min(self._ranks, key=lambda rank: len(rank.batch))

    async def _live(self, rank: Rank) -> None:
        try:
            await rank.live(self._sink)
        except Exception as error:  # noqa: BLE001 - supervises the engine's task: the sink is told
            self._die(error)

    def _die(self, error: Exception) -> None:
        if self._death is not None:
            return  # of another rank, a moment ago
        self._death = errors.EngineFailed(
            f"the simulated engine died: {type(error).__name__}: {error}"
        )
        self._death.__cause__ = error
        self._sink.died(self._death)


def _facts(settings: MockConfig, context_length: int) -> api.EngineFacts:
    longest = settings.num_gpu_blocks_override * settings.block_size
    if not settings.enable_chunked_prefill:
        longest = min(longest, settings.max_num_batched_tokens)
    return api.EngineFacts(
        context_length=min(settings.max_model_len or context_length, longest),
        kv_block_size=settings.block_size,
        total_kv_blocks=settings.num_gpu_blocks_override,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        data_parallel_size=settings.data_parallel_size,
        lora_names=settings.lora_names,
    )


def _timing(settings: MockConfig, profile: Profile | None) -> Timing:
    return Timing(
        speedup_ratio=settings.speedup_ratio,
        decode_speedup_ratio=settings.decode_speedup_ratio,
        tick_ms=settings.tick_ms,
        profile=profile,
        num_cache_tokens=settings.num_gpu_blocks_override * settings.block_size,
    )


def _link(settings: MockConfig, clock: clocks.Clock) -> kv_link.KvLink:
    return kv_link.KvLink(
        clock,
        bytes_per_second=settings.kv_transfer_bandwidth * 1e9,
        bytes_per_block=settings.kv_bytes_per_token * settings.block_size,
        limit_s=settings.kv_transfer_timeout_s,
        fail_every=settings.kv_transfer_fail_every,
    )


def _memory(settings: MockConfig, cycle: Cycle) -> Memory:
    return Memory(
        cycle,
        num_blocks=settings.num_gpu_blocks_override,
        block_size=settings.block_size,
        prefix_caching=settings.enable_prefix_caching,
        watermark=settings.watermark,
    )


def _batch(
    settings: MockConfig,
    facts: api.EngineFacts,
    cycle: Cycle,
    memory: Memory,
    rank: int,
    share_ids: Iterator[int],
) -> Batch:
    limits = Limits(
        max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        context_length=facts.context_length,
        chunked_prefill=settings.enable_chunked_prefill,
        preempts_newest=settings.preemption_mode == "lifo",
    )
    shared: sharing.SharedBlocks[Choice] = sharing.SharedBlocks(
        memory.pool, memory.block_size, first_block=rank * facts.total_kv_blocks, ids=share_ids
    )
    return Batch(cycle, memory, limits, shared)
