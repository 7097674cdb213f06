"""Modules that every process loads need nothing that only an extra installs, or that only Linux has."""

import subprocess
import sys

import pytest

OPTIONAL = ("obstore", "matplotlib", "nats", "grpc", "lightkube", "torch", "xllamacpp")


@pytest.mark.parametrize(
    "module",
    [
        "dynamo.cli.main",
        "dynamo.frontend.service",
        "dynamo.kvbm.tier_setup",
        "dynamo.planner.profiling",
        "dynamo.planner.service",
        "dynamo.simulate.plan",
        "dynamo.worker.main",
    ],
)
def test_module_loads_without_optional_packages(module):
    absent = dict.fromkeys(OPTIONAL)
    program = f"import sys; sys.modules.update({absent}); import {module}"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert ended.returncode == 0, ended.stderr


WITHOUT_LINUX = """
import ctypes, fcntl, os, signal, socket

for module, names in {
    os: "O_DIRECT memfd_create pidfd_open posix_fallocate sched_getaffinity",
    socket: "MSG_MORE SO_PEERCRED TCP_KEEPIDLE TCP_USER_TIMEOUT",
    fcntl: "F_ADD_SEALS F_GET_SEALS F_OFD_GETLK F_OFD_SETLK",
    signal: "SIGRTMIN sigtimedwait",
}.items():
    for name in names.split():
        delattr(module, name)


class Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name in ("fallocate", "inotify_init1", "prctl"):
            raise AttributeError(name)
        return super().__getattr__(name)


ctypes.CDLL = Library
"""


@pytest.mark.parametrize(
    "module",
    ["dynamo.cli.main", "dynamo.frontend.service", "dynamo.kvbm.storage", "dynamo.worker.main"],
)
def test_module_loads_where_the_system_is_not_linux(module):
    program = f"{WITHOUT_LINUX}\nimport {module}"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert ended.returncode == 0, ended.stderr
