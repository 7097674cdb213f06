"""Several workers in one process, over memory planes."""

import asyncio

import pytest
from worker_fakes import FakeEngine, make_request

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.protocols import instances, model_card
from dynamo.runtime import component
from dynamo.worker import fleet, host, metrics

ENDPOINT = instances.EndpointName("dynamo", "backend", "generate")


def make_card(facts):
    return model_card.ModelCard(
        display_name="m",
        source_path="/m",
        context_length=facts.context_length,
        kv_cache_block_size=facts.kv_block_size,
    )


class Receiver:
    """Nobody listens."""

    def receive(self, output):
        pass

    def replied(self, body):
        pass

    def ended(self, error):
        pass


class World:
    """Three workers under one lease, and one who asks them."""

    def __init__(self, runtime, asker):
        clock = clocks.SystemClock()
        self.asker = asker
        self.engines = [FakeEngine() for _ in range(3)]
        self.counts = metrics.WorkerMetrics(ENDPOINT, clock)
        self.made = []

        def make_host(engine, sibling):
            self.made.append(sibling.instance_id)
            return host.Host(
                engine,
                sibling,
                ENDPOINT,
                make_card=make_card,
                request_limit=8,
                clock=clock,
                counts=self.counts,
            )

        self.fleet = fleet.Fleet(
            self.engines, runtime, make_host, endpoint=ENDPOINT, counts=self.counts
        )

    async def ask(self, instance_id):
        client = self.asker.client(ENDPOINT)
        await client.wait_for_instances(1)
        await client.open(make_request(), Receiver(), instance_id=instance_id)

    async def known(self):
        return await self.asker.discovery.get_prefix(f"v1/instances/{ENDPOINT.path}/")


@pytest.fixture
async def world():
    cluster = component.MemoryCluster()
    async with (
        await component.DistributedRuntime.in_memory(cluster) as runtime,
        await component.DistributedRuntime.in_memory(cluster) as asker,
    ):
        made = World(runtime, asker)
        await made.fleet.start()
        yield made
        await made.fleet.stop(1)


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


async def test_each_is_an_instance_of_its_own(world):
    assert len(set(world.made)) == 3
    assert len(await world.known()) == 3

    await world.ask(world.made[1])
    await until(lambda: world.engines[1].submitted)

    assert [len(engine.submitted) for engine in world.engines] == [0, 1, 0]


async def test_counts_and_load_are_those_of_all(world):
    await world.ask(world.made[0])
    await world.ask(world.made[2])
    await until(lambda: world.engines[0].submitted and world.engines[2].submitted)
    port = await world.fleet.open_system_port("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    samples = dict(
        line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("dynamo_component")
    )

    assert samples["dynamo_component_kvstats_total_blocks"] == "192.0"
    assert samples["dynamo_component_kvstats_active_blocks"] == "2.0"
    assert [value for name, value in samples.items() if "requests_total{" in name] == ["2.0"]


async def test_they_are_told_to_stop_together(world):
    stop = asyncio.Event()
    running = asyncio.create_task(world.fleet.run_until(stop))
    stop.set()

    await running
    await world.fleet.stop(1)

    assert [engine.num_stopped for engine in world.engines] == [1, 1, 1]
    assert await world.known() == {}


async def test_one_engine_that_dies_ends_all(world):
    running = asyncio.create_task(world.fleet.run_until(asyncio.Event()))
    world.engines[1].sink.died(errors.EngineFailed("out of order"))

    with pytest.raises(errors.EngineFailed, match="out of order"):
        await running
