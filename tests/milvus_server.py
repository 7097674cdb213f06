"""A real milvus-lite for tests: a process that listens on a port of its own, with a store that outlives it."""

import importlib.util
import pathlib
import signal
import subprocess
import sys

import pytest

import ports
import processes
from waiting import eventually


class MilvusServer:
    """A milvus-lite process. Skips the test if milvus-lite or its client is not installed."""

    def __init__(self, directory: pathlib.Path) -> None:
        for name in ("milvus_lite", "pymilvus"):
            if importlib.util.find_spec(name) is None:
                pytest.skip(f"{name} is not installed: make .venv/.dev")
        self._directory = directory
        self._process: subprocess.Popen | None = None
        self.port = ports.reserve()

    def start(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        program = str(pathlib.Path(sys.executable).with_name("milvus-lite"))
        address = ("--host", "127.0.0.1", "--port", str(self.port))
        log = self._directory / "log"
        with log.open("wb") as file:
            argv = [program, "server", "--data-dir", str(self._directory / "data"), *address]
            self._process = subprocess.Popen(
                processes.bind(argv),
                stdout=file,
                stderr=file,
                env={"PYTHONUNBUFFERED": "1"},
            )
        eventually(lambda: "listening" in log.read_text(), what="milvus-lite listens")

    def stop(self) -> None:
        """Kill the server, as kill -9 does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        processes.freeze(self._process.pid)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)
