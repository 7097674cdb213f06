"""What we ask about TensorRT-LLM; all else is in its own file. Importable without it: `--help` works everywhere."""

from dataclasses import dataclass

from dynamo.base import config


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmConfig:
    """The TensorRT-LLM engine."""

    tensor_parallel_size: int = config.option(1, help="GPUs that share each layer")
    max_batch_size: int = config.option(2048, help="sequences that may run at once")
    max_num_tokens: int = config.option(8192, help="tokens that a step may compute")
    max_seq_len: int | None = config.option(
        None, help="context in tokens; by default what the model's config.json says"
    )
    kv_block_size: int = config.option(32, help="tokens in a block of the KV cache")
    free_gpu_memory_fraction: float | None = config.option(
        None, help="share of the GPU memory that is free after loading, for the KV cache"
    )
    extra_engine_args: str | None = config.option(
        None,
        help="a YAML file with more arguments of TensorRT-LLM's LLM class, as trtllm-serve takes; it overrides flags",
    )
    override_engine_args: str = config.option(
        "{}", help="the same as JSON on the command line; it overrides the file"
    )
