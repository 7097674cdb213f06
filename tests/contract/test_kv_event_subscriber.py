"""A fed index equals what the workers hold, over real planes: whatever was missed, whoever came late or died."""

import asyncio

import msgspec
import pytest

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.engine import api as engines
from dynamo.protocols import blocks, generate, instances, kv_events, model_card
from dynamo.router import api, kv_event_subscriber, prefix_index
from dynamo.runtime import component, events
from dynamo.worker import host, kv_event_publisher
from waiting import PATIENT_S, until

GENERATE = instances.EndpointName("n", "backend", "generate")
FACTS = engines.EngineFacts(
    context_length=64,
    kv_block_size=4,
    total_kv_blocks=8,
    max_num_seqs=1,
    max_num_batched_tokens=64,
)


class Engine:
    """Only speaks of blocks, when the test says so."""

    capabilities = engines.EngineCapabilities()

    async def start(self, sink):
        return FACTS

    async def stop(self):
        pass

    def load(self):
        return ()


class LosingPlane:
    """An event plane on whose way messages can be lost."""

    def __init__(self, plane):
        self._plane, self.is_losing = plane, False

    def publish(self, topic, payload):
        if not self.is_losing:
            self._plane.publish(topic, payload)

    def __getattr__(self, name):
        return getattr(self._plane, name)


class Worker:
    """A real host around an engine that the test plays."""

    @classmethod
    async def start(cls, runtime):
        worker = cls()
        worker.runtime, runtime.events = runtime, LosingPlane(runtime.events)
        worker.id = runtime.instance_id
        worker.host = host.Host(
            Engine(),
            runtime,
            GENERATE,
            make_card=lambda facts: model_card.ModelCard(
                display_name="m", source_path="/m", context_length=64, kv_cache_block_size=4
            ),
            options=host.HostOptions(request_limit=1),
            clock=clocks.SystemClock(),
        )
        await worker.host.start()
        return worker

    def store(self, local_hashes, dp_rank=0):
        names = blocks.sequence_hashes(local_hashes)
        pairs = tuple(map(kv_events.StoredBlock, names, local_hashes))
        self.host.kv_events([kv_events.Stored(parent_hash=None, blocks=pairs)], dp_rank)

    def remove(self, local_hashes, dp_rank=0):
        name = blocks.sequence_hashes(local_hashes)[-1]
        self.host.kv_events([kv_events.Removed(block_hashes=(name,))], dp_rank)

    def lose(self, is_losing=True):
        self.runtime.events.is_losing = is_losing

    async def die(self):
        await self.host.stop(0)
        await self.runtime.close()


class Router:
    """A fed index."""

    @classmethod
    async def start(cls, runtime):
        router = cls()
        router.runtime, router.index = runtime, prefix_index.PrefixIndex()
        router.feed = kv_event_subscriber.KvEventSubscriber(
            runtime,
            router.index,
            namespace="n",
            component_name="backend",
            clock=clocks.SystemClock(),
        )
        await router.feed.start()
        return router

    def held(self):
        """Names by worker."""
        held = {}
        for worker, _, names in self.index.cached_runs():
            held.setdefault(worker, set()).update(names)
        return held

    async def await_held(self, expected):
        await until(lambda: self.held() == expected and self.feed.is_current)

    async def close(self):
        await self.feed.close()
        await self.runtime.close()


def names(*chains):
    return {name for chain in chains for name in blocks.sequence_hashes(chain)}


@pytest.fixture(params=["memory", "zmq and tcp"])
async def join(request):
    """Makes runtimes that find each other."""
    cluster, made = component.MemoryCluster(), []
    planes = ("memory", "memory") if request.param == "memory" else ("tcp", "zmq")

    async def join():
        settings = component.RuntimeConfig(
            discovery_backend="mem", request_plane=planes[0], event_plane=planes[1]
        )
        made.append(
            await component.DistributedRuntime.open(settings, cluster, item_type=generate.Output)
        )
        return made[-1]

    yield join
    for runtime in made:
        await runtime.close()


@pytest.fixture
async def worker(join):
    worker = await Worker.start(await join())
    yield worker
    await worker.die()


@pytest.fixture
async def router(join):
    router = await Router.start(await join())
    yield router
    await router.close()


async def test_late_subscriber_gets_all_blocks_and_then_events(worker, join):
    worker.store([1, 2, 3])
    worker.remove([1, 2, 3])
    router = await Router.start(await join())
    await router.await_held({api.Worker(worker.id): names([1, 2])})
    worker.store([1, 2, 4])
    await router.await_held({api.Worker(worker.id): names([1, 2, 4])})
    await router.close()


async def test_ranks_are_indexed_as_separate_workers(worker, router):
    worker.store([1, 2], dp_rank=0)
    worker.store([1, 3], dp_rank=1)

    await router.await_held(
        {api.Worker(worker.id, 0): names([1, 2]), api.Worker(worker.id, 1): names([1, 3])}
    )


@pytest.mark.parametrize("num_remembered", [100, 1], ids=["remembered", "forgotten"])
async def test_lost_events_are_replayed(worker, router, monkeypatch, num_remembered):
    monkeypatch.setattr(kv_event_publisher, "RECENT_EVENTS", num_remembered)
    worker.store([1, 2])
    await router.await_held({api.Worker(worker.id): names([1, 2])})
    worker.lose()
    worker.store([3, 4])
    worker.remove([1, 2])
    worker.lose(False)
    worker.store([5])

    await router.await_held({api.Worker(worker.id): names([1], [3, 4], [5])})


async def test_lost_last_event_is_noticed(worker, router, monkeypatch):
    monkeypatch.setattr(kv_event_publisher, "HEARTBEAT_S", 0.02)
    worker.store([1])
    await router.await_held({api.Worker(worker.id): names([1])})
    worker.lose()
    worker.store([2])
    worker.lose(False)

    await router.await_held({api.Worker(worker.id): names([1], [2])})


async def test_dead_worker_is_removed_and_its_successor_indexed(router, join):
    first = await Worker.start(await join())
    first.store([1, 2])
    await router.await_held({api.Worker(first.id): names([1, 2])})
    await first.die()
    await router.await_held({})
    async with asyncio.timeout(PATIENT_S):
        while router.index.num_blocks:  # it is swept without any event
            await asyncio.sleep(0)
    second = await Worker.start(await join())
    second.store([1])
    await router.await_held({api.Worker(second.id): names([1])})
    await second.die()


async def test_large_cache_is_replayed_in_parts(worker, join, monkeypatch):
    monkeypatch.setattr(kv_event_publisher, "RECENT_BLOCKS", 1)
    chains = [list(range(start, start + 500)) for start in range(1, 10_000, 500)]
    for chain in chains:
        worker.store(chain)
    router = await Router.start(await join())
    await router.await_held({api.Worker(worker.id): names(*chains)})
    await router.close()


async def test_refused_replay_is_requested_again(router, join):
    runtime, num_asked = await join(), 0

    def answer(call):
        nonlocal num_asked
        num_asked += 1
        if num_asked < 3:
            call.fail(errors.EngineFailed("not now"))
            return
        stored = kv_events.Stored(parent_hash=None, blocks=(kv_events.StoredBlock(7, 7),))
        call.reply(kv_events.ReplayPart(dp_rank=0, begins_anew=True, events=(stored,)))
        call.reply(kv_events.ReplayPart(dp_rank=0, position=kv_events.Position(1, 1)))
        call.finish()

    await runtime.register(
        instances.EndpointName("n", "backend", instances.KV_EVENTS_REPLAY), answer
    )

    await router.await_held({api.Worker(runtime.instance_id): {7}})
    assert num_asked == 3


async def test_noise_on_the_topic_is_ignored(worker, router):
    worker.store([1])
    await router.await_held({api.Worker(worker.id): names([1])})
    plane = worker.runtime.events
    stranger = kv_events.EventBatch(worker_id=99, epoch=1, first_event_id=0)
    for payload in (b"noise", msgspec.msgpack.encode(stranger)):
        plane.publish("n/backend/kv_events", payload)
    worker.store([-1])
    worker.store([2])

    await router.await_held({api.Worker(worker.id): names([1], [2])})


async def test_noise_of_one_worker_is_logged_once(worker, router, caplog):
    for number in range(5):
        noise = events.Event(topic="t", publisher=worker.id, number=number, payload=b"noise")
        router.feed._on_events([noise])

    assert caplog.text.count("ignored a KV event") == 1


async def test_malformed_replay_request_is_refused(worker, join):
    runtime = await join()
    client = runtime.client(instances.EndpointName("n", "backend", instances.KV_EVENTS_REPLAY))
    await client.wait_for_instances(PATIENT_S)

    with pytest.raises(errors.RemoteProtocolError, match="a replay"):
        await client.call("noise", reply_type=kv_events.ReplayPart)


async def test_silent_worker_is_asked_for_what_its_events_did_not_say(
    worker, router, monkeypatch, caplog
):
    """Nothing of it comes by the event plane, heartbeats neither; requests reach it."""
    monkeypatch.setattr(kv_event_subscriber, "SILENCE_S", 0.2)
    monkeypatch.setattr(kv_event_subscriber, "_WATCH_S", 0.05)
    worker.store([1, 2])
    await router.await_held({api.Worker(worker.id): names([1, 2])})
    worker.lose()
    worker.store([3, 4])
    await router.await_held({api.Worker(worker.id): names([1, 2], [3, 4])})
    worker.store([5, 6])
    await router.await_held({api.Worker(worker.id): names([1, 2], [3, 4], [5, 6])})
    warnings = [line for line in caplog.messages if line.startswith("no event of worker")]

    assert len(warnings) == 1


async def test_seconds_since_the_last_event_are_reported_by_worker(worker, join, monkeypatch):
    monkeypatch.setattr(kv_event_subscriber, "_WATCH_S", 0.02)
    router, ages = await Router.start(await join()), []
    router.feed._on_age = lambda *report: ages.append(report)
    worker.store([1])
    await router.await_held({api.Worker(worker.id): names([1])})
    worker.lose()
    await until(lambda: any(age > 0.3 for _, age in ages))
    await router.close()

    assert {instance_id for instance_id, _ in ages} == {worker.id}
