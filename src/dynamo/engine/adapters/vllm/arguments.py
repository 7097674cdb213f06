"""The arguments of vLLM, from this worker's settings and from vLLM's own flags."""

import dataclasses
import importlib.util
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from dynamo.base import distribution, errors
from dynamo.engine.adapters import kv_subscriber, startup
from dynamo.engine.adapters.vllm import connectors, versions
from dynamo.engine.adapters.vllm.settings import VllmConfig

_TRANSFER = "--kv-transfer-config"


def engine_args(directory: Path, settings: VllmConfig, model_name: str) -> versions.AsyncEngineArgs:
    """Return vLLM's arguments to serve the model in `directory` as `model_name`. Raises ConfigError."""
    refused_flags = dict(startup.RESERVED_FLAGS)
    if settings.connector is not None:
        refused_flags[_TRANSFER] = f"--connector and {_TRANSFER} say the same: give one of them"
    startup.refuse_flags(settings.engine_args, refused_flags)
    overrides = {"model": str(directory), "served_model_name": [model_name]}
    args = versions.read_flags(settings.engine_args, overrides)
    if not startup.has_flag(settings.engine_args, _TRANSFER):
        names = _connectors(settings, has_sleep_mode=args.enable_sleep_mode)
        fields = connectors.transfer_config(names, engine_id=uuid.uuid4().hex)
        args.kv_transfer_config = fields and versions.KVTransferConfig(**fields)
    return args


def kv_event_endpoints(
    args: versions.AsyncEngineArgs,
) -> kv_subscriber.PublisherEndpoints | None:
    """Return where vLLM publishes its KV events, or None if it publishes none.

    Unless the user has configured it, free ports are chosen and written into `args`.
    """
    config = args.kv_events_config
    if config is None and args.enable_prefix_caching is not False:
        endpoints = kv_subscriber.PublisherEndpoints.on_free_ports(args.data_parallel_size)
        args.kv_events_config = versions.KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", **dataclasses.asdict(endpoints)
        )
        return endpoints
    if config is None or not config.enable_kv_cache_events or config.publisher != "zmq":
        return None
    return kv_subscriber.PublisherEndpoints(
        endpoint=config.endpoint, replay_endpoint=config.replay_endpoint, topic=config.topic
    )


def lora_requests(settings: VllmConfig, *, is_enabled: bool) -> Mapping[str, versions.LoRARequest]:
    """Return the LoRA adapters of `--lora-modules` by name. Raises ConfigError.

    `is_enabled` says whether vLLM was given `--enable-lora`.
    """
    pairs = [module.partition("=") for module in settings.lora_modules]
    modules = ",".join(settings.lora_modules)
    if not all(name and path for name, _, path in pairs):
        raise errors.ConfigError(f"--lora-modules: expected NAME=DIRECTORY, got {modules!r}")
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise errors.ConfigError(f"--lora-modules: expected each name once, got {modules!r}")
    if pairs and not is_enabled:
        raise errors.ConfigError(f"--lora-modules {modules}: give --enable-lora too, for vLLM")
    return {
        name: lora_request(name, number, Path(path))
        for number, (name, _, path) in enumerate(pairs, start=1)
    }


def lora_request(name: str, number: int, directory: Path) -> versions.LoRARequest:
    """Return vLLM's description of a LoRA adapter; vLLM identifies the adapter by `number`."""
    return versions.LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(directory))


def _connectors(settings: VllmConfig, *, has_sleep_mode: bool) -> Sequence[str]:
    """Return the connectors to use. Raises ConfigError if NIXL is requested but not installed."""
    has_nixl = importlib.util.find_spec("nixl") is not None
    if settings.connector is None:
        return ("nixl",) if has_nixl and not has_sleep_mode else ("none",)
    if "nixl" in settings.connector and not has_nixl:
        raise errors.ConfigError(
            "--connector nixl: expected the package nixl to be installed: "
            f"{distribution.install_command('nixl')}"
        )
    return settings.connector
