"""Give processes a share of a core each, by Linux control groups, so that few cores can stand for many.

Two processes that shall show what they would do on a core of their own are each held to the same part of one; the
rest of the machine is then left to whoever loads them. Needs root and the cpu controller, of either version.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

PERIOD_US = 10_000  # short: a process that has used its share waits for some milliseconds only
_ROOT = Path("/sys/fs/cgroup")


def children(pid: int) -> list[int]:
    """The processes that this one has started."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.contextmanager
def of_a_core(pids: Sequence[int], share: float) -> Iterator[bool]:
    """Each of these processes gets at most this share of a core; False: not on this machine, or not as this user."""
    with contextlib.ExitStack() as stack:
        try:
            for pid in pids:
                stack.enter_context(_limited(pid, share))
        except OSError:
            yield False
        else:
            yield True


@contextlib.contextmanager
def _limited(pid: int, share: float) -> Iterator[None]:
    old = (_ROOT / "cpu").is_dir()  # version 1 has a tree for each controller
    parent = _ROOT / "cpu" if old else _ROOT
    group = parent / f"pydynamo-bench-{os.getpid()}-{pid}"
    group.mkdir()
    try:
        quota_us = int(share * PERIOD_US)
        if old:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with contextlib.suppress(OSError):  # it has ended
            (parent / "cgroup.procs").write_text(str(pid))
        group.rmdir()
