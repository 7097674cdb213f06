"""vLLM behind the engine seam (`streams`): its requests, its load, its KV events, its death."""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo.base import errors
from dynamo.engine import api
from dynamo.engine.adapters import guides, kv_feed, ports, streams
from dynamo.engine.adapters.vllm import (
    arguments,
    connectors,
    kv_transfer_engine,
    outputs,
    sampling,
    versions,
)
from dynamo.engine.adapters.vllm.load import Load
from dynamo.engine.adapters.vllm.settings import VllmConfig
from dynamo.protocols import blocks, generate, load

_SLEEPS = (
    "--enable-sleep-mode: expected --connector none: NIXL would read memory that was given back"
)


def build(directory: Path, settings: VllmConfig, model_name: str) -> api.Engine:
    """The engine for the model in `directory`, not yet started. Raises ConfigError."""
    args = arguments.engine_args(directory, settings, model_name)
    loras = arguments.lora_requests(settings, is_enabled=args.enable_lora)
    library = VllmLibrary(args, loras)
    engine = streams.StreamingEngine(
        library,
        library if args.enable_sleep_mode else None,
        library if args.enable_lora else None,
    )
    moves = args.kv_transfer_config
    if moves is None or not connectors.can_export(
        moves.kv_connector, moves.kv_connector_extra_config
    ):
        return engine
    if args.enable_sleep_mode:
        raise errors.ConfigError(_SLEEPS)
    channel = connectors.side_channel(os.environ, ports.free_run(args.data_parallel_size))
    return kv_transfer_engine.KvTransferEngine(
        engine, engine_id=moves.engine_id, connector=moves.kv_connector, environment=channel
    )


class VllmLibrary:
    """vLLM's `AsyncLLM` as a `streams.Library`, `api.SleepController` and `api.LoraAdapterStore`."""

    name = "vLLM"

    def __init__(
        self, args: versions.AsyncEngineArgs, loras: Mapping[str, versions.LoRARequest]
    ) -> None:
        self._args = args
        self._loras = dict(loras)
        self._lora_numbers = itertools.count(len(loras) + 1)  # vLLM takes a number for the same
        self._load = Load(args.data_parallel_size)
        self._llm: versions.AsyncLLM | None = None
        self._has_weights = True
        self._feed: kv_feed.KvFeed | None = None

    async def start(self, tell: streams.Tell) -> api.EngineFacts:
        """Load, in processes of vLLM's."""
        endpoints = arguments.kv_endpoints(self._args)
        config = versions.make_config(self._args)
        if endpoints is not None:
            self._feed = kv_feed.KvFeed(endpoints, self._args.data_parallel_size)
        self._llm = await versions.start(self._args, config, self._load.record)
        shapes = config.structured_outputs_config
        self._ability = guides.Ability(shapes.backend, bool(shapes.reasoning_parser))
        self._vocab_size: int = config.model_config.get_vocab_size()
        facts = _facts(config, tuple(self._loras))
        if self._feed is not None:
            self._feed.start(facts.kv_block_size, tell)
        return facts

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        return self._vocab_size

    def plan(self, request: generate.Request, index: int) -> Any:
        """Sampling parameters and adapter for vLLM; the adapter may be unloaded before `stream`."""
        params = versions.sampling_params(sampling.fields(request, index, self._ability))
        return params, self._loras[request.lora_name] if request.lora_name else None

    def stream(self, request: generate.Request, plan: Any, name: str) -> AsyncIterator[Any]:
        """What it says of one choice."""
        params, lora = plan
        said: AsyncIterator[Any] = self._started.generate(
            versions.tokens_input(blocks.unpack(request.token_ids)),
            params,
            name,
            lora_request=lora,
            priority=-request.priority,  # with vLLM the lower is served first
            data_parallel_rank=request.data_parallel_rank,
        )
        return said

    def translate(
        self, said: Any, index: int, request: generate.Request, *, is_first: bool
    ) -> generate.Output:
        """In our words."""
        return outputs.translate(said, index, request, is_first=is_first)

    def explain(self, error: Exception) -> errors.DynamoError | None:
        """It has errors of its own."""
        return None if isinstance(error, versions.EngineDeadError) else versions.translated(error)

    def death(self) -> BaseException | None:
        """Of its engine's process."""
        cause: BaseException | None = self._started.dead_error if self._started.errored else None
        return cause

    async def abort(self, names: Sequence[str]) -> None:
        """All at once."""
        await self._started.abort(list(names))

    def load(
        self, facts: api.EngineFacts, *, num_prefill_tokens: int, is_idle: bool
    ) -> Sequence[load.ForwardPassMetrics]:
        """As of its last step."""
        return self._load.now(facts, num_prefill_tokens=num_prefill_tokens, is_idle=is_idle)

    async def clear(self) -> None:
        """What runs computes its own anew, if need be."""
        if not await self._started.reset_prefix_cache():  # something runs
            await self._started.reset_prefix_cache(reset_running_requests=True)

    async def sleep(self, level: int) -> None:
        """See `api.SleepController`."""
        await self._started.sleep(level)
        self._has_weights = level < 2

    async def wake_up(self, tags: Sequence[str]) -> bool:
        """See `api.SleepController`. vLLM leaves it to us to read weights anew."""
        await self._started.wake_up(list(tags) or None)
        if not self._has_weights and (not tags or "weights" in tags):
            await self._started.collective_rpc("reload_weights")
            self._has_weights = True
        return not await self._started.is_sleeping()

    @property
    def lora_names(self) -> tuple[str, ...]:
        """See `api.LoraAdapterStore`."""
        return tuple(self._loras)

    async def load_lora(self, name: str, directory: Path) -> None:
        """See `api.LoraAdapterStore`. vLLM reads it now, so that what is wrong with it is told."""
        request = arguments.lora_request(name, next(self._lora_numbers), directory)
        try:
            await self._started.add_lora(request)
        except versions.EngineDeadError as error:
            raise errors.EngineFailed("vLLM's engine process died") from error
        except Exception as error:
            raise errors.InvalidRequest(
                f"vLLM cannot load the LoRA adapter in {directory}: {error}", param="source.uri"
            ) from error
        self._loras[name] = request

    async def unload_lora(self, name: str) -> None:
        """Refuse new requests for an adapter. vLLM evicts it when another adapter needs its slot."""
        del self._loras[name]

    async def stop(self) -> None:
        """End its processes."""
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown)
            self._llm = None
        if self._feed is not None:
            await self._feed.close()

    @property
    def _started(self) -> versions.AsyncLLM:
        assert self._llm is not None, "the engine is used before start() has returned"
        return self._llm


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
