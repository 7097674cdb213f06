"""Blocking work in a thread, as a future of the event loop, with a deadline that holds in the queue as well."""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from dynamo.base import errors
from dynamo.transfer.limit import Limit

T = TypeVar("T")


class Job(Generic[T]):
    """Starts with its construction, on a running loop. `outcome` may be cancelled: then the work stops soon."""

    def __init__(
        self,
        threads: ThreadPoolExecutor,
        work: Callable[[Limit], T],
        *,
        deadline_s: float,
        discard: Callable[[T], None] = lambda _: None,
    ) -> None:
        """`discard` gets a result that came too late. Raises LocalProtocolError for a bad deadline."""
        self._loop = asyncio.get_running_loop()
        self._limit, self._discard = Limit(deadline_s), discard
        self._quiet = asyncio.Event()
        self.outcome: asyncio.Future[T] = self._loop.create_future()
        self.outcome.add_done_callback(self._on_outcome)
        self._running = threads.submit(work, self._limit)
        self._running.add_done_callback(self._on_thread)
        self._timer = self._loop.call_later(deadline_s, self._running.cancel)

    @property
    def is_running(self) -> bool:
        """A thread may still be at work."""
        return not self._quiet.is_set()

    async def result(self) -> T:
        """The outcome. One that comes in the moment in which its caller is cancelled is discarded like a late one."""
        try:
            return await self.outcome
        except asyncio.CancelledError:
            if self.outcome.done() and not self.outcome.cancelled():
                self._drop(self.outcome)
            raise

    async def stop(self) -> None:
        """Returns when no thread is at work on it any more; `outcome` is over then."""
        self._stop()
        await self._quiet.wait()
        if not self.outcome.cancelled():
            self.outcome.exception()  # whoever stops it has no need to be warned of its failure

    def _on_outcome(self, outcome: "asyncio.Future[T]") -> None:
        if outcome.cancelled():
            self._stop()

    def _stop(self) -> None:
        if not self._running.cancel():
            self._limit.cancel()

    def _on_thread(self, running: "Future[T]") -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
            self._loop.call_soon_threadsafe(self._finish, running)

    def _finish(self, running: "Future[T]") -> None:
        self._timer.cancel()
        self._quiet.set()
        if self.outcome.done():
            self._drop(running)
        elif running.cancelled():
            self.outcome.set_exception(
                errors.TransferError(
                    f"not begun within {self._limit.deadline_s:g} s: others were before it"
                )
            )
        elif error := running.exception():
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(running.result())

    def _drop(self, running: "Future[T] | asyncio.Future[T]") -> None:
        if not running.cancelled() and running.exception() is None:
            self._discard(running.result())
