"""The settings of the mock engine; names and defaults are those of Dynamo's mocker."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from dynamo.base import config, errors
from dynamo.kvbm import agents

_EARLIER_NAMES = {"num_gpu_blocks": "num_gpu_blocks_override", "dp_size": "data_parallel_size"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MockConfig(agents.TransferConfig):
    """The mock engine."""

    connector: Literal["nixl", "null"] = config.option(
        "nixl",
        help="accepted as vLLM's workers take it; simulated blocks move in the same way by both",
    )
    block_size: int = config.option(64, help="tokens per KV block")
    num_gpu_blocks_override: int = config.option(16384, help="KV blocks of each data-parallel rank")
    max_num_seqs: int = config.option(256, help="sequences that may run at once")
    max_num_batched_tokens: int = config.option(8192, help="tokens that one step may compute")
    max_model_len: int | None = config.option(
        None,
        help="context length in tokens (default: that of the model, at most what the KV cache holds)",
    )
    enable_prefix_caching: bool = config.option(True, help="reuse the KV blocks of cached prefixes")
    enable_chunked_prefill: bool = config.option(
        True,
        help="split a prompt that does not fit into a step; if off, it waits for a step that has room for all of it",
    )
    watermark: float = config.option(
        0.01,
        help="share of the KV blocks that admission leaves free while other requests run",
        least=0,
        most=0.5,
    )
    preemption_mode: Literal["lifo", "fifo"] = config.option(
        "lifo",
        help="request that is preempted when blocks run out: the one admitted last (lifo) or first (fifo)",
    )
    data_parallel_size: int = config.option(
        1,
        aliases=("--dp-size",),
        help="data-parallel ranks, each with a scheduler and a KV cache of its own",
        least=1,
        most=1024,
    )
    num_workers: int = config.option(
        1,
        help="workers in this process, each an instance with a KV cache of its own",
        least=1,
        most=4096,
    )
    speedup_ratio: float = config.option(
        1.0,
        help="speed relative to the simulated GPU; 0, or a million and more: steps take no time",
    )
    decode_speedup_ratio: float = config.option(1.0, help="factor on the speed of decode only")
    planner_profile_data: str | None = config.option(
        None, help="JSON file with measured step times, in place of the built-in polynomials"
    )
    tick_ms: float | None = config.option(
        None, help="milliseconds of every step, whatever it computes: an even speed for benchmarks"
    )
    echo: bool = config.option(False, help="answer each request with its own prompt")
    embedding_dimensions: int = config.option(
        384, help="dimensions of a vector, for embedding workers", least=1
    )
    lora_names: tuple[str, ...] = config.option(
        (), help="names of simulated LoRA adapters; each has answers and KV blocks of its own"
    )
    startup_time: float = config.option(
        0.0, help="seconds that the engine takes to load before it serves", least=0
    )
    kv_transfer_bandwidth: float = config.option(
        64.0, help="GB/s at which KV blocks are copied from a prefill worker; 0: at once", least=0
    )
    kv_bytes_per_token: int = config.option(
        131_072, help="KV bytes per token, for the time of a copy between workers", least=1
    )
    kv_transfer_fail_every: int = config.option(
        0, help="let every Nth copy of KV blocks fail, to test the fallback; 0: none", least=0
    )
    kvbm_host_blocks: int = config.option(
        0, help="blocks of a simulated host tier below the KV cache of each rank; 0: none", least=0
    )
    kvbm_disk_blocks: int = config.option(
        0, help="blocks of a simulated disk tier below the host tier; 0: none", least=0
    )
    kvbm_host_bandwidth: float = config.option(
        20.0, help="GB/s at which blocks are copied to and from the host tier", least=0.001
    )
    kvbm_disk_bandwidth: float = config.option(
        3.0, help="GB/s at which blocks are copied to and from the disk tier", least=0.001
    )
    extra_engine_args: str | None = config.option(
        None,
        help="JSON file with these settings, by field name; it overrides flags and environment",
    )

    def check(self) -> None:
        """Raise ConfigError for settings that contradict one another."""
        for name in ("block_size", "num_gpu_blocks_override", "max_num_seqs", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise errors.ConfigError(f"{_flag(name)}: expected at least 1, got {value}")
        for name in ("speedup_ratio", "decode_speedup_ratio", "tick_ms", "startup_time"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise errors.ConfigError(f"{_flag(name)}: expected 0 or more, got {value}")
        if self.kvbm_disk_blocks and not self.kvbm_host_blocks:
            raise errors.ConfigError(
                "--kvbm-disk-blocks needs --kvbm-host-blocks: blocks go to the disk through host memory"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise errors.ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is less than"
                f" --max-num-seqs {self.max_num_seqs}: every running sequence gets a token in each step"
            )
        length = self.max_model_len or 0
        if not self.enable_chunked_prefill and length > self.max_num_batched_tokens:
            raise errors.ConfigError(
                f"--no-enable-chunked-prefill: a prompt must fit into one step, but --max-model-len"
                f" {length} is more than --max-num-batched-tokens {self.max_num_batched_tokens}"
            )


def merge_extra_args(settings: MockConfig) -> MockConfig:
    """Return the settings overridden by the file of --extra-engine-args. Raises ConfigError, which names the file."""
    path = settings.extra_engine_args
    if path is None:
        return settings
    where = f"--extra-engine-args {path}"
    try:
        content: Any = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise errors.ConfigError(f"{where}: expected a readable JSON file: {error}") from error
    if not isinstance(content, dict):
        raise errors.ConfigError(f"{where}: expected a JSON object")
    fields = {field.name: field for field in dataclasses.fields(MockConfig)}
    field_names = fields.keys() - {"extra_engine_args"}
    arguments: dict[str, Any] = content
    values = {_EARLIER_NAMES.get(name, name): value for name, value in arguments.items()}
    unknown = sorted(values.keys() - field_names)
    if unknown:
        raise errors.ConfigError(
            f"{where}: unknown key {unknown[0]!r}; expected one of {', '.join(sorted(field_names))}"
        )
    try:
        merged = msgspec.convert(dataclasses.asdict(settings) | values, MockConfig)
    except msgspec.ValidationError as error:
        raise errors.ConfigError(f"{where}: {error}") from error
    for name in values:
        config.check_range(fields[name], getattr(merged, name), f"{where}: {name}")
    return merged


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
