"""An engine without a model: the seam, the memory, the timing and the events of a real one, for tests and benchmarks.

It lives on the caller's event loop, as one task that makes steps: schedule, wait as long as a GPU would, commit.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo.base import clock as clocks
from dynamo.base import config, errors, tasks
from dynamo.engine import api, refusal
from dynamo.engine.mock.answers import Cycle
from dynamo.engine.mock.batch import Batch, Limits, Plan
from dynamo.engine.mock.memory import Memory
from dynamo.engine.mock.timing import Timing
from dynamo.protocols import generate, load


@dataclass(frozen=True, slots=True, kw_only=True)
class MockConfig:
    """The simulated engine."""

    block_size: int = config.option(64, help="tokens in a block of the KV cache")
    num_gpu_blocks_override: int = config.option(16384, help="blocks of the KV cache")
    max_num_seqs: int = config.option(256, help="sequences that may run at once")
    max_num_batched_tokens: int = config.option(8192, help="tokens that a step may compute")
    max_model_len: int | None = config.option(
        None, help="context in tokens; by default the model's, as far as the KV cache holds it"
    )
    enable_prefix_caching: bool = config.option(True, help="compute a known prefix only once")
    speedup_ratio: float = config.option(
        1.0, help="how much faster than the simulated GPU; 0 or a million: at once"
    )
    decode_speedup_ratio: float = config.option(1.0, help="multiplies it for decoding only")
    tick_ms: float | None = config.option(
        None, help="every step takes this long, whatever it holds: an even pace for benchmarks"
    )
    embedding_dimensions: int = config.option(
        384, help="numbers in a vector, where the task is to embed", least=1
    )


class MockEngine:
    """An `api.Engine` whose answers repeat `token_ids`, which should decode to words."""

    def __init__(
        self,
        settings: MockConfig,
        *,
        token_ids: Sequence[int],
        context_length: int,
        clock: clocks.Clock | None = None,
    ) -> None:
        _check(settings)
        self._facts = _facts(settings, context_length)
        self._timing = Timing(
            speedup_ratio=settings.speedup_ratio,
            decode_speedup_ratio=settings.decode_speedup_ratio,
            tick_ms=settings.tick_ms,
        )
        self._clock = clock or clocks.SystemClock()
        self._batch = _batch(settings, self._facts, Cycle(token_ids))
        self._tasks = tasks.Tasks()
        self._has_work = asyncio.Event()
        self._death: errors.EngineFailed | None = None

    async def start(self, sink: api.EngineSink) -> api.EngineFacts:
        """Nothing to load."""
        self._sink = sink
        self._due = self._clock.now()  # when the last step was over
        self._tasks.start("mock engine", self._live())
        return self._facts

    def submit(self, request: generate.Request) -> None:
        """Begin it with the next step."""
        if self._death is not None:
            raise self._death
        refusal.check(request, self._facts, vocab_size=None)
        if request.id in self._batch:
            raise errors.InvalidRequest(f"a request with the id {request.id!r} runs already")
        self._batch.submit(request)
        self._has_work.set()

    def abort(self, request_id: str) -> None:
        """Free its blocks now."""
        self._batch.abort(request_id)

    def abort_choice(self, request_id: str, index: int) -> None:
        """Free its blocks now."""
        self._batch.abort_choice(request_id, index)

    def load(self) -> load.ForwardPassMetrics:
        """As of now."""
        return self._batch.load()

    async def clear_kv_blocks(self) -> None:
        """Forget all reusable prefixes now."""
        self._batch.clear()
        self._sink.kv_events(self._batch.take_events())

    async def stop(self) -> None:
        """End the task."""
        await self._tasks.close()

    async def _live(self) -> None:
        try:
            while True:
                await self._step()
        except Exception as error:  # noqa: BLE001 - supervises the engine's task: the sink is told
            self._death = errors.EngineFailed(
                f"the simulated engine died: {type(error).__name__}: {error}"
            )
            self._death.__cause__ = error
            self._sink.died(self._death)

    async def _step(self) -> None:
        """Schedule, let time pass, commit."""
        if not self._batch.has_work:
            self._has_work.clear()
            await self._has_work.wait()
            self._due = self._clock.now()
        await self._pace(self._batch.schedule())
        outputs = self._batch.commit()
        if outputs:
            self._sink.outputs(outputs)
        if events := self._batch.take_events():
            self._sink.kv_events(events)

    async def _pace(self, plan: Plan) -> None:
        """Wait until the step is over; what is late by less than a step is caught up."""
        duration_s = self._timing.step_s(
            num_prompt_tokens=plan.num_prompt_tokens,
            num_decoding=plan.num_decoding,
            active_share=plan.active_share,
        )
        now = self._clock.now()
        self._due = max(self._due, now - duration_s) + duration_s
        await self._clock.sleep(max(0.0, self._due - now))


def _check(settings: MockConfig) -> None:
    """Raises ConfigError for settings that cannot be."""
    for name in ("block_size", "num_gpu_blocks_override", "max_num_seqs", "max_model_len"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise errors.ConfigError(f"{_flag(name)}: expected at least 1, got {value}")
    for name in ("speedup_ratio", "decode_speedup_ratio", "tick_ms"):
        value = getattr(settings, name)
        if value is not None and not 0 <= value < math.inf:
            raise errors.ConfigError(f"{_flag(name)}: expected 0 or more, got {value}")
    if settings.max_num_batched_tokens < settings.max_num_seqs:
        raise errors.ConfigError(
            f"--max-num-batched-tokens {settings.max_num_batched_tokens} is less than"
            f" --max-num-seqs {settings.max_num_seqs}: every running sequence gets a token in each step"
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _facts(settings: MockConfig, context_length: int) -> api.EngineFacts:
    capacity = settings.num_gpu_blocks_override * settings.block_size
    return api.EngineFacts(
        context_length=min(settings.max_model_len or context_length, capacity),
        kv_block_size=settings.block_size,
        total_kv_blocks=settings.num_gpu_blocks_override,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
    )


def _batch(settings: MockConfig, facts: api.EngineFacts, cycle: Cycle) -> Batch:
    memory = Memory(
        cycle,
        num_blocks=facts.total_kv_blocks,
        block_size=facts.kv_block_size,
        prefix_caching=settings.enable_prefix_caching,
    )
    limits = Limits(
        max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        context_length=facts.context_length,
    )
    return Batch(cycle, memory, limits)
