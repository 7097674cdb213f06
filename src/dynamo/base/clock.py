"""Clocks: every component that waits or reads the time is given one, so that tests and simulations run in virtual time.

`SystemClock` reads the machine's time. `dynamo.testing.clock.VirtualClock` moves only when a test moves it. Timers and
timeouts belong to the clock too: a component that used the event loop's own would wait in real time.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol


class Timer(Protocol):
    """A callback that waits for its time."""

    def cancel(self) -> None:
        """Do not call the callback. Does nothing if it was called already."""
        ...


class Clock(Protocol):
    """The source of time of a component."""

    def now(self) -> float:
        """Return seconds on a clock that never goes back; its origin has no meaning."""
        ...

    def wall(self) -> float:
        """Return seconds since 1970, for people and for other hosts; the value may jump."""
        ...

    async def sleep(self, duration_s: float) -> None:
        """Wait for `duration_s` seconds."""
        ...

    def call_later(self, duration_s: float, callback: Callable[..., object], *args: Any) -> Timer:
        """Call `callback(*args)` on the event loop after `duration_s` seconds, unless the timer is cancelled."""
        ...

    def timeout(self, duration_s: float) -> AbstractAsyncContextManager[object]:
        """Cancel the body of this context after `duration_s` seconds and raise TimeoutError in its place."""
        ...


class SystemClock:
    """The clock of the machine and of the running event loop."""

    # the functions themselves: some clocks are read for each token
    now = staticmethod(time.monotonic)
    wall = staticmethod(time.time)

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)

    def call_later(self, duration_s: float, callback: Callable[..., object], *args: Any) -> Timer:
        return asyncio.get_running_loop().call_later(duration_s, callback, *args)

    def timeout(self, duration_s: float) -> AbstractAsyncContextManager[object]:
        return asyncio.timeout(duration_s)
