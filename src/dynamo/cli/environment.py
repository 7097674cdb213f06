"""`dynamo env`: versions, machine, engines and variables, for a bug report."""

import importlib.metadata
import os
import platform
import re
import sys
from dataclasses import dataclass

from dynamo.base import config, distribution, membership
from dynamo.runtime import component
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
_PREFIXES = ("DYN_", "DYNAMO_", "ETCD_", "NATS_", "HF_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
_SECRETS = ("TOKEN", "KEY", "PASSWORD", "SECRET")
# with a password, as in nats://me:quiet@10.0.0.5:4222, which needs no scheme
_URL_USER = re.compile(r"(?:(?<=://)[^\s,]*|[^\s,/]+)@")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig:
    """Display information about the current environment, for a bug report."""


def show_environment(_: EnvironmentConfig) -> int:
    """Print the report and return 0."""
    print(report())
    return 0


def report() -> str:
    """Return versions, machine, engines, planes and the variables that matter, one per line; secrets are hidden."""
    planes = config.load(component.RuntimeConfig, prog="dynamo env", argv=())
    discovery: str = planes.discovery_backend
    if discovery == "file":
        discovery += f", {membership.discovery_directory(None, os.environ)}"
    variables = {
        name: "(set)" if any(word in name for word in _SECRETS) else _URL_USER.sub("…@", value)
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
        "discovery": discovery,
        "planes": f"requests {planes.request_plane}, events {planes.event_plane}",
        **variables,
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
