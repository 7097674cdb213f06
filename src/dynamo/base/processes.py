"""Child processes that cannot outlive us.

Each child has its own process group, so that Ctrl-C in the terminal reaches only us and we drain in order. On Linux
the kernel kills a child whose parent died, however it died. A child's output is passed on line by line, with its name
before it, and its last words are kept; or it goes straight where ours goes.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from dynamo.base import tasks

_PR_SET_PDEATHSIG = 1
_LINE_BYTES = 2**20


class ChildDied(Exception):
    """A process that we need has ended; `exit_code` is what we exit with."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Child:
    """One running process. Made by `start`."""

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, running: tasks.Tasks
    ) -> None:
        self.name = name
        self.last_words = ""
        self._process = process
        self._output = running.start(f"pass on what {name} says", self._pass_on())

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.returncode

    async def ended(self) -> int:
        """Wait until it has exited and all it said was passed on."""
        await asyncio.wait((self._output,))  # whoever gives up waiting does not stop the task
        return await self._process.wait()

    async def stop(self, timeout_s: float) -> None:
        """Ask it to end, then make it."""
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                await self.ended()
        except TimeoutError:
            self.kill()
            await self.ended()

    def kill(self) -> None:
        """At once."""
        self.signal(signal.SIGKILL)

    async def death(self) -> ChildDied:
        """Wait until it has ended; what is to be said of it."""
        code = await self.ended()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        words = f"; its last words: {self.last_words}" if self.last_words else ""
        return ChildDied(f"{self.name} {how}{words}", max(code, 1))

    def signal(self, number: int) -> None:
        """Send it one; nothing happens if it has ended."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _pass_on(self) -> None:
        if self._process.stdout is None:  # it speaks for itself
            await self._process.wait()
            return
        async for line in self._process.stdout:
            text = line.decode("utf-8", "replace").rstrip()
            self.last_words = text or self.last_words
            with contextlib.suppress(OSError):  # nobody may listen to us; the child must not notice
                sys.stderr.write(f"[{self.name}] {text}\n")
                sys.stderr.flush()


async def start(
    name: str,
    argv: Sequence[str],
    environ: Mapping[str, str],
    running: tasks.Tasks,
    *,
    is_passed_on: bool = True,
) -> Child:
    """Run `argv` as a child of ours; `running` holds the task that passes its output on, or waits for its end."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        env=dict(environ),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE if is_passed_on else None,
        stderr=asyncio.subprocess.STDOUT if is_passed_on else None,
        process_group=0,
        preexec_fn=dies_with(os.getpid()),
        limit=_LINE_BYTES,
    )
    return Child(name, process, running)


def dies_with(parent: int) -> Callable[[], None] | None:
    """What a new child does first: ask the kernel to be killed with its parent. None where that cannot be asked."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)

    def bind() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died in between
            os.kill(os.getpid(), signal.SIGKILL)

    return bind
