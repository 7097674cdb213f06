"""A worker within the process: memory planes, and an engine that does what the test says."""

import asyncio

import httpx
import pytest
from worker_fakes import FACTS, FakeEngine, make_request

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.engine import api
from dynamo.protocols import generate, instances, kv_events, model_card
from dynamo.runtime import component, requests
from dynamo.worker import canary, host

ENDPOINT = instances.EndpointName("dynamo", "backend", "generate")
CLEAR = instances.EndpointName("dynamo", "backend", "clear_kv_blocks")


def make_card(facts):
    return model_card.ModelCard(
        display_name="m",
        source_path="/m",
        context_length=facts.context_length,
        kv_cache_block_size=facts.kv_block_size,
    )


class Receiver:
    """The asking side."""

    def __init__(self):
        self.received, self.end = [], asyncio.get_running_loop().create_future()

    def receive(self, output):
        self.received.append(output)

    def replied(self, body):
        self.received.append(body)

    def ended(self, error):
        self.end.set_result(error)


class World:
    """One worker and one who asks it."""

    @classmethod
    async def make(cls):
        world, cluster = cls(), component.MemoryCluster()
        world.engine = FakeEngine()
        world.runtime = await component.DistributedRuntime.in_memory(cluster)
        world.asker = await component.DistributedRuntime.in_memory(cluster)
        world.host = host.Host(
            world.engine,
            world.runtime,
            ENDPOINT,
            make_card=make_card,
            request_limit=8,
            clock=clocks.SystemClock(),
        )
        return world

    async def ask(self, request=None):
        receiver = Receiver()
        client = self.asker.client(ENDPOINT)
        await client.wait_for_instances(1)
        stream = await client.open(request or make_request(), receiver)
        await until(lambda: self.engine.submitted)
        return receiver, stream

    async def keys(self):
        return list(await self.asker.discovery.get_prefix("v1/"))

    async def is_found(self):
        return any("/generate/" in key for key in await self.keys())

    async def tell(self, what):
        async with httpx.AsyncClient() as client:
            return await client.post(f"http://127.0.0.1:{self.port}/engine/{what}")

    async def health(self):
        async with httpx.AsyncClient() as client:
            return (await client.get(f"http://127.0.0.1:{self.port}/health")).status_code

    async def close(self):
        await self.host.stop(0)
        await self.asker.close()
        await self.runtime.close()


@pytest.fixture
async def world():
    world = await World.make()
    yield world
    await world.close()


async def until(condition):
    async with asyncio.timeout(2):
        while not condition():
            await asyncio.sleep(0)


def output(end=None):
    return api.EngineOutput("r", generate.Output((7,), end))


async def test_a_started_worker_is_found_with_its_card(world):
    card = await world.host.start()
    keys = await world.keys()

    assert card.context_length == FACTS.context_length
    assert [key for key in keys if key.startswith("v1/mdc/dynamo/backend/generate/")]
    assert [key for key in keys if key.startswith("v1/instances/dynamo/backend/clear_kv_blocks/")]


async def test_a_request_is_answered_over_the_planes(world):
    await world.host.start()
    receiver, _ = await world.ask()
    world.host.outputs([output()])
    world.host.outputs([output(generate.FinishReason.EOS)])

    assert await receiver.end is None
    assert len(receiver.received) == 2


async def test_a_cancelled_request_is_aborted_in_the_engine(world):
    await world.host.start()
    _, stream = await world.ask()
    stream.cancel()
    await until(lambda: world.engine.aborted)

    assert world.engine.aborted == ["r"]


async def test_blocks_are_cleared_on_demand(world):
    await world.host.start()
    reply = await requests.ask(
        world.asker.requests,
        (await address(world)),
        CLEAR.path,
        {},
        reply_type=dict,
        timeout_s=1,
    )

    assert reply["status"] == "success"
    assert world.engine.num_cleared == 1


async def address(world):
    client = world.asker.client(CLEAR)
    await client.wait_for_instances(1)
    return next(iter(client.instances.values())).transport["memory"]


async def test_a_stopped_worker_leaves_first_and_finishes_what_runs(world):
    await world.host.start()
    receiver, _ = await world.ask()
    stopping = asyncio.create_task(world.host.stop(5))
    while any("instances" in key for key in await world.keys()):
        await asyncio.sleep(0)

    assert world.engine.num_stopped == 0

    world.host.outputs([output(generate.FinishReason.EOS)])
    await stopping

    assert await receiver.end is None
    assert world.engine.num_stopped == 1


async def test_a_worker_that_holds_blocks_for_others_waits_until_they_are_read(world):
    is_asked, is_read = asyncio.Event(), asyncio.Event()

    class Exports:
        async def wait_until_released(self):
            is_asked.set()
            await is_read.wait()

    world.engine.capabilities = api.EngineCapabilities(kv_exports=Exports())
    await world.host.start()
    stopping = asyncio.create_task(world.host.stop(60))
    await is_asked.wait()

    assert world.engine.num_stopped == 0

    is_read.set()
    await stopping

    assert world.engine.num_stopped == 1


async def test_a_worker_whose_blocks_nobody_reads_waits_for_its_time_only(world, caplog):
    class Exports:
        async def wait_until_released(self):
            await asyncio.Event().wait()

    world.engine.capabilities = api.EngineCapabilities(kv_exports=Exports())
    await world.host.start()
    await world.host.stop(0.01)

    assert world.engine.num_stopped == 1
    assert "nobody came" in caplog.text


async def test_a_dead_engine_fails_its_requests_and_ends_the_worker(world):
    await world.host.start()
    receiver, _ = await world.ask()
    serving = asyncio.create_task(world.host.run_until(asyncio.Event()))
    await asyncio.sleep(0)
    world.host.died(errors.EngineFailed("out of memory"))
    with pytest.raises(errors.EngineFailed, match="out of memory"):
        await serving

    assert isinstance(await receiver.end, errors.WorkerLost)


async def test_what_does_not_finish_in_time_is_given_back(world):
    await world.host.start()
    receiver, _ = await world.ask()
    world.host.outputs([output()])
    await world.host.stop(0)
    error = await receiver.end

    assert (type(error), str(error)) == (errors.WorkerLost, "the worker stops: ask another")
    assert receiver.received == [output().output]


async def test_an_engine_that_hangs_ends_the_worker(world, monkeypatch):
    monkeypatch.setattr(host, "ENGINE_STOP_S", 0)
    world.engine.stop = asyncio.Event().wait
    world.host.ask_when_quiet(canary.Patience(wait_s=0, answer_s=0))
    await world.host.start()
    receiver, _ = await world.ask()
    with pytest.raises(errors.EngineFailed, match="hangs"):
        await world.host.run_until(asyncio.Event())
    await world.host.stop(5)

    assert isinstance(await receiver.end, errors.WorkerLost)


class Sleeper:
    """The engine's memory, and whether its worker is found while it is given back."""

    def __init__(self, world):
        self.world, self.heard = world, []

    async def sleep(self, level):
        self.heard.append(("sleep", level, await self.world.is_found()))

    async def wake_up(self, tags):
        self.heard.append(("wake up", *tags, await self.world.is_found()))
        return True


@pytest.fixture
async def asleep(world):
    """A world whose worker sleeps as soon as what ran has ended."""
    world.sleeper = Sleeper(world)
    world.host.sleep_when_told(world.sleeper, timeout_s=60)
    world.port = await world.host.open_system_port("127.0.0.1", 0)
    await world.host.start()
    receiver, _ = await world.ask()
    sleeping = asyncio.create_task(world.tell("sleep"))
    await until_not_found(world)
    assert (await world.health(), world.sleeper.heard) == (503, [])
    world.host.outputs([output(generate.FinishReason.EOS)])
    assert await receiver.end is None
    assert (await sleeping).status_code == 200
    return world


async def until_not_found(world):
    async with asyncio.timeout(5):
        while await world.is_found():
            await asyncio.sleep(0)


async def test_a_worker_that_is_put_to_sleep_leaves_first_and_comes_back_awake(asleep):
    meanwhile = await asleep.keys()
    woken = await asleep.tell("wake_up")
    asleep.engine.submitted.clear()
    receiver, _ = await asleep.ask()
    asleep.host.outputs([output(generate.FinishReason.EOS)])

    assert meanwhile == []
    assert asleep.engine.num_cleared == 1
    assert woken.json() == {"status": "ok", "message": "awake"}
    assert asleep.sleeper.heard == [("sleep", 1, False), ("wake up", False)]
    assert await receiver.end is None
    assert await asleep.health() == 200


async def test_a_worker_that_sleeps_stops_when_it_is_told(asleep):
    await asleep.host.stop(5)

    assert asleep.engine.num_stopped == 1


async def test_a_worker_whose_engine_fails_to_sleep_ends(world):
    async def fail(level):
        raise OSError("no memory")

    sleeper = Sleeper(world)
    sleeper.sleep = fail
    world.host.sleep_when_told(sleeper, timeout_s=0)
    world.port = await world.host.open_system_port("127.0.0.1", 0)
    await world.host.start()

    answer = await world.tell("sleep")

    assert answer.status_code == 500
    with pytest.raises(errors.EngineFailed, match="no memory"):
        await world.host.run_until(asyncio.Event())


async def test_a_canary_asks_no_engine_that_sleeps(world):
    asked = asyncio.Event()
    world.host.ask_when_quiet(canary.Patience(wait_s=0, answer_s=60))
    world.engine.submit = lambda request: asked.set()
    world.host.sleep_when_told(Sleeper(world), timeout_s=0)
    world.port = await world.host.open_system_port("127.0.0.1", 0)
    await world.host.start()
    await asked.wait()
    await world.tell("sleep")
    asked.clear()
    for _ in range(100):
        await asyncio.sleep(0)

    assert not asked.is_set()


async def test_a_worker_that_cannot_sleep_has_no_route_for_it(world):
    world.port = await world.host.open_system_port("127.0.0.1", 0)

    assert (await world.tell("sleep")).status_code == 404


async def test_kv_events_reach_whoever_listens(world):
    heard = []
    await world.asker.events.subscribe("dynamo/backend/kv_events", heard.extend)
    await world.host.start()
    world.host.kv_events([kv_events.Cleared()])
    await until(lambda: heard)

    assert heard[0].publisher == world.runtime.instance_id


async def test_an_engine_that_does_not_start_is_not_registered(world):
    async def fail(sink):
        raise errors.ConfigError("no such device")

    world.engine.start = fail
    with pytest.raises(errors.ConfigError):
        await world.host.start()

    assert await world.keys() == []


class Beside:
    """Notes when it is told what, and who can be found then."""

    def __init__(self, world):
        self.world, self.heard = world, []

    async def start(self):
        self.heard.append(("start", await self.world.is_found(), self.world.engine.is_stopped))

    async def leave(self):
        self.heard.append(("leave", await self.world.is_found(), self.world.engine.is_stopped))

    async def close(self):
        self.heard.append(("close", await self.world.is_found(), self.world.engine.is_stopped))


async def test_what_lives_beside_it_starts_before_it_is_found_and_leaves_before_what_runs_ends(
    monkeypatch,
):
    world = await World.make()
    world.engine.is_stopped = False
    beside = Beside(world)
    world.host.live_with([beside])
    stop = world.engine.stop

    async def stopped():
        world.engine.is_stopped = True
        await stop()

    monkeypatch.setattr(world.engine, "stop", stopped)
    await world.host.start()
    await world.close()

    assert beside.heard == [("start", False, False), ("leave", True, False), ("close", False, False)]  # fmt: skip
