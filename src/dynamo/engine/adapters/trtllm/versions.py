"""The only module that imports TensorRT-LLM, and so the only one that depends on its releases.

Written after its sources (1.1 to 1.4rc: `llmapi/llm.py`, `executor/result.py`, `sampling_params.py`) and the
reference of its API. Not run here.
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
STATISTICS_TIMEOUT_S = 1.0  # how long one call waits for the statistics of a step


def read_file(path: str | None) -> dict[str, Any]:
    """Return the map in a YAML file, or an empty one without a path. Raises ConfigError."""
    if path is None:
        return {}
    try:
        fields = yaml.safe_load(Path(path).read_text()) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise errors.ConfigError(f"--extra-engine-args: cannot read {path!r}: {error}") from error
    if not isinstance(fields, dict):
        raise errors.ConfigError(f"--extra-engine-args: expected a map in {path!r}")
    return fields


async def start(arguments: Mapping[str, Any]) -> LLM:
    """Load an engine without blocking the event loop. Raises ConfigError or EngineFailed."""
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
    """Return TensorRT-LLM's sampling parameters. Raises InvalidRequest if it refuses the fields."""
    guided = fields["guided_decoding"]
    try:
        return SamplingParams(
            **{**fields, "guided_decoding": guided and GuidedDecodingParams(**guided)}
        )
    except (ValueError, TypeError) as error:
        raise errors.InvalidRequest(f"TensorRT-LLM: {error}") from error


def generate(llm: LLM, token_ids: list[int], params: SamplingParams) -> Any:
    """Start a request; the returned `RequestOutput` is iterated over and can be aborted."""
    return llm.generate_async(token_ids, sampling_params=params, streaming=True)


def is_alive(llm: LLM) -> bool:
    """Return whether TensorRT-LLM would accept a request."""
    executor = llm._executor
    return executor is not None and not executor.is_shutdown()


def statistics(llm: LLM) -> AsyncIterator[dict[str, Any]]:
    """Yield the statistics of the steps since the last call, until none come for STATISTICS_TIMEOUT_S."""
    stats: AsyncIterator[dict[str, Any]] = llm.get_stats_async(timeout=STATISTICS_TIMEOUT_S)
    return stats
