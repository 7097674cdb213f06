"""vLLM's engine behind the engine seam (`streams.Library`): requests, load, KV events, sleep mode, LoRA adapters."""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.engine import api
from dynamo.engine.adapters import guided_decoding, kv_subscriber, startup, streams
from dynamo.engine.adapters.vllm import (
    arguments,
    connectors,
    kv_transfer_engine,
    translation,
    versions,
)
from dynamo.engine.adapters.vllm.settings import VllmConfig
from dynamo.protocols import blocks, generate, load


def build(directory: Path, settings: VllmConfig, model_name: str) -> api.Engine:
    """Return the engine for the model in `directory`, not yet started. Raises ConfigError."""
    args = arguments.engine_args(directory, settings, model_name)
    loras = arguments.lora_requests(settings, is_enabled=args.enable_lora)
    library = VllmLibrary(args, loras)
    engine = streams.StreamingEngine(
        library,
        sleep=library if args.enable_sleep_mode else None,
        lora_adapters=library if args.enable_lora else None,
    )
    transfer = args.kv_transfer_config
    if transfer is None or not connectors.can_export(
        transfer.kv_connector, transfer.kv_connector_extra_config
    ):
        return engine
    if args.enable_sleep_mode:
        raise errors.ConfigError(
            "--enable-sleep-mode: expected --connector none: NIXL would read memory that was released"
        )
    port = startup.find_free_ports(args.data_parallel_size)
    return kv_transfer_engine.KvTransferEngine(
        engine,
        clocks.SystemClock(),
        engine_id=transfer.engine_id,
        connector=transfer.kv_connector,
        environment=connectors.side_channel(os.environ, port),
    )


class VllmLibrary:
    """vLLM's `AsyncLLM` as a `streams.Library`, `api.SleepController` and `api.LoraAdapterStore`."""

    name = "vLLM"

    def __init__(
        self, args: versions.AsyncEngineArgs, loras: Mapping[str, versions.LoRARequest]
    ) -> None:
        self._args = args
        self._loras = dict(loras)
        self._lora_numbers = itertools.count(len(loras) + 1)  # vLLM identifies adapters by number
        self._load = translation.VllmLoad(args.data_parallel_size)
        self._llm: versions.AsyncLLM | None = None
        self._has_weights = True
        self._kv_subscriber: kv_subscriber.ZmqKvSubscriber | None = None

    async def start(self, on_kv_events: streams.OnKvEvents) -> api.EngineFacts:
        endpoints = arguments.kv_event_endpoints(self._args)
        config = versions.make_config(self._args)
        if endpoints is not None:
            self._kv_subscriber = kv_subscriber.ZmqKvSubscriber(
                endpoints, self._args.data_parallel_size
            )
        self._llm = await versions.start(self._args, config, self._load.record)
        structured = config.structured_outputs_config
        self._guided_support = guided_decoding.GuidedSupport(
            structured.backend, bool(structured.reasoning_parser)
        )
        self._vocab_size: int = config.model_config.get_vocab_size()
        facts = _facts(config, tuple(self._loras))
        if self._kv_subscriber is not None:
            self._kv_subscriber.start(facts.kv_block_size, on_kv_events)
        return facts

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def plan(self, request: generate.Request, index: int) -> Any:
        """Return vLLM's sampling parameters and LoRA adapter; the adapter may be unloaded before `stream`."""
        fields = translation.sampling_fields(request, index, self._guided_support)
        lora = self._loras[request.lora_name] if request.lora_name else None
        return versions.sampling_params(fields), lora

    def stream(self, request: generate.Request, plan: Any, name: str) -> AsyncIterator[Any]:
        params, lora = plan
        results: AsyncIterator[Any] = self._started.generate(
            versions.tokens_input(blocks.unpack(request.token_ids)),
            params,
            name,
            lora_request=lora,
            priority=-request.priority,  # vLLM serves the lower first
            data_parallel_rank=request.data_parallel_rank,
        )
        return results

    def translate(
        self, result: Any, index: int, request: generate.Request, *, is_first: bool
    ) -> generate.Output:
        return translation.translate_output(result, index, request, is_first=is_first)

    def explain(self, error: Exception) -> errors.DynamoError | None:
        return None if isinstance(error, versions.EngineDeadError) else versions.translated(error)

    def death(self) -> BaseException | None:
        cause: BaseException | None = self._started.dead_error if self._started.errored else None
        return cause

    async def abort(self, names: Sequence[str]) -> None:
        await self._started.abort(list(names))

    def load(
        self, facts: api.EngineFacts, *, num_prefill_tokens: int, is_idle: bool
    ) -> Sequence[load.ForwardPassMetrics]:
        return self._load.metrics(facts, num_prefill_tokens=num_prefill_tokens, is_idle=is_idle)

    async def clear(self) -> None:
        """Clear vLLM's prefix cache; running requests are preempted and computed again if it is in use."""
        if not await self._started.reset_prefix_cache():  # requests are running
            await self._started.reset_prefix_cache(reset_running_requests=True)

    async def sleep(self, level: int) -> None:
        """Release memory; see `api.SleepController`."""
        await self._started.sleep(level)
        self._has_weights = level < 2

    async def wake_up(self, tags: Sequence[str]) -> bool:
        """Take memory back; see `api.SleepController`. vLLM needs a call of its own to read the weights again."""
        await self._started.wake_up(list(tags) or None)
        if not self._has_weights and (not tags or "weights" in tags):
            await self._started.collective_rpc("reload_weights")
            self._has_weights = True
        return not await self._started.is_sleeping()

    @property
    def lora_names(self) -> tuple[str, ...]:
        """Return the names of the loaded LoRA adapters."""
        return tuple(self._loras)

    async def load_lora(self, name: str, directory: Path) -> None:
        """Load a LoRA adapter; see `api.LoraAdapterStore`. vLLM reads it now, so that its errors are reported."""
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
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown)
            self._llm = None
        if self._kv_subscriber is not None:
            await self._kv_subscriber.close()

    @property
    def _started(self) -> versions.AsyncLLM:
        assert self._llm is not None, "the engine is used before start() has returned"
        return self._llm


def _facts(config: versions.VllmConfig, lora_names: tuple[str, ...]) -> api.EngineFacts:
    num_ranks = config.parallel_config.data_parallel_size
    return api.EngineFacts(
        context_length=config.model_config.max_model_len,
        kv_block_size=config.cache_config.block_size,
        # vLLM reports the sum of all ranks
        total_kv_blocks=(config.cache_config.num_gpu_blocks or 0) // num_ranks,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        data_parallel_size=num_ranks,
        max_top_logprobs=config.model_config.max_logprobs,
        supports_guided=not config.model_config.skip_tokenizer_init,
        lora_names=lora_names,
    )
