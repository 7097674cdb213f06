"""An engine without a model: the seam, the memory, the timing and the events of a real one, for tests and benchmarks.

It lives on the caller's event loop, as one task for each data-parallel rank. Ranks share nothing but the loop: each has
its scheduler, its cache, its events and its load, as if it were a GPU of its own.
"""

from collections.abc import Sequence

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.engine import api, refusal
from dynamo.engine.mock.answers import Cycle
from dynamo.engine.mock.batch import Batch, Limits
from dynamo.engine.mock.memory import Memory
from dynamo.engine.mock.profile import Profile
from dynamo.engine.mock.rank import Rank
from dynamo.engine.mock.settings import MockConfig
from dynamo.engine.mock.timing import Timing
from dynamo.protocols import generate, load


class MockEngine:
    """An `api.Engine` whose answers repeat the tokens of `cycle`, which should decode to words."""

    def __init__(
        self,
        settings: MockConfig,
        *,
        cycle: Cycle,
        context_length: int,
        profile: Profile | None = None,
        clock: clocks.Clock | None = None,
    ) -> None:
        settings.check()
        self._startup_s = settings.startup_time
        self._facts = _facts(settings, context_length)
        self._clock = clock or clocks.SystemClock()
        timing = _timing(settings, profile)
        self._ranks = [
            Rank(number, _batch(settings, self._facts, cycle), timing, self._clock)
            for number in range(settings.data_parallel_size)
        ]
        self._tasks = tasks.Tasks()
        self._death: errors.EngineFailed | None = None

    async def start(self, sink: api.EngineSink) -> api.EngineFacts:
        """Nothing to load, but it may be told to take its time."""
        self._sink = sink
        if self._startup_s:
            await self._clock.sleep(self._startup_s)
        for rank in self._ranks:
            self._tasks.start(f"mock engine, rank {rank.number}", self._live(rank))
        return self._facts

    def submit(self, request: generate.Request) -> None:
        """Begin it with the next step of the rank it names, or of the one with the fewest requests."""
        if self._death is not None:
            raise self._death
        refusal.check(request, self._facts, vocab_size=None)
        if any(request.id in rank.batch for rank in self._ranks):
            raise errors.InvalidRequest(f"a request with the id {request.id!r} runs already")
        self._rank_for(request).submit(request)

    def abort(self, request_id: str) -> None:
        """Free its blocks now."""
        for rank in self._ranks:
            rank.batch.abort(request_id)

    def abort_choice(self, request_id: str, index: int) -> None:
        """Free its blocks now."""
        for rank in self._ranks:
            rank.batch.abort_choice(request_id, index)

    def load(self) -> Sequence[load.ForwardPassMetrics]:
        """As of now, of each rank."""
        return [rank.batch.load(rank.number) for rank in self._ranks]

    async def clear_kv_blocks(self) -> None:
        """Forget all reusable prefixes now."""
        for rank in self._ranks:
            rank.batch.clear()
            rank.tell_events(self._sink)

    async def stop(self) -> None:
        """End the tasks."""
        await self._tasks.close()

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
    )


def _timing(settings: MockConfig, profile: Profile | None) -> Timing:
    return Timing(
        speedup_ratio=settings.speedup_ratio,
        decode_speedup_ratio=settings.decode_speedup_ratio,
        tick_ms=settings.tick_ms,
        profile=profile,
        num_cache_tokens=settings.num_gpu_blocks_override * settings.block_size,
    )


def _batch(settings: MockConfig, facts: api.EngineFacts, cycle: Cycle) -> Batch:
    memory = Memory(
        cycle,
        num_blocks=facts.total_kv_blocks,
        block_size=facts.kv_block_size,
        prefix_caching=settings.enable_prefix_caching,
        watermark=settings.watermark,
    )
    limits = Limits(
        max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        context_length=facts.context_length,
        chunked_prefill=settings.enable_chunked_prefill,
        preempts_newest=settings.preemption_mode == "lifo",
    )
    return Batch(cycle, memory, limits)
