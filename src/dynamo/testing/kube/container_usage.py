"""What the processes of a container use, from /proc."""

import contextlib
import os
import re
from pathlib import Path

Processes = dict[int, tuple[int, float, int]]  # as `read_processes` returns them
_HELD = re.compile(r"^Pss_(?:Anon|Shmem): +(\d+) kB", re.MULTILINE)


def read_processes() -> Processes:
    """Return parent, seconds of CPU with those of children that ended, and resident bytes of each process."""
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may end meanwhile
            fields = (folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            cpu_s = sum(map(int, fields[11:15])) / ticks
            processes[int(folder.name)] = int(fields[1]), cpu_s, int(fields[21]) * page
    return processes


def sum_usage(root: int, processes: Processes) -> tuple[float, int]:
    """Return seconds of CPU and resident bytes of a process and all below it."""
    usages = [processes[pid] for pid in _find_family(root, processes) if pid in processes]
    return sum(cpu_s for _, cpu_s, _ in usages), sum(resident for _, _, resident in usages)


def is_beyond(root: int, processes: Processes, limit_bytes: float) -> bool:
    """Return True if a process and all below it hold more memory.

    Pages that they share count once, and those of files never.
    """
    if sum_usage(root, processes)[1] <= limit_bytes:
        return False
    num_kib = 0
    for pid in _find_family(root, processes):
        with contextlib.suppress(OSError):  # it may have ended meanwhile
            numbers = _HELD.findall(Path(f"/proc/{pid}/smaps_rollup").read_text())
            num_kib += sum(map(int, numbers))
    return num_kib * 1024 > limit_bytes


def _find_family(root: int, processes: Processes) -> set[int]:
    """Return the numbers of a process and of all below it."""
    family = {root}
    for pid in sorted(processes):  # children have higher numbers, but where numbers began anew
        if processes[pid][0] in family:
            family.add(pid)
    return family
