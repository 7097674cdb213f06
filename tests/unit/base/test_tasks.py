import asyncio
import contextlib
import logging

import pytest

from dynamo.base import tasks
from dynamo.testing.clock import VirtualClock


async def for_ever():
    await asyncio.Event().wait()


async def die():
    raise ValueError("dead")


@pytest.fixture
async def told():
    """What the loop's exception handler is told."""
    contexts = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: contexts.append(context))
    return contexts


async def test_leaving_the_block_cancels_running_tasks():
    async with tasks.Tasks() as running:
        task = running.start("wait", for_ever())

        assert len(running) == 1
        assert task.get_name() == "wait"

    assert task.cancelled()
    assert len(running) == 0


async def test_close_cancels_tasks_started_by_cancelled_tasks():
    running = tasks.Tasks()
    started = []

    async def start_another():
        try:
            await for_ever()
        finally:
            started.append(running.start("another", for_ever()))

    running.start("first", start_another())
    await asyncio.sleep(0)
    await running.close()

    assert started[0].cancelled()


async def test_error_of_a_task_is_handed_to_those_that_wait_for_it(told):
    deaths = []
    async with tasks.Tasks() as running:
        running.start("die", die(), on_death=deaths.append)
        running.start("end", asyncio.sleep(0), on_death=deaths.append)
        running.start("wait", for_ever(), on_death=deaths.append)
        while len(running) > 1:
            await asyncio.sleep(0)

    assert [str(death) for death in deaths] == ["dead"]
    assert len(told) == 1


async def test_run_until_returns_when_its_event_is_set():
    stop = asyncio.Event()
    async with tasks.Tasks() as running:
        running.start("stop", asyncio.sleep(0)).add_done_callback(lambda _: stop.set())
        await running.run_until(stop)

    assert stop.is_set()


async def test_run_until_raises_the_exception_of_a_failed_task(told):
    async with tasks.Tasks() as running:
        running.start("victim", die())
        with pytest.raises(ValueError, match="dead"):
            await running.run_until(asyncio.Event())

    assert [context["message"] for context in told] == ["task 'victim' died"]


async def test_run_until_raises_even_if_the_task_died_before(told):
    async with tasks.Tasks() as running:
        victim = running.start("victim", die())
        await asyncio.wait((victim,))
        with pytest.raises(ValueError, match="dead"):
            await running.run_until(asyncio.Event())

    assert len(told) == 1


async def test_ended_or_cancelled_task_is_no_failure(told):
    async with tasks.Tasks() as running:
        done = running.start("done", asyncio.sleep(0))
        cancelled = running.start("cancelled", for_ever())
        cancelled.cancel()
        await asyncio.wait((done, cancelled))
        stop = asyncio.Event()
        stop.set()
        await running.run_until(stop)

    assert told == []


async def test_swallowed_cancellation_is_repeated(monkeypatch):
    monkeypatch.setattr(tasks, "_CANCEL_AGAIN_S", 0.01)
    begun, owner, num_lost = asyncio.Event(), tasks.Tasks(), 0

    async def lose_the_first():
        nonlocal num_lost
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            num_lost += 1
        await asyncio.Event().wait()

    owner.start("lose", lose_the_first())
    await begun.wait()
    await owner.close()

    assert (num_lost, len(owner)) == (1, 0)


async def lose_a_cancellation():
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()


async def test_cancellation_that_a_call_loses_is_kept():
    async def call():
        with tasks.keep_cancellation():
            await lose_a_cancellation()

    calling = asyncio.ensure_future(call())
    await asyncio.sleep(0)
    calling.cancel()
    await asyncio.wait((calling,))

    assert calling.cancelled()


async def test_cleaning_up_after_a_cancellation_is_not_cancelled_again():
    async def clean_up():
        await lose_a_cancellation()
        with tasks.keep_cancellation():
            await asyncio.sleep(0)
        return "clean"

    cleaning = asyncio.ensure_future(clean_up())
    await asyncio.sleep(0)
    cleaning.cancel()

    assert await cleaning == "clean"


async def test_wait_for_open_requests_says_every_ten_seconds_how_many_are_left(caplog):
    caplog.set_level("INFO")
    clock, is_idle, num_open = VirtualClock(), asyncio.Event(), 3
    waiting = asyncio.ensure_future(
        tasks.wait_until_idle(
            is_idle, lambda: num_open, timeout_s=35.0, clock=clock, log=logging.getLogger("test")
        )
    )
    await clock.advance(15.0)
    num_open = 1
    await clock.advance(10.0)
    is_idle.set()

    assert await waiting
    assert caplog.messages == [
        f"stopping; running requests: {num}, for at most another {left_s} s"
        for num, left_s in ((3, 35), (3, 25), (1, 15))
    ]


async def test_wait_for_open_requests_ends_with_its_time():
    clock = VirtualClock()
    log = logging.getLogger("test")
    waiting = asyncio.ensure_future(
        tasks.wait_until_idle(asyncio.Event(), lambda: 1, timeout_s=12.0, clock=clock, log=log)
    )
    await clock.advance(11.9)
    assert not waiting.done()
    await clock.advance(0.1)

    assert not await waiting
