"""vLLM behind the engine seam: one stream per choice, gathered to one batch per turn of the event loop.

vLLM wakes all streams of a step together; the first to bring something asks the loop to send what all bring. Requests
are named anew for vLLM, as an id may be in use again before vLLM has heard that its first use was aborted.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dynamo.base import errors, garbage, tasks
from dynamo.engine import api, refusal
from dynamo.engine.adapters import guides
from dynamo.engine.adapters.vllm import arguments, outputs, sampling, versions
from dynamo.engine.adapters.vllm.load import Load
from dynamo.engine.adapters.vllm.settings import VllmConfig
from dynamo.protocols import blocks, generate, load

WATCH_S = 0.25  # how often vLLM is asked whether its processes live


def build(directory: Path, settings: VllmConfig, model_name: str) -> "VllmEngine":
    """The engine for the model in `directory`, not yet started. Raises ConfigError."""
    args = arguments.engine_args(directory, settings, model_name)
    return VllmEngine(args, arguments.lora_requests(settings))


@dataclass(slots=True, eq=False)
class _Open:
    """A request that has not ended, and what vLLM calls those of its choices that have not."""

    request: generate.Request
    names: dict[int, str]
    has_begun: bool = False


class _Gathered(NamedTuple):
    opened: _Open
    output: generate.Output


class VllmEngine:
    """An `api.Engine`. `start` comes first."""

    def __init__(
        self, args: versions.AsyncEngineArgs, loras: Mapping[str, versions.LoRARequest]
    ) -> None:
        self._args = args
        self._loras = loras
        self._load = Load(args.data_parallel_size)
        self._tasks = tasks.Tasks()
        self._open: dict[str, _Open] = {}  # by request id
        self._gathered: list[_Gathered] = []
        self._num_named = 0
        self._num_prefill_tokens = 0
        self._death: errors.EngineFailed | None = None
        self._is_silent = False
        self._llm: versions.AsyncLLM | None = None

    async def start(self, sink: api.EngineSink) -> api.EngineFacts:
        """Load, in processes of vLLM's."""
        self._sink = sink
        config = versions.make_config(self._args)
        self._llm = await versions.start(self._args, config, self._load.record)
        shapes = config.structured_outputs_config
        self._ability = guides.Ability(shapes.backend, bool(shapes.reasoning_parser))
        self._vocab_size = config.model_config.get_vocab_size()
        self._facts = _facts(config, tuple(self._loras))
        self._tasks.start("watch vLLM", self._watch())
        garbage.collect_rarely()  # what vLLM has imported is a million objects
        return self._facts

    def submit(self, request: generate.Request) -> None:
        """Check it here, begin it there; what only vLLM can refuse it refuses through the sink."""
        if self._death is not None:
            raise self._death
        refusal.check(request, self._facts, vocab_size=self._vocab_size)
        if request.id in self._open:
            raise errors.InvalidRequest(f"a request with the id {request.id!r} runs already")
        choices = range(request.sampling_options.n)
        params = [
            versions.sampling_params(sampling.fields(request, index, self._ability))
            for index in choices
        ]
        self._num_named += 1
        opened = _Open(
            request, {index: f"{request.id}-{self._num_named}-{index}" for index in choices}
        )
        self._open[request.id] = opened
        self._num_prefill_tokens += request.prompt_len
        for index in choices:
            self._tasks.start("answer", self._answer(opened, index, params[index]))

    def abort(self, request_id: str) -> None:
        """Silent from now on."""
        opened = self._open.get(request_id)
        if opened is not None:
            self._drop(opened, *opened.names)

    def abort_choice(self, request_id: str, index: int) -> None:
        """The same of one choice."""
        opened = self._open.get(request_id)
        if opened is not None and index in opened.names:
            self._drop(opened, index)

    def load(self) -> Sequence[load.ForwardPassMetrics]:
        """As of vLLM's last step."""
        return self._load.now(
            self._facts, num_prefill_tokens=self._num_prefill_tokens, is_idle=not self._open
        )

    async def clear_kv_blocks(self) -> None:
        """Forget all reusable prefixes. What runs computes its own anew, if need be. Raises EngineFailed."""
        if self._death is not None:
            return
        try:
            if not await self._started.reset_prefix_cache():  # something runs
                await self._started.reset_prefix_cache(reset_running_requests=True)
        except Exception as error:
            raise errors.EngineFailed(f"vLLM did not forget its prefixes: {error}") from error

    async def stop(self) -> None:
        """End vLLM's processes."""
        self._is_silent = True
        self._open.clear()
        await self._tasks.close()
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown)
            self._llm = None
            garbage.collect_all()  # else libraries of vLLM's complain of leaks at the exit

    @property
    def _started(self) -> versions.AsyncLLM:
        assert self._llm is not None, "the engine is used before start() has returned"
        return self._llm

    async def _answer(self, opened: _Open, index: int, params: versions.SamplingParams) -> None:
        """The life of one choice."""
        if index not in opened.names:
            return  # aborted before it began
        request = opened.request
        stream = self._started.generate(
            versions.tokens_input(blocks.unpack(request.token_ids)),
            params,
            opened.names[index],
            lora_request=self._loras[request.lora_name] if request.lora_name else None,
            priority=-request.priority,  # with vLLM the lower is served first
            data_parallel_rank=request.data_parallel_rank,
        )
        try:
            async for result in stream:
                self._heard(opened, index, result)
        except versions.EngineDeadError as error:
            self._die(error)
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises is told to who asked
            self._failed(opened, versions.translated(error))

    def _heard(self, opened: _Open, index: int, result: Any) -> None:
        if index not in opened.names:
            return
        output = self._translated(opened, index, result)
        if output is None:
            return
        if not self._gathered:
            asyncio.get_running_loop().call_soon(self._send)
        self._gathered.append(_Gathered(opened, output))

    def _translated(self, opened: _Open, index: int, result: Any) -> generate.Output | None:
        request = opened.request
        reason = result.outputs[0].finish_reason
        if opened.has_begun and reason is None and request.output_options == _PLAIN:
            return outputs.plain(result, index)
        if reason == "error":
            self._failed(opened, errors.EngineFailed("vLLM gave the request up"))
            return None
        is_first, opened.has_begun = not opened.has_begun, True
        if is_first:
            self._num_prefill_tokens -= request.prompt_len
        return outputs.whole(result, index, request, is_first_of_request=is_first)

    def _send(self) -> None:
        """What this turn brought, without what is not wanted any more."""
        gathered, self._gathered = self._gathered, []
        batch = [
            api.EngineOutput(opened.request.id, output)
            for opened, output in gathered
            if output.index in opened.names
        ]
        for opened, output in gathered:
            if output.finish_reason is not None:
                self._close(opened, output.index)
        if batch and not self._is_silent:
            self._sink.outputs(batch)

    def _drop(self, opened: _Open, *indices: int) -> None:
        names = [self._close(opened, index) for index in indices]
        if self._death is None:
            self._tasks.start("abort", self._started.abort([name for name in names if name]))

    def _close(self, opened: _Open, index: int) -> str | None:
        """This choice is over; what vLLM calls it."""
        name = opened.names.pop(index, None)
        if not opened.names and self._open.get(opened.request.id) is opened:
            del self._open[opened.request.id]
            if not opened.has_begun:
                self._num_prefill_tokens -= opened.request.prompt_len
        return name

    def _failed(self, opened: _Open, error: errors.DynamoError) -> None:
        """One choice of a request failed: all of it does."""
        if not opened.names or self._is_silent:
            return
        self._drop(opened, *opened.names)
        self._sink.failed(opened.request.id, error)

    async def _watch(self) -> None:
        """An engine that dies while nobody asks it anything shall be missed too."""
        while not self._started.errored:  # noqa: ASYNC110 (vLLM has no event for it)
            await asyncio.sleep(WATCH_S)
        self._die(self._started.dead_error)

    def _die(self, error: BaseException) -> None:
        if self._death is not None or self._is_silent:
            return
        self._death = errors.EngineFailed("vLLM's engine process died; its log says why")
        self._death.__cause__ = error
        self._sink.died(self._death)


_PLAIN = generate.OutputOptions()


def _facts(config: versions.VllmConfig, lora_names: tuple[str, ...]) -> api.EngineFacts:
    num_ranks = config.parallel_config.data_parallel_size
    return api.EngineFacts(
        context_length=config.model_config.max_model_len,
        kv_block_size=config.cache_config.block_size,
        total_kv_blocks=(config.cache_config.num_gpu_blocks or 0) // num_ranks,  # vLLM adds them up
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        data_parallel_size=num_ranks,
        max_top_logprobs=config.model_config.max_logprobs,
        supports_guided=not config.model_config.skip_tokenizer_init,
        lora_names=lora_names,
    )
