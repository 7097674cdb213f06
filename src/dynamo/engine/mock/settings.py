"""What the simulated engine can be told; names and defaults are those of the original's simulator."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from dynamo.base import config, errors
from dynamo.kvbm import local_agent

_EARLIER_NAMES = {"num_gpu_blocks": "num_gpu_blocks_override", "dp_size": "data_parallel_size"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MockConfig(local_agent.TransferConfig):
    """The simulated engine."""

    block_size: int = config.option(64, help="tokens in a block of the KV cache")
    num_gpu_blocks_override: int = config.option(16384, help="blocks of the KV cache, of each rank")
    max_num_seqs: int = config.option(256, help="sequences that may run at once")
    max_num_batched_tokens: int = config.option(8192, help="tokens that a step may compute")
    max_model_len: int | None = config.option(
        None, help="context in tokens; by default the model's, as far as the KV cache holds it"
    )
    enable_prefix_caching: bool = config.option(True, help="compute a known prefix only once")
    enable_chunked_prefill: bool = config.option(
        True,
        help="cut a prompt that does not fit into a step; without, it waits for one that holds it",
    )
    watermark: float = config.option(
        0.01,
        help="share of the blocks that stay free when a prompt is admitted beside others",
        least=0,
        most=0.5,
    )
    preemption_mode: Literal["lifo", "fifo"] = config.option(
        "lifo", help="who gives way when blocks run out: who was admitted last, or first"
    )
    data_parallel_size: int = config.option(
        1, help="ranks, each with a scheduler and a cache of its own", least=1, most=1024
    )
    num_workers: int = config.option(
        1,
        help="workers in this process, each an instance with a cache of its own",
        least=1,
        most=4096,
    )
    speedup_ratio: float = config.option(
        1.0, help="how much faster than the simulated GPU; 0 or a million: at once"
    )
    decode_speedup_ratio: float = config.option(1.0, help="multiplies it for decoding only")
    planner_profile_data: str | None = config.option(
        None, help="JSON file of measured step times, instead of the built-in polynomials"
    )
    tick_ms: float | None = config.option(
        None, help="every step takes this long, whatever it holds: an even pace for benchmarks"
    )
    embedding_dimensions: int = config.option(
        384, help="numbers in a vector, where the task is to embed", least=1
    )
    lora_names: tuple[str, ...] = config.option(
        (), help="LoRA adapters that it pretends to have; their answers and their blocks differ"
    )
    startup_time: float = config.option(
        0.0, help="seconds that the engine takes to load before it serves", least=0
    )
    kv_transfer_bandwidth: float = config.option(
        64.0, help="GB/s by which a prompt's blocks come from a prefill worker; 0: at once", least=0
    )
    kv_bytes_per_token: int = config.option(
        131_072, help="of keys and values, for the time that it takes to move them", least=1
    )
    kv_transfer_fail_every: int = config.option(
        0, help="let every Nth copy fail, to see what becomes of its request; 0: none", least=0
    )
    extra_engine_args: str | None = config.option(
        None, help="JSON file of these settings, by field name; it has the last word"
    )

    def check(self) -> None:
        """Raises ConfigError for settings that cannot be."""
        for name in ("block_size", "num_gpu_blocks_override", "max_num_seqs", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise errors.ConfigError(f"{_flag(name)}: expected at least 1, got {value}")
        for name in ("speedup_ratio", "decode_speedup_ratio", "tick_ms", "startup_time"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise errors.ConfigError(f"{_flag(name)}: expected 0 or more, got {value}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise errors.ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is less than"
                f" --max-num-seqs {self.max_num_seqs}: every running sequence gets a token in each step"
            )
        self._check_whole_prompts()

    def _check_whole_prompts(self) -> None:
        length = self.max_model_len
        if self.enable_chunked_prefill or length is None or length <= self.max_num_batched_tokens:
            return
        raise errors.ConfigError(
            f"--no-enable-chunked-prefill: a prompt must fit into one step, but --max-model-len"
            f" {length} is more than --max-num-batched-tokens {self.max_num_batched_tokens}"
        )


def with_extra(settings: MockConfig) -> MockConfig:
    """The settings, as the file of --extra-engine-args corrects them. Raises ConfigError, naming the file."""
    path = settings.extra_engine_args
    if path is None:
        return settings
    where = f"--extra-engine-args {path}"
    values = _read_object(where, path)
    known = {field.name for field in dataclasses.fields(MockConfig)} - {"extra_engine_args"}
    values = {_EARLIER_NAMES.get(name, name): value for name, value in values.items()}
    unknown = sorted(values.keys() - known)
    if unknown:
        raise errors.ConfigError(
            f"{where}: unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}"
        )
    try:
        return msgspec.convert(dataclasses.asdict(settings) | values, MockConfig)
    except msgspec.ValidationError as error:
        raise errors.ConfigError(f"{where}: {error}") from error


def _read_object(where: str, path: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise errors.ConfigError(f"{where}: expected a readable JSON file: {error}") from error
    if not isinstance(content, dict):
        raise errors.ConfigError(f"{where}: expected a JSON object")
    return content


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
