"""How long tests wait: for an event, and with patience, because the machine may be slow and full of other work.

A test that waits for something that is promised at no time bounds its wait by `PATIENT_S`. The bound is there to end a
test that hangs; it says nothing of how long the thing takes, and is far above what a machine needs whose two cores are
shared by forty busy processes. What is promised within a time is measured by `assert_prompt`.
"""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

PATIENT_S = 300.0  # a sixth of pytest's own limit for one test


def eventually(
    check: Callable[[], object],
    *,
    what: str,
    within_s: float = PATIENT_S,
    every_s: float = 0.01,
) -> float:
    """Wait until `check` holds; returns the seconds that this took."""
    began_at = time.monotonic()
    while not check():
        waited_s = time.monotonic() - began_at
        assert waited_s < within_s, f"not within {within_s} s: {what}"
        time.sleep(every_s)
    return time.monotonic() - began_at


async def until(check: Callable[[], Any]) -> Any:
    """Wait on the event loop until `check`, which may be a coroutine function, returns something true; return that."""
    async with asyncio.timeout(PATIENT_S):
        while True:
            found = check()
            if inspect.isawaitable(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(0.001)
