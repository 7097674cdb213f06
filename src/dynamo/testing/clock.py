"""A virtual clock that stands still until a test moves it.

It starts far from zero, so that code which takes `now` for a duration, or one kind of time for the other, is found out.
"""

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

_START_S = 81_517_404.25
_WALL_AHEAD_S = 1_700_000_000.5
_TURNS_TO_SETTLE = 10  # of the event loop, for what a sleeper does when it wakes


class VirtualTimer:
    """A callback of a `VirtualClock` and its arguments; implements `base.clock.Timer`."""

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._callback: Callable[..., object] | None = callback
        self._args = args

    def cancel(self) -> None:
        self._callback = None

    def fire(self) -> bool:
        """Call the callback; return False if the timer was cancelled."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback(*self._args)
        return callback is not None


class VirtualClock:
    """A `base.clock.Clock` for one event loop."""

    def __init__(self) -> None:
        self._now = _START_S
        self._timers: list[tuple[float, int, VirtualTimer]] = []  # a heap
        self._order = itertools.count()  # of timers that fire at the same time

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now + _WALL_AHEAD_S

    async def sleep(self, duration_s: float) -> None:
        if duration_s <= 0:
            await asyncio.sleep(0)
            return
        woken = asyncio.get_running_loop().create_future()
        timer = self.call_later(duration_s, _wake, woken)
        try:
            await woken
        finally:
            timer.cancel()

    def call_later(
        self, duration_s: float, callback: Callable[..., object], *args: Any
    ) -> VirtualTimer:
        timer = VirtualTimer(callback, args)
        heapq.heappush(self._timers, (self._now + duration_s, next(self._order), timer))
        return timer

    @contextlib.asynccontextmanager
    async def timeout(self, duration_s: float) -> AsyncIterator[None]:
        async with asyncio.timeout(None) as limit:
            timer = self.call_later(duration_s, limit.reschedule, float("-inf"))
            try:
                yield
            finally:
                timer.cancel()

    async def advance(self, duration_s: float) -> None:
        """Move `duration_s` seconds forward and fire each timer at its own time, those too that a fired one starts."""
        end = self._now + duration_s
        await _settle()  # tasks that are about to sleep do so before time moves
        while self._timers and self._timers[0][0] <= end:
            due_at, _, timer = heapq.heappop(self._timers)
            self._now = max(self._now, due_at)
            if timer.fire():
                await _settle()
        self._now = end


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():  # the sleeper was cancelled in this very turn
        woken.set_result(None)


async def _settle() -> None:
    for _ in range(_TURNS_TO_SETTLE):
        await asyncio.sleep(0)
