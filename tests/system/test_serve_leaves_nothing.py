"""However `dynamo serve` ends, nothing of it is left: no process, no port, no shared memory, no temporary folder.

Each test gives its command a temporary directory of its own and finds its processes by the variable that names it.
"""

import os
import pathlib
import random
import signal
import socket
import sys
import tempfile
import time

import pytest
from deployment import Process

import ports
import processes
from waiting import PATIENT_S, eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /dev/shm")

NUM_KILLS = 50
AT_ONCE = 2
WINDOW_S = 3.0  # a start takes about two seconds; so some kills come while it serves
MOCK = ("--engine", "mocker")
SPLIT = ("--engine", "mocker", "--prefill", "1", "--decode", "1")


class Command:
    """One `dynamo serve`, and what there is of it."""

    def __init__(self, deployment, folder: pathlib.Path, *flags: str) -> None:
        folder.mkdir()
        self.folder = folder
        self.port = ports.reserve()
        self.shared_before = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
        deployment.environ |= {"TMPDIR": str(folder)}
        argv = ("dynamo.cli", "serve", "--http-port", str(self.port), *flags)
        self.process: Process = deployment.run(*argv)

    def pids(self) -> list[int]:
        """All processes that inherited our temporary directory, at any depth."""
        mark = f"TMPDIR={self.folder}".encode()
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found

    def remains(self) -> list[object]:
        """What is left; empty if nothing is."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port))
                left: list[object] = []
            except OSError:
                left = [f"port {self.port}"]
        pids = self.pids()
        return left + pids + list(self.folder.iterdir()) + sorted(self.shared_files(pids))

    def shared_files(self, pids: list[int]) -> set[str]:
        """New files in /dev/shm, but for those that processes of other tests use."""
        names = {name for name in os.listdir("/dev/shm") if "faketime_" not in name}
        new = {f"/dev/shm/{name}" for name in names} - self.shared_before
        if not new:
            return new
        everyone = {int(path.name) for path in pathlib.Path("/proc").glob("[0-9]*")}
        return new - processes.shared_files(everyone - set(pids))

    def await_nothing(self) -> None:
        eventually(lambda: not self.remains(), what=f"gone: {self.remains()}")

    def await_ready(self) -> None:
        eventually(
            lambda: "curl " in self.process.log.read_text() or not self.process.is_running,
            what=f"ready; see {self.process.log}",
        )
        assert self.process.is_running, self.process.log.read_text()


def test_nothing_is_left_after_sigkill_at_random_moments(deployment, tmp_path):
    moments = random.Random(14)
    for number in range(0, NUM_KILLS, AT_ONCE):
        commands = [
            Command(deployment, tmp_path / f"{number + n}", *(SPLIT if n else MOCK))
            for n in range(AT_ONCE)
        ]
        time.sleep(moments.uniform(0, WINDOW_S))
        for command in commands:
            command.process.kill()
        for command in commands:
            command.await_nothing()


def test_nothing_is_left_after_sigkill_of_a_command_with_the_native_engine(deployment, tmp_path):
    command = Command(deployment, tmp_path / "native", "--prefill", "1")
    command.await_ready()
    assert len(command.pids()) >= 4

    command.process.kill()

    command.await_nothing()


@pytest.fixture
def short_path():
    """A directory for Unix sockets, whose paths have at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="dyn-") as folder:
        yield pathlib.Path(folder)


def test_nothing_is_left_after_sigkill_of_several_http_workers(deployment, short_path):
    folder = short_path
    deployment.environ |= {"TMPDIR": str(folder)}
    frontend = deployment.frontend("--http-workers", "2")
    eventually(lambda: len(list(folder.glob("dynamo-http-*/*.sock"))) == 2, what="listening")
    frontend.kill()

    eventually(lambda: not list(folder.iterdir()), what="no folder is left")


@pytest.mark.parametrize("delay_s", [0.3, 1.0, None], ids=["import", "start", "serving"])
def test_nothing_is_left_after_the_terminal_closes(deployment, tmp_path, delay_s):
    command = Command(deployment, tmp_path / "hangup", *MOCK)
    if delay_s is None:
        command.await_ready()
    else:
        time.sleep(delay_s)
    command.process.signal(signal.SIGHUP)
    command.process.popen.wait(PATIENT_S)

    command.await_nothing()


def test_nothing_is_left_after_a_worker_fails_to_start(deployment, tmp_path):
    command = Command(deployment, tmp_path / "crash", *MOCK, "--worker-flags", "--block-size 0")
    command.process.may_end = True

    assert command.process.exit_code() == 2
    command.await_nothing()


def test_nothing_is_left_after_sigkill_of_a_frontend_of_several_processes(deployment, tmp_path):
    folder = tmp_path / "several"
    folder.mkdir()
    deployment.environ |= {"TMPDIR": str(folder)}
    frontend = deployment.frontend("--http-workers", "2")
    eventually(frontend.is_live, what="a frontend answers")

    frontend.kill()

    eventually(lambda: not frontend.is_live(), what="no process answers")
    eventually(lambda: not list(folder.iterdir()), what="the folder is gone")
