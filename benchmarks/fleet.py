"""A frontend and simulated workers on loopback, to be hurt: killed, stopped, told to go, replaced."""

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
from collections.abc import Iterator
from pathlib import Path

from benchmarks import systems

MODEL = "m"


class Process:
    """One of ours."""

    def __init__(self, module: str, flags: list[str], environ: dict[str, str], log: Path) -> None:
        command = [sys.executable, "-m", module, *flags]
        with log.open("ab") as output:
            self._popen = subprocess.Popen(command, env=environ, stdout=output, stderr=output)
        self.is_hurt = False

    @property
    def is_running(self) -> bool:
        return self._popen.poll() is None

    def signal(self, number: int) -> None:
        """SIGCONT heals; all others hurt."""
        self.is_hurt = number != signal.SIGCONT
        self._popen.send_signal(number)

    def end(self) -> None:
        for number in (signal.SIGCONT, signal.SIGTERM):
            self._popen.send_signal(number)
        try:
            self._popen.wait(15)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    def wait(self) -> None:
        self._popen.wait()

    @property
    def num_fds(self) -> int:
        return len(list(Path(f"/proc/{self._popen.pid}/fd").iterdir()))

    @property
    def rss_mb(self) -> float:
        pages = int(Path(f"/proc/{self._popen.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Fleet:
    """One frontend, and workers that come and go."""

    def __init__(self, directory: Path, model: Path, worker_flags: list[str]) -> None:
        self.log = directory / "log"
        self._model = model
        self._worker_flags = worker_flags
        self._environ = os.environ | {
            "DYN_FILE_KV": str(directory / "discovery"),
            "DYN_LOG": "warn,dynamo.frontend.dispatch=info",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        port = systems.free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.workers: list[Process] = []
        self.frontend = self._start("dynamo.frontend", "--http-port", str(port))

    def add_worker(self) -> Process:
        worker = self._start(
            *("dynamo.mocker", "--model-path", str(self._model), "--model-name", MODEL),
            *self._worker_flags,
        )
        self.workers.append(worker)
        return worker

    def wait_for_workers(self, number: int, limit_s: float = 60) -> None:
        """Until the frontend knows so many."""
        deadline = time.monotonic() + limit_s
        while self.metric("model_workers") != number:
            if time.monotonic() > deadline:
                raise SystemExit(f"not {number} workers after {limit_s:g} s; see {self.log}")
            time.sleep(0.05)

    def metric(self, name: str) -> float:
        """Of the frontend, summed over its labels."""
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
        for process in (*self.workers, self.frontend):
            if process.is_running:
                process.end()

    def _start(self, module: str, *flags: str) -> Process:
        return Process(module, list(flags), self._environ, self.log)


@contextlib.contextmanager
def running(model: Path, num_workers: int, worker_flags: list[str]) -> Iterator[Fleet]:
    """A fleet while the block runs."""
    with tempfile.TemporaryDirectory() as directory:
        fleet = Fleet(Path(directory), model, worker_flags)
        try:
            for _ in range(num_workers):
                fleet.add_worker()
            fleet.wait_for_workers(num_workers)
            yield fleet
        finally:
            fleet.end()
