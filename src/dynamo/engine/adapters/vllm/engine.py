"""vLLM's engine behind the engine seam (`streams.Library`): requests, load, KV events, sleep mode, LoRA adapters."""

import asyncio
import contextlib
import dataclasses
import importlib.util
import itertools
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo.base import clock as clocks
from dynamo.base import distribution, errors
from dynamo.engine import api, trials
from dynamo.engine.adapters import kv_subscriber, streams
from dynamo.engine.adapters import settings as adapter_settings
from dynamo.engine.adapters import translation as shared
from dynamo.engine.adapters.settings import VllmConfig
from dynamo.engine.adapters.vllm import (
    connectors,
    grammars,
    kv_transfer_engine,
    translation,
    versions,
)
from dynamo.kvbm import tier_report, tier_setup
from dynamo.observability import logs
from dynamo.protocols import blocks, generate, load
from dynamo.runtime import listening

HELD_S = 35.0  # longer than vLLM keeps blocks for another engine
FIRST_RETRY_S, RETRY_S = 0.1, 5.0  # a copy to another tier takes less than that
PAUSE_S = 0.5  # longer than a step takes on a GPU
_TRANSFER = "--kv-transfer-config"
_END_S = 15.0  # until vLLM kills its engine process; its own 5 s are short on a busy machine


def build(directory: Path, settings: VllmConfig, model_name: str) -> api.Engine:
    """Return the engine for the model in `directory`, not yet started. Raises ConfigError."""
    args = engine_args(directory, settings, model_name)
    loras = lora_requests(settings, is_enabled=args.enable_lora)
    library = VllmLibrary(args, loras, grammars.make_trials(directory, settings.engine_args))
    transfer = args.kv_transfer_config
    engine = streams.StreamingEngine(
        library,
        sleep=library if args.enable_sleep_mode else None,
        lora_adapters=library if args.enable_lora else None,
        kv_tiers=library if connectors.has_tiers(transfer) else None,
    )
    if not connectors.can_export(transfer):
        return engine
    if args.enable_sleep_mode:
        raise errors.ConfigError(
            "--enable-sleep-mode: expected --connector none: NIXL would read memory that was released"
        )

    def environment(reservations: contextlib.ExitStack) -> Mapping[str, str]:
        port = listening.reserve_ports(args.data_parallel_size, reservations)
        return connectors.side_channel(os.environ, port)

    return kv_transfer_engine.KvTransferEngine(
        engine,
        clocks.SystemClock(),
        engine_id=transfer.engine_id,
        connector=transfer.kv_connector,
        environment=environment,
    )


class VllmLibrary:
    """vLLM's `AsyncLLM` as a `streams.Library`, `api.SleepController` and `api.LoraAdapterStore`."""

    name = "vLLM"

    def __init__(
        self,
        args: versions.AsyncEngineArgs,
        loras: Mapping[str, versions.LoRARequest],
        grammar_trials: trials.GrammarTrials,
        clock: clocks.Clock | None = None,
    ) -> None:
        self._clock = clock or clocks.SystemClock()
        self._args = args
        self._loras = dict(loras)
        self._lora_numbers = itertools.count(len(loras) + 1)  # vLLM identifies adapters by number
        self._load = translation.VllmLoad(args.data_parallel_size)
        self._llm: versions.AsyncLLM | None = None
        self._has_weights = True
        self._grammars = grammar_trials
        self._preparing: set[str] = set()  # choices that vLLM does not have yet
        self._kv_subscriber: kv_subscriber.ZmqKvSubscriber | None = None

    async def start(self, on_kv_events: streams.OnKvEvents) -> api.EngineFacts:
        with contextlib.ExitStack() as reservations:
            endpoints = kv_event_endpoints(self._args, reservations)
            config = versions.make_config(self._args)
            connectors.check_device(self._args.kv_transfer_config, config.device_config.device_type)
            if connectors.has_tiers(self._args.kv_transfer_config):
                connectors.check_layers(config)
            if endpoints is not None:
                self._kv_subscriber = kv_subscriber.ZmqKvSubscriber(
                    endpoints, self._args.data_parallel_size
                )
            self._llm = await versions.start(self._args, config, self._load.record)
        # vLLM's engine would end with the first request for an adapter that it cannot load.
        for lora in self._loras.values():
            try:
                await self._llm.add_lora(lora)
            except Exception as error:
                await self.stop()
                raise errors.ConfigError(
                    f"--lora-modules {lora.lora_name}={lora.lora_path}: vLLM cannot load it: {error}"
                ) from error
        structured = config.structured_outputs_config
        self._guided_support = shared.GuidedSupport(
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

    def plan(self, request: generate.Request, index: int) -> tuple[Any, Any]:
        """Return vLLM's sampling parameters and LoRA adapter; the adapter may be unloaded before `stream`."""
        fields = translation.sampling_fields(request, index, self._guided_support)
        lora = self._loras[request.lora_name] if request.lora_name else None
        return versions.sampling_params(fields), lora

    def stream(
        self, request: generate.Request, plan: tuple[Any, Any], name: str
    ) -> AsyncIterator[Any]:
        if request.images or request.sampling_options.guided_decoding is not None:
            return self._prepare_and_generate(request, plan, name)
        token_ids = blocks.unpack(request.token_ids)
        prompt = versions.tokens_input(token_ids, cache_salt=request.cache_salt)
        return self._generate(request, prompt, plan, name)

    async def _prepare_and_generate(
        self, request: generate.Request, plan: tuple[Any, Any], name: str
    ) -> AsyncIterator[Any]:
        """Try the grammar, prepare images in threads, while other streams go on; an abort meanwhile ends the stream."""
        guided, token_ids = (
            request.sampling_options.guided_decoding,
            blocks.unpack(request.token_ids),
        )
        self._preparing.add(name)
        try:
            if guided is not None:
                await self._grammars.check(guided)
            if request.images:
                prompt = await versions.image_input(
                    self._started, token_ids, request.images, cache_salt=request.cache_salt
                )
            else:
                prompt = versions.tokens_input(token_ids, cache_salt=request.cache_salt)
        finally:
            is_open = name in self._preparing
            self._preparing.discard(name)
        if is_open:
            async for result in self._generate(request, prompt, plan, name):
                yield result

    def _generate(
        self, request: generate.Request, prompt: Any, plan: tuple[Any, Any], name: str
    ) -> AsyncIterator[Any]:
        params, lora = plan
        results: AsyncIterator[Any] = self._started.generate(
            prompt,
            params,
            name,
            lora_request=lora,
            priority=-request.priority,  # vLLM serves the lower first
            data_parallel_rank=request.data_parallel_rank,
            trace_headers=self._trace_headers(),
        )
        return results

    def _trace_headers(self) -> dict[str, str] | None:
        """Return the trace to which vLLM adds its own spans, if it exports any (`--otlp-traces-endpoint`)."""
        context = logs.log_context.get()
        if self._args.otlp_traces_endpoint is None or context is None or context.trace is None:
            return None
        return dict(context.trace.headers())

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
        self._preparing.difference_update(names)
        await self._started.abort(list(names))

    def load(
        self, facts: api.EngineFacts, *, num_prefill_tokens: int, is_idle: bool
    ) -> Sequence[load.ForwardPassMetrics]:
        return self._load.metrics(facts, num_prefill_tokens=num_prefill_tokens, is_idle=is_idle)

    def report_tiers(self) -> tier_report.TierReport | None:
        """Return the last report of our connector; see `api.KvTierReporter`."""
        return self._load.tier_report

    async def clear(self) -> None:
        """Clear vLLM's prefix cache, and that of its connector; running requests are preempted and computed again.

        Blocks that another engine has not fetched yet cannot be cleared; vLLM frees them after half a minute.
        """
        await self._clear(has_store=self._args.kv_transfer_config is not None)

    async def clear_adapters(self) -> None:
        """Clear vLLM's prefix cache, which tells adapters apart by name, and stores that do so, too."""
        transfer = self._args.kv_transfer_config
        await self._clear(has_store=not connectors.keeps_loads_apart(transfer))

    async def _clear(self, *, has_store: bool) -> None:
        # Of several ranks some releases of vLLM tell only what the first one returns, but all raise what one raises.
        if not self._has_ranks and await self._reset(reset_connector=has_store):
            return
        until, delay = self._clock.now() + HELD_S, FIRST_RETRY_S
        while self._clock.now() < until:  # requests are running, or blocks are held
            with contextlib.suppress(Exception):  # a RuntimeError of another process
                if await self._reset_running(has_store=has_store):
                    return
            if self.death() is not None:
                break
            await self._clock.sleep(min(delay, until - self._clock.now()))
            delay = min(2 * delay, RETRY_S)
        raise errors.EngineFailed(f"its blocks were in use for {HELD_S:g} s")

    async def _reset_running(self, *, has_store: bool) -> bool:
        """Clear while vLLM begins no step, or while it does if it has ranks, of which none may pause alone.

        With a connector vLLM keeps the blocks of a preempted request until the step under way has ended, and where it
        schedules ahead of its GPU one always is.
        """
        if self._has_ranks:
            return await self._reset(reset_running_requests=True, reset_connector=has_store)
        try:
            await self._briefly(self._started.pause_generation(mode="keep", clear_cache=False))
            return await self._reset(reset_running_requests=True, reset_connector=has_store)
        finally:
            await self._briefly(self._started.resume_generation())

    async def _briefly(self, call: Awaitable[None]) -> None:
        """Await a call of vLLM's engine process, which has it anyway: a pause has no end while blocks are held."""
        with contextlib.suppress(TimeoutError):
            async with self._clock.timeout(PAUSE_S):
                await call

    @property
    def _has_ranks(self) -> bool:
        num_ranks: int = self._args.data_parallel_size
        return num_ranks > 1

    async def _reset(self, **options: bool) -> bool:
        is_cleared: bool = await self._started.reset_prefix_cache(**options)
        return is_cleared

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
        request = lora_request(name, next(self._lora_numbers), directory)
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
        await self._grammars.close()
        if self._llm is not None:
            if (handler := getattr(self._llm, "output_handler", None)) is not None:
                handler.cancel()  # else it may log the end of the engine's process as a death
            await asyncio.to_thread(self._llm.shutdown, timeout=_END_S)
            self._llm = None
        if self._kv_subscriber is not None:
            await self._kv_subscriber.close()

    @property
    def _started(self) -> versions.AsyncLLM:
        assert self._llm is not None, "the engine is used before start() has returned"
        return self._llm


def engine_args(directory: Path, settings: VllmConfig, model_name: str) -> versions.AsyncEngineArgs:
    """Return vLLM's arguments to serve the model in `directory` as `model_name`. Raises ConfigError."""
    adapter_settings.refuse_flags(settings.engine_args, adapter_settings.RESERVED_FLAGS)
    overrides = {
        "model": str(directory),
        "served_model_name": [model_name],
        "use_tqdm_on_load": False,  # a log has no place for a progress bar
    }
    args = versions.read_flags(settings.engine_args, overrides)
    # vLLM's parser takes the beginning of a flag as well.
    has_transfer = args.kv_transfer_config is not None or adapter_settings.has_flag(
        settings.engine_args, _TRANSFER
    )
    if has_transfer and settings.connector is not None:
        raise errors.ConfigError(f"--connector and {_TRANSFER} say the same: give one of them")
    if not has_transfer:
        names = _connectors(settings, has_sleep_mode=args.enable_sleep_mode)
        options = {
            field.name: getattr(settings, field.name)
            for field in dataclasses.fields(tier_setup.TierConfig)
        }
        if "kvbm" not in names:
            tier_setup.warn_of_unused(settings, ())
        elif not settings.storage_tiers:
            raise errors.ConfigError(
                "--kvbm-storage-tiers: expected host_dram with --connector kvbm"
            )
        fields = connectors.transfer_config(names, engine_id=uuid.uuid4().hex, tier_options=options)
        args.kv_transfer_config = fields and versions.KVTransferConfig(**fields)
    return args


def kv_event_endpoints(
    args: versions.AsyncEngineArgs, reservations: contextlib.ExitStack
) -> kv_subscriber.PublisherEndpoints | None:
    """Return where vLLM publishes its KV events, or None if it publishes none.

    Unless the user has configured it, free ports are chosen, written into `args` and kept until `reservations` is
    closed.
    """
    config = args.kv_events_config
    if config is None and args.enable_prefix_caching is not False:
        endpoints = kv_subscriber.PublisherEndpoints.on_free_ports(
            args.data_parallel_size, reservations
        )
        args.kv_events_config = versions.KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", **dataclasses.asdict(endpoints)
        )
        return endpoints
    if config is None or not config.enable_kv_cache_events or config.publisher != "zmq":
        return None
    return kv_subscriber.PublisherEndpoints(
        endpoint=config.endpoint, replay_endpoint=config.replay_endpoint, topic=config.topic
    )


def lora_requests(settings: VllmConfig, *, is_enabled: bool) -> Mapping[str, versions.LoRARequest]:
    """Return the LoRA adapters of `--lora-modules` by name. Raises ConfigError.

    `is_enabled` says whether vLLM was given `--enable-lora`.
    """
    pairs = adapter_settings.read_lora_modules(settings.lora_modules)
    if pairs and not is_enabled:
        modules = ",".join(settings.lora_modules)
        raise errors.ConfigError(f"--lora-modules {modules}: give --enable-lora too, for vLLM")
    return {
        name: lora_request(name, number, Path(path))
        for number, (name, path) in enumerate(pairs, start=1)
    }


def lora_request(name: str, number: int, directory: Path) -> versions.LoRARequest:
    """Return vLLM's description of a LoRA adapter; vLLM identifies the adapter by `number`."""
    return versions.LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(directory))


def _connectors(settings: VllmConfig, *, has_sleep_mode: bool) -> Sequence[str]:
    """Return the connectors to use. Raises ConfigError if NIXL is requested but not installed."""
    has_nixl = importlib.util.find_spec("nixl") is not None
    if settings.connector in (None, (connectors.UNSET,)):
        return ("nixl",) if has_nixl and not has_sleep_mode else (connectors.NONE,)
    assert settings.connector is not None
    if "nixl" in settings.connector and not has_nixl:
        raise errors.ConfigError(
            "--connector nixl: expected the package nixl to be installed: "
            f"{distribution.install_command('nixl')}"
        )
    return settings.connector


def _facts(config: versions.VllmConfig, lora_names: tuple[str, ...]) -> api.EngineFacts:
    parallel = config.parallel_config
    num_ranks = parallel.data_parallel_size
    thoughts = config.reasoning_config
    return api.EngineFacts(
        context_length=config.model_config.max_model_len,
        # its ranks share the tokens of a block
        kv_block_size=config.cache_config.block_size * parallel.decode_context_parallel_size,
        # vLLM reports the sum of all ranks
        total_kv_blocks=(config.cache_config.num_gpu_blocks or 0) // num_ranks,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        data_parallel_size=num_ranks,
        max_top_logprobs=translation.max_top_logprobs(
            config.model_config.max_logprobs, config.model_config.get_vocab_size()
        ),
        # it needs `--reasoning-parser` or `--reasoning-config`
        supports_thinking_limit=thoughts is not None and thoughts.enabled,
        supports_guided=not config.model_config.skip_tokenizer_init,
        lora_names=lora_names,
        max_images=versions.max_images(config),
    )
