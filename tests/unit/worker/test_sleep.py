"""When a worker may sleep and wake, what happens around it, and the routes of both commands."""

import asyncio

import pytest
import worker_fakes

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.testing import clock as virtual
from dynamo.worker import sleep
from waiting import PATIENT_S


class World:
    """A worker and its engine that record the calls to them."""

    def __init__(self):
        self.calls, self.deaths, self.estimates_s = [], [], []
        self.missing = set()
        self.may_change = asyncio.Event()
        self.may_change.set()
        self.failure = None

    async def withdraw(self):
        self.calls.append("withdraw")

    async def promise_wake_up(self, estimate_s):
        self.estimates_s.append(estimate_s)

    async def clear_prefixes(self):
        self.calls.append("clear")

    async def restore(self):
        self.calls.append("restore")

    def died(self, error):
        self.deaths.append(str(error))

    async def sleep(self, level):
        self.calls.append(f"sleep {level}")
        self.missing = {"weights", "kv_cache"}
        await self._change()

    async def wake_up(self, tags):
        self.calls.append(f"wake up {','.join(tags)}")
        self.missing -= set(tags) or self.missing
        await self._change()
        return not self.missing

    async def _change(self):
        await self.may_change.wait()
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def world():
    return World()


@pytest.fixture
async def controller(world):
    controller = sleep.Sleep(world, world, clocks.SystemClock(), change_s=60)
    controller.begin()
    yield controller
    await controller.close()


async def test_worker_withdraws_before_it_sleeps_and_is_restored_once_awake(controller, world):
    answers = [await controller.sleep(1), await controller.wake_up(())]

    assert answers == ["asleep (level 1)", "awake"]
    assert world.calls == ["withdraw", "clear", "sleep 1", "wake up ", "restore"]


async def test_time_to_wake_up_is_estimated_by_falling_asleep_and_then_by_the_last_time(world):
    time = virtual.VirtualClock()
    controller = sleep.Sleep(world, world, time, change_s=60)
    controller.begin()
    for command, took_s in (
        (controller.sleep(1), 3.0),
        (controller.wake_up(()), 7.0),
        (controller.sleep(1), 2.0),
    ):
        world.may_change.clear()
        running = asyncio.ensure_future(command)
        await time.advance(took_s)
        world.may_change.set()
        await running
    await controller.close()

    assert world.estimates_s == pytest.approx([3.0, 7.0])


async def test_repeated_command_succeeds_and_changes_nothing(controller, world):
    answers = [await controller.wake_up(()), await controller.sleep(2), await controller.sleep(1)]

    assert answers == ["awake already", "asleep (level 2)", "asleep already (level 2)"]
    assert world.calls == ["withdraw", "clear", "sleep 2"]


async def test_worker_is_restored_only_when_weights_and_cache_are_back(controller, world):
    await controller.sleep(1)

    first = await controller.wake_up(["weights"])
    assert first == "asleep still, though weights may be back"
    assert "restore" not in world.calls

    assert await controller.wake_up(["kv_cache"]) == "awake"
    assert world.calls[-1] == "restore"


async def test_second_command_during_a_change_is_a_conflict(controller, world):
    world.may_change.clear()
    first = asyncio.create_task(controller.sleep(1))
    await until(lambda: "sleep 1" in world.calls)

    with pytest.raises(errors.Conflict, match="the worker is falling asleep: ask again"):
        await controller.wake_up(())
    world.may_change.set()

    assert await first == "asleep (level 1)"


async def test_change_continues_when_its_caller_is_cancelled(controller, world):
    world.may_change.clear()
    first = asyncio.create_task(controller.sleep(1))
    await until(lambda: "sleep 1" in world.calls)
    first.cancel()
    world.may_change.set()
    await until(lambda: first.done())

    await until_asleep(controller)
    assert world.calls == ["withdraw", "clear", "sleep 1"]


async def test_command_before_the_worker_serves_is_a_conflict():
    controller = sleep.Sleep(World(), World(), clocks.SystemClock())

    with pytest.raises(errors.Conflict, match="not ready yet"):
        await controller.sleep(1)


async def test_engine_that_fails_to_sleep_counts_as_dead(controller, world):
    world.failure = OSError("no memory")

    with pytest.raises(errors.EngineFailed, match="failed while falling asleep: no memory"):
        await controller.sleep(1)
    with pytest.raises(errors.Conflict, match="the worker is lost"):
        await controller.wake_up(())

    assert world.deaths == ["the engine failed while falling asleep: no memory"]


async def test_engine_that_exceeds_the_time_limit_counts_as_dead(world):
    controller = sleep.Sleep(world, world, clocks.SystemClock(), change_s=0.01)
    controller.begin()
    await controller.sleep(1)
    world.may_change.clear()

    with pytest.raises(errors.EngineFailed, match=r"waking up: not done within 0\.01 s"):
        await controller.wake_up(())

    assert len(world.deaths) == 1
    assert "restore" not in world.calls


async def test_stopping_worker_cancels_the_change_under_way(controller, world):
    world.may_change.clear()
    first = asyncio.create_task(controller.sleep(1))
    await until(lambda: "sleep 1" in world.calls)
    await controller.close()

    with pytest.raises(errors.Conflict, match="the worker stops"):
        await first
    with pytest.raises(errors.Conflict, match="about to stop"):
        await controller.sleep(1)
    assert world.deaths == []


async def until(condition):
    async with asyncio.timeout(PATIENT_S):
        while not condition():
            await asyncio.sleep(0)


async def until_asleep(controller):
    async with asyncio.timeout(PATIENT_S):
        while True:
            try:
                assert await controller.sleep(1) == "asleep already (level 1)"
            except errors.Conflict:
                await asyncio.sleep(0)
            else:
                return


class FakeSleep(worker_fakes.Commands, sleep.Sleep):
    result = "done"

    async def sleep(self, level):
        return self.record("sleep", level)

    async def wake_up(self, tags):
        return self.record("wake up", *tags)


@pytest.fixture
def commanded():
    return FakeSleep()


@pytest.fixture
async def client(commanded):
    async with worker_fakes.client_of(commanded.routes(), "/engine") as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body", "call"),
    [
        ("sleep", b"", ("sleep", 1)),
        ("sleep", b"{}", ("sleep", 1)),
        ("sleep", b'{"level": 2}', ("sleep", 2)),
        ("wake_up", b"", ("wake up",)),
        ("wake_up", b'{"tags": ["weights", "kv_cache"]}', ("wake up", "weights", "kv_cache")),
    ],
)
async def test_route_runs_the_command(client, commanded, path, body, call):
    answer = await client.post(path, content=body)

    assert (answer.status_code, answer.json()) == (200, {"status": "ok", "message": "done"})
    assert commanded.calls == [call]


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("sleep", b'{"level": 3}', "level: expected a whole number from 1 to 2, got 3"),
        ("sleep", b'{"level": "deep"}', "level: expected a whole number from 1 to 2"),
        ("sleep", b'{"depth": 1}', "`depth`"),
        ("sleep", b"[", "no valid JSON"),
        ("wake_up", b'{"tags": ["mind"]}', "tags[0]: expected 'kv_cache' or 'weights', got"),
        ("wake_up", b'{"tags": 5}', "tags: expected a list"),
    ],
)
async def test_wrong_field_of_a_command_is_named(client, commanded, path, body, says):
    answer = await client.post(path, content=body)

    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert commanded.calls == []


@pytest.mark.parametrize(
    ("failure", "status"),
    [(errors.Conflict("the worker is waking up"), 409), (errors.EngineFailed("no memory"), 500)],
)
async def test_error_of_a_command_has_its_status(client, commanded, failure, status):
    commanded.failure = failure

    answer = await client.post("sleep")

    assert answer.status_code == status
    assert answer.json() == {"error": {"message": str(failure), "code": status}}


async def test_get_does_not_put_the_worker_to_sleep(client, commanded):
    answer = await client.get("sleep")

    assert answer.status_code == 405
    assert commanded.calls == []
