"""Which `dynamo serve` runs, by the files that each one keeps."""

import errno
import io
import os
import shutil
import subprocess
import sys

import msgspec
import pytest

from dynamo.launch import state


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv(state.HOME_VARIABLE, str(tmp_path))


@pytest.fixture
def stranger():
    """A process that is no `dynamo serve`."""
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    yield process
    process.kill()
    process.wait()


def leave_behind(name, **changes):
    """Write the file of a `dynamo serve` that was killed."""
    with state.registered(name, "m") as registration:
        left = msgspec.structs.replace(registration.state, **changes)
    path = state.directory() / f"{name}.json"
    path.write_bytes(msgspec.json.encode(left))
    return path


def test_process_that_registers_runs_until_it_ends():
    with state.registered("one", "m"):
        during = [each.name for each in state.running()]

    assert during == ["one"]
    assert state.running() == []


def test_directory_that_is_taken_away_does_not_end_what_is_served(tmp_path):
    with state.registered("one", "m") as registration:
        shutil.rmtree(tmp_path / "state")
        (tmp_path / "state").touch()  # no directory can be made there
        registration.update(url="http://127.0.0.1:8000")

    assert registration.state.url == "http://127.0.0.1:8000"


@pytest.mark.parametrize("content", [b'{"name": "old"}', b'{"name": "\xff"}'])
def test_file_that_is_no_state_is_left_and_named(content):
    path = state.directory() / "old.json"
    path.write_bytes(content)

    assert state.running() == []
    assert state.unreadable() == [path]


def test_second_one_of_a_name_gets_a_number():
    with state.registered("one", "m"), state.registered("one", "m") as second:
        assert second.state.name == "one-2"


def test_file_of_a_process_that_was_killed_is_removed(stranger):
    stranger.kill()
    stranger.wait()
    path = leave_behind("one", pid=stranger.pid)

    assert state.running() == []
    assert not path.exists()


def test_process_that_has_got_the_id_of_a_killed_one_is_not_taken_for_it(stranger):
    path = leave_behind("one", pid=stranger.pid)

    assert state.process_start(stranger.pid) != state.process_start(os.getpid())
    assert state.running() == []
    assert not path.exists()


def test_line_that_is_drawn_anew_is_not_in_the_log_and_leaves_nothing_behind(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    with state.logged("a"):
        sys.stderr.write("\r\x1b[Kwaiting for m (1 s)\r")
        sys.stderr.write("[worker] loads\n")
        sys.stderr.write("[worker] ready\n")

    lines = "[worker] loads\n[worker] ready\n"
    assert state.log_path("a").read_text() == lines
    assert terminal.getvalue() == f"\r\x1b[Kwaiting for m (1 s)\r\x1b[K{lines}"


def test_log_that_a_full_disk_has_not_taken_is_no_error_at_its_end():
    state.log_path("a").symlink_to("/dev/full")
    with state.logged("a"):
        sys.stderr.write("[worker] ready\n")


def test_state_that_a_full_disk_has_not_taken_leaves_no_file(monkeypatch):
    def fill(path, data):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", fill)
    with state.registered("a", "m"):
        pass

    assert list(state.directory().iterdir()) == []
