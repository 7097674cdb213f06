"""When a worker may change between prefill and decode, and what others see of it."""

import asyncio
import signal

import httpx
import pytest
from worker_fakes import FakeEngine

from dynamo.base import errors
from dynamo.engine import api
from dynamo.engine.mock.answers import TokenCycle
from dynamo.engine.mock.engine import MockEngine
from dynamo.engine.mock.settings import MockConfig
from dynamo.protocols import blocks, generate, instances, kv_events
from dynamo.runtime import component
from dynamo.worker import main, model_source, role_change, settings
from waiting import PATIENT_S, until

PREFILL, DECODE = (
    instances.EndpointName("dynamo", name, "generate") for name in ("prefill", "backend")
)


ONE_TOKEN = generate.StopConditions(max_tokens=1)


def published_blocks(world):
    parts = world.host._host._publisher.replay(kv_events.ReplayRequest(positions={}))
    return [
        block
        for part in parts
        for event in part.events
        if isinstance(event, kv_events.Stored)
        for block in event.blocks
    ]


class World:
    """A worker with a role, and what discovery has of it."""

    def __init__(self, runtime, role="decode"):
        self.runtime, self.stop = runtime, asyncio.Event()
        self.engine = MockEngine(
            MockConfig(block_size=16), cycle=TokenCycle((1, 2)), context_length=64
        )
        worker = settings.WorkerConfig(disaggregation_mode=role, max_local_prefill_length=0)
        self.host = main.make_role_host(worker, self.engine, runtime, model_source.built_in())

    async def serve(self):
        await self.host.start()
        self.running = asyncio.create_task(self.host.run_until(self.stop))

    async def instances(self, endpoint):
        return await self.runtime.discovery.get_prefix(f"{instances.INSTANCES}{endpoint.path}/")

    async def until_serving(self, endpoint):
        await until(lambda: self.instances(endpoint))


@pytest.fixture
async def world():
    async with await component.DistributedRuntime.in_memory(
        component.MemoryCluster(), item_type=generate.Output
    ) as runtime:
        world = World(runtime)
        await world.serve()
        yield world
        world.stop.set()
        await asyncio.wait([world.running])
        await world.host.stop(1)


async def test_change_is_another_instance_at_another_endpoint(world):
    before = await world.instances(DECODE)
    await world.host.change("prefill")
    during = await world.instances(PREFILL), await world.instances(DECODE)
    await world.host.change("decode")

    assert [len(found) for found in during] == [1, 0]
    assert not before.keys() & (await world.instances(DECODE)).keys()
    assert await world.instances(PREFILL) == {}


async def test_signal_orders_a_change(world):
    signal.raise_signal(signal.SIGUSR1)
    await world.until_serving(PREFILL)
    signal.raise_signal(signal.SIGUSR2)
    await world.until_serving(DECODE)


async def test_route_answers_when_the_worker_serves_in_its_role(world):
    port = await world.host.system_port.start("127.0.0.1", 0)
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(timeout=PATIENT_S) as client:
        for _ in range(2):
            answer = await client.post(f"{url}/engine/role", json={"role": "prefill"})
            assert answer.json() == {"status": "ok", "message": "serves as a prefill worker"}
        wrong = await client.post(f"{url}/engine/role", json={"role": "both"})
        health = await client.get(f"{url}/health")
        exposition = await client.get(f"{url}/metrics")
        asleep = await client.post(f"{url}/engine/sleep")
        refused = await client.post(f"{url}/engine/role", json={"role": "decode"})

    assert len(await world.instances(PREFILL)) == 0
    assert (wrong.status_code, health.status_code, asleep.status_code) == (400, 200, 200)
    assert 'dynamo_component="prefill"' in exposition.text
    assert refused.status_code == 409


async def test_second_change_is_refused_while_one_runs(world):
    changing = asyncio.create_task(world.host.change("prefill"))
    await asyncio.sleep(0)
    with pytest.raises(errors.Conflict, match="does not serve now"):
        await world.host.change("decode")
    await changing


async def test_adapters_that_were_loaded_are_in_the_card_of_the_new_role(world, tmp_path):
    await world.engine.load_lora("style", tmp_path)
    await world.host.change("prefill")

    cards = await world.runtime.discovery.get_prefix(f"{instances.CARDS}{PREFILL.path}/")
    assert [b'"style"' in card for card in cards.values()] == [True]


async def test_worker_that_is_stopped_while_it_changes_ends(world):
    changing = asyncio.create_task(world.host.change("prefill"))
    await asyncio.sleep(0)
    world.stop.set()
    await world.running
    await world.host.stop(1)

    with pytest.raises(errors.Conflict, match="the worker stops"):
        await changing
    assert await world.instances(PREFILL) == await world.instances(DECODE) == {}


async def test_worker_with_an_engine_that_dies_while_it_changes_ends(world, monkeypatch):
    async def die():
        world.engine._sink.died(errors.EngineFailed("out of memory"))
        await close()

    close = world.host._sibling.close
    monkeypatch.setattr(world.host._sibling, "close", die)
    changing = asyncio.create_task(world.host.change("prefill"))
    async with asyncio.timeout(PATIENT_S):
        await asyncio.wait([world.running, changing], return_when=asyncio.FIRST_COMPLETED)
    served = await world.instances(PREFILL)
    await world.host.stop(1)

    with pytest.raises(errors.Conflict, match="the worker stops"):
        await changing
    with pytest.raises(errors.EngineFailed, match="out of memory"):
        await world.running
    assert served == {}


async def test_blocks_stay_cached_and_the_new_role_publishes_them(world):
    world.engine.submit(
        generate.Request(
            id="r", model="m", token_ids=blocks.pack(range(40)), stop_conditions=ONE_TOKEN
        )
    )
    await until(lambda: published_blocks(world))
    before = published_blocks(world)
    await world.host.change("prefill")

    assert published_blocks(world) == before


async def test_decode_worker_knows_the_prompts_that_it_computed_in_its_former_role(world):
    tokens = blocks.pack(range(40))
    await world.host.change("prefill")
    world.engine.submit(
        generate.Request(id="r", model="m", token_ids=tokens, stop_conditions=ONE_TOKEN)
    )
    await until(lambda: published_blocks(world))
    await world.host.change("decode")

    assert world.host._host._engine._cached.count_tokens(tokens, 16) == 32
    assert len(published_blocks(world)) == 2


@pytest.mark.parametrize(
    ("fields", "engine_can", "can"),
    [
        ({"disaggregation_mode": "decode"}, True, True),
        ({"is_prefill_worker": True}, True, True),
        ({"disaggregation_mode": "decode"}, False, False),
        ({}, True, False),
        ({"disaggregation_mode": "agg"}, True, False),
        ({"disaggregation_mode": "decode", "endpoint": "dyn://a.b.generate"}, True, False),
    ],
)
def test_role_changes_only_with_a_role_at_the_usual_endpoint(fields, engine_can, can):
    engine = FakeEngine()
    if engine_can:
        engine.capabilities = api.EngineCapabilities(role_changer=MockEngine.__new__(MockEngine))

    assert role_change.can_change_role(settings.WorkerConfig(**fields), engine) is can
