"""Both ends of a shared queue when the queue itself fails; the rest is in the suite over all queues."""

import asyncio

import msgspec
import pytest

from dynamo.base import errors
from dynamo.disagg import metrics, shared_queue
from dynamo.observability import metrics as registries
from dynamo.protocols import blocks, generate
from dynamo.runtime import component, requests
from dynamo.testing import clock as clocks
from waiting import PATIENT_S, until

REQUEST = generate.Request(id="r", model="m", token_ids=blocks.pack([1, 2, 3]))


class Work:
    """A work queue that does what the test says."""

    def __init__(self):
        self.waiting, self.error, self.pushed, self.is_stuck = 0, None, [], False
        self.num_closed = 0

    async def push(self, body):
        if self.is_stuck:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        self.pushed.append(body)

    async def close(self):
        self.num_closed += 1

    async def num_waiting(self):
        if self.error is not None:
            raise self.error
        return self.waiting


class Client:
    """Of prefill workers."""

    def __init__(self, *ids):
        self.ids = list(ids)

    def usable(self, among, tried=()):
        return [i for i in among if i in self.ids and i not in tried]

    def on_change(self, listener):
        self.changed = listener


class World:
    async def start(self, *ids):
        self.work, self.client = Work(), Client(*ids)
        self.clock = clocks.VirtualClock()
        self.runtime = await component.DistributedRuntime.in_memory(
            component.MemoryCluster(), item_type=generate.Output
        )
        self.queue = shared_queue.SharedQueue(
            self.join,
            lambda: self.client.ids,
            self.client,
            self.runtime.requests,
            "leases",
            metrics.DisaggMetrics(registries.Registry("x")),
            self.clock,
        )
        await self.queue.start()
        return self

    async def join(self):
        return self.work

    async def until_size(self, expected):
        async with asyncio.timeout(PATIENT_S):
            while self.queue.size != expected:
                await self.clock.advance(shared_queue.COUNT_S)


@pytest.fixture
async def world():
    world = await World().start(1)
    yield world
    await world.queue.close()
    await world.runtime.close()


async def test_size_counts_prompts_of_other_decode_workers(world):
    world.work.waiting = 7

    await world.until_size(7)


async def test_size_ignores_an_old_count(world):
    world.work.waiting = 7
    await world.until_size(7)
    await world.clock.advance(shared_queue.COUNT_S)  # the last count that a reader has requested
    await world.clock.advance(shared_queue._STALE_S + shared_queue.COUNT_S)

    assert world.queue.size == 0


async def test_unreachable_queue_has_no_size_until_it_is_back(world, caplog):
    world.work.error = errors.Unavailable("NATS is gone")
    await world.until_size(None)
    with pytest.raises(errors.Unavailable, match="gone"):
        await world.queue.prefill(REQUEST, timeout_s=5)
    world.work.error = None
    await world.until_size(0)

    assert caplog.text.count("NATS is gone") == 1


async def test_push_that_hangs_fails_soon(world):
    world.work.is_stuck = True
    pushing = asyncio.ensure_future(world.queue.prefill(REQUEST, timeout_s=PATIENT_S))
    await world.clock.advance(shared_queue.PUSH_S)
    with pytest.raises(errors.Unavailable, match="within 1 s"):
        await pushing

    assert world.queue.size is None


async def test_full_queue_raises_overloaded(world):
    world.work.error = errors.Overloaded("full")
    with pytest.raises(errors.Overloaded):
        await world.queue.prefill(REQUEST, timeout_s=5)


async def test_closed_queue_is_left_once(world):
    await world.queue.close()
    await world.queue.close()

    assert world.work.num_closed == 1


async def test_waiting_prompt_fails_when_the_last_worker_is_gone(world):
    asking = asyncio.ensure_future(world.queue.prefill(REQUEST, timeout_s=PATIENT_S))
    async with asyncio.timeout(PATIENT_S):
        while not world.work.pushed:
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    world.client.ids.clear()
    world.client.changed()

    with pytest.raises(errors.NoWorkers):
        await asking


async def test_prompt_fails_when_all_remaining_workers_have_failed(world, monkeypatch):
    async def fail(client, instance_id, request, *, timeout_s, headers):
        raise errors.EngineFailed("x")

    monkeypatch.setattr(shared_queue.prefill_queue, "request_prefill", fail)
    world.client.ids.append(2)
    asking = asyncio.ensure_future(world.queue.prefill(REQUEST, timeout_s=PATIENT_S))
    async with asyncio.timeout(PATIENT_S):
        while not world.work.pushed:
            await asyncio.sleep(0)
    job = msgspec.msgpack.decode(world.work.pushed[0], type=shared_queue.PrefillJob)
    is_over = await requests.call(
        world.runtime.requests,
        job.transport["memory"],
        job.endpoint,
        shared_queue.LeaseRequest(number=job.number, instance_id=1, num_deliveries=1),
        reply_type=bool,
        timeout_s=PATIENT_S,
    )
    world.client.ids.remove(2)
    world.client.changed()

    with pytest.raises(errors.NoWorkers):
        await asking
    assert not is_over


async def test_malformed_lease_request_is_refused(world):
    address = await world.runtime.requests.serve("x", lambda call: None)
    with pytest.raises(errors.RemoteProtocolError, match="expected a lease request"):
        await requests.call(
            world.runtime.requests,
            address,
            "leases",
            {"number": 1},
            reply_type=bool,
            timeout_s=PATIENT_S,
        )


async def test_worker_that_cannot_join_at_start_says_what_to_do():
    async def join():
        raise errors.Unavailable("JetStream does not answer")

    with pytest.raises(errors.ConfigError, match=r"JetStream.*--prefill-queue direct"):
        await shared_queue.join_at_start(join)


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


class ConsumedWork:
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


class ConsumerWorld:
    def __init__(self):
        self.joined, self.refusals = [], []
        self.clock = clocks.VirtualClock()

    async def start(self, monkeypatch):
        for name, value in (("NUM_JOBS", 1), ("PULL_S", 60.0)):
            monkeypatch.setattr(shared_queue, name, value)
        self.runtime = await component.DistributedRuntime.in_memory(
            component.MemoryCluster(), item_type=generate.Output
        )
        self.consumer = shared_queue.PrefillJobConsumer(
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
        self.joined.append(ConsumedWork())
        return self.joined[-1]


@pytest.fixture
async def joined(monkeypatch):
    joined = await ConsumerWorld().start(monkeypatch)
    yield joined
    closing = asyncio.ensure_future(joined.consumer.close())
    await joined.clock.advance(shared_queue.CLOSE_S)
    await closing
    await joined.runtime.close()


async def test_lost_queue_is_joined_again(joined):
    joined.refusals = [errors.Unavailable("not yet"), errors.ConfigError("nor yet")]
    joined.joined[0].things.put_nowait(errors.Unavailable("the stream is gone"))
    joined.joined[0].things.put_nowait(errors.Unavailable("it still is"))
    joined.joined[0].things.put_nowait(errors.Unavailable("and still"))
    await joined.clock.advance(2 * shared_queue.REJOIN_S)
    assert len(joined.joined) == 1
    await joined.clock.advance(shared_queue.REJOIN_S)
    assert len(joined.joined) == 2
    item = Item()
    joined.joined[1].things.put_nowait(item)
    await until(lambda: item.given_back_after is not None)

    assert joined.joined[0].is_closed


async def test_job_that_arrives_while_draining_is_given_back_at_once(joined):
    await joined.consumer.leave()
    item = Item()
    joined.joined[0].things.put_nowait(item)
    await until(lambda: joined.joined[0].is_closed)

    assert item.given_back_after == 0.0


@pytest.mark.parametrize(("num_deliveries", "is_dropped"), [(1, False), (2, False), (3, True)])
async def test_job_without_a_reachable_decode_worker_is_dropped_after_some_deliveries(
    joined, num_deliveries, is_dropped
):
    item = Item()
    item.num_deliveries = num_deliveries
    joined.joined[0].things.put_nowait(item)
    await until(lambda: item.is_done or item.given_back_after is not None)

    assert item.is_done is is_dropped


async def test_queue_is_left_though_a_job_outlives_the_time_to_close(joined):
    calls, plane = [], joined.runtime.requests
    address = await plane.serve("leases", calls.append)
    item = Item()
    item.body = msgspec.msgpack.encode(
        shared_queue.PrefillJob(number="1", endpoint="leases", transport={plane.name: address})
    )
    joined.joined[0].things.put_nowait(item)
    await until(lambda: calls)
    closing = asyncio.ensure_future(joined.consumer.close())
    await joined.clock.advance(shared_queue.CLOSE_S)
    await closing

    assert joined.joined[0].is_closed


async def test_consumer_can_be_closed_before_it_starts():
    consumer = shared_queue.PrefillJobConsumer(None, None, 1, None, clocks.VirtualClock())

    await consumer.leave()
    await consumer.close()
