"""What every work queue promises, held in memory and in JetStream."""

import asyncio
import contextlib
import itertools
import time

import pytest
from nats.js import JetStreamContext

import nats_server as servers
from dynamo.base import errors
from dynamo.runtime import services
from dynamo.runtime.backends import memory
from dynamo.runtime.backends.nats import jetstream
from waiting import PATIENT_S, until

NAMES = itertools.count()
NOTHING_S = 0.05  # for what should not come
NORMAL = services.WorkQueueBounds()
IMPATIENT = services.WorkQueueBounds(acknowledge_s=0.2)


class Factory:
    """Opens sides of one queue."""

    def __init__(self, kind, nats=None):
        self._kind = kind
        self._nats = nats
        self._name = f"namespace/prefill {next(NAMES)}"
        self._work = None
        self.opened = []

    async def open(self, bounds=NORMAL):
        if self._kind == "memory":
            queue = self._work = self._work or memory.MemoryWorkQueue(bounds)
        else:
            queue = await jetstream.NatsWorkQueue.open(self._nats, self._name, bounds)
        self.opened.append(queue)
        return queue


@pytest.fixture(params=["memory", "nats"])
async def factory(request):
    nats = None
    if request.param == "nats":
        nats = await servers.connect(request.getfixturevalue("nats_server").url)
    factory = Factory(request.param, nats)
    yield factory
    for queue in factory.opened:
        await queue.close()
    if nats is not None:
        await nats.close()


async def test_oldest_item_comes_first_and_is_gone_when_acknowledged(factory):
    queue = await factory.open()
    for body in (b"one", b"two"):
        await queue.push(body)
    first, second = await queue.pull(PATIENT_S), await queue.pull(PATIENT_S)
    depth_before = await queue.depth()
    await first.acknowledge()
    await second.acknowledge()
    await second.acknowledge()

    assert [first.body, second.body] == [b"one", b"two"]
    assert (first.num_deliveries, second.num_deliveries) == (1, 1)
    assert (depth_before, await queue.depth()) == (2, 0)


async def test_waiting_pull_gets_the_next_item(factory):
    queue, other = await factory.open(), await factory.open()
    pulling = asyncio.ensure_future(queue.pull(PATIENT_S))
    await asyncio.sleep(0)
    await other.push(b"late")

    assert (await pulling).body == b"late"


async def test_cancelled_push_ends_even_if_its_acknowledgement_comes_at_that_moment(
    nats_server, monkeypatch
):
    nats = await servers.connect(nats_server.url)
    queue = await jetstream.NatsWorkQueue.open(nats, f"cancelled {next(NAMES)}")
    publish = JetStreamContext.publish

    async def publish_then_cancel(*args):
        pushing.cancel()  # as `asyncio.wait_for` of Python 3.11 does: its answer is there, so it returns that
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        return await publish(*args)

    monkeypatch.setattr(JetStreamContext, "publish", publish_then_cancel)
    pushing = asyncio.ensure_future(queue.push(b"one"))
    await asyncio.wait((pushing,))

    assert pushing.cancelled()
    await queue.close()
    await nats.close()


async def test_pull_from_an_empty_queue_returns_none(factory):
    queue = await factory.open()

    assert await queue.pull(NOTHING_S) is None
    assert await queue.depth() == 0


async def test_each_item_goes_to_one_puller(factory):
    queues = [await factory.open() for _ in range(3)]
    bodies, done = {b"%d" % i for i in range(60)}, []

    async def work(queue):
        while len(done) < len(bodies):
            item = await queue.pull(NOTHING_S)
            if item is not None:
                await item.acknowledge()
                done.append(item.body)

    working = [asyncio.ensure_future(work(queue)) for queue in queues]
    for body in bodies:
        await queues[0].push(body)
    await asyncio.gather(*working)

    assert sorted(done) == sorted(bodies)
    assert await queues[0].depth() == 0


async def test_unacknowledged_item_goes_to_another_puller(factory):
    forgetful, other = await factory.open(IMPATIENT), await factory.open(IMPATIENT)
    await forgetful.push(b"x")
    lost = await forgetful.pull(PATIENT_S)
    await forgetful.close()
    again = await other.pull(PATIENT_S)
    await lost.keep()
    await again.acknowledge()

    assert (again.body, again.num_deliveries) == (b"x", 2)
    assert await other.depth() == 0


async def test_late_acknowledgement_removes_the_item(factory):
    queue = await factory.open(IMPATIENT)
    await queue.push(b"x")
    slow = await queue.pull(PATIENT_S)
    again = await queue.pull(PATIENT_S)
    await slow.acknowledge()
    await again.acknowledge()

    assert await queue.depth() == 0


async def test_returned_item_is_available_at_once(factory):
    queue = await factory.open()
    await queue.push(b"x")
    await (await queue.pull(PATIENT_S)).give_back()
    again = await queue.pull(PATIENT_S)

    assert (again.body, again.num_deliveries) == (b"x", 2)


async def test_item_returned_with_a_delay_is_available_later(factory):
    queue = await factory.open()
    await queue.push(b"x")
    item = await queue.pull(PATIENT_S)
    returned_at = time.monotonic()
    await item.give_back(after_s=1.0)
    again = await queue.pull(PATIENT_S)

    assert time.monotonic() - returned_at >= 1.0
    assert again.num_deliveries == 2


async def test_waiting_items_are_counted_apart_from_items_in_work(factory):
    queue = await factory.open()
    for body in (b"one", b"two", b"three"):
        await queue.push(body)
    await queue.pull(PATIENT_S)

    assert (await queue.num_waiting(), await queue.depth()) == (2, 3)


async def test_extended_item_stays_with_its_puller(factory):
    bounds = services.WorkQueueBounds(acknowledge_s=3.0)  # kept on a busy machine, too
    queue = await factory.open(bounds)
    await queue.push(b"x")
    item = await queue.pull(PATIENT_S)
    for _ in range(9):
        await item.keep()
        assert await queue.pull(bounds.acknowledge_s / 6) is None


async def test_full_queue_is_an_error_and_keeps_working(factory):
    queue = await factory.open(services.WorkQueueBounds(max_items=2))
    for _ in range(2):
        await queue.push(b"x")
    with pytest.raises(errors.Overloaded, match="full"):
        await queue.push(b"x")
    await (await queue.pull(PATIENT_S)).acknowledge()
    await queue.push(b"y")

    assert await queue.depth() == 2


async def test_queue_is_bounded_in_bytes(factory):
    queue = await factory.open(services.WorkQueueBounds(max_bytes=3000, max_item_bytes=2000))
    await queue.push(b"x" * 2000)
    with pytest.raises(errors.Overloaded, match="full"):
        await queue.push(b"x" * 2000)
    with pytest.raises(errors.LocalProtocolError, match=r"2001 bytes.*2000"):
        await queue.push(b"x" * 2001)


async def test_old_items_expire(factory):
    queue = await factory.open(services.WorkQueueBounds(max_age_s=2.0))
    await queue.push(b"waiting")
    await queue.push(b"in work")
    item = await queue.pull(PATIENT_S)
    async with asyncio.timeout(PATIENT_S):
        while await queue.depth():
            await asyncio.sleep(0.01)
    await item.give_back()

    assert await queue.pull(NOTHING_S) is None


async def test_cancelled_pull_loses_no_item(factory):
    queue = await factory.open(IMPATIENT)
    pulling = asyncio.ensure_future(queue.pull(PATIENT_S))
    await asyncio.sleep(0)
    pulling.cancel()
    await asyncio.wait((pulling,))
    await queue.push(b"x")
    item = await queue.pull(PATIENT_S)

    assert item.body == b"x"


async def test_bounds_are_those_of_the_last_opener(nats_server):
    nats = await servers.connect(nats_server.url)
    name = f"rebound {next(NAMES)}"
    await jetstream.NatsWorkQueue.open(nats, name, services.WorkQueueBounds(max_items=1))
    queue = await jetstream.NatsWorkQueue.open(nats, name, services.WorkQueueBounds(max_items=2))
    for _ in range(2):
        await queue.push(b"x")

    assert await queue.depth() == 2
    await nats.close()


async def test_items_survive_a_server_restart_and_pulls_continue(tmp_path, monkeypatch):
    monkeypatch.setattr(jetstream, "_PULL_AGAIN_S", 0.5)
    server = servers.NatsServer(tmp_path / "nats")
    server.start()
    nats = await servers.connect(server.url)
    queue = await jetstream.NatsWorkQueue.open(nats, "q")
    gone = asyncio.Event()
    nats.on_lost(lambda _: gone.set())
    await queue.push(b"x")
    server.stop()
    await gone.wait()
    with pytest.raises(errors.Unavailable, match="does not answer"):
        await queue.push(b"y")
    pulling = asyncio.ensure_future(queue.pull(PATIENT_S))
    await asyncio.sleep(0)
    server.start()
    item = await pulling
    await item.acknowledge()

    assert item.body == b"x"
    await nats.close()
    server.stop()


async def test_queue_lost_by_its_server_is_unavailable_until_reopened(tmp_path):
    server = servers.NatsServer(tmp_path / "nats")
    server.start()
    nats = await servers.connect(server.url)
    queue = await jetstream.NatsWorkQueue.open(nats, "q")
    await nats.jetstream.delete_stream("q")
    for ask in (queue.depth, queue.num_waiting, lambda: queue.push(b"x")):
        with pytest.raises(errors.Unavailable):
            await ask()
    again = await jetstream.NatsWorkQueue.open(nats, "q")
    await queue.push(b"x")

    assert (await again.pull(PATIENT_S)).body == b"x"
    await nats.close()
    server.stop()


async def test_queue_is_used_on_after_the_server_has_dismissed_us(nats_server):
    nats = await servers.connect(nats_server.url)
    name = f"dismissed {next(NAMES)}"
    queue = await jetstream.NatsWorkQueue.open(nats, name)
    former = nats._client
    await former.close()  # as nats-py does after some errors of the server
    await until(lambda: nats._client is not former and nats.is_connected)
    await queue.push(b"x")

    assert await queue.depth() == await queue.num_waiting() == 1
    with pytest.raises(errors.Unavailable):
        await queue.pull(PATIENT_S)
    again = await jetstream.NatsWorkQueue.open(nats, name)
    assert (await again.pull(PATIENT_S)).body == b"x"
    await nats.close()


async def test_server_without_jetstream_is_named(tmp_path):
    server = servers.NatsServer(tmp_path / "nats", jetstream=False)
    server.start()
    nats = await servers.connect(server.url)
    with pytest.raises(errors.ConfigError, match="-js"):
        await jetstream.NatsWorkQueue.open(nats, "q")
    await nats.close()
    server.stop()


async def test_queue_that_jetstream_refuses_is_named(tmp_path):
    config = tmp_path / "config"
    config.write_text("jetstream { max_file_store: 1MB }")
    server = servers.NatsServer(tmp_path / "nats", "-c", str(config))
    server.start()
    nats = await servers.connect(server.url)
    with pytest.raises(errors.ConfigError, match=r"work queue q: .*insufficient storage"):
        await jetstream.NatsWorkQueue.open(nats, "q")
    await nats.close()
    server.stop()
