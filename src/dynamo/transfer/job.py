"""Blocking work in a thread under a time limit, as a future of the event loop.

The limit holds while the work waits for a thread as well, and any other thread can end the work earlier.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from dynamo.base import errors

MAX_DEADLINE_S = 600.0
T = TypeVar("T")


class TimeLimit:
    """The time limit of an operation. The working thread calls `remaining_s` often; any other may `cancel`."""

    def __init__(self, deadline_s: float) -> None:
        """Raises LocalProtocolError unless 0 < deadline_s <= MAX_DEADLINE_S."""
        if not 0 < deadline_s <= MAX_DEADLINE_S:
            raise errors.LocalProtocolError(
                f"deadline_s is {deadline_s}, expected at most {MAX_DEADLINE_S}, and more than 0"
            )
        self.deadline_s = deadline_s
        self._until = time.monotonic() + deadline_s
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._interrupt: Callable[[], None] | None = None

    def remaining_s(self) -> float:
        """Return the seconds left, more than 0. Raises TransferError when none are left, or after `cancel`."""
        if self._is_cancelled:
            raise errors.TransferError("cancelled")
        remaining_s = self._until - time.monotonic()
        if remaining_s <= 0:
            raise errors.TransferError(f"not complete within {self.deadline_s:g} s")
        return remaining_s

    def cancel(self) -> None:
        """End the work at its next `remaining_s`, and interrupt its wait."""
        with self._lock:
            self._is_cancelled = True
            if self._interrupt is not None:
                self._interrupt()

    @contextlib.contextmanager
    def interruptible(self, interrupt: Callable[[], None]) -> Iterator[None]:
        """Let `cancel` call `interrupt` within this context, to end a wait that does not call `remaining_s`."""
        with self._lock:
            self._interrupt = interrupt
        try:
            self.remaining_s()
            yield
        finally:
            with self._lock:
                self._interrupt = None


class ThreadJob(Generic[T]):
    """A job that starts with its construction, on a running loop. Cancelling `outcome` stops the work soon."""

    def __init__(
        self,
        threads: ThreadPoolExecutor,
        work: Callable[[TimeLimit], T],
        *,
        deadline_s: float,
        discard: Callable[[T], None] = lambda _: None,
    ) -> None:
        """`discard` is called with a result that came too late. Raises LocalProtocolError for an invalid deadline."""
        self._loop = asyncio.get_running_loop()
        self._limit, self._discard = TimeLimit(deadline_s), discard
        self._quiet = asyncio.Event()
        self.outcome: asyncio.Future[T] = self._loop.create_future()
        self.outcome.add_done_callback(self._on_outcome)
        self._running = threads.submit(work, self._limit)
        self._running.add_done_callback(self._on_thread)
        self._timer = self._loop.call_later(deadline_s, self._running.cancel)

    @property
    def is_running(self) -> bool:
        """True while a thread may still be at work."""
        return not self._quiet.is_set()

    async def result(self) -> T:
        """Return the outcome; it is discarded if it comes at the moment at which the caller is cancelled."""
        try:
            return await self.outcome
        except asyncio.CancelledError:
            if self.outcome.done() and not self.outcome.cancelled():
                self._drop(self.outcome)
            raise

    async def stop(self) -> None:
        """Stop the job, and return when no thread works on it any more; `outcome` is done then."""
        self._stop()
        await self._quiet.wait()
        if not self.outcome.cancelled():
            self.outcome.exception()  # so that asyncio does not warn of a failure that nothing awaits

    def _on_outcome(self, outcome: "asyncio.Future[T]") -> None:
        if outcome.cancelled():
            self._stop()

    def _stop(self) -> None:
        if not self._running.cancel():
            self._limit.cancel()

    def _on_thread(self, running: "Future[T]") -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._finish, running)

    def _finish(self, running: "Future[T]") -> None:
        self._timer.cancel()
        self._quiet.set()
        if self.outcome.done():
            self._drop(running)
        elif running.cancelled():
            self.outcome.set_exception(
                errors.TransferError(
                    f"not begun within {self._limit.deadline_s:g} s: other jobs were ahead of it"
                )
            )
        elif error := running.exception():
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(running.result())

    def _drop(self, running: "Future[T] | asyncio.Future[T]") -> None:
        if not running.cancelled() and running.exception() is None:
            self._discard(running.result())
