"""The prefill worker's end of a shared queue when the queue itself fails; the rest is in the suite over all queues."""

import asyncio

import pytest

from dynamo.base import errors
from dynamo.disagg import job_consumer, metrics
from dynamo.observability import metrics as registries
from dynamo.protocols import generate
from dynamo.runtime import component
from dynamo.testing import clock as clocks


class Item:
    """A job that cannot be decoded."""

    body, num_deliveries = b"junk", 1

    def __init__(self):
        self.given_back_after, self.is_done = None, False

    async def give_back(self, *, after_s=0.0):
        self.given_back_after = after_s

    async def acknowledge(self):
        self.is_done = True

    async def keep(self):
        pass


class Work:
    """A work queue that gives what the test puts in; an error is raised."""

    def __init__(self):
        self.things, self.is_closed = asyncio.Queue(), False

    async def pull(self, timeout_s):
        try:
            async with asyncio.timeout(timeout_s):
                thing = await self.things.get()
        except TimeoutError:
            return None
        if isinstance(thing, Exception):
            raise thing
        return thing

    async def close(self):
        self.is_closed = True


class World:
    def __init__(self):
        self.joined, self.refusals = [], []
        self.clock = clocks.VirtualClock()

    async def start(self, monkeypatch):
        for name, value in (("NUM_JOBS", 1), ("PULL_S", 60.0)):
            monkeypatch.setattr(job_consumer, name, value)
        self.runtime = await component.DistributedRuntime.in_memory(
            component.MemoryCluster(), item_type=generate.Output
        )
        self.consumer = job_consumer.PrefillJobConsumer(
            self.join,
            self.runtime.requests,
            1,
            metrics.PrefillJobMetrics(registries.Registry("x")),
            self.clock,
        )
        await self.consumer.start()
        return self

    async def join(self):
        if self.refusals:
            raise self.refusals.pop()
        self.joined.append(Work())
        return self.joined[-1]


@pytest.fixture
async def world(monkeypatch):
    world = await World().start(monkeypatch)
    yield world
    closing = asyncio.ensure_future(world.consumer.close())
    await world.clock.advance(job_consumer.CLOSE_S)
    await closing
    await world.runtime.close()


async def until(is_so):
    async with asyncio.timeout(20):
        while not is_so():
            await asyncio.sleep(0.002)


async def test_lost_queue_is_joined_again(world):
    world.refusals = [errors.Unavailable("not yet"), errors.ConfigError("nor yet")]
    world.joined[0].things.put_nowait(errors.Unavailable("the stream is gone"))
    world.joined[0].things.put_nowait(errors.Unavailable("it still is"))
    world.joined[0].things.put_nowait(errors.Unavailable("and still"))
    await world.clock.advance(2 * job_consumer.REJOIN_S)
    assert len(world.joined) == 1
    await world.clock.advance(job_consumer.REJOIN_S)
    assert len(world.joined) == 2
    item = Item()
    world.joined[1].things.put_nowait(item)
    await until(lambda: item.given_back_after is not None)

    assert world.joined[0].is_closed


async def test_job_that_arrives_while_draining_is_given_back_at_once(world):
    await world.consumer.leave()
    item = Item()
    world.joined[0].things.put_nowait(item)
    await until(lambda: world.joined[0].is_closed)

    assert item.given_back_after == 0.0


@pytest.mark.parametrize(("num_deliveries", "is_dropped"), [(1, False), (2, False), (3, True)])
async def test_job_without_a_reachable_decode_worker_is_dropped_after_some_deliveries(
    world, num_deliveries, is_dropped
):
    item = Item()
    item.num_deliveries = num_deliveries
    world.joined[0].things.put_nowait(item)
    await until(lambda: item.is_done or item.given_back_after is not None)

    assert item.is_done is is_dropped


async def test_consumer_can_be_closed_before_it_starts():
    consumer = job_consumer.PrefillJobConsumer(None, None, 1, None, clocks.VirtualClock())

    await consumer.leave()
    await consumer.close()
