"""A real NATS server for tests, on a port of its own, with a store that can be kept or lost."""

import pathlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence

import pytest

import ports
import processes
from dynamo.base import addresses
from dynamo.runtime.backends.nats import access, connection
from waiting import PATIENT_S


class NatsServer:
    """A nats-server process. Skips the test if nats-server is not installed."""

    def __init__(
        self,
        directory: pathlib.Path,
        *flags: str,
        jetstream: bool = True,
        host: str = "127.0.0.1",
        before: Sequence[str] = (),
    ) -> None:
        """`before` precedes the command, to run it in another network namespace at the address `host`."""
        if shutil.which("nats-server") is None:
            pytest.skip(
                "nats-server is not installed: as root on Debian, tests/install_services.sh"
            )
        self._directory = directory
        store = ("-js", "-sd", str(directory / "store")) if jetstream else ()
        self._flags = (*store, *flags)
        self._port = ports.reserve()
        self._process: subprocess.Popen | None = None
        self._host, self._before = host, before
        self.url = f"nats://{addresses.join(host, self._port)}"

    def start(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        argv = [*self._before, "nats-server", "-a", self._host, "-p", str(self._port), *self._flags]
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(processes.bind(argv), stdout=log, stderr=log)
        until = time.monotonic() + PATIENT_S
        while not self._is_listening():
            assert time.monotonic() < until, (self._directory / "log").read_text()
            time.sleep(0.005)

    def stop(self) -> None:
        """Kill the server, as kill -9 does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def reload(self) -> None:
        """Make the server read its configuration again."""
        self._process.send_signal(signal.SIGHUP)

    def freeze(self) -> None:
        processes.freeze(self._process.pid)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def _is_listening(self) -> bool:
        with socket.socket(addresses.resolve(self._host)[0]) as probe:
            return probe.connect_ex((self._host, self._port)) == 0


async def connect(url: str, name: str = "test") -> connection.NatsConnection:
    return await connection.NatsConnection.open(
        access.read((url,), {}), name=name, start_timeout_s=PATIENT_S
    )
