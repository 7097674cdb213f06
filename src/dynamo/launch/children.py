"""The children of a process: how one is started, what it says, and how it ended.

Each child leads its own process group, so that Ctrl-C in the terminal reaches only the parent, which stops the children
in order. When a child has ended, what remains of its group (processes of its engine, for example) is killed, before the
child may be started again. If the parent itself dies, the kernel kills the children on Linux, and the `guard` all that
is below them everywhere; children with a time of grace get SIGTERM
from the guard instead, once (the kernel may send its signal for each thread of the parent), and are killed after it.
"""

import asyncio
import contextlib
import errno
import itertools
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dynamo.base import clock as clocks
from dynamo.base import tasks
from dynamo.launch import allocation, guard, prepare_child

LINE_BYTES = 2**20
_EXIT_POLL_S = 0.5  # asyncio may report an exit only when all have closed the output
_GROUP_S = 2.0  # for the rest of a group to end by itself
_OUTPUT_S = 10.0  # for the output to end, which a process in another session may keep open
_SCAN_S = 0.02


class ChildDied(Exception):
    """A process that is needed, such as a child, has ended; the parent exits with `exit_code`."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What to start."""

    name: str
    argv: Sequence[str]
    environ: Mapping[str, str]
    directory: str | None = None  # to start in; None: the parent's
    is_relayed: bool = True  # its output comes through the parent, marked with its name
    resources: allocation.Allocation = field(default_factory=allocation.Allocation)
    grace_s: float = 0.0  # for which it may finish what it runs after its parent's death


def shell_line(
    argv: Sequence[str],
    *,
    environ: Mapping[str, str],
    resources: allocation.Allocation,
    directory: str,
) -> str:
    """Return a line to paste into a shell, which starts such a process by itself; `environ` is added to the shell's."""
    variables = {**environ, **resources.environ}
    words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    if resources.cores:
        words += ["taskset", "-c", ",".join(map(str, resources.cores))]
    return f"cd {shlex.quote(directory)} && {' '.join([*words, shlex.join(argv)])}"


class Child:
    """One started process."""

    def __init__(
        self,
        spec: ChildSpec,
        process: asyncio.subprocess.Process,
        guardian: guard.Guard,
        running: tasks.Tasks,
        clock: clocks.Clock,
    ) -> None:
        self.spec = spec
        self.last_line = ""
        self.started_at = clock.now()
        self._process = process
        self._guard = guardian
        self._clock = clock
        self._running = running
        self._end = running.start(f"wait for the end of {spec.name}", self._wait())

    @property
    def pid(self) -> int:
        """Its process id, which is also its process group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Its exit code, the negative number of the signal that killed it, or None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait until it has ended, its group is empty and the output of both is relayed; return the exit code."""
        await asyncio.wait((self._end,))  # a caller that is cancelled does not cancel the task
        assert self.exit_code is not None
        return self.exit_code

    async def death(self) -> ChildDied:
        """Wait until it has ended, and describe how."""
        code = await self.wait()
        end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        words = f"; its last words: {self.last_line}" if self.last_line else ""
        return ChildDied(f"{self.spec.name} {end}{words}", max(code, 1))

    async def stop(self, timeout_s: float) -> None:
        """Send SIGTERM, and SIGKILL after `timeout_s` seconds; wait until it has ended."""
        self.signal(signal.SIGTERM)
        try:
            async with self._clock.timeout(timeout_s):
                await self.wait()
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self.wait()

    def signal(self, number: int) -> None:
        """Send a signal to the process itself; a child that has ended is left alone."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _wait(self) -> None:
        relay = self._running.start(f"relay the output of {self.spec.name}", self._relay())
        exited = self._running.start(f"wait for {self.spec.name}", self._process.wait())
        while self._process.returncode is None:
            await asyncio.wait((exited,), timeout=_EXIT_POLL_S)
        await self._end_group()
        self._guard.remove_group(self.pid)
        await asyncio.wait((relay, exited), timeout=_OUTPUT_S)

    async def _end_group(self) -> None:
        """Wait until the rest of the group has ended, and kill it after a while."""
        if sys.platform != "linux":
            guard.kill_group(self.pid)
            return
        for is_last in (False, True):
            with contextlib.suppress(TimeoutError):
                async with self._clock.timeout(_GROUP_S):
                    while await asyncio.to_thread(guard.live_processes, (self.pid,)):
                        await self._clock.sleep(_SCAN_S)
                    return
            if not is_last:
                guard.kill_group(self.pid)

    async def _relay(self) -> None:
        if self._process.stdout is None:  # it writes where its parent writes
            return
        async for line in _read_lines(self._process.stdout):
            text = line.decode("utf-8", "replace").rstrip()
            self.last_line = text or self.last_line
            with contextlib.suppress(OSError):  # a closed terminal must not harm the child
                sys.stderr.write(f"[{self.spec.name}] {text}\n")
                sys.stderr.flush()


async def _read_lines(output: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of an output until it ends, but not what is longer than LINE_BYTES."""
    while True:
        try:
            line = await output.readline()
        except ValueError:  # a program may redraw its progress for hours without a line feed
            continue
        if not line:
            return
        yield line


async def start(
    spec: ChildSpec, guardian: guard.Guard, running: tasks.Tasks, clock: clocks.Clock
) -> Child:
    """Start a child; `running` holds the tasks that wait for it and relay its output."""
    _check_program(spec)
    output = asyncio.subprocess.PIPE if spec.is_relayed else None
    argv = prepare_child.command(
        spec.argv,
        lifeline=guardian.lifeline,
        parent=None if spec.grace_s else os.getpid(),
        cores=spec.resources.cores,
    )
    if spec.grace_s:
        guardian.grant(spec.grace_s)
    process = await asyncio.create_subprocess_exec(
        *argv,
        cwd=spec.directory,
        env=guardian.mark({**spec.environ, **spec.resources.environ}),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=asyncio.subprocess.STDOUT if spec.is_relayed else None,
        process_group=0,
        pass_fds=(guardian.lifeline,),
        limit=LINE_BYTES,
    )
    return Child(spec, process, guardian, running, clock)


def _check_program(spec: ChildSpec) -> None:
    """Raise FileNotFoundError if there is no such program: later only the child itself could say so."""
    program = spec.argv[0]
    if os.sep in program:
        program = os.path.join(spec.directory or "", program)
    if shutil.which(program, path=spec.environ.get("PATH", os.defpath)) is None:
        raise FileNotFoundError(errno.ENOENT, "no such program", spec.argv[0])


def machine_resources(environ: Mapping[str, str]) -> allocation.Allocation:
    """Return the cores and NVIDIA GPUs that this process may use."""
    cores = os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count() or 1)
    visible = environ.get(allocation.DEVICES_VARIABLE)
    if visible is None:
        gpus = Path("/proc/driver/nvidia/gpus")
        devices = [str(n) for n, _ in enumerate(gpus.iterdir())] if gpus.is_dir() else []
    else:
        names = [device.strip() for device in visible.split(",") if device.strip()]
        # CUDA shows none behind a name of none, such as -1
        devices = list(itertools.takewhile(re.compile(r"\d|GPU-|MIG-").match, names))
    return allocation.Allocation(tuple(sorted(cores)), tuple(devices))
