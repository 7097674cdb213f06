"""`dynamo env`: what to put into a bug report."""

import importlib.metadata
import os
import platform
import sys

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
_VARIABLES = ("DYN_", "ETCD_", "HF_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
_SECRET = ("TOKEN", "KEY", "PASSWORD", "SECRET")


def report() -> str:
    """Versions, machine, engines, planes and the variables that matter; one per line."""
    rows = {
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": f"{platform.platform()}, {os.cpu_count()} CPUs",
        **{package: _version(package) for package in _PACKAGES},
        "engines": ", ".join(_describe_engine(name) for name in engines.KIND_BY_NAME),
        "discovery": f"file, {file.default_directory(os.environ)}",
        "planes": "requests tcp, events zmq",
        **_variables(),
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _describe_engine(name: str) -> str:
    return name if engines.is_installed(name) else f"{name} (not installed)"


def _variables() -> dict[str, str]:
    """What the environment sets for us; secrets are not shown."""
    return {
        name: "(set)" if any(word in name for word in _SECRET) else value
        for name, value in sorted(os.environ.items())
        if name.startswith(_VARIABLES) and name != "DYN_FILE_KV"
    }
