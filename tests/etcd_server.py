"""A real etcd for tests, on ports of its own, with data that can be kept or lost."""

import base64
import pathlib
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence

import httpx
import pytest

import ports
import processes
from dynamo.base import addresses
from waiting import PATIENT_S


class EtcdServer:
    """An etcd process. Skips the test if etcd is not installed."""

    def __init__(
        self,
        directory: pathlib.Path,
        *flags: str,
        scheme: str = "http",
        name: str = "default",
        host: str = "127.0.0.1",
        before: Sequence[str] = (),
    ) -> None:
        """`before` precedes the command, to run it in another network namespace at the address `host`."""
        if shutil.which("etcd") is None:
            pytest.skip("etcd is not installed: as root on Debian, tests/install_services.sh")
        self.port = ports.reserve()
        self.address = addresses.join(host, self.port)
        self.url = f"{scheme}://{self.address}"
        self._flags = flags
        self._before = before
        self._directory = directory
        self._peer = f"http://127.0.0.1:{ports.reserve()}"
        self._name = name
        self._headers: dict[str, str] = {}
        self.cluster = [self]
        self._process: subprocess.Popen | None = None

    def start(self, *, wait: bool = True) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        argv = [*self._before, "etcd", "--data-dir", self._directory / "data", *self._flags]
        argv += ["--listen-client-urls", self.url, "--advertise-client-urls", self.url]
        argv += ["--listen-peer-urls", self._peer, "--initial-advertise-peer-urls", self._peer]
        peers = (f"{server._name}={server._peer}" for server in self.cluster)
        argv += ["--name", self._name, "--initial-cluster", ",".join(peers)]
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(processes.bind(argv), stdout=log, stderr=log)
        if wait:
            self.await_health()

    def await_health(self) -> None:
        until = time.monotonic() + PATIENT_S
        while not self._is_healthy():
            assert time.monotonic() < until, (self._directory / "log").read_text()
            time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def lose_data(self) -> None:
        """Delete the data of the stopped server."""
        shutil.rmtree(self._directory / "data")

    def freeze(self) -> None:
        processes.freeze(self._process.pid)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def call(self, path: str, **body: object) -> dict:
        """Call etcd's HTTP interface, without a client library."""
        until = time.monotonic() + PATIENT_S
        while True:
            url = f"{self.url}/v3/{path}"
            answer = httpx.post(url, json=body, headers=self._headers, timeout=PATIENT_S)
            if answer.status_code == 200:
                return answer.json()
            assert "request timed out" in answer.text, answer.text  # by a limit of etcd's own
            assert time.monotonic() < until, answer.text

    def log_in(self, name: str, password: str) -> None:
        """Make all further calls as this user."""
        token = self.call("auth/authenticate", name=name, password=password)["token"]
        self._headers = {"Authorization": token}

    def held(self) -> dict[str, bytes]:
        """Return all keys with their values."""
        nul = base64.b64encode(b"\0").decode()
        pairs = self.call("kv/range", key=nul, range_end=nul).get("kvs", [])
        decode = base64.b64decode
        return {decode(kv["key"]).decode(): decode(kv.get("value", "")) for kv in pairs}

    def wipe(self) -> None:
        nul = base64.b64encode(b"\0").decode()
        self.call("kv/deleterange", key=nul, range_end=nul)

    def compact(self) -> None:
        """Compact the history up to now."""
        nul = base64.b64encode(b"\0").decode()
        revision = self.call("kv/range", key=nul)["header"]["revision"]
        self.call("kv/compaction", revision=revision)

    def _is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=PATIENT_S).json()["health"] == "true"
        except (httpx.TransportError, ValueError):
            return False
