"""The descendants of a process: an engine may have several, which survive it if it is killed."""

import contextlib
import os
import pathlib
import signal


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


def kill(pids: set[int]) -> None:
    """Kill these processes; ids of processes that have ended are ignored."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
