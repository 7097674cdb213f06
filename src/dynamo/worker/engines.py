"""The table of engines by name, and the only place that builds one.

Engines are imported late and by name, so that `--help` does not wait for PyTorch, and a machine without an engine's
extra is told which extra to install.
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
from dynamo.engine.adapters.vllm import plugin
from dynamo.transfer.backends import local
from dynamo.worker import model_source


@dataclass(frozen=True)
class NoSettings:
    """The settings of an engine without flags of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """Where the parts of an engine are (as `module:name`) and what it needs."""

    # a dataclass, importable without the extra
    settings: str = "dynamo.worker.engines:NoSettings"
    engine: str  # function of the model's directory and the settings
    embedder: str | None = None  # likewise; None: the engine cannot embed
    # called before the import; raises ConfigError for an unsupported version
    check: str | None = None
    several: str | None = None  # likewise; builds as many engines as the settings say
    requires: str | None = None  # a package that the plain installation lacks
    extra: str | None = None  # the extra of our distribution that brings it
    needs_weights: bool = True
    reads_gguf: bool = False  # its models are GGUF files, and no others
    max_local_prefill_length: int | None = None  # the engine's own default; None: the usual one
    build_arguments: tuple[str, ...] = ("room",)  # further arguments of `engine`: model_name, room
    metrics: str | None = None  # prefix of the metrics that the engine counts itself
    # variables to set before the import
    environment: Mapping[str, str] = field(default_factory=dict)


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
        settings="dynamo.engine.adapters.settings:VllmConfig",
        engine="dynamo.engine.adapters.vllm.engine:build",
        check="dynamo.engine.adapters.settings:check_vllm",
        requires="vllm",
        extra="vllm",
        max_local_prefill_length=0,
        build_arguments=("model_name",),
        metrics="vllm:",
        environment={
            "VLLM_NO_USAGE_STATS": "1",  # no usage statistics, unless the user asks for them
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would keep our sockets open after us
            "VLLM_LOGGING_CONFIG_PATH": str(plugin.LOGGING_CONFIG),
            # What would write past the formatter of our logs: progress bars, warnings of C++ and of Python.
            "TQDM_DISABLE": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            # The second one is that of Python's resource tracker, which removes what processes that end at once leave.
            "PYTHONWARNINGS": "ignore::FutureWarning,ignore::UserWarning:multiprocessing.resource_tracker",
            plugin.OWNED: "1",
        },
    ),
    "sglang": EngineKind(
        settings="dynamo.engine.adapters.settings:SglangConfig",
        engine="dynamo.engine.adapters.sglang:build",
        check="dynamo.engine.adapters.settings:check_sglang",
        requires="sglang",
        build_arguments=("model_name",),
    ),
    "trtllm": EngineKind(
        settings="dynamo.engine.adapters.settings:TrtllmConfig",
        engine="dynamo.engine.adapters.trtllm:build",
        check="dynamo.engine.adapters.settings:check_trtllm",
        requires="tensorrt_llm",
        build_arguments=(),
    ),
    "llamacpp": EngineKind(
        settings="dynamo.engine.adapters.settings:LlamacppConfig",
        engine="dynamo.engine.adapters.llamacpp.engine:build",
        check="dynamo.engine.adapters.settings:check_llamacpp",
        requires="xllamacpp",
        extra="llamacpp",
        reads_gguf=True,
        build_arguments=(),
    ),
}


def kind_of(name: str) -> EngineKind:
    """Return the engine of this name. Raises ConfigError."""
    try:
        return KIND_BY_NAME[name]
    except KeyError:
        names = ", ".join(KIND_BY_NAME)
        # An engine of NVIDIA Dynamo 0.3, which its documents still name.
        hint = "use native, or llamacpp for a GGUF file; " if name == "mistralrs" else ""
        raise errors.ConfigError(f"no engine is called {name!r}; {hint}there are {names}") from None


def default_for(model: str | None) -> str:
    """Return the engine that serves a model unless the user names another: llama.cpp for a GGUF file."""
    return (
        "llamacpp" if model is not None and model.endswith(model_source.GGUF_SUFFIX) else "native"
    )


def find_model(
    name: str, model: str | None, on_download: model_source.OnDownload | None = None
) -> Path:
    """Return the directory of a model for this engine, as `model_source.resolve`. Raises ConfigError."""
    kind = kind_of(name)
    directory = model_source.resolve(
        model, with_weights=kind.needs_weights, on_download=on_download
    )
    is_gguf = any(directory.glob(f"*{model_source.GGUF_SUFFIX}"))
    has_others = model_source.has_all_weights(directory)  # beside a GGUF file, as in gemma-2b
    if is_gguf and not has_others and not kind.reads_gguf and kind.needs_weights:
        raise errors.ConfigError(
            f"{model} is a GGUF file, which the {name} engine does not read: serve it with python -m dynamo.llamacpp"
        )
    if kind.needs_weights and not (
        is_gguf or has_others or Path(model or "").expanduser().is_dir()
    ):
        raise errors.ConfigError(
            f"model {model!r} has no safetensors at the hub; pickled weights (.bin, .pt) can run code as they are"
            " read, and are not downloaded: convert them to safetensors, and give the directory"
        )
    if kind.reads_gguf and not is_gguf:
        raise errors.ConfigError(
            f"the {name} engine reads GGUF files: expected --model FILE{model_source.GGUF_SUFFIX}, got"
            f" {model or 'the built-in model'}"
        )
    return directory


def settings_of(name: str) -> type:
    """Return the dataclass of this engine's own settings."""
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
    """Build an engine without starting it. Raises ConfigError if a package that it needs is not installed.

    Clients call the model `model_name`. Engines of one process find each other in `room` and copy KV blocks directly.
    """
    kind = KIND_BY_NAME[name]
    arguments = {"model_name": model_name, "room": room}
    chosen = {key: arguments[key] for key in kind.build_arguments}
    engine: api.Engine = _load_part(name, kind.engine)(directory, settings, **chosen)
    return engine


def build_all(name: str, directory: Path, settings: Any, model_name: str) -> Sequence[api.Engine]:
    """Build the engines of one process without starting them: one, unless the settings say more. Raises ConfigError."""
    several = KIND_BY_NAME[name].several
    if several is None:
        return (build(name, directory, settings, model_name=model_name),)
    engines: Sequence[api.Engine] = _load_part(name, several)(directory, settings)
    return engines


def build_embedder(name: str, directory: Path, settings: Any) -> api.Embedder:
    """Build an embedder without starting it. Raises ConfigError as `build` does, and if the engine cannot embed."""
    target = KIND_BY_NAME[name].embedder
    if target is None:
        raise errors.ConfigError(
            f"{directory} is a model that embeds, and the {name} engine only generates here: serve it with"
            " python -m dynamo.native"
        )
    embedder: api.Embedder = _load_part(name, target)(directory, settings)
    return embedder


def is_installed(name: str) -> bool:
    """Return whether the package that the engine needs is installed."""
    requires = kind_of(name).requires
    return requires is None or importlib.util.find_spec(requires) is not None


def check_installed(name: str) -> None:
    """Raise ConfigError if the package that the engine needs is not installed, before its model is downloaded."""
    if not is_installed(name):
        _load_part(name, KIND_BY_NAME[name].engine)


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
