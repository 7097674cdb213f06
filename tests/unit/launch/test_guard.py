"""What is left of a process that had a guard: nothing. These start small processes."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from dynamo.launch import guard
from waiting import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /dev/shm")

# A process with a guard, a folder, a grandchild in a session of its own, and a shared-memory file; it says which.
PARENT = """
import os, pathlib, subprocess, sys, time
from dynamo.launch import guard

guardian = guard.Guard()
folder = guardian.make_folder("dynamo-test-")
(folder / "file").write_text("x")
name = f"/dev/shm/dynamo-test-{os.getpid()}"
below = f'''
import mmap, os, subprocess, sys, time
file = os.open({name!r}, os.O_RDWR | os.O_CREAT)
os.ftruncate(file, 4096)
shared = mmap.mmap(file, 4096)
print(os.getpid(), flush=True)
time.sleep(60)
'''
child = subprocess.Popen([sys.executable, "-S", "-c", below], env=guardian.mark({}),
    start_new_session=True, stdout=subprocess.PIPE)
pid = int(child.stdout.readline())
print(pid, folder, name, guardian._process.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.fixture
def parent():
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, "60"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    pid, folder, file, guard_pid = process.stdout.readline().split()
    yield process, int(pid), pathlib.Path(folder), pathlib.Path(file), int(guard_pid)
    process.kill()
    process.wait()
    process.stdout.close()


def num_waits(pid):
    """How often this process has waited: the guard does it once a second, behind each list."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def is_alive(pid):
    try:
        return ") Z" not in pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_processes_folders_and_shared_memory_of_a_killed_process_are_removed(parent):
    process, pid, folder, file, guard_pid = parent
    assert is_alive(pid)
    assert file.exists()

    process.kill()

    eventually(lambda: not is_alive(guard_pid), what="the guard has ended")
    assert not is_alive(pid)
    assert not folder.exists()
    assert not file.exists()


def test_shared_memory_of_a_process_that_died_before_is_removed(parent):
    process, pid, _, file, guard_pid = parent
    before = num_waits(guard_pid)
    eventually(lambda: num_waits(guard_pid) > before + 1, what="the guard has listed /dev/shm")
    os.kill(pid, 9)
    process.kill()

    eventually(lambda: not is_alive(guard_pid), what="the guard has ended")
    assert not file.exists()


def test_signals_to_the_guard_do_not_end_it(parent):
    *_, guard_pid = parent
    for number in (1, 2, 15):
        os.kill(guard_pid, number)
    time.sleep(0.1)

    assert is_alive(guard_pid)


def test_guard_within_a_guard_marks_children_for_both(monkeypatch):
    monkeypatch.delenv(guard.TOKEN_VARIABLE, raising=False)
    with guard.Guard() as outer:
        monkeypatch.setenv(guard.TOKEN_VARIABLE, outer.mark({})[guard.TOKEN_VARIABLE])
        with guard.Guard() as inner:
            tokens = inner.mark({"A": "b"})[guard.TOKEN_VARIABLE]

    assert len(tokens.split(",")) == 2


TEST = """
import os, subprocess, sys

def test_that_hangs():
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], process_group=0)
    os.write(3, b"%d" % child.pid)
    child.wait()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_a_test_has_started_ends_with_pytest(tmp_path, number):
    (tmp_path / "test_hanging.py").write_text(TEST)
    reading, writing = os.pipe()
    script = 'exec 3>&"$FD"; exec "$@"'
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "--rootdir", ".", "."]
    environ = {**os.environ, "FD": str(writing), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = ["bash", "-c", script, "bash", *argv]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environ, pass_fds=(writing,), stdout=subprocess.DEVNULL
    ) as process:
        os.close(writing)
        pid = int(os.read(reading, 64))
        os.close(reading)
        process.send_signal(number)

    eventually(lambda: not is_alive(pid), what="what the test has started has ended")


def test_name_of_another_user_s_file_is_no_command(monkeypatch, tmp_path):
    bystander = [sys.executable, "-S", "-c", "input()"]
    monkeypatch.setattr(guard, "_SHARED_MEMORY", tmp_path)
    with subprocess.Popen(bystander, stdin=subprocess.PIPE, process_group=0) as process:
        (tmp_path / f"x\ngroup {process.pid}").touch()
        with guard.Guard():
            pass
        process.communicate(b"\n")

    assert process.returncode == 0


def test_name_that_is_no_text_is_no_error(monkeypatch, tmp_path):
    (tmp_path / os.fsdecode(b"\xff")).touch()
    monkeypatch.setattr(guard, "_SHARED_MEMORY", tmp_path)
    with guard.Guard() as guardian:
        folder = guardian.make_folder("dynamo-test-")

    assert not folder.exists()
