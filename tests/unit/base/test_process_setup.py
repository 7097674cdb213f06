"""Settings of a process at its start: garbage collection, open files, signals."""

import gc
import os
import resource
import signal
import subprocess
import sys
import weakref

import pytest

from dynamo.base import process_setup
from waiting import PATIENT_S

INFINITE = resource.RLIM_INFINITY
PROGRAM = """
import asyncio
from dynamo.base import process_setup

async def main():
    stop = process_setup.stop_on_signals()
    print("ready", flush=True)
    await stop.wait()
    print("stopping", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Cycle:
    def __init__(self):
        self.itself = self


@pytest.fixture
def settings():
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


@pytest.mark.usefixtures("settings")
def test_cycles_are_collected_after_many_new_objects_only():
    process_setup.collect_garbage_rarely()
    lost = weakref.ref(Cycle())
    few = [Cycle() for _ in range(1000)]
    is_alive_after_few = lost() is not None
    many = [[] for _ in range(20_000)]

    assert is_alive_after_few
    assert lost() is None
    assert few
    assert many


@pytest.mark.usefixtures("settings")
def test_objects_that_exist_at_the_start_are_never_scanned():
    lasting = Cycle()
    process_setup.collect_garbage_rarely()

    assert gc.get_freeze_count() > 0
    assert not any(one is lasting for one in gc.get_objects())


@pytest.mark.parametrize(
    ("before", "after", "room"),
    [
        ((1024, 20_000), 1200, 1000),  # all that is needed
        ((1024, 1100), 1100, 900),  # all that is allowed
        ((1024, INFINITE), 1200, 1000),
        ((5000, 20_000), 5000, 1000),  # the limit is high enough
        ((INFINITE, INFINITE), INFINITE, 1000),
        ((64, 64), 64, 1),
    ],
)
def test_open_file_limit_is_raised_up_to_the_hard_limit(monkeypatch, before, after, room):
    limits = [before]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))

    assert process_setup.reserve_open_files(1000) == room
    assert limits[-1] == (after, before[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_ends_the_process(number):
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == b"stopping\n"
        process.send_signal(number)

        assert process.wait(PATIENT_S) == 128 + number


@pytest.mark.parametrize("redirection", [">&-", "2>&-", ">/dev/full"])
def test_process_without_an_output_ends_with_its_exit_code(redirection):
    program = "from dynamo.base import process_setup; print('x'); process_setup.end_now(7)"
    argv = ["bash", "-c", f'"$0" -c "$1" {redirection}', sys.executable, program]
    environ = {**os.environ, "PYTHONUNBUFFERED": ""}  # else `print` would fail
    done = subprocess.run(argv, env=environ, stderr=subprocess.PIPE, text=True, timeout=PATIENT_S)

    assert (done.returncode, done.stderr) == (7, "")
