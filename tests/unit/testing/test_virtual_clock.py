import asyncio

import pytest

from dynamo.testing import clock


async def test_time_passes_only_by_advance():
    virtual = clock.VirtualClock()
    began = virtual.now()
    await virtual.advance(2.5)

    assert virtual.now() == began + 2.5
    assert virtual.wall() - virtual.now() > 1e9


async def test_sleepers_wake_in_the_order_of_their_deadlines():
    virtual = clock.VirtualClock()
    began, woken = virtual.now(), []

    async def sleep(duration_s):
        await virtual.sleep(duration_s)
        woken.append((duration_s, virtual.now() - began))

    async with asyncio.TaskGroup() as group:
        for duration_s in (3.0, 1.0, 2.0):
            group.create_task(sleep(duration_s))
        await virtual.advance(2.0)
        seen_at_two = list(woken)
        await virtual.advance(1.0)

    assert seen_at_two == [(1.0, 1.0), (2.0, 2.0)]
    assert woken == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]


async def test_repeated_sleeps_end_within_one_advance():
    virtual = clock.VirtualClock()
    began, ticks = virtual.now(), []

    async def tick():
        while True:
            await virtual.sleep(1.0)
            ticks.append(virtual.now() - began)

    task = asyncio.create_task(tick())
    await virtual.advance(3.5)
    task.cancel()

    assert ticks == [1.0, 2.0, 3.0]


async def test_cancelled_sleeper_does_not_delay_the_others():
    virtual = clock.VirtualClock()
    cancelled = asyncio.create_task(virtual.sleep(1.0))
    other = asyncio.create_task(virtual.sleep(2.0))
    await asyncio.sleep(0)
    cancelled.cancel()
    await virtual.advance(2.0)

    assert other.done()
    assert cancelled.cancelled()


async def test_sleep_of_zero_returns_at_once():
    await clock.VirtualClock().sleep(0)


async def test_timer_fires_at_its_time_and_a_cancelled_one_does_not():
    virtual = clock.VirtualClock()
    began, fired = virtual.now(), []
    virtual.call_later(1.0, lambda: fired.append(virtual.now() - began))
    virtual.call_later(0.5, pytest.fail, "this timer was cancelled").cancel()
    await virtual.advance(2.0)

    assert fired == [1.0]


async def test_timeout_cancels_its_body_when_virtual_time_has_come():
    virtual = clock.VirtualClock()

    async def wait():
        async with virtual.timeout(5.0):
            await asyncio.Event().wait()

    waiting = asyncio.create_task(wait())
    await virtual.advance(4.9)
    was_done = waiting.done()
    await virtual.advance(0.2)

    assert not was_done
    with pytest.raises(TimeoutError):
        await waiting


async def test_timeout_whose_body_ends_in_time_leaves_no_timer():
    virtual = clock.VirtualClock()
    async with virtual.timeout(1.0):
        await asyncio.sleep(0)
    await virtual.advance(2.0)
