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

from dynamo.base import errors, extras
from dynamo.engine import api
from dynamo.transfer.backends import local


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """Where an engine's parts are (`module:name`) and what it needs."""

    settings: str  # a dataclass, importable without the extra
    engine: str  # called with the model's directory and the settings
    embedder: str  # likewise
    several: str | None = None  # likewise; gives all that the settings want in one process
    requires: str | None = None  # a package that only an extra of our distribution brings
    extra: str | None = None
    needs_weights: bool = True
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


def build(name: str, directory: Path, settings: Any, room: local.Room | None = None) -> api.Engine:
    """An engine, not yet started. Raises ConfigError if what it needs is not installed.

    Engines of one process find each other in `room`, and copy blocks without leaving it.
    """
    beside = {} if room is None else {"room": room}
    engine: api.Engine = _load_part(name, KIND_BY_NAME[name].engine)(directory, settings, **beside)
    return engine


def build_all(name: str, directory: Path, settings: Any) -> Sequence[api.Engine]:
    """The engines of one process, not yet started: one, unless the settings want more. Raises ConfigError."""
    several = KIND_BY_NAME[name].several
    if several is None:
        return (build(name, directory, settings),)
    engines: Sequence[api.Engine] = _load_part(name, several)(directory, settings)
    return engines


def build_embedder(name: str, directory: Path, settings: Any) -> api.Embedder:
    """An embedder, not yet started. Raises ConfigError as `build` does."""
    embedder: api.Embedder = _load_part(name, KIND_BY_NAME[name].embedder)(directory, settings)
    return embedder


def is_installed(name: str) -> bool:
    """Can it be built here?"""
    requires = KIND_BY_NAME[name].requires
    return requires is None or importlib.util.find_spec(requires) is not None


def _load_part(name: str, target: str) -> Any:
    for variable, value in KIND_BY_NAME[name].environment.items():
        os.environ.setdefault(variable, value)
    return _load(name, target)


def _load(name: str, target: str) -> Any:
    module, _, attribute = target.partition(":")
    extra = KIND_BY_NAME[name].extra
    if extra is None:
        return getattr(importlib.import_module(module), attribute)
    return getattr(extras.load(module, what=f"the {name} engine", extra=extra), attribute)
