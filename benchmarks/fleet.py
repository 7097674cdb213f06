"""Frontends and simulated workers on loopback, with the services of their mix, to be hurt: killed, stopped, told to go.

Each keeps its ports when it is started again, as behind a load balancer and under a supervisor.
"""

import contextlib
import datetime
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks import systems
from etcd_server import EtcdServer
from nats_server import NatsServer

MODEL = "m"
DEFAULT_MIX = "file+tcp+zmq"
MIXES: Mapping[str, Mapping[str, str]] = {
    DEFAULT_MIX: {},
    "etcd+tcp+zmq": {"DYN_DISCOVERY_BACKEND": "etcd"},
    "etcd+nats+nats": {
        "DYN_DISCOVERY_BACKEND": "etcd",
        "DYN_REQUEST_PLANE": "nats",
        "DYN_EVENT_PLANE": "nats",
    },
}
START_LIMIT_S = 90.0
Service = EtcdServer | NatsServer


class Process:
    """One of ours. `url` is where it tells of its health."""

    def __init__(
        self, module: str, flags: list[str], environ: dict[str, str], log: Path, port: int
    ) -> None:
        self._command = [sys.executable, "-m", module, *flags]
        self._environ = environ
        self._log = log
        self.url = f"http://127.0.0.1:{port}"
        self.ended_at = 0.0  # when it was last told to end, or killed
        self.start()

    def start(self) -> None:
        """Also again, after its end."""
        with self._log.open("ab") as output:
            self._popen = subprocess.Popen(
                self._command, env=self._environ, stdout=output, stderr=output
            )
        self.is_hurt = False

    @property
    def is_running(self) -> bool:
        return self._popen.poll() is None

    @property
    def is_well(self) -> bool:
        """Unhurt, and says so itself."""
        return not self.is_hurt and self.is_running and is_healthy(self.url)

    def signal(self, number: int) -> None:
        """SIGCONT heals; all others hurt."""
        self.is_hurt = number != signal.SIGCONT
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.ended_at = time.monotonic()
        self._popen.send_signal(number)

    def end(self) -> None:
        for number in (signal.SIGCONT, signal.SIGTERM):
            self._popen.send_signal(number)
        try:
            self._popen.wait(15)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    def wait(self) -> int:
        return self._popen.wait()

    @property
    def num_fds(self) -> int:
        return len(list(Path(f"/proc/{self._popen.pid}/fd").iterdir()))

    @property
    def rss_mb(self) -> float:
        pages = int(Path(f"/proc/{self._popen.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Fleet:
    """Frontends, workers that come and go, and the servers that they need."""

    def __init__(
        self, directory: Path, model: Path, worker_flags: list[str], mix: str, num_frontends: int
    ) -> None:
        self.log = directory / "log"
        self._model = model
        self._worker_flags = worker_flags
        self._environ = os.environ | {
            "DYN_FILE_KV": str(directory / "discovery"),
            "DYN_LOG": "warn,dynamo.frontend.dispatch=info",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            **MIXES[mix],
        }
        self.services: dict[str, Service] = {}
        self.workers: list[Process] = []
        self.frontends: list[Process] = []
        try:
            self._start_services(directory, mix)
            for _ in range(num_frontends):
                self.frontends.append(self._start("dynamo.frontend", "--http-port"))
        except BaseException:
            self.end()
            raise

    @property
    def frontend(self) -> Process:
        """The one that is asked for what it knows."""
        return self.frontends[0]

    @property
    def url(self) -> str:
        return self.frontend.url

    def add_worker(self) -> Process:
        worker = self._start(
            "dynamo.mocker",
            *("--model-path", str(self._model), "--model-name", MODEL),
            *self._worker_flags,
            "--system-port",
        )
        self.workers.append(worker)
        return worker

    def wait_for_workers(self, number: int) -> None:
        """Until the first frontend knows so many."""
        await_it(lambda: self.metric("model_workers") == number, f"{number} workers; {self.log}")

    def wait_until_well(self) -> None:
        """Until everybody is, and each frontend has heard of all workers."""
        for process in (*self.workers, *self.frontends):
            await_it(lambda one=process: one.is_well, f"health at {process.url}; {self.log}")
        self.wait_for_workers(len(self.workers))

    def metric(self, name: str) -> float:
        """Of the first frontend, summed over its labels."""
        try:
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=5) as answer:
                rows = answer.read().decode().splitlines()
        except (urllib.error.URLError, ConnectionError):
            return 0.0
        own = [row for row in rows if row.startswith(f"dynamo_frontend_{name}{{")]
        return sum(float(row.rpartition(" ")[2]) for row in own)

    def log_times(self, words: str) -> list[datetime.datetime]:
        """When a line with these words was written."""
        lines = [line for line in self.log.read_text().splitlines() if words in line]
        return [datetime.datetime.fromisoformat(line.split(maxsplit=1)[0]) for line in lines]

    def end(self) -> None:
        for process in (*self.workers, *self.frontends):
            if process.is_running:
                process.end()
        for service in self.services.values():
            service.stop()

    def _start_services(self, directory: Path, mix: str) -> None:
        kinds = {"etcd": (EtcdServer, "ETCD_ENDPOINTS"), "nats": (NatsServer, "NATS_SERVER")}
        for name in kinds.keys() & set(mix.split("+")):
            kind, variable = kinds[name]
            service = self.services[name] = kind(directory / name)
            service.start()
            self._environ[variable] = service.url

    def _start(self, module: str, *flags: str) -> Process:
        """The last of the flags takes the port at which it tells of its health."""
        port = systems.free_port()
        return Process(module, [*flags, str(port)], self._environ, self.log, port)


@contextlib.contextmanager
def running(
    model: Path,
    num_workers: int,
    worker_flags: list[str],
    *,
    mix: str = DEFAULT_MIX,
    num_frontends: int = 1,
) -> Iterator[Fleet]:
    """A fleet while the block runs."""
    with tempfile.TemporaryDirectory() as directory:
        fleet = Fleet(Path(directory), model, worker_flags, mix, num_frontends)
        try:
            for _ in range(num_workers):
                fleet.add_worker()
            fleet.wait_for_workers(num_workers)
            yield fleet
        finally:
            fleet.end()


def is_healthy(url: str, limit_s: float = 2.0) -> bool:
    """Does a process tell of itself that it can be asked?"""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=limit_s) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def await_it(check: Callable[[], bool], what: str) -> None:
    """Until it is so. Ends the program if it never is."""
    deadline = time.monotonic() + START_LIMIT_S
    while not check():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {START_LIMIT_S:g} s: {what}")
        time.sleep(0.05)
