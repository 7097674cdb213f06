"""The settings of the native engine; their names are those of vLLM's flags."""

from dataclasses import dataclass
from typing import Literal

from dynamo.base import config
from dynamo.kvbm import tier_setup


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeConfig(tier_setup.KvbmConfig):
    """The built-in engine."""

    device: Literal["cpu", "cuda"] = config.option("cpu", help="device that computes")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = config.option(
        "auto",
        help="type of weights and KV cache; auto: float32 on a CPU, else the checkpoint's type",
    )
    block_size: int = config.option(16, help="tokens in a block of the KV cache", least=1)
    num_gpu_blocks_override: int | None = config.option(
        None,
        help="blocks of the KV cache; by default as many as --kv-cache-memory-gb holds",
        least=1,
    )
    kv_cache_memory_gb: float = config.option(
        1.0,
        help="memory for the KV cache in GiB; less is used if --max-num-seqs sequences need less",
        least=0,
    )
    max_num_seqs: int = config.option(256, help="sequences that may run at once", least=1)
    max_num_batched_tokens: int | None = config.option(
        None,
        help="tokens that one step may compute; requests that arrive during a step wait for its end, so lower it for"
        " a shorter time to first token (default: 512 on a CPU, 2048 elsewhere, 8192 for embeddings)",
    )
    max_model_len: int | None = config.option(
        None,
        help="context length in tokens; by default the model's, or what the KV cache holds if that is less",
        least=1,
    )
    enable_prefix_caching: bool = config.option(
        True, help="reuse the KV blocks of prefixes that were computed before"
    )
    threads: int | None = config.option(
        None,
        help="CPU threads that compute; by default OMP_NUM_THREADS, else one for a small model and all cores for a"
        " large one",
        least=1,
    )

    @property
    def step_tokens(self) -> int:
        """Return `max_num_batched_tokens` or its default, at least a token for every running sequence."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(512 if self.device == "cpu" else 2048, self.max_num_seqs)
