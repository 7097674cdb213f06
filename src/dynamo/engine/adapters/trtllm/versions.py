"""The one door to TensorRT-LLM, and so the one file that knows what its releases call things.

Read in its sources (1.1 to 1.4rc: `llmapi/llm.py`, `executor/result.py`, `sampling_params.py`) and in the reference of
its LLM API. Not run here.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from tensorrt_llm import LLM, SamplingParams
from tensorrt_llm.executor.utils import RequestError
from tensorrt_llm.llmapi import GuidedDecodingParams, KvCacheConfig

from dynamo.base import errors

__all__ = ["LLM", "RequestError", "SamplingParams"]
LISTEN_S = 1.0  # how long it waits for statistics, or for KV events, before it asks anew


def read_file(path: str | None) -> dict[str, Any]:
    """A map from YAML; empty without a file. Raises ConfigError."""
    if path is None:
        return {}
    try:
        read = yaml.safe_load(Path(path).read_text()) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise errors.ConfigError(f"--extra-engine-args: cannot read {path!r}: {error}") from error
    if not isinstance(read, dict):
        raise errors.ConfigError(f"--extra-engine-args: expected a map in {path!r}")
    return read


async def start(arguments: Mapping[str, Any]) -> LLM:
    """An engine that has loaded; our event loop turns meanwhile. Raises ConfigError or EngineFailed."""
    try:
        cache = KvCacheConfig(**arguments["kv_cache_config"])
        return await asyncio.to_thread(LLM, **{**arguments, "kv_cache_config": cache})
    except (ValueError, TypeError) as error:  # pydantic's are among them
        raise errors.ConfigError(f"TensorRT-LLM: {error}") from error
    except Exception as error:
        raise errors.EngineFailed(
            f"TensorRT-LLM did not start: {type(error).__name__}: {error}"
        ) from error


def sampling_params(fields: Mapping[str, Any]) -> SamplingParams:
    """Raises InvalidRequest for what TensorRT-LLM finds wrong with them."""
    shape = fields["guided_decoding"]
    try:
        return SamplingParams(
            **{**fields, "guided_decoding": shape and GuidedDecodingParams(**shape)}
        )
    except (ValueError, TypeError) as error:
        raise errors.InvalidRequest(f"TensorRT-LLM: {error}") from error


def generate(llm: LLM, token_ids: list[int], params: SamplingParams) -> Any:
    """An answer to be iterated over (`RequestOutput`), which can be aborted."""
    return llm.generate_async(token_ids, sampling_params=params, streaming=True)


def is_alive(llm: LLM) -> bool:
    """As TensorRT-LLM judges it before it takes a request."""
    executor = llm._executor
    return executor is not None and not executor.is_shutdown()


def statistics(llm: LLM) -> AsyncIterator[dict[str, Any]]:
    """Of the steps since the last call, until there are none for some time."""
    told: AsyncIterator[dict[str, Any]] = llm.get_stats_async(timeout=LISTEN_S)
    return told
