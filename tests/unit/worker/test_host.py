"""A worker within the process, and several of them: memory planes, and an engine that does what the test says."""

import asyncio

import httpx
import pytest
from worker_fakes import FACTS, FakeEngine, make_request

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.engine import api
from dynamo.protocols import generate, instances, kv_events, kv_transfer, model_card
from dynamo.runtime import component, requests
from dynamo.worker import health, host
from waiting import PATIENT_S

ENDPOINT = instances.EndpointName("dynamo", "backend", "generate")
OPTIONS = host.HostOptions(request_limit=8)
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
    async def make(cls, options=OPTIONS, make_capabilities=None, make_hooks=None):
        world, cluster = cls(), component.MemoryCluster()
        world.engine = FakeEngine()
        if make_capabilities is not None:
            world.engine.capabilities = api.EngineCapabilities(**make_capabilities(world))
        world.runtime = await component.DistributedRuntime.in_memory(
            cluster, item_type=generate.Output
        )
        world.asker = await component.DistributedRuntime.in_memory(
            cluster, item_type=generate.Output
        )
        world.host = host.Host(
            world.engine,
            world.runtime,
            ENDPOINT,
            make_card=make_card,
            options=options,
            clock=clocks.SystemClock(),
            hooks=make_hooks(world) if make_hooks is not None else (),
        )
        return world

    async def ask(self, request=None):
        receiver = Receiver()
        client = self.asker.client(ENDPOINT)
        await client.wait_for_instances(PATIENT_S)
        stream = await client.open(request or make_request(), receiver)
        await until(lambda: self.engine.submitted)
        return receiver, stream

    async def keys(self):
        return list(await self.asker.discovery.get_prefix("v1/"))

    async def is_found(self):
        return any("/generate/" in key for key in await self.keys())

    async def tell(self, what):
        async with httpx.AsyncClient(timeout=PATIENT_S) as client:
            return await client.post(f"http://127.0.0.1:{self.port}/engine/{what}")

    async def health(self):
        async with httpx.AsyncClient(timeout=PATIENT_S) as client:
            return (await client.get(f"http://127.0.0.1:{self.port}/health")).status_code

    async def close(self):
        await self.host.stop(0)
        await self.asker.close()
        await self.runtime.close()


@pytest.fixture
async def worlds():
    """Makes a world; all are closed at the end."""
    made = []

    async def make(*args, **kwargs):
        made.append(await World.make(*args, **kwargs))
        return made[-1]

    yield make
    for world in made:
        await world.close()


@pytest.fixture
async def world(worlds):
    return await worlds()


async def until(condition):
    async with asyncio.timeout(PATIENT_S):
        while not condition():
            await asyncio.sleep(0)


def output(end=None):
    return api.EngineOutput("r", generate.Output((7,), end))


async def test_worker_that_could_not_start_ends_without_a_time_of_grace(worlds):
    class Hook:
        async def start(self):
            raise errors.ConfigError("no queue")

        async def leave(self):
            pass

        async def close(self):
            pass

    world = await worlds(make_hooks=lambda _: (Hook(),))
    with pytest.raises(errors.ConfigError, match="no queue"):
        await world.host.start()
    async with asyncio.timeout(PATIENT_S):
        await world.host.stop(0, grace_s=3600)


async def test_started_worker_is_in_discovery_with_a_card(world):
    card = await world.host.start()
    keys = await world.keys()

    assert card.context_length == FACTS.context_length
    assert [key for key in keys if key.startswith("v1/mdc/dynamo/backend/generate/")]
    assert [key for key in keys if key.startswith("v1/instances/dynamo/backend/clear_kv_blocks/")]


async def test_request_is_answered_over_the_request_plane(world):
    await world.host.start()
    receiver, _ = await world.ask()
    world.host.outputs([output()])
    world.host.outputs([output(generate.FinishReason.EOS)])

    assert await receiver.end is None
    assert len(receiver.received) == 2


async def test_cancelled_request_is_aborted_in_the_engine(world):
    await world.host.start()
    _, stream = await world.ask()
    stream.cancel()
    await until(lambda: world.engine.aborted)

    assert world.engine.aborted == ["r"]


async def test_blocks_are_cleared_on_demand(world):
    await world.host.start()
    reply = await requests.call(
        world.asker.requests,
        (await address(world)),
        CLEAR.path,
        {},
        reply_type=dict,
        timeout_s=PATIENT_S,
    )

    assert reply["status"] == "success"
    assert world.engine.num_cleared == 1


async def address(world):
    client = world.asker.client(CLEAR)
    await client.wait_for_instances(PATIENT_S)
    return next(iter(client.instances.values())).transport["memory"]


async def test_stopped_worker_leaves_discovery_and_finishes_running_requests(world):
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


async def test_stopping_worker_waits_until_its_exported_blocks_are_read(world):
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


async def test_stopping_worker_waits_for_exported_blocks_until_its_deadline(world, caplog):
    class Exports:
        async def wait_until_released(self):
            await asyncio.Event().wait()

    world.engine.capabilities = api.EngineCapabilities(kv_exports=Exports())
    await world.host.start()
    await world.host.stop(0.01)

    assert world.engine.num_stopped == 1
    assert "no worker copied them" in caplog.text


async def test_dead_engine_ends_the_worker(world):
    await world.host.start()
    receiver, _ = await world.ask()
    serving = asyncio.create_task(world.host.run_until(asyncio.Event()))
    await asyncio.sleep(0)
    world.host.died(errors.EngineFailed("out of memory"))
    with pytest.raises(errors.EngineFailed, match="out of memory"):
        await serving

    assert isinstance(await receiver.end, errors.WorkerLost)


async def test_request_that_exceeds_the_drain_is_handed_over(world):
    await world.host.start()
    receiver, _ = await world.ask()
    world.host.outputs([output()])
    await world.host.stop(0)
    error = await receiver.end

    assert (type(error), str(error)) == (errors.WorkerLost, "the worker stops: ask another")
    assert receiver.received == [output().output]


async def test_hanging_engine_ends_the_worker(worlds, monkeypatch):
    monkeypatch.setattr(host, "ENGINE_STOP_S", 0)
    check = health.HealthCheck(wait_s=0, answer_s=0)
    world = await worlds(host.HostOptions(request_limit=8, health_check=check))
    world.engine.stop = asyncio.Event().wait
    await world.host.start()
    receiver, _ = await world.ask()
    with pytest.raises(errors.EngineFailed, match="hangs"):
        await world.host.run_until(asyncio.Event())
    await world.host.stop(5)

    assert isinstance(await receiver.end, errors.WorkerLost)


async def test_probe_is_no_request_too_many(worlds, monkeypatch):
    """An engine that hangs keeps all its requests, so a refused probe would say nothing of it."""
    monkeypatch.setattr(host, "ENGINE_STOP_S", 0)
    check = health.HealthCheck(wait_s=0.1, answer_s=0)
    world = await worlds(host.HostOptions(request_limit=1, health_check=check))
    await world.host.start()
    receiver, _ = await world.ask()
    async with asyncio.timeout(PATIENT_S):
        with pytest.raises(errors.EngineFailed, match="hangs"):
            await world.host.run_until(asyncio.Event())

    assert isinstance(await receiver.end, errors.WorkerLost)


@pytest.mark.parametrize(
    ("is_aggregated", "params"), [(True, None), (False, kv_transfer.COMPUTE_LOCALLY)]
)
async def test_probe_is_computed_by_the_engine_itself(worlds, is_aggregated, params):
    """A decode worker would else be given up because a prefill worker is slow, to which vLLM's gives every prompt."""
    check = health.HealthCheck(wait_s=0.01, answer_s=60)
    options = host.HostOptions(request_limit=8, is_aggregated=is_aggregated, health_check=check)
    world = await worlds(options)
    await world.host.start()
    await until(lambda: world.engine.submitted)
    (probe,) = world.engine.submitted

    assert (probe.id, probe.kv_transfer_params) == ("canary", params)


class SlowAdapters:
    """Adapters that an engine reads for so long that it does nothing else, also afterwards."""

    lora_names = ()

    def __init__(self, engine):
        self.engine, self.is_read = engine, asyncio.Event()
        engine.submit = self.refuse

    def refuse(self, request):
        raise errors.Overloaded("as an answer to the probe")

    async def load_lora(self, name, directory):
        self.engine.submit = lambda request: None
        await self.is_read.wait()


def with_slow_adapters(world):
    world.store = SlowAdapters(world.engine)
    return {"lora_adapters": world.store}


async def test_engine_that_reads_an_adapter_counts_as_alive(worlds, monkeypatch, tmp_path):
    monkeypatch.setattr(host, "ENGINE_STOP_S", 0)
    (tmp_path / "adapter_config.json").touch()
    check = health.HealthCheck(wait_s=0.01, answer_s=0.01)
    options = host.HostOptions(request_limit=8, health_check=check)
    world = await worlds(options, with_slow_adapters)
    world.port = await world.host.system_port.start("127.0.0.1", 0)
    await world.host.start()
    running = asyncio.create_task(world.host.run_until(asyncio.Event()))
    async with httpx.AsyncClient(timeout=PATIENT_S) as client:
        body = {"lora_name": "poet", "source": {"uri": str(tmp_path)}}
        loading = asyncio.create_task(
            client.post(f"http://127.0.0.1:{world.port}/v1/loras", json=body)
        )
        await asyncio.wait([running], timeout=0.5)
        was_alive = not running.done()
        world.store.is_read.set()
        answer = await loading
    with pytest.raises(errors.EngineFailed, match="hangs"):
        await running

    assert was_alive
    assert answer.status_code == 200


class Sleeper:
    """The engine's memory, and whether its worker is found while it is given back."""

    def __init__(self, world):
        self.world, self.heard = world, []

    async def sleep(self, level):
        self.heard.append(("sleep", level, await self.world.is_found()))

    async def wake_up(self, tags):
        self.heard.append(("wake up", *tags, await self.world.is_found()))
        return True


def with_sleeper(world):
    world.sleeper = Sleeper(world)
    return {"sleep": world.sleeper}


@pytest.fixture
async def asleep(worlds):
    """A world with a worker that sleeps, since its running request has ended."""
    options = host.HostOptions(request_limit=8, drain_timeout_s=60)
    world = await worlds(options, with_sleeper)
    world.port = await world.host.system_port.start("127.0.0.1", 0)
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
    async with asyncio.timeout(PATIENT_S):
        while await world.is_found():
            await asyncio.sleep(0)


async def test_sleeping_worker_leaves_discovery_and_returns_when_woken(asleep):
    meanwhile = await asleep.keys()
    woken = await asleep.tell("wake_up")
    asleep.engine.submitted.clear()
    receiver, _ = await asleep.ask()
    asleep.host.outputs([output(generate.FinishReason.EOS)])

    assert meanwhile == [f"{instances.STARTS}{asleep.runtime.instance_id:x}"]  # requests may wait
    assert meanwhile[0] not in await asleep.keys()
    assert asleep.engine.num_cleared == 1
    assert woken.json() == {"status": "ok", "message": "awake"}
    assert asleep.sleeper.heard == [("sleep", 1, False), ("wake up", False)]
    assert await receiver.end is None
    assert await asleep.health() == 200


async def test_sleeping_worker_can_be_stopped(asleep):
    await asleep.host.stop(5)

    assert asleep.engine.num_stopped == 1


async def test_worker_ends_if_the_engine_fails_to_sleep(worlds):
    async def fail(level):
        raise OSError("no memory")

    world = await worlds(host.HostOptions(request_limit=8, drain_timeout_s=0), with_sleeper)
    world.sleeper.sleep = fail
    world.port = await world.host.system_port.start("127.0.0.1", 0)
    await world.host.start()

    answer = await world.tell("sleep")

    assert answer.status_code == 500
    with pytest.raises(errors.EngineFailed, match="no memory"):
        await world.host.run_until(asyncio.Event())


async def test_sleeping_engine_is_not_probed(worlds):
    asked = asyncio.Event()
    check = health.HealthCheck(wait_s=0, answer_s=60)
    options = host.HostOptions(request_limit=8, drain_timeout_s=0, health_check=check)
    world = await worlds(options, with_sleeper)
    world.engine.submit = lambda request: asked.set()
    world.port = await world.host.system_port.start("127.0.0.1", 0)
    await world.host.start()
    await asked.wait()
    await world.tell("sleep")
    asked.clear()
    for _ in range(100):
        await asyncio.sleep(0)

    assert not asked.is_set()


async def test_worker_without_sleep_support_has_no_sleep_route(world):
    world.port = await world.host.system_port.start("127.0.0.1", 0)

    assert (await world.tell("sleep")).status_code == 404


async def test_kv_events_reach_subscribers(world):
    heard = []
    await world.asker.events.subscribe("dynamo/backend/kv_events", heard.extend)
    await world.host.start()
    world.host.kv_events([kv_events.Cleared()])
    await until(lambda: heard)

    assert heard[0].publisher == world.runtime.instance_id


async def test_system_port_may_be_shown_before_the_worker_is_found(world):
    found = []

    async def look():
        found.append(await world.is_found())

    await world.host.start(look)

    assert found == [False]
    assert await world.is_found()


async def test_worker_is_not_registered_if_the_engine_fails_to_start(world):
    async def fail(sink):
        raise errors.ConfigError("no such device")

    world.engine.start = fail
    with pytest.raises(errors.ConfigError):
        await world.host.start()

    assert await world.keys() == []


class Hook:
    """Records each call to it, with whether the worker is in discovery and its engine stopped then."""

    def __init__(self, world):
        self.world, self.calls = world, []

    async def start(self):
        self.calls.append(("start", await self.world.is_found(), self.world.engine.num_stopped))

    async def leave(self):
        self.calls.append(("leave", await self.world.is_found(), self.world.engine.num_stopped))

    async def close(self):
        self.calls.append(("close", await self.world.is_found(), self.world.engine.num_stopped))


async def test_lifecycle_hook_starts_before_registration_and_closes_after_the_drain():
    def make_hooks(world):
        world.hook = Hook(world)
        return [world.hook]

    world = await World.make(make_hooks=make_hooks)
    await world.host.start()
    await world.close()

    assert world.hook.calls == [("start", False, 0), ("leave", True, 0), ("close", False, 0)]


class SilentReceiver:
    """The asking side that ignores all answers."""

    def receive(self, output):
        pass

    def replied(self, body):
        pass

    def ended(self, error):
        pass


class FleetWorld:
    """Three workers under one lease, and one who asks them."""

    def __init__(self, runtime, asker):
        clock = clocks.SystemClock()
        self.asker = asker
        self.engines = [FakeEngine() for _ in range(3)]
        self.counts = health.WorkerMetrics(ENDPOINT, clock)
        self.built = []

        def make_host(engine, sibling):
            self.built.append(sibling.instance_id)
            return host.Host(
                engine,
                sibling,
                ENDPOINT,
                make_card=make_card,
                options=OPTIONS,
                clock=clock,
                counters=self.counts,
            )

        self.fleet = host.Fleet(
            self.engines, runtime, make_host, endpoint=ENDPOINT, counters=self.counts
        )

    async def ask(self, instance_id):
        client = self.asker.client(ENDPOINT)
        await client.wait_for_instances(PATIENT_S)
        await client.open(make_request(), SilentReceiver(), instance_id=instance_id)

    async def known(self):
        return await self.asker.discovery.get_prefix(f"v1/instances/{ENDPOINT.path}/")


@pytest.fixture
async def fleet_world():
    cluster = component.MemoryCluster()
    async with (
        await component.DistributedRuntime.in_memory(cluster, item_type=generate.Output) as runtime,
        await component.DistributedRuntime.in_memory(cluster, item_type=generate.Output) as asker,
    ):
        built = FleetWorld(runtime, asker)
        await built.fleet.start()
        yield built
        await built.fleet.stop(1)


async def test_each_host_of_a_fleet_is_an_instance(fleet_world):
    assert len(set(fleet_world.built)) == 3
    assert len(await fleet_world.known()) == 3

    await fleet_world.ask(fleet_world.built[1])
    await until(lambda: fleet_world.engines[1].submitted)

    assert [len(engine.submitted) for engine in fleet_world.engines] == [0, 1, 0]


async def test_metrics_of_a_fleet_are_those_of_all_hosts(fleet_world):
    await fleet_world.ask(fleet_world.built[0])
    await fleet_world.ask(fleet_world.built[2])
    await until(lambda: fleet_world.engines[0].submitted and fleet_world.engines[2].submitted)
    port = await fleet_world.fleet.system_port.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    samples = dict(
        line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("dynamo_component")
    )

    assert samples["dynamo_component_kvstats_total_blocks"] == "192.0"
    assert samples["dynamo_component_kvstats_active_blocks"] == "2.0"
    assert [value for name, value in samples.items() if "_total_blocks{" in name] == ["192.0"]
    assert [value for name, value in samples.items() if "requests_total{" in name] == ["2.0"]


async def test_hosts_of_a_fleet_stop_together(fleet_world):
    stop = asyncio.Event()
    running = asyncio.create_task(fleet_world.fleet.run_until(stop))
    stop.set()

    await running
    await fleet_world.fleet.stop(1)

    assert [engine.num_stopped for engine in fleet_world.engines] == [1, 1, 1]
    assert await fleet_world.known() == {}


async def test_death_of_one_engine_ends_the_fleet(fleet_world):
    running = asyncio.create_task(fleet_world.fleet.run_until(asyncio.Event()))
    fleet_world.engines[1].sink.died(errors.EngineFailed("out of order"))

    with pytest.raises(errors.EngineFailed, match="out of order"):
        await running


async def test_metrics_of_a_sleeping_worker_show_its_load_and_not_that_before_it_slept(worlds):
    world = await worlds(host.HostOptions(request_limit=8, drain_timeout_s=0), with_sleeper)
    world.port = await world.host.system_port.start("127.0.0.1", 0)
    await world.host.start()
    await world.ask()
    busy = world.host.render_metrics()
    await world.tell("sleep")  # its request is handed over

    assert b"kvstats_active_blocks 1.0" in busy
    assert b"kvstats_active_blocks 0.0" in world.host.render_metrics()


async def test_worker_sleeps_though_discovery_takes_no_promise_of_its_return(worlds, monkeypatch):
    async def refuse(key, value):
        raise errors.ConfigError("no space left on device")

    world = await worlds(host.HostOptions(request_limit=8, drain_timeout_s=0), with_sleeper)
    world.port = await world.host.system_port.start("127.0.0.1", 0)
    await world.host.start()
    monkeypatch.setattr(world.runtime.discovery, "put", refuse)

    assert (await world.tell("sleep")).json() == {"status": "ok", "message": "asleep (level 1)"}
    monkeypatch.undo()
