"""`dynamo stop` waits until a `dynamo serve` has ended, as long as that may take."""

import contextlib
import signal
import subprocess
import sys
import types

import pytest

from dynamo.base import errors
from dynamo.cli import processes
from dynamo.launch import state

DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); signal.pause()"


class Clock:
    """Time that passes when it is waited for; `at` calls a function at its time."""

    def __init__(self):
        self.time_s, self._calls = 1000.0, []

    def monotonic(self):
        return self.time_s

    def at(self, after_s, call):
        self._calls.append((self.time_s + after_s, call))

    def sleep(self, seconds):
        self.time_s += 100 * seconds
        for due_at, call in self._calls:
            if due_at <= self.time_s:
                call()


@pytest.fixture
def clock(monkeypatch):
    passing = Clock()
    monkeypatch.setattr(
        processes, "time", types.SimpleNamespace(monotonic=passing.monotonic, sleep=passing.sleep)
    )
    return passing


@pytest.fixture
def draining(tmp_path, monkeypatch):
    """A process that SIGTERM does not end, listed as a `dynamo serve` whose processes may take 120 s."""
    monkeypatch.setenv("DYNAMO_HOME", str(tmp_path))
    process = subprocess.Popen([sys.executable, "-S", "-c", DEAF], stdout=subprocess.PIPE)
    with process, contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        process.stdout.readline()
        registration = stack.enter_context(state.registered("slow", "m"))
        registration.update(
            pid=process.pid,
            process_start=state.process_start(process.pid),
            stop_timeout_s=120.0,
        )
        yield process


def end(process):
    process.kill()
    process.wait()


def test_long_drain_is_waited_for(draining, clock, capsys):
    clock.at(110.0, lambda: end(draining))

    assert processes.stop(processes.StopConfig()) == 0
    assert draining.returncode == -signal.SIGKILL
    assert capsys.readouterr().out == (
        "stopping slow: running requests finish first, within 120 s; waiting for at most 145 s\n"
    )


def test_what_has_not_ended_in_its_time_is_named(draining, clock):
    with pytest.raises(errors.EngineFailed, match=r"slow has not ended within 145 s; kill -9 \d+"):
        processes.stop(processes.StopConfig())

    assert clock.time_s > 1145.0
    assert draining.poll() is None


def test_wait_is_bounded_by_its_flag(draining, clock):
    bound_s = 20.0
    with pytest.raises(errors.EngineFailed, match="slow has not ended within 20 s"):
        processes.stop(processes.StopConfig(timeout=bound_s))

    assert clock.time_s < 1060.0
