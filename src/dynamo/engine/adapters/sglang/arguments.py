"""From our flags and SGLang's own to what SGLang is started with."""

import dataclasses
import json
from pathlib import Path

from dynamo.engine.adapters import flags, kv_feed
from dynamo.engine.adapters.sglang import versions
from dynamo.engine.adapters.sglang.settings import SglangConfig

_ENDPOINT = "tcp://*:5557"  # where SGLang tells KV events unless it is told otherwise
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


def kv_endpoints(args: versions.ServerArgs) -> kv_feed.Endpoints | None:
    """Where SGLang is to tell its KV events, which is written into `args`; None if it tells none."""
    if args.kv_events_config is None and not args.disable_radix_cache:
        endpoints = kv_feed.Endpoints.free(args.dp_size)
        config = {"publisher": "zmq", **dataclasses.asdict(endpoints)}
        args.kv_events_config = json.dumps(config)
        return endpoints
    asked = json.loads(args.kv_events_config or "{}")
    if asked.get("publisher") != "zmq":
        return None
    return kv_feed.Endpoints(
        endpoint=asked.get("endpoint", _ENDPOINT),
        replay_endpoint=asked.get("replay_endpoint"),
        topic=asked.get("topic", ""),
    )
