"""The worker's settings for TensorRT-LLM, the arguments of its LLM class that follow from them, and its releases.

Importable without TensorRT-LLM, because `--help` must work everywhere.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo.base import config, distribution, errors
from dynamo.engine.adapters import startup

TENSORRT_LLM = startup.SupportedReleases(
    name="TensorRT-LLM",
    package="tensorrt_llm",
    install_hint=f"{distribution.install_command('trtllm')} (it needs an NVIDIA GPU)",
    oldest=(1, 1),
    newest=(1, 2),
)
check_installed = TENSORRT_LLM.check_installed
Arguments = Mapping[str, Any]
_RESERVED_ARGUMENTS = {
    "model": "--model says it",
    "skip_tokenizer_init": "a tokenizer is loaded if guided_decoding_backend is given",
    "backend": "only the PyTorch backend is supported",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmConfig:
    """The TensorRT-LLM engine."""

    tensor_parallel_size: int = config.option(1, help="GPUs that share each layer")
    max_batch_size: int = config.option(2048, help="sequences that may run at once")
    max_num_tokens: int = config.option(8192, help="tokens that one step may compute")
    max_seq_len: int | None = config.option(
        None, help="context length in tokens; by default that of the model's config.json"
    )
    kv_block_size: int = config.option(32, help="tokens in a block of the KV cache")
    free_gpu_memory_fraction: float | None = config.option(
        None,
        help="share of the GPU memory that is free after loading to use for the KV cache, 0 to 1",
    )
    extra_engine_args: str | None = config.option(
        None,
        help="YAML file with more arguments of TensorRT-LLM's LLM class, as trtllm-serve takes it; it overrides flags",
    )
    override_engine_args: str = config.option(
        "{}", help="JSON map with more arguments of the LLM class; it overrides the file"
    )


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
            if name in arguments:
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
        "backend": "pytorch",
        "tensor_parallel_size": settings.tensor_parallel_size,
        "max_batch_size": settings.max_batch_size,
        "max_num_tokens": settings.max_num_tokens,
        "max_seq_len": settings.max_seq_len
        or read_model_number(directory, "max_position_embeddings"),
        "enable_chunked_prefill": True,  # else a prompt may not be longer than a step
        "enable_iter_perf_stats": True,
        "kv_cache_config": cache,
    }
