"""The long-lived tasks of a process: each has a name, and one that dies ends the process with its error.

    async with Tasks() as tasks:
        tasks.start("watch models", models.watch())
        ...
    # leaving cancels all that still run, and waits for them

A task that ends by an error is reported at once to the loop's exception handler, which logs it, and its error is raised
by `run_until`, even if it died before that was called: no task dies in silence.
"""

import asyncio
import contextlib
import contextvars
import errno
import functools
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from dynamo.base import clock as clocks

T = TypeVar("T")
_CANCEL_AGAIN_S = 5.0  # longer than it takes to clean up
_LOG_EVERY_S = 10.0


class Tasks:
    """The tasks of one owner, which closes them."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self._error: BaseException | None = None  # of the first task that died
        self._died = asyncio.Event()

    async def __aenter__(self) -> "Tasks":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def start(
        self,
        name: str,
        work: Coroutine[Any, Any, Any],
        *,
        on_death: Callable[[BaseException], None] | None = None,
    ) -> asyncio.Task[Any]:
        """Run a coroutine as a task until it ends or `close` cancels it.

        `on_death` is called with the error by which it ends, for those that wait for what it does.
        """
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(functools.partial(self._ended, on_death))
        return task

    async def close(self) -> None:
        """Cancel all tasks and wait until they are gone, those too that they start meanwhile."""
        await cancel(self._running)

    async def run_until(self, stop: asyncio.Event) -> None:
        """Wait for `stop`. Raises the error of a task that dies first."""
        waits = [asyncio.ensure_future(event.wait()) for event in (stop, self._died)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._error is not None:
            raise self._error

    def __len__(self) -> int:
        return len(self._running)

    def _ended(
        self, on_death: Callable[[BaseException], None] | None, task: asyncio.Task[Any]
    ) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if self._error is None:
            self._error = error
            self._died.set()
        task.get_loop().call_exception_handler(
            {"message": f"task {task.get_name()!r} died", "exception": error, "task": task}
        )
        if on_death is not None:
            on_death(error)


async def wait_until_idle(
    is_idle: asyncio.Event,
    count_open: Callable[[], int],
    *,
    timeout_s: float,
    clock: clocks.Clock,
    log: logging.Logger,
) -> bool:
    """Wait until no request is open, and log every ten seconds how many are; return False if some outlive the time."""
    deadline = clock.now() + timeout_s
    while not is_idle.is_set():
        left_s = deadline - clock.now()
        if left_s <= 0:
            return False
        log.info("stopping; running requests: %d, for at most another %.0f s", count_open(), left_s)
        with contextlib.suppress(TimeoutError):
            async with clock.timeout(min(_LOG_EVERY_S, left_s)):
                await is_idle.wait()
    return True


@contextlib.contextmanager
def map_missing_thread() -> Iterator[None]:
    """Raise OSError, as where no file is left, if the host has no thread left that the body wants to start."""
    try:
        yield
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        raise OSError(errno.EAGAIN, "no thread can be started") from error


async def run_in_thread(function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Run a function in a thread of the event loop's pool. Raises OSError if no thread can be started."""
    call = functools.partial(contextvars.copy_context().run, function, *arguments, **options)
    with map_missing_thread():
        running = asyncio.get_running_loop().run_in_executor(None, call)
    return await running


@contextlib.contextmanager
def keep_cancellation() -> Iterator[None]:
    """Raise CancelledError when the body ends, if the task was cancelled meanwhile and the body has lost that.

    For calls of a library that waits by `asyncio.wait_for`: see `cancel` below. Else the task of a caller who is gone
    goes on.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    yield
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError


async def cancel(running: set[asyncio.Task[Any]]) -> None:
    """Cancel all tasks of a set, to which they may add meanwhile, and wait until it is empty.

    They are cancelled again after a while: `asyncio.wait_for`
    loses a cancellation that comes in the moment in which its wait is over
    (before Python 3.12, https://github.com/python/cpython/issues/81839).
    """
    while tasks := list(running):
        for task in tasks:
            task.cancel()
        done, _ = await asyncio.wait(tasks, timeout=_CANCEL_AGAIN_S)
        running -= done
