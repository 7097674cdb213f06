import asyncio

import pytest

from dynamo.base import tasks


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


async def test_leaving_cancels_what_still_runs():
    async with tasks.Tasks() as running:
        task = running.start("wait", for_ever())

        assert len(running) == 1
        assert task.get_name() == "wait"

    assert task.cancelled()
    assert len(running) == 0


async def test_leaving_cancels_what_a_task_starts_while_it_goes():
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


async def test_run_until_returns_when_told_to_stop():
    stop = asyncio.Event()
    async with tasks.Tasks() as running:
        running.start("stop", asyncio.sleep(0)).add_done_callback(lambda _: stop.set())
        await running.run_until(stop)

    assert stop.is_set()


async def test_run_until_raises_what_a_task_died_of(told):
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


async def test_a_task_that_ends_or_is_cancelled_did_not_die(told):
    async with tasks.Tasks() as running:
        done = running.start("done", asyncio.sleep(0))
        cancelled = running.start("cancelled", for_ever())
        cancelled.cancel()
        await asyncio.wait((done, cancelled))
        stop = asyncio.Event()
        stop.set()
        await running.run_until(stop)

    assert told == []


async def test_a_cancellation_that_is_lost_is_said_again(monkeypatch):
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
