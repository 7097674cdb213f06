"""What a user may set of the native engine; the names are those that vLLM's users know."""

from dataclasses import dataclass
from typing import Literal

from dynamo.base import config
from dynamo.kvbm import local_agent


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeConfig(local_agent.TransferConfig):
    """The built-in engine."""

    device: Literal["cpu", "cuda"] = config.option("cpu", help="where to compute")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = config.option(
        "auto", help="type of weights and cache; auto: the fitting one for checkpoint and device"
    )
    block_size: int = config.option(16, help="tokens in a block of the KV cache")
    num_gpu_blocks_override: int | None = config.option(
        None, help="blocks of the KV cache; by default as many as its memory holds"
    )
    kv_cache_memory_gb: float = config.option(
        1.0, help="memory for the KV cache in GiB; less is taken if all slots need less", least=0
    )
    max_num_seqs: int = config.option(256, help="sequences that may run at once")
    max_num_batched_tokens: int | None = config.option(
        None,
        help="tokens that a step may compute; all that comes in between waits for the step, so that by default"
        " it is 512 on a CPU and 2048 elsewhere",
    )
    max_model_len: int | None = config.option(
        None, help="context in tokens; by default the model's, as far as the KV cache holds it"
    )
    enable_prefix_caching: bool = config.option(True, help="compute a known prefix only once")
    threads: int | None = config.option(
        None,
        help="CPU threads; by default OMP_NUM_THREADS, or one for a small model and else all cores",
    )

    @property
    def step_tokens(self) -> int:
        """`max_num_batched_tokens`, or its default: at least a token for every running sequence."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(512 if self.device == "cpu" else 2048, self.max_num_seqs)
