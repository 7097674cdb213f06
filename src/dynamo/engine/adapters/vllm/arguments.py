"""From our flags and vLLM's own to what vLLM is started with."""

import dataclasses
import importlib.util
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from dynamo.base import distribution, errors
from dynamo.engine.adapters import flags, kv_feed
from dynamo.engine.adapters.vllm import connectors, versions
from dynamo.engine.adapters.vllm.settings import VllmConfig

_TRANSFER = "--kv-transfer-config"
_TWICE = f"--connector and {_TRANSFER} say the same: give one of them"


def engine_args(directory: Path, settings: VllmConfig, model_name: str) -> versions.AsyncEngineArgs:
    """What vLLM is started with to serve the model in `directory`, and to call it so. Raises ConfigError."""
    twice = {} if settings.connector is None else {_TRANSFER: _TWICE}
    flags.refuse(settings.engine_args, {**flags.OURS, **twice})
    overrides = {"model": str(directory), "served_model_name": [model_name]}
    args = versions.read_flags(settings.engine_args, overrides)
    if not flags.is_among(_TRANSFER, settings.engine_args):
        fields = connectors.transfer_config(
            _connectors(settings, sleeps=args.enable_sleep_mode), engine_id=uuid.uuid4().hex
        )
        args.kv_transfer_config = fields and versions.KVTransferConfig(**fields)
    return args


def kv_endpoints(args: versions.AsyncEngineArgs) -> kv_feed.Endpoints | None:
    """Where vLLM is to tell its KV events, which is written into `args`; None if it tells none."""
    asked = args.kv_events_config
    if asked is None and args.enable_prefix_caching is not False:
        endpoints = kv_feed.Endpoints.free(args.data_parallel_size)
        args.kv_events_config = versions.KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", **dataclasses.asdict(endpoints)
        )
        return endpoints
    if asked is None or not asked.enable_kv_cache_events or asked.publisher != "zmq":
        return None
    return kv_feed.Endpoints(
        endpoint=asked.endpoint, replay_endpoint=asked.replay_endpoint, topic=asked.topic
    )


def lora_requests(settings: VllmConfig, *, is_enabled: bool) -> Mapping[str, versions.LoRARequest]:
    """The adapters that can be asked for, by name; `is_enabled` as vLLM was told. Raises ConfigError."""
    pairs = [module.partition("=") for module in settings.lora_modules]
    given = ",".join(settings.lora_modules)
    if not all(name and path for name, _, path in pairs):
        raise errors.ConfigError(f"--lora-modules: expected NAME=DIRECTORY, got {given!r}")
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise errors.ConfigError(f"--lora-modules: expected each name once, got {given!r}")
    if pairs and not is_enabled:
        raise errors.ConfigError(f"--lora-modules {given}: give --enable-lora too, for vLLM")
    return {
        name: lora_request(name, number, Path(path))
        for number, (name, _, path) in enumerate(pairs, start=1)
    }


def lora_request(name: str, number: int, directory: Path) -> versions.LoRARequest:
    """How vLLM is asked for an adapter; it knows it by its number."""
    return versions.LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(directory))


def _connectors(settings: VllmConfig, *, sleeps: bool) -> Sequence[str]:
    """Raises ConfigError if NIXL is asked for and not installed."""
    has_nixl = importlib.util.find_spec("nixl") is not None
    if settings.connector is None:
        return ("nixl",) if has_nixl and not sleeps else ("none",)
    if "nixl" in settings.connector and not has_nixl:
        raise errors.ConfigError(
            "--connector nixl: expected the package nixl to be installed: "
            f"{distribution.install_command('nixl')}"
        )
    return settings.connector
