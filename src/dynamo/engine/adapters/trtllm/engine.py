"""TensorRT-LLM's engine behind the engine seam (`streams.Library`): requests, statistics, health.

TensorRT-LLM reports the number of its blocks only with the statistics of a step. So `start` computes a first token,
before the worker is ready and writes that number to its model card.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.engine import api
from dynamo.engine.adapters import streams
from dynamo.engine.adapters.translation import RankLoad
from dynamo.engine.adapters.trtllm import settings as trtllm_settings
from dynamo.engine.adapters.trtllm import translation, versions
from dynamo.protocols import blocks, generate, load

FIRST_STEP_S = 120.0  # the first token may compile kernels that later ones use
_STATISTICS_PAUSE_S = 0.1
_FIRST_REQUEST = generate.Request(
    id="first",
    model="",
    token_ids=blocks.pack([0]),
    stop_conditions=generate.StopConditions(max_tokens=1),
    sampling_options=generate.SamplingOptions(temperature=0.0),
)


def build(directory: Path, settings: trtllm_settings.TrtllmConfig) -> streams.StreamingEngine:
    """Return the engine for the model in `directory`, not yet started. Raises ConfigError."""
    extra = versions.read_file(settings.extra_engine_args)
    args = trtllm_settings.llm_arguments(directory, settings, extra)
    vocab_size = trtllm_settings.read_model_number(directory, "vocab_size")
    return streams.StreamingEngine(TrtllmLibrary(args, vocab_size))


class TrtllmLibrary:
    """TensorRT-LLM's `LLM` as a `streams.Library`."""

    name = "TensorRT-LLM"

    def __init__(
        self, args: Mapping[str, Any], vocab_size: int, clock: clocks.Clock | None = None
    ) -> None:
        self._args = args
        self._vocab_size = vocab_size
        self._clock = clock or clocks.SystemClock()
        self._tasks = tasks.Tasks()
        self._rank = RankLoad()
        self._num_blocks = 0
        self._has_stepped = asyncio.Event()
        self._results: dict[str, Any] = {}  # running choices by name
        self._death: BaseException | None = None
        self._llm: versions.LLM | None = None

    async def start(self, on_kv_events: streams.OnKvEvents) -> api.EngineFacts:
        """Load the model and compute a first token. Raises ConfigError or EngineFailed."""
        self._llm = await versions.start(self._args)
        self._tasks.start("TensorRT-LLM's statistics", self._read_statistics())
        try:
            async with self._clock.timeout(FIRST_STEP_S):
                plan = self.plan(_FIRST_REQUEST, 0)
                async for _ in self.stream(_FIRST_REQUEST, plan, "first"):
                    pass
                await self._has_stepped.wait()
        except TimeoutError:
            raise errors.EngineFailed(
                f"TensorRT-LLM computed no token in {FIRST_STEP_S:.0f} s"
            ) from None
        return api.EngineFacts(
            context_length=self._args["max_seq_len"],
            kv_block_size=self._args["kv_cache_config"]["tokens_per_block"],
            total_kv_blocks=self._num_blocks,
            max_num_seqs=self._args["max_batch_size"],
            max_num_batched_tokens=self._args["max_num_tokens"],
            supports_prompt_logprobs=False,
            supports_guided=self._args.get("guided_decoding_backend") is not None,
        )

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def plan(self, request: generate.Request, index: int) -> Any:
        fields = translation.sampling_fields(request, index, self._args["max_seq_len"])
        return versions.sampling_params(fields)

    async def stream(self, request: generate.Request, plan: Any, name: str) -> AsyncIterator[Any]:
        results = versions.generate(self._started, blocks.unpack(request.token_ids), plan)
        self._results[name] = results
        try:
            async for result in results:
                yield result
        finally:
            del self._results[name]

    def translate(
        self, result: Any, index: int, request: generate.Request, *, is_first: bool
    ) -> generate.Output:
        return translation.translate_output(result, index, request, is_first=is_first)

    def explain(self, error: Exception) -> errors.DynamoError | None:
        """Convert an error; all but ValueError and RequestError are the end of TensorRT-LLM."""
        if isinstance(error, ValueError):
            return errors.InvalidRequest(f"TensorRT-LLM: {error}")
        if isinstance(error, versions.RequestError):
            return errors.EngineFailed(f"TensorRT-LLM: {error}")
        return None

    def death(self) -> BaseException | None:
        if self._death is None and not versions.is_alive(self._started):
            self._death = errors.EngineFailed("TensorRT-LLM has shut down")
        return self._death

    async def abort(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self._results:
                self._results[name].abort()

    def load(
        self, facts: api.EngineFacts, *, num_prefill_tokens: int, is_idle: bool
    ) -> Sequence[load.ForwardPassMetrics]:
        return [
            self._rank.metrics(facts, 0, num_prefill_tokens=num_prefill_tokens, is_idle=is_idle)
        ]

    async def clear(self) -> None:
        """Raise EngineFailed: TensorRT-LLM cannot clear its prefix cache."""
        raise errors.EngineFailed("it has no way to")

    async def stop(self) -> None:
        await self._tasks.close()
        if self._llm is not None:
            llm, self._llm = self._llm, None
            await asyncio.to_thread(llm.shutdown)

    @property
    def _started(self) -> versions.LLM:
        assert self._llm is not None, "the engine is used before start() has returned"
        return self._llm

    async def _read_statistics(self) -> None:
        while True:
            async for stats in versions.statistics(self._started):
                if cache := stats.get("kvCacheStats"):
                    self._num_blocks = cache["maxNumBlocks"]
                    self._rank = translation.rank_load(stats, cache)
                    self._has_stepped.set()
            await self._clock.sleep(_STATISTICS_PAUSE_S)
