import asyncio
import time

import pytest

from dynamo.base import clock
from waiting import PATIENT_S


def test_system_clock_returns_the_time_of_the_machine():
    system = clock.SystemClock()
    before, now, after = time.monotonic(), system.now(), time.monotonic()

    assert before <= now <= after
    assert abs(system.wall() - time.time()) < 60


async def test_system_clock_sleeps_for_the_given_seconds():
    system = clock.SystemClock()
    began = system.now()
    await system.sleep(0.005)

    assert system.now() - began >= 0.004


async def test_system_clock_calls_back_after_the_duration_unless_cancelled():
    system = clock.SystemClock()
    fired = asyncio.Event()
    cancelled = system.call_later(0.001, pytest.fail, "this timer was cancelled")
    cancelled.cancel()
    system.call_later(0.002, fired.set)

    await asyncio.wait_for(fired.wait(), PATIENT_S)


async def test_system_clock_raises_timeout_error_after_the_duration():
    with pytest.raises(TimeoutError):
        async with clock.SystemClock().timeout(0.001):
            await asyncio.Event().wait()
