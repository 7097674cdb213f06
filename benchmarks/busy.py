"""A command beside busy processes: `python -m benchmarks.busy --processes 8 -- make test` (make test-busy).

Each busy process keeps a core busy as far as it gets one. They end with the command, however that ends. Printed at the
end are the load averages and the seconds that the command took; the exit code is the command's.

With `--stopped 0.3` each process that the command has started is stopped (SIGSTOP) for three tenths of the time, for
0.1 to 1.2 seconds at a time by default: what a busy machine does to processes now and then happens all the time, and
costs no processor time. Tests that stop processes themselves must be left out, because these are continued here.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time

from benchmarks import load

TICK_S = 0.1
SPIN = "import os, sys\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10_000))"


class StoppedProcesses:
    """The descendants of a process, of which a share is stopped at any time."""

    def __init__(self, pid: int, share: float, bounds_s: tuple[float, float]) -> None:
        self._pid, self._bounds_s = pid, bounds_s
        self._chance = (
            share / (1 - share) * TICK_S / (sum(bounds_s) / 2)
        )  # of being stopped, per tick
        self._until: dict[int, float] = {}

    def tick(self) -> None:
        """Continue those whose time is over, and stop some of those that run."""
        now = time.monotonic()
        for pid in [pid for pid, until in self._until.items() if until <= now]:
            self._continue(pid)
        for pid in load.tree(self._pid)[1:]:
            if pid not in self._until and random.random() < self._chance:
                self._until[pid] = now + random.uniform(*self._bounds_s)
                _send(pid, signal.SIGSTOP)

    def end(self) -> None:
        """Continue all."""
        for pid in list(self._until):
            self._continue(pid)

    def _continue(self, pid: int) -> None:
        del self._until[pid]
        _send(pid, signal.SIGCONT)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def main() -> int:
    """Return the exit code of the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--stopped", type=float, default=0.0, help="share of the time, below 1")
    parser.add_argument("--stop-seconds", type=float, nargs=2, default=(0.1, 1.2))
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        for _ in range(options.processes):
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", SPIN]))
            stack.callback(busy.kill)
        began_at = time.monotonic()
        command = stack.enter_context(subprocess.Popen(options.command))
        stopped = StoppedProcesses(command.pid, options.stopped, tuple(options.stop_seconds))
        stack.callback(stopped.end)
        while (code := command.poll()) is None:
            if options.stopped:
                stopped.tick()
            time.sleep(TICK_S)
        took_s = time.monotonic() - began_at
    loads = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    print(f"{options.processes} busy processes, load averages {loads}, {took_s:.0f} s")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
