"""The engines that there are, by name; the only place that picks one.

Engines are imported by name and late: so `--help` does not wait for PyTorch, and a machine without an engine's extra
learns which one to install.
"""

import importlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamo.base import distribution, errors
from dynamo.engine import api
from dynamo.engine.adapters.vllm import orphans
from dynamo.transfer.backends import local


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """Where an engine's parts are (`module:name`) and what it needs."""

    settings: str  # a dataclass, importable without the extra
    engine: str  # called with the model's directory and the settings
    embedder: str | None  # likewise; None: it has none
    check: str | None = None  # called before it is imported; refuses what will not do (ConfigError)
    several: str | None = None  # likewise; gives all that the settings want in one process
    requires: str | None = None  # a package that the plain installation does not bring
    extra: str | None = None  # of our distribution, which brings it
    needs_weights: bool = True
    max_local_prefill_length: int | None = None  # where it has a custom of its own
    told: tuple[str, ...] = ("room",)  # what its engine is also told, of what `build` knows
    metrics: str | None = None  # what the names of its own metrics begin with, if it has some
    environment: Mapping[str, str] = field(default_factory=dict)  # set before it is imported


KIND_BY_NAME = {
    "native": EngineKind(
        settings="dynamo.engine.native.settings:NativeConfig",
        engine="dynamo.engine.native.engine:NativeEngine",
        embedder="dynamo.engine.native.embedder:NativeEmbedder",
        requires="torch",
        extra="native",
        environment={
            "OMP_WAIT_POLICY": "PASSIVE",  # torch's threads sleep while they wait
            # One matrix kernel is kept for each shape of a batch; without a bound that adds up to
            # hundreds of megabytes.
            "LRU_CACHE_CAPACITY": "64",
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
        },
    ),
    "mocker": EngineKind(
        settings="dynamo.engine.mock.settings:MockConfig",
        engine="dynamo.worker.mocking:build",
        several="dynamo.worker.mocking:build_all",
        embedder="dynamo.worker.mocking:build_embedder",
        needs_weights=False,
    ),
    "vllm": EngineKind(
        settings="dynamo.engine.adapters.vllm.settings:VllmConfig",
        engine="dynamo.engine.adapters.vllm.engine:build",
        embedder=None,
        check="dynamo.engine.adapters.vllm.supported:check",
        requires="vllm",
        extra="vllm",
        max_local_prefill_length=0,
        told=("model_name",),
        metrics="vllm:",
        environment={
            "VLLM_NO_USAGE_STATS": "1",  # nothing is told to strangers, unless it is asked for
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would keep our sockets open after us
            orphans.OWNED: "1",
        },
    ),
    "sglang": EngineKind(
        settings="dynamo.engine.adapters.sglang.settings:SglangConfig",
        engine="dynamo.engine.adapters.sglang.engine:build",
        embedder=None,
        check="dynamo.engine.adapters.sglang.supported:check",
        requires="sglang",
        told=("model_name",),
    ),
    "trtllm": EngineKind(
        settings="dynamo.engine.adapters.trtllm.settings:TrtllmConfig",
        engine="dynamo.engine.adapters.trtllm.engine:build",
        embedder=None,
        check="dynamo.engine.adapters.trtllm.supported:check",
        requires="tensorrt_llm",
        told=(),
    ),
}


def kind_of(name: str) -> EngineKind:
    """The engine of this name. Raises ConfigError."""
    try:
        return KIND_BY_NAME[name]
    except KeyError:
        known = ", ".join(KIND_BY_NAME)
        raise errors.ConfigError(f"no engine is called {name!r}; there are {known}") from None


def settings_of(name: str) -> type:
    """The dataclass of this engine's own settings."""
    settings: type = _load(name, KIND_BY_NAME[name].settings)
    return settings


def build(
    name: str,
    directory: Path,
    settings: Any,
    *,
    model_name: str = "",
    room: local.Room | None = None,
) -> api.Engine:
    """An engine, not yet started. Raises ConfigError if what it needs is not installed.

    Clients call the model `model_name`. Engines of one process find each other in `room`, and copy blocks without
    leaving it.
    """
    kind = KIND_BY_NAME[name]
    known = {"model_name": model_name, "room": room}
    beside = {key: known[key] for key in kind.told}
    engine: api.Engine = _load_part(name, kind.engine)(directory, settings, **beside)
    return engine


def build_all(name: str, directory: Path, settings: Any, model_name: str) -> Sequence[api.Engine]:
    """The engines of one process, not yet started: one, unless the settings want more. Raises ConfigError."""
    several = KIND_BY_NAME[name].several
    if several is None:
        return (build(name, directory, settings, model_name=model_name),)
    engines: Sequence[api.Engine] = _load_part(name, several)(directory, settings)
    return engines


def build_embedder(name: str, directory: Path, settings: Any) -> api.Embedder:
    """An embedder, not yet started. Raises ConfigError as `build` does, and if this engine has none."""
    target = KIND_BY_NAME[name].embedder
    if target is None:
        raise errors.ConfigError(
            f"{directory} is a model that embeds, and the {name} engine only generates here: serve it with"
            " python -m dynamo.native"
        )
    embedder: api.Embedder = _load_part(name, target)(directory, settings)
    return embedder


def is_installed(name: str) -> bool:
    """Can it be built here?"""
    requires = KIND_BY_NAME[name].requires
    return requires is None or importlib.util.find_spec(requires) is not None


def _load_part(name: str, target: str) -> Any:
    kind = KIND_BY_NAME[name]
    for variable, value in kind.environment.items():
        os.environ.setdefault(variable, value)
    if kind.check is not None:
        _load(name, kind.check)()
    return _load(name, target)


def _load(name: str, target: str) -> Any:
    module, _, attribute = target.partition(":")
    extra = KIND_BY_NAME[name].extra
    if extra is None:
        return getattr(importlib.import_module(module), attribute)
    return getattr(
        distribution.load_extra(module, feature=f"the {name} engine", extra=extra), attribute
    )
