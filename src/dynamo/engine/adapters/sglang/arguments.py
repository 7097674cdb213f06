"""From our flags and SGLang's own to what SGLang is started with."""

from pathlib import Path

from dynamo.engine.adapters import flags
from dynamo.engine.adapters.sglang import versions
from dynamo.engine.adapters.sglang.settings import SglangConfig

_REFUSALS = {
    **flags.OURS,
    "--skip-tokenizer-init": "--skip-tokenizer-init is the default; --load-tokenizer is its contrary",
    "--tokenizer-worker-num": "--tokenizer-worker-num: our frontend makes tokens, SGLang needs no workers for that",
    "--node-rank": "--node-rank: SGLang on several hosts is not supported yet",
    "--nnodes": "--nnodes: SGLang on several hosts is not supported yet",
}


def server_args(directory: Path, settings: SglangConfig, model_name: str) -> versions.ServerArgs:
    """What SGLang is started with to serve the model in `directory`, and to call it so. Raises ConfigError."""
    flags.refuse(settings.engine_args, _REFUSALS)
    overrides = {
        "model_path": str(directory),
        "served_model_name": model_name,
        "skip_tokenizer_init": not settings.load_tokenizer,
        "incremental_streaming_output": True,  # each output has what is new, not all so far
    }
    return versions.read_flags(settings.engine_args, overrides)
