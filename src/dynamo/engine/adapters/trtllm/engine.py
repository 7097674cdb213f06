"""TensorRT-LLM behind the engine seam (`streams`): its requests, its statistics, its death.

It counts its blocks only with the statistics of a step. So a first token is computed before the worker says that it is
ready, and the card can say how many there are.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo.base import errors, tasks
from dynamo.engine import api
from dynamo.engine.adapters import streams
from dynamo.engine.adapters.rank_load import RankLoad
from dynamo.engine.adapters.trtllm import arguments, outputs, sampling, versions
from dynamo.engine.adapters.trtllm.settings import TrtllmConfig
from dynamo.protocols import blocks, generate, load

FIRST_STEP_S = 120.0  # the first token may compile what later ones use
_PAUSE_S = 0.1  # between two times that it has no statistics
_FIRST = generate.Request(
    id="first",
    model="",
    token_ids=blocks.pack([0]),
    stop_conditions=generate.StopConditions(max_tokens=1),
    sampling_options=generate.SamplingOptions(temperature=0.0),
)


def build(directory: Path, settings: TrtllmConfig) -> streams.StreamingEngine:
    """The engine for the model in `directory`, not yet started. Raises ConfigError."""
    extra = versions.read_file(settings.extra_engine_args)
    args = arguments.llm_arguments(directory, settings, extra)
    return streams.StreamingEngine(
        TrtllmLibrary(args, arguments.model_number(directory, "vocab_size"))
    )


class TrtllmLibrary:
    """A `streams.Library`."""

    name = "TensorRT-LLM"

    def __init__(self, args: Mapping[str, Any], vocab_size: int) -> None:
        self._args = args
        self._vocab_size = vocab_size
        self._tasks = tasks.Tasks()
        self._rank = RankLoad()
        self._num_blocks = 0
        self._has_stepped = asyncio.Event()
        self._answers: dict[str, Any] = {}  # those that run, by name
        self._death: BaseException | None = None
        self._llm: versions.LLM | None = None

    async def start(self, tell: streams.Tell) -> api.EngineFacts:
        """Load, in processes of TensorRT-LLM's, and compute a first token."""
        self._llm = await versions.start(self._args)
        self._tasks.start("TensorRT-LLM's statistics", self._listen())
        try:
            async with asyncio.timeout(FIRST_STEP_S):
                async for _ in self.stream(_FIRST, self.plan(_FIRST, 0), "first"):
                    pass
                await self._has_stepped.wait()
        except TimeoutError:
            raise errors.EngineFailed(
                f"TensorRT-LLM computed no token in {FIRST_STEP_S:.0f} s"
            ) from None
        return self._facts()

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        return self._vocab_size

    def plan(self, request: generate.Request, index: int) -> Any:
        """Sampling parameters for TensorRT-LLM."""
        return versions.sampling_params(sampling.fields(request, index, self._args["max_seq_len"]))

    async def stream(self, request: generate.Request, plan: Any, name: str) -> AsyncIterator[Any]:
        """What it says of one choice."""
        answer = versions.generate(self._started, blocks.unpack(request.token_ids), plan)
        self._answers[name] = answer
        try:
            async for said in answer:
                yield said
        finally:
            del self._answers[name]

    def translate(
        self, said: Any, index: int, request: generate.Request, *, is_first: bool
    ) -> generate.Output:
        """In our words."""
        return outputs.translate(said, index, request, is_first=is_first)

    def explain(self, error: Exception) -> errors.DynamoError | None:
        """It raises ValueError or RequestError for one request; all else is its end."""
        if isinstance(error, ValueError):
            return errors.InvalidRequest(f"TensorRT-LLM: {error}")
        if isinstance(error, versions.RequestError):
            return errors.EngineFailed(f"TensorRT-LLM: {error}")
        return None

    def death(self) -> BaseException | None:
        """As it judges itself."""
        if self._death is None and not versions.is_alive(self._started):
            self._death = errors.EngineFailed("TensorRT-LLM has shut down")
        return self._death

    async def abort(self, names: Sequence[str]) -> None:
        """Each by its answer."""
        for name in names:
            if name in self._answers:
                self._answers[name].abort()

    def load(
        self, facts: api.EngineFacts, *, num_prefill_tokens: int, is_idle: bool
    ) -> Sequence[load.ForwardPassMetrics]:
        """As of its last step."""
        return [
            self._rank.metrics(facts, 0, num_prefill_tokens=num_prefill_tokens, is_idle=is_idle)
        ]

    async def clear(self) -> None:
        """It has no way to."""
        raise errors.EngineFailed("it has no way to")

    async def stop(self) -> None:
        """End its processes."""
        await self._tasks.close()
        if self._llm is not None:
            llm, self._llm = self._llm, None
            await asyncio.to_thread(llm.shutdown)

    @property
    def _started(self) -> versions.LLM:
        assert self._llm is not None, "the engine is used before start() has returned"
        return self._llm

    async def _listen(self) -> None:
        while True:
            async for said in versions.statistics(self._started):
                self._record(said)
            await asyncio.sleep(_PAUSE_S)

    def _record(self, said: Mapping[str, Any]) -> None:
        """Of one step."""
        cache = said.get("kvCacheStats") or {}
        if not cache:
            return
        self._num_blocks = cache["maxNumBlocks"]
        self._rank = RankLoad(
            num_running=said.get("numActiveRequests", 0),
            num_waiting=said.get("numQueuedRequests", 0),
            num_blocks=cache["usedNumBlocks"],
            hit_rate=cache.get("cacheHitRate", 0.0),
        )
        self._has_stepped.set()

    def _facts(self) -> api.EngineFacts:
        return api.EngineFacts(
            context_length=self._args["max_seq_len"],
            kv_block_size=self._args["kv_cache_config"]["tokens_per_block"],
            total_kv_blocks=self._num_blocks,
            max_num_seqs=self._args["max_batch_size"],
            max_num_batched_tokens=self._args["max_num_tokens"],
            supports_prompt_logprobs=False,
            supports_guided=self._args.get("guided_decoding_backend") is not None,
        )
