"""The only module that imports vLLM: everything that the adapter uses of vLLM has a name here.

Differences between vLLM's releases are handled here, and are invisible to the other modules.
"""

import argparse
import asyncio
import contextlib
import functools
import time
import types
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any, NoReturn

from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.multimodal.media import ImageMediaIO
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.request import StructuredOutputRequest

from dynamo.base import errors
from dynamo.engine.adapters.vllm import plugin

__all__ = [
    "AsyncEngineArgs",
    "AsyncLLM",
    "EngineDeadError",
    "KVEventsConfig",
    "KVTransferConfig",
    "LoRARequest",
    "SamplingParams",
    "VllmConfig",
    "tokens_input",
]
_VISION = ("vision_config", "img_processor")  # in the configuration of models that see
# data-parallel rank, SchedulerStats, IterationStats (None if there are none)
RecordStats = Callable[[int, Any, Any], None]


class _VllmParser(FlexibleArgumentParser):  # type: ignore[misc]
    def error(self, message: str) -> NoReturn:
        raise errors.ConfigError(f"vLLM: {message}")


def read_flags(flags: Sequence[str], overrides: Mapping[str, Any]) -> AsyncEngineArgs:
    """Parse vLLM's own flags with its parser; `overrides` replaces parsed fields. Raises ConfigError."""
    parser = AsyncEngineArgs.add_cli_args(_VllmParser(prog="vllm", add_help=False))
    namespace: argparse.Namespace = parser.parse_args(list(flags))
    vars(namespace).update(overrides)
    return AsyncEngineArgs.from_cli_args(namespace)


def make_config(arguments: AsyncEngineArgs) -> VllmConfig:
    """Return vLLM's configuration for these arguments and the model's files. Raises ConfigError."""
    try:
        return arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    except (ValueError, TypeError, NotImplementedError, AssertionError, OSError) as error:
        raise errors.ConfigError(f"vLLM: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return the text of an error; of one of pydantic, which wraps what vLLM finds, only what vLLM says."""
    details = getattr(error, "errors", None)
    if details is None:
        return str(error)
    return "; ".join(each["msg"].removeprefix("Value error, ") for each in details())


class _StatLogger(StatLoggerBase):  # type: ignore[misc]
    """Forwards the statistics of one rank after each step; vLLM's documented interface for that."""

    def __init__(self, record: RecordStats, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._record, self._rank = record, engine_index

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self._record(self._rank, scheduler_stats, iteration_stats)

    def log_engine_initialized(self) -> None:
        pass


def max_images(config: VllmConfig) -> int:
    """Return the number of images that a request to this model may have; 0 for a model without a vision part."""
    options = config.model_config.multimodal_config
    if options is None or not any(hasattr(config.model_config.hf_config, key) for key in _VISION):
        return 0
    return int(options.get_limit_per_prompt("image"))


async def image_input(
    llm: AsyncLLM, token_ids: Sequence[int], files: Sequence[bytes], *, cache_salt: str | None
) -> Any:
    """Return the input of a prompt with images, as vLLM's renderer makes it. Raises InvalidRequest for a broken one.

    The files are decoded in a thread. The renderer computes the model's form of images in one thread of its own, in
    which it also warms up after the start. A prompt that `AsyncLLM.generate` renders itself would be computed in
    another thread, beside the warm-up, and neither the model's processor nor its cache is made for two threads.
    """
    prompt = await asyncio.to_thread(_image_prompt, token_ids, files, cache_salt)
    (rendered,) = await llm.renderer.render_cmpl_async([prompt])
    return rendered


def _image_prompt(
    token_ids: Sequence[int], files: Sequence[bytes], cache_salt: str | None
) -> Mapping[str, Any]:
    media = ImageMediaIO()
    images = []
    for number, file in enumerate(files):
        try:
            images.append(media.load_bytes(file))
        except Exception as error:  # of many kinds, by what is wrong with a file
            raise errors.InvalidRequest(f"image {number} of the messages: {error}") from error
    salt = {"cache_salt": cache_salt} if cache_salt else {}
    return {"prompt_token_ids": list(token_ids), "multi_modal_data": {"image": images}, **salt}


def sampling_params(fields: Mapping[str, Any]) -> SamplingParams:
    """Return vLLM's sampling parameters. Raises InvalidRequest if vLLM refuses the fields."""
    structured = fields["structured_outputs"]
    try:
        return SamplingParams(
            **{
                **fields,
                "structured_outputs": structured and StructuredOutputsParams(**structured),
            },
            output_kind=RequestOutputKind.DELTA,
        )
    except (ValueError, VLLMClientError) as error:
        raise translated(error) from error


class _InlineExecutor:
    """Calls in the thread that submits: a process that forks may have no other thread."""

    def submit(self, function: Callable[..., Any], *arguments: Any) -> futures.Future[Any]:
        result: futures.Future[Any] = futures.Future()
        try:
            result.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001 - raised where the result is taken
            result.set_exception(error)
        return result


def make_grammar_compiler(config: VllmConfig) -> Callable[[Mapping[str, Any]], float]:
    """Return a function that checks and compiles a grammar, given by its fields, as vLLM will.

    It returns the processor time of the check, in seconds, and raises InvalidRequest for what vLLM refuses. An engine
    keeps the library with which it compiled its first grammar, so XGrammar is tried with each one that vLLM meant for
    another library.
    """
    tokenizer = cached_tokenizer_from_config(model_config=config.model_config)
    managers: dict[str, StructuredOutputManager] = {}

    def compile_with(library: str, params: SamplingParams) -> None:
        if library not in managers:
            managers[library] = StructuredOutputManager(config)
            managers[library].executor = _InlineExecutor()
        params.structured_outputs._backend = library
        request = types.SimpleNamespace(
            request_id="trial",
            sampling_params=params,
            structured_output_request=StructuredOutputRequest(params=params.structured_outputs),
        )
        managers[library].grammar_init(request)
        grammar = request.structured_output_request.grammar  # None for an error in some releases
        if isinstance(grammar, Exception):
            raise grammar

    def compile_grammar(fields: Mapping[str, Any]) -> float:
        params = sampling_params({"structured_outputs": fields})
        began_at = time.process_time()
        try:
            params.verify(
                config.model_config,
                config.speculative_config,
                config.structured_outputs_config,
                tokenizer,
            )
            check_s = time.process_time() - began_at
            chosen = params.structured_outputs._backend
            compile_with(chosen, params)
        except Exception as error:
            if "bad_alloc" in str(error):
                raise MemoryError from error
            raise errors.InvalidRequest(str(error)) from error
        if chosen != "xgrammar":
            with contextlib.suppress(Exception):  # it may refuse what the other library knows
                compile_with("xgrammar", params)
        return check_s

    return compile_grammar


async def start(
    arguments: AsyncEngineArgs, vllm_config: VllmConfig, record: RecordStats
) -> AsyncLLM:
    """Load an engine without blocking the event loop. Raises EngineFailed."""
    try:
        llm = await asyncio.to_thread(_start, arguments, vllm_config, record)
        await llm.get_supported_tasks()  # vLLM caches them, so no request waits for this call
    except Exception as error:
        raise errors.EngineFailed(f"vLLM did not start: {type(error).__name__}: {error}") from error
    return llm


def _start(arguments: AsyncEngineArgs, vllm_config: VllmConfig, record: RecordStats) -> AsyncLLM:
    with plugin.keep_interrupts():
        return AsyncLLM.from_vllm_config(
            vllm_config,
            usage_context=UsageContext.ENGINE_CONTEXT,
            stat_loggers=[functools.partial(_StatLogger, record)],
            enable_log_requests=arguments.enable_log_requests,
            disable_log_stats=arguments.disable_log_stats,
        )


def translated(error: Exception) -> errors.DynamoError:
    """Convert the error of a request that vLLM refused or gave up."""
    cause = error.__cause__ if isinstance(error, EngineGenerateError) else error
    if isinstance(cause, VLLMClientError | ValueError):
        return errors.InvalidRequest(str(cause), param=getattr(cause, "parameter", None))
    if type(cause).__name__ in ("QueueOverflowError", "MaxQueuedTokensError"):  # 0.30 and later
        return errors.Overloaded(str(cause))
    return errors.EngineFailed(f"vLLM: {type(cause).__name__}: {cause}")
