"""TensorRT-LLM's engine behind the engine seam (`streams.Library`): requests, results, statistics, health.

TensorRT-LLM reports the number of its blocks only with the statistics of a step. So `start` computes a first token,
before the worker is ready and writes that number to its model card.

The only module that imports TensorRT-LLM, and so the only one that depends on its releases. Written after its sources
(1.1 to 1.4rc: `llmapi/llm.py`, `executor/result.py`, `sampling_params.py`) and the reference of its API. Not run here.

Each choice is a request of its own, so that one can be aborted alone, and greedy ones may be several. TensorRT-LLM
knows one end token, which alone it can hold back (`min_tokens`); all others are stop words. An option that it cannot
honour is refused by name.

A result is a `RequestOutput` with one `CompletionOutput`, and the same object after every step: only its
`token_ids_diff` and `logprobs_diff` are new.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from tensorrt_llm import LLM, SamplingParams
from tensorrt_llm.executor.utils import RequestError
from tensorrt_llm.llmapi import GuidedDecodingParams, KvCacheConfig

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.engine import api
from dynamo.engine.adapters import streams, translation
from dynamo.engine.adapters.settings import TrtllmConfig
from dynamo.engine.adapters.translation import RankLoad
from dynamo.observability import logs
from dynamo.protocols import blocks, generate, load

_logger = logging.getLogger(__name__)
_NO_END_TOKEN = -1
_NAME = "TensorRT-LLM"
_GUIDED_SUPPORT = translation.GuidedSupport(has_choice=False)


def sampling_fields(request: generate.Request, index: int, context_length: int) -> dict[str, Any]:
    """Return the fields of TensorRT-LLM's SamplingParams for choice `index`. Raises InvalidRequest."""
    options, stop, report = (
        request.sampling_options,
        request.stop_conditions,
        request.output_options,
    )
    end_ids = () if stop.ignore_eos else request.eos_token_ids
    stop_ids = [*end_ids[1:], *stop.stop_token_ids]
    _refuse_unsupported(request, stop_ids)
    max_output = context_length - request.prompt_len
    guided = None
    if options.guided_decoding is not None:
        translation.refuse_resumed_guided(request, _NAME)
        fields = translation.structured_output_fields(options.guided_decoding, _GUIDED_SUPPORT)
        guided = {name: value for name, value in fields.items() if value is not None}
    sampling = translation.sampling_fields(request, index, "trtllm")
    sampling["min_p"] = options.min_p or None
    if translation.is_greedy(options):
        for name in ("temperature", "top_p", "min_p"):
            del sampling[name]
        sampling["top_k"] = 1
    return {  # top_k 0: all tokens; without top_p and top_k TensorRT-LLM would be greedy
        **sampling,
        "max_tokens": min(stop.max_tokens or max_output, max_output),
        "min_tokens": stop.min_tokens or None,
        "end_id": end_ids[0] if end_ids else _NO_END_TOKEN,
        "stop_token_ids": stop_ids or None,
        "include_stop_str_in_output": True,  # our outputs include the token that ends an answer
        "logprobs": None if report.logprobs is None else max(1, report.logprobs),
        "guided_decoding": guided,
        "detokenize": False,
    }


def _refuse_unsupported(request: generate.Request, stop_ids: list[int]) -> None:
    translation.refuse_param(
        _NAME, "min_tokens", "can hold back one end token only, and this request may end with others",
        is_used=request.stop_conditions.min_tokens > 0 and bool(stop_ids),
    )  # fmt: skip
    translation.refuse_param(
        _NAME, "logit_bias", "has no logit bias here",
        is_used=bool(request.sampling_options.logit_bias),
    )  # fmt: skip
    translation.refuse_param(
        _NAME, "allowed_token_ids", "cannot hold an answer to some tokens here",
        is_used=bool(request.sampling_options.allowed_token_ids),
    )  # fmt: skip
    translation.refuse_param(
        _NAME, "prompt_logprobs", "has no prompt logprobs here",
        is_used=request.output_options.prompt_logprobs is not None,
    )  # fmt: skip
    translation.refuse_param(
        _NAME, "nvext.max_thinking_tokens", "has no limit for thoughts here",
        is_used=request.thinking is not None,
    )  # fmt: skip
    translation.refuse_param(
        _NAME, "kv_transfer_params", "moves blocks by a protocol of its own, which is not supported yet",
        is_used=request.kv_transfer_params is not None,
    )  # fmt: skip


def translate_output(
    result: Any, index: int, request: generate.Request, *, is_first: bool
) -> generate.Output:
    """Convert a result of choice `index`; `is_first` marks the request's first one.

    Raises DeadlineExceeded or EngineFailed if TensorRT-LLM gave the request up.
    """
    completion, report = result.outputs[0], request.output_options
    tokens = tuple(completion.token_ids_diff)
    if completion.finish_reason is None and not is_first and report == translation.TOKENS_ONLY:
        return generate.Output(tokens, None, index)
    finish_reason, stop_reason = _finish(completion, request)
    logprobs = None
    if report.logprobs is not None:
        logprobs = tuple(
            translation.token_logprobs(step[token], step, report.logprobs)
            for token, step in zip(tokens, completion.logprobs_diff, strict=True)
        )
    return generate.Output(
        tokens,
        finish_reason,
        index,
        logprobs=logprobs,
        cached_tokens=result.cached_tokens if is_first else None,
        stop_reason=stop_reason,
    )


def _finish(
    completion: Any, request: generate.Request
) -> tuple[generate.FinishReason | None, int | str | None]:
    match completion.finish_reason:
        case None:
            return None, None
        case "stop":
            return translation.stop_finish(request, completion.stop_reason)
        case "length":
            return generate.FinishReason.LENGTH, None
        case "timeout":
            raise errors.DeadlineExceeded("TensorRT-LLM's time limit for a request passed")
        case other:
            raise errors.EngineFailed(f"TensorRT-LLM gave the request up: {other}")


def rank_load(stats: Mapping[str, Any], cache: Mapping[str, Any]) -> translation.RankLoad:
    """Return the load from the statistics of a step and their map `kvCacheStats`."""
    return translation.RankLoad(
        num_running=stats.get("numActiveRequests", 0),
        num_waiting=stats.get("numQueuedRequests", 0),
        num_blocks=cache["usedNumBlocks"],
        hit_rate=cache.get("cacheHitRate", 0.0),
    )


FIRST_STEP_S = 120.0  # the first token may compile kernels that later ones use
STATISTICS_TIMEOUT_S = 1.0  # in which one call waits for the statistics of a step
_STATISTICS_PAUSE_S = 0.1
Arguments = Mapping[str, Any]
_BACKEND = "pytorch"
_RESERVED_ARGUMENTS = {
    "model": "--model says it",
    "skip_tokenizer_init": "a tokenizer is loaded if guided_decoding_backend is given",
    "backend": "only the PyTorch backend is supported",
}
_FIRST_REQUEST = generate.Request(
    id="first",
    model="",
    token_ids=blocks.pack([0]),
    stop_conditions=generate.StopConditions(max_tokens=1),
    sampling_options=generate.SamplingOptions(temperature=0.0),
)


def build(directory: Path, settings: TrtllmConfig) -> api.Engine:
    """Return the engine for the model in `directory`, not yet started. Raises ConfigError."""
    extra = read_file(settings.extra_engine_args)
    args = llm_arguments(directory, settings, extra)
    vocab_size = read_model_number(directory, "vocab_size")
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
        self._llm: LLM | None = None

    async def start(self, on_kv_events: streams.OnKvEvents) -> api.EngineFacts:
        """Load the model and compute a first token. Raises ConfigError or EngineFailed."""
        try:
            cache = KvCacheConfig(**self._args["kv_cache_config"])
            self._llm = await asyncio.to_thread(LLM, **{**self._args, "kv_cache_config": cache})
        except (ValueError, TypeError) as error:  # pydantic's are among them
            raise errors.ConfigError(f"TensorRT-LLM: {error}") from error
        except Exception as error:
            raise errors.EngineFailed(
                f"TensorRT-LLM did not start: {type(error).__name__}: {error}"
            ) from error
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
            supports_cache_salt=False,
            supports_thinking_limit=False,
            supports_guided=self._args.get("guided_decoding_backend") is not None,
        )

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def plan(self, request: generate.Request, index: int) -> Any:
        fields = sampling_fields(request, index, self._args["max_seq_len"])
        guided = fields["guided_decoding"]
        try:
            return SamplingParams(
                **{**fields, "guided_decoding": guided and GuidedDecodingParams(**guided)}
            )
        except (ValueError, TypeError) as error:
            raise errors.InvalidRequest(f"TensorRT-LLM: {error}") from error

    async def stream(self, request: generate.Request, plan: Any, name: str) -> AsyncIterator[Any]:
        results = self._started.generate_async(
            blocks.unpack(request.token_ids), sampling_params=plan, streaming=True
        )
        self._results[name] = results
        try:
            async for result in results:
                yield result
        finally:
            del self._results[name]

    def translate(
        self, result: Any, index: int, request: generate.Request, *, is_first: bool
    ) -> generate.Output:
        return translate_output(result, index, request, is_first=is_first)

    def explain(self, error: Exception) -> errors.DynamoError | None:
        """Convert an error; all but ValueError and RequestError are the end of TensorRT-LLM."""
        if isinstance(error, ValueError):
            return errors.InvalidRequest(f"TensorRT-LLM: {error}")
        if isinstance(error, RequestError):
            return errors.EngineFailed(f"TensorRT-LLM: {error}")
        return None

    def death(self) -> BaseException | None:
        executor = self._started._executor
        if self._death is None and (executor is None or executor.is_shutdown()):
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
    def _started(self) -> LLM:
        assert self._llm is not None, "the engine is used before start() has returned"
        return self._llm

    async def _read_statistics(self) -> None:
        log = logs.PeerLog(_logger, self._clock.now)
        while True:
            try:
                # Yields the statistics of the steps since the last call.
                async for stats in self._started.get_stats_async(timeout=STATISTICS_TIMEOUT_S):
                    if cache := stats.get("kvCacheStats"):
                        self._num_blocks = cache["maxNumBlocks"]
                        self._rank = rank_load(stats, cache)
                        self._has_stepped.set()
            except Exception as error:  # noqa: BLE001 - whatever it is: its answers do not depend on it
                log.warning(_NAME, "no statistics of %s, will ask again: %r", _NAME, error)
            await self._clock.sleep(_STATISTICS_PAUSE_S)


def read_file(path: str | None) -> dict[str, Any]:
    """Return the map in a YAML file, or an empty one without a path. Raises ConfigError."""
    if path is None:
        return {}
    try:
        fields = yaml.safe_load(Path(path).read_bytes()) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise errors.ConfigError(f"--extra-engine-args: cannot read {path!r}: {error}") from error
    if not isinstance(fields, dict):
        raise errors.ConfigError(f"--extra-engine-args: expected a map in {path!r}")
    return fields


def llm_arguments(directory: Path, settings: TrtllmConfig, extra: Arguments) -> dict[str, Any]:
    """Return the arguments of the LLM class as plain values; `extra` is the file's content. Raises ConfigError."""
    try:
        override = json.loads(settings.override_engine_args)
    except ValueError as error:
        raise errors.ConfigError(f"--override-engine-args: expected JSON: {error}") from error
    if not isinstance(override, dict):
        raise errors.ConfigError(
            f"--override-engine-args: expected a map, got {settings.override_engine_args!r}"
        )
    for arguments, flag in ((extra, "--extra-engine-args"), (override, "--override-engine-args")):
        for name, reason in _RESERVED_ARGUMENTS.items():
            if name in arguments and (name, arguments[name]) != ("backend", _BACKEND):
                raise errors.ConfigError(f"{flag}: {name} is set by this worker: {reason}")
    merged = merge_arguments(merge_arguments(_flag_arguments(directory, settings), extra), override)
    # Only guided decoding needs a tokenizer.
    return {**merged, "skip_tokenizer_init": merged.get("guided_decoding_backend") is None}


def merge_arguments(base: Arguments, override: Arguments) -> dict[str, Any]:
    """Merge two maps, and recursively the maps that both hold under one key; else `override` wins."""
    nested = {
        key: merge_arguments(base[key], value)
        for key, value in override.items()
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
    }
    return {**base, **override, **nested}


def read_model_number(directory: Path, name: str) -> int:
    """Return an integer of the model's config.json, or of its text model's configuration. Raises ConfigError."""
    path = directory / "config.json"
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise errors.ConfigError(f"{path}: expected a model's configuration: {error}") from error
    number = fields.get(name, fields.get("text_config", {}).get(name))
    if not isinstance(number, int):
        raise errors.ConfigError(f"{path}: expected a number {name!r}, got {number!r}")
    return number


def _flag_arguments(directory: Path, settings: TrtllmConfig) -> dict[str, Any]:
    cache: dict[str, Any] = {
        "tokens_per_block": settings.kv_block_size,
        "enable_block_reuse": True,
    }
    if settings.free_gpu_memory_fraction is not None:
        cache["free_gpu_memory_fraction"] = settings.free_gpu_memory_fraction
    return {
        "model": str(directory),
        "backend": _BACKEND,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "max_batch_size": settings.max_batch_size,
        "max_num_tokens": settings.max_num_tokens,
        "max_seq_len": settings.max_seq_len
        or read_model_number(directory, "max_position_embeddings"),
        "enable_chunked_prefill": True,  # else a prompt may not be longer than a step
        "enable_iter_perf_stats": True,
        "kv_cache_config": cache,
    }
