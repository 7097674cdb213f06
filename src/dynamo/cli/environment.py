"""`dynamo env`: the facts that belong into a bug report."""

import importlib.metadata
import os
import platform
import sys
from dataclasses import dataclass

from dynamo.base import distribution
from dynamo.runtime.backends import file
from dynamo.worker import engines

_PACKAGES = (
    distribution.NAME,
    "torch",
    "tokenizers",
    "msgspec",
    "httptools",
    "pyzmq",
    "huggingface-hub",
)
_PREFIXES = ("DYN_", "ETCD_", "HF_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
_SECRETS = ("TOKEN", "KEY", "PASSWORD", "SECRET")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig:
    """Show what belongs into a bug report."""


def show(_: EnvironmentConfig) -> int:
    """Print the report and return 0."""
    print(report())
    return 0


def report() -> str:
    """Return versions, machine, engines, planes and the variables that matter, one per line; secrets are hidden."""
    variables = {
        name: "(set)" if any(word in name for word in _SECRETS) else value
        for name, value in sorted(os.environ.items())
        if name.startswith(_PREFIXES) and name != "DYN_FILE_KV"
    }
    rows = {
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": f"{platform.platform()}, {os.cpu_count()} CPUs",
        **{package: _version(package) for package in _PACKAGES},
        "engines": ", ".join(
            name if engines.is_installed(name) else f"{name} (not installed)"
            for name in engines.KIND_BY_NAME
        ),
        "discovery": f"file, {file.default_directory(os.environ)}",
        "planes": "requests tcp, events zmq",
        **variables,
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
