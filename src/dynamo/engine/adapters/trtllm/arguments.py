"""From our flags, a file and JSON to the arguments of TensorRT-LLM's LLM class, as plain values."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynamo.base import errors
from dynamo.engine.adapters.trtllm.settings import TrtllmConfig

Arguments = Mapping[str, Any]
_OURS = {
    "model": "--model says it",
    "skip_tokenizer_init": "a tokenizer is loaded if guided_decoding_backend is given",
    "backend": "only the PyTorch backend is supported",
}


def llm_arguments(directory: Path, settings: TrtllmConfig, extra: Arguments) -> dict[str, Any]:
    """What TensorRT-LLM is started with; `extra` is what the file says. Raises ConfigError."""
    override = _json(settings.override_engine_args)
    for given, where in ((extra, "--extra-engine-args"), (override, "--override-engine-args")):
        _refuse(given, where)
    merged = merge(merge(_of_flags(directory, settings), extra), override)
    shapes = merged.get("guided_decoding_backend")
    return {**merged, "skip_tokenizer_init": shapes is None}  # only shapes of answers need one


def merge(base: Arguments, over: Arguments) -> dict[str, Any]:
    """All of both; where both have a map, all of both maps."""
    nested = {
        key: merge(base[key], value)
        for key, value in over.items()
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
    }
    return {**base, **over, **nested}


def model_number(directory: Path, name: str) -> int:
    """A number of the model's config.json, be it of a text model within a larger one. Raises ConfigError."""
    path = directory / "config.json"
    try:
        read = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise errors.ConfigError(f"{path}: expected a model's configuration: {error}") from error
    number = read.get(name, read.get("text_config", {}).get(name))
    if not isinstance(number, int):
        raise errors.ConfigError(f"{path}: expected a number {name!r}, got {number!r}")
    return number


def _of_flags(directory: Path, settings: TrtllmConfig) -> dict[str, Any]:
    cache: dict[str, Any] = {
        "tokens_per_block": settings.kv_block_size,
        "enable_block_reuse": True,
    }
    if settings.free_gpu_memory_fraction is not None:
        cache["free_gpu_memory_fraction"] = settings.free_gpu_memory_fraction
    context = settings.max_seq_len or model_number(directory, "max_position_embeddings")
    return {
        "model": str(directory),
        "backend": "pytorch",
        "tensor_parallel_size": settings.tensor_parallel_size,
        "max_batch_size": settings.max_batch_size,
        "max_num_tokens": settings.max_num_tokens,
        "max_seq_len": context,
        "enable_chunked_prefill": True,  # else a prompt may not be longer than a step
        "enable_iter_perf_stats": True,
        "kv_cache_config": cache,
    }


def _json(text: str) -> dict[str, Any]:
    try:
        read = json.loads(text)
    except ValueError as error:
        raise errors.ConfigError(f"--override-engine-args: expected JSON: {error}") from error
    if not isinstance(read, dict):
        raise errors.ConfigError(f"--override-engine-args: expected a map, got {text!r}")
    return read


def _refuse(given: Arguments, where: str) -> None:
    for name, why in _OURS.items():
        if name in given:
            raise errors.ConfigError(f"{where}: {name} is not yours to say: {why}")
