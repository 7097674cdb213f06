"""When a worker may sleep and wake, what it does around it, and what becomes of an engine that fails at it."""

import asyncio

import pytest

from dynamo.base import errors
from dynamo.worker import sleeping


class World:
    """A worker and its engine: they note what they are told, and do what the test says."""

    def __init__(self):
        self.heard, self.deaths = [], []
        self.missing = set()
        self.may_change = asyncio.Event()
        self.may_change.set()
        self.failure = None

    async def retire(self):
        self.heard.append("retire")

    async def forget_prefixes(self):
        self.heard.append("forget")

    async def come_back(self):
        self.heard.append("come back")

    def died(self, error):
        self.deaths.append(str(error))

    async def sleep(self, level):
        self.heard.append(f"sleep {level}")
        self.missing = {"weights", "kv_cache"}
        await self._change()

    async def wake_up(self, tags):
        self.heard.append(f"wake up {','.join(tags)}")
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
async def asked(world):
    made = sleeping.Sleeping(world, world, change_s=60)
    made.begin()
    yield made
    await made.close()


async def test_it_leaves_before_it_sleeps_and_comes_back_when_it_is_awake(asked, world):
    said = [await asked.sleep(1), await asked.wake_up(())]

    assert said == ["asleep (level 1)", "awake"]
    assert world.heard == ["retire", "forget", "sleep 1", "wake up ", "come back"]


async def test_what_has_happened_already_is_no_error(asked, world):
    said = [await asked.wake_up(()), await asked.sleep(2), await asked.sleep(1)]

    assert said == ["awake already", "asleep (level 2)", "asleep already (level 2)"]
    assert world.heard == ["retire", "forget", "sleep 2"]


async def test_it_comes_back_only_when_all_is_back(asked, world):
    await asked.sleep(1)

    first = await asked.wake_up(["weights"])
    assert first == "asleep still, though weights may be back"
    assert "come back" not in world.heard

    assert await asked.wake_up(["kv_cache"]) == "awake"
    assert world.heard[-1] == "come back"


async def test_two_changes_at_a_time_are_a_conflict(asked, world):
    world.may_change.clear()
    first = asyncio.create_task(asked.sleep(1))
    await until(lambda: "sleep 1" in world.heard)

    with pytest.raises(errors.Conflict, match="the worker is falling asleep: ask again"):
        await asked.wake_up(())
    world.may_change.set()

    assert await first == "asleep (level 1)"


async def test_who_asked_may_leave(asked, world):
    world.may_change.clear()
    first = asyncio.create_task(asked.sleep(1))
    await until(lambda: "sleep 1" in world.heard)
    first.cancel()
    world.may_change.set()
    await until(lambda: first.done())

    await until_asleep(asked)
    assert world.heard == ["retire", "forget", "sleep 1"]


async def test_before_it_serves_it_is_not_ready():
    made = sleeping.Sleeping(World(), World())

    with pytest.raises(errors.Conflict, match="not ready yet"):
        await made.sleep(1)


async def test_an_engine_that_fails_is_lost(asked, world):
    world.failure = OSError("no memory")

    with pytest.raises(errors.EngineFailed, match="failed while falling asleep: no memory"):
        await asked.sleep(1)
    with pytest.raises(errors.Conflict, match="the worker is lost"):
        await asked.wake_up(())

    assert world.deaths == ["the engine failed while falling asleep: no memory"]


async def test_an_engine_that_is_not_done_in_time_is_lost(world):
    made = sleeping.Sleeping(world, world, change_s=0.01)
    made.begin()
    await made.sleep(1)
    world.may_change.clear()

    with pytest.raises(errors.EngineFailed, match=r"waking up: not done within 0\.01 s"):
        await made.wake_up(())

    assert len(world.deaths) == 1
    assert "come back" not in world.heard


async def test_a_worker_that_stops_ends_what_is_under_way(asked, world):
    world.may_change.clear()
    first = asyncio.create_task(asked.sleep(1))
    await until(lambda: "sleep 1" in world.heard)
    await asked.close()

    with pytest.raises(errors.Conflict, match="the worker stops"):
        await first
    with pytest.raises(errors.Conflict, match="about to stop"):
        await asked.sleep(1)
    assert world.deaths == []


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


async def until_asleep(asked):
    async with asyncio.timeout(5):
        while True:
            try:
                assert await asked.sleep(1) == "asleep already (level 1)"
            except errors.Conflict:
                await asyncio.sleep(0)
            else:
                return
