"""The processes below a process: an engine may have several, and one that is killed leaves them."""

import contextlib
import os
import pathlib
import signal


def descendants(pid: int) -> set[int]:
    """Of this process, at any depth, as of now."""
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
    """All of them, those that are gone too."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
