"""The processes of a test: how they end with it, and the descendants of one, of which an engine may have several."""

import contextlib
import os
import pathlib
import shutil
import signal
import threading
from collections.abc import Iterable

from waiting import eventually


def bind(argv: Iterable[str | os.PathLike[str]], end: str = "KILL") -> list[str]:
    """Return the command line of a process that gets the signal `end` when the process of the tests ends.

    So nothing outlives a test run that is killed. The kernel sends it when the thread that started the process ends:
    in another thread than the first one the command line stays, as where there is no setpriv (util-linux).
    """
    is_first_thread = threading.current_thread() is threading.main_thread()
    setpriv = shutil.which("setpriv") if is_first_thread else None
    binding = [setpriv, "--pdeathsig", end, "--"] if setpriv else []
    return [*binding, *map(os.fspath, argv)]


def descendants(pid: int) -> set[int]:
    """Return the process ids of all present descendants, at any depth."""
    parents = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            number, _, rest = stat.read_text().partition(" (")
            parents[int(number)] = int(rest.rpartition(") ")[2].split()[1])
    found, below = {pid}, set()
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
        below |= more
    return below


def command_line(pid: int) -> str:
    """Return the arguments of a process, each with a zero byte behind it; nothing if the process has ended."""
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def shared_files(pids: Iterable[int]) -> set[str]:
    """Return the paths in /dev/shm that these processes map or have open; processes that have ended are ignored."""
    paths = set()
    for pid in pids:
        process = pathlib.Path(f"/proc/{pid}")
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_text().splitlines():
                paths.add(line.partition(" /")[2])
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    paths.add(str(descriptor.readlink())[1:])
    return {f"/{path}" for path in paths if path.startswith("dev/shm/")}


def freeze(pid: int) -> None:
    """Stop a process (SIGSTOP), and return when all its threads stand, which on a busy machine takes a while."""
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: _thread_states(pid) <= set("TZX"), what="the process stands or has ended")


def _thread_states(pid: int) -> set[str]:
    states = set()
    for stat in pathlib.Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            states.add(stat.read_text().rpartition(") ")[2][0])
    return states


def kill(pids: set[int]) -> None:
    """Kill these processes; ids of processes that have ended are ignored."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
