"""The files by which commands find each other: one for each `dynamo serve` that runs, in ~/.dynamo/state.

`NAME.json` holds the namespace, discovery and processes of the `dynamo serve` called NAME, `NAME.log` what they said.
It is there from the start, and names the processes that run now, also after one was restarted.
The file of a process that has ended is removed by the next command that reads it.
"""

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import msgspec

from dynamo.base import draining, errors

HOME_VARIABLE = "DYNAMO_HOME"
LOG_BYTES = 16 * 2**20  # then the log begins anew, and the former part is NAME.log.1
_CLEAR_ROW = "\x1b[K"


class ProcessState(msgspec.Struct, kw_only=True):
    """One process: all that is needed to start it again by hand."""

    name: str
    pid: int
    shell: str  # the line to paste


class ServeState(msgspec.Struct, kw_only=True):
    """One `dynamo serve`."""

    name: str
    namespace: str
    pid: int
    started_at: float  # seconds since 1970
    url: str
    model: str
    variables: dict[str, str]  # by which another process joins: discovery and namespace
    processes: list[ProcessState]
    models: dict[str, str] = {}  # the state in words of each model that is loaded on demand
    stop_timeout_s: float = draining.STOP_TIMEOUT_S  # after which its processes are killed
    # of `pid`, as `process_start` returns it: a later process may get the same id
    process_start: str = ""


def home() -> Path:
    """Return the directory of the command's own files: DYNAMO_HOME, or ~/.dynamo. Raises ConfigError without a home."""
    try:
        return Path(os.environ.get(HOME_VARIABLE) or "~/.dynamo").expanduser()
    except RuntimeError as error:
        raise errors.ConfigError(f"{error} Name a directory by {HOME_VARIABLE}") from error


def directory() -> Path:
    """Return the directory of the states, which is made if it is missing. Raises ConfigError."""
    try:
        path = home() / "state"
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise errors.ConfigError(
            f"there is no directory for the states of `dynamo serve` ({error}): name one by {HOME_VARIABLE}"
        ) from error
    return path


def running() -> list[ServeState]:
    """Return what runs now, the oldest first."""
    states = []
    for path in directory().glob("*.json"):
        if (state := _read(path)) is None:
            continue
        if is_alive(state):
            states.append(state)
        else:
            path.unlink(missing_ok=True)
    return sorted(states, key=lambda state: state.started_at)


def unreadable() -> list[Path]:
    """Return the files that hold no state of this version's `dynamo serve`."""
    return [path for path in sorted(directory().glob("*.json")) if _read(path) is None]


def _read(path: Path) -> ServeState | None:
    with contextlib.suppress(OSError, UnicodeDecodeError, msgspec.MsgspecError):
        return msgspec.json.decode(path.read_bytes(), type=ServeState)
    return None


def find(name: str | None) -> ServeState:
    """Return the named `dynamo serve`, or the only one that runs. Raises ConfigError."""
    states = running()
    if name is None and len(states) == 1:
        return states[0]
    for state in states:
        if state.name == name:
            return state
    names = ", ".join(state.name for state in states)
    if not states:
        raise errors.ConfigError("no `dynamo serve` runs here; start one: dynamo serve")
    if name is None:
        raise errors.ConfigError(f"expected a name, because several run: {names}")
    raise errors.ConfigError(f"no `dynamo serve` is called {name}; there are {names}")


class Registration:
    """The state of this process's `dynamo serve`, in a file as long as it runs."""

    def __init__(self, state: ServeState) -> None:
        self.state = state
        self._is_listed = False

    def open(self) -> None:
        """Write the state under the first free name: the present one, or that with a number."""
        running()  # which removes the files of processes that have ended
        preferred_name = self.state.name
        for number in itertools.count(2):
            new = self._write()
            try:
                os.link(new, _path(self.state.name))  # which fails if it exists
            except FileExistsError:
                self.update(name=f"{preferred_name}-{number}")
            else:
                self._is_listed = True
                return
            finally:
                new.unlink()

    def update(self, **changes: Any) -> None:
        """Change fields of the state. A full disk, or a directory that has gone, must not end what is served."""
        self.state = msgspec.structs.replace(self.state, **changes)
        if self._is_listed:
            with contextlib.suppress(OSError, errors.ConfigError):
                self._write().replace(_path(self.state.name))

    def add_process(self, process: ProcessState) -> None:
        """Add a process that was started, in place of a former one of its name."""
        processes = [each for each in self.state.processes if each.name != process.name]
        self.update(processes=[*processes, process])

    def close(self) -> None:
        """Remove the state; its log stays."""
        with contextlib.suppress(OSError, errors.ConfigError):
            (directory() / f"{os.getpid()}.new").unlink(missing_ok=True)  # of a full disk
            if self._is_listed:
                _path(self.state.name).unlink(missing_ok=True)

    def _write(self) -> Path:
        """Write the state into a file of this process, for this user alone, and return its path."""
        path = directory() / f"{os.getpid()}.new"
        path.touch(mode=0o600)
        path.write_bytes(msgspec.json.encode(self.state))
        return path


@contextlib.contextmanager
def registered(name: str, model: str) -> Iterator[Registration]:
    """List a `dynamo serve` of this name, or of this name with a number, while the block runs.

    Where no file can be written (a container without a home), it is served all the same, but not listed.
    """
    registration = Registration(
        ServeState(
            name=name, namespace=name, pid=os.getpid(), started_at=time.time(), url="", model=model,
            variables={}, processes=[], process_start=process_start(os.getpid()),
        )
    )  # fmt: skip
    try:
        registration.open()
    except (OSError, errors.ConfigError) as error:
        sys.stderr.write(f"dynamo: `dynamo ps` will not list this: {error}\n")
    try:
        yield registration
    finally:
        registration.close()


def _path(name: str) -> Path:
    return directory() / f"{name}.json"


def log_path(name: str) -> Path:
    """Return the log of a `dynamo serve`."""
    return directory() / f"{name}.log"


class _Tee:
    """Writes what goes to standard error to the log as well."""

    def __init__(self, terminal: TextIO, path: Path) -> None:
        self._terminal, self._path = terminal, path
        self._file = path.open("w", encoding="utf-8")
        self._is_drawn = False

    def write(self, text: str) -> int:
        """Write to both; a full disk must not end what is served.

        A line that is drawn anew is for the terminal alone, and what follows it takes its row.
        """
        was_drawn, self._is_drawn = self._is_drawn, text.startswith("\r")
        if self._is_drawn:
            return self._terminal.write(text)
        with contextlib.suppress(OSError, ValueError):
            self._file.write(text)
            self._file.flush()
            if self._file.tell() > LOG_BYTES:
                self._file.close()
                self._path.replace(f"{self._path}.1")
                self._file = self._path.open("w", encoding="utf-8")
        return self._terminal.write(f"{_CLEAR_ROW}{text}" if was_drawn else text)

    def close(self) -> None:
        """Close the log, not the terminal; what a full disk did not take is lost."""
        with contextlib.suppress(OSError):
            self._file.close()

    def flush(self) -> None:
        """Flush the terminal; the log is flushed at each write."""
        self._terminal.flush()

    def isatty(self) -> bool:
        """Return whether the terminal is one."""
        return self._terminal.isatty()

    def fileno(self) -> int:
        """Return the terminal's descriptor."""
        return self._terminal.fileno()


@contextlib.contextmanager
def logged(name: str) -> Iterator[None]:
    """Copy what is written to standard error inside to the log, if one can be written."""
    terminal = sys.stderr
    try:
        tee = _Tee(terminal, log_path(name))
    except (OSError, errors.ConfigError):
        yield
        return
    sys.stderr = tee
    try:
        yield
    finally:
        sys.stderr = terminal
        tee.close()


def process_start(pid: int) -> str:
    """Return when the kernel started a process, in ticks since the boot; "" where it does not say (macOS)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ""
    # field 22 of proc(5); a name may hold spaces
    return stat.rpartition(b")")[2].split()[19].decode()


def is_alive(state: ServeState) -> bool:
    """Return whether the process of a state runs, and not another one that has got its id since."""
    try:
        os.kill(state.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return process_start(state.pid) == state.process_start
