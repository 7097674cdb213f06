"""The prefill workers of a decode worker: cards come and go, engines connect."""

import asyncio
import base64

import msgspec
import pytest

from dynamo.base import errors
from dynamo.disagg import prefill_workers
from dynamo.protocols import instances, kv_transfer, model_card
from dynamo.runtime.backends import memory
from dynamo.testing import clock as clocks
from waiting import PATIENT_S

ENDPOINT = instances.EndpointName("dynamo", "prefill", "generate")


class Engine:
    """Connects to engines that are not `unreachable`; the id is the metadata."""

    def __init__(self):
        self.connected, self.gone, self.unreachable, self.num_tried = [], [], set(), 0
        self.error = errors.TransferError("nobody there")

    async def connect_peer(self, metadata, *, deadline_s):
        self.num_tried += 1
        if metadata in self.unreachable:
            raise self.error
        self.connected.append(metadata.decode())
        return metadata.decode()

    async def disconnect_peer(self, engine_id):
        self.gone.append(engine_id)


class World:
    def __init__(self):
        self.engine = Engine()
        self.clock = clocks.VirtualClock()
        self.registry = memory.MemoryDiscovery(memory.MemoryRegistry())
        self.published, self.is_registered = [], True
        self.workers = prefill_workers.PrefillWorkers(
            ENDPOINT,
            self.registry,
            self.engine,
            self.clock,
            is_usable=lambda card: card.display_name == "m",
            publish=self.publish,
        )
        self.workers.start()

    async def publish(self, unreachable):
        if not self.is_registered:
            raise errors.Conflict("not registered")
        self.published.append(unreachable)

    def key(self, instance_id):
        return f"{instances.CARDS}{ENDPOINT.path}/{instance_id:x}"

    async def join(self, instance_id, metadata=b"e1", *, name="m", data=None, lora_names=()):
        if data is None:
            data = {kv_transfer.METADATA_KEY: base64.b64encode(metadata).decode()}
        card = model_card.ModelCard(
            display_name=name,
            source_path="/m",
            context_length=8,
            kv_cache_block_size=4,
            runtime_config=model_card.ModelRuntimeConfig(runtime_data=data),
            lora_names=lora_names,
        )
        record = model_card.CardRecord(
            namespace="dynamo",
            component="prefill",
            endpoint="generate",
            instance_id=instance_id,
            card_json=card,
        )
        await self.registry.put(self.key(instance_id), msgspec.json.encode(record))


async def until(check):
    async with asyncio.timeout(PATIENT_S):
        while not check():
            await asyncio.sleep(0)


@pytest.fixture
async def world():
    world = World()
    yield world
    await world.workers.close()


async def test_worker_is_used_from_its_connection_until_it_is_gone(world):
    await world.join(0x1F)
    await until(lambda: world.workers.connected == [0x1F])
    await world.registry.delete(world.key(0x1F))
    await until(lambda: not world.workers.connected)

    assert world.engine.gone == ["e1"]


async def test_worker_is_unreachable_until_our_own_agent_can_start(world):
    """As long as another process has its port: else prompts would be computed there, and here as well."""
    world.engine.error = errors.ConfigError("the port is taken")
    world.engine.unreachable = {b"e1"}
    await world.join(0x1F)
    await until(lambda: world.published == [frozenset({0x1F})])
    world.engine.unreachable = set()
    await world.clock.advance(1)
    await until(lambda: world.published[-1] == frozenset())

    assert world.workers.connected == [0x1F]


async def test_number_of_workers_is_logged_every_five_seconds(world, caplog):
    line = "Current Prefill Workers: "
    with caplog.at_level("DEBUG", logger=prefill_workers.__name__):
        await world.clock.advance(20)
        num_before = caplog.text.count(line)
        await world.join(1)
        await until(lambda: world.workers.connected)
        await world.clock.advance(10)

    assert (num_before, caplog.text.count(f"{line}1")) == (0, 2)


async def test_unreachable_worker_is_tried_again(world):
    world.engine.unreachable.add(b"e1")
    await world.join(1)
    await until(lambda: world.engine.num_tried == 1)
    await world.clock.advance(prefill_workers.RETRY_S)
    assert world.engine.num_tried == 2
    assert not world.workers.connected

    world.engine.unreachable.clear()
    await world.clock.advance(prefill_workers.RETRY_S)
    await until(lambda: world.workers.connected == [1])


async def test_worker_that_cannot_be_reached_is_published_until_it_can(world):
    await world.join(1)
    await until(lambda: world.workers.connected == [1])
    world.engine.unreachable.add(b"e1")
    world.workers.reconnect("e1")
    await until(lambda: world.published)
    await world.clock.advance(3 * prefill_workers.RETRY_S)
    world.engine.unreachable.clear()
    await world.clock.advance(prefill_workers.RETRY_S + prefill_workers.PUBLISH_S)

    assert world.published == [{1}, set()]


async def test_unreachable_worker_that_leaves_is_published_no_more(world):
    world.engine.unreachable.add(b"e1")
    await world.join(1)
    await until(lambda: world.published == [{1}])
    await world.registry.delete(world.key(1))
    await until(lambda: world.engine.num_tried and not world.workers._unreachable)
    await world.clock.advance(prefill_workers.PUBLISH_S)

    assert world.published == [{1}, set()]


async def test_unreachable_worker_is_published_once_this_worker_is_registered(world):
    world.is_registered = False
    world.engine.unreachable.add(b"e1")
    await world.join(1)
    await until(lambda: world.engine.num_tried)
    world.is_registered = True
    await world.clock.advance(prefill_workers.PUBLISH_S)

    assert world.published == [{1}]


async def test_worker_with_a_failed_copy_is_used_again_after_a_new_connection(world):
    await world.join(1)
    await until(lambda: world.workers.connected == [1])
    world.workers.reconnect("e1")
    assert not world.workers.connected

    await until(lambda: world.workers.connected == [1])
    assert world.engine.connected == ["e1", "e1"]


async def test_worker_that_leaves_while_it_is_connected_to_anew_is_disconnected(world):
    await world.join(1)
    await until(lambda: world.workers.connected)
    world.engine.unreachable.add(b"e1")
    world.workers.reconnect("e1")
    await world.registry.delete(world.key(1))

    await until(lambda: world.engine.gone == ["e1"])


async def test_workers_of_other_models_and_broken_cards_are_ignored(world, caplog):
    await world.join(1, name="other")
    await world.join(2, data={kv_transfer.METADATA_KEY: "?"})
    await world.join(3, data={})
    await world.join(4)
    await until(lambda: world.workers.connected)

    assert world.workers.connected == [4]
    assert caplog.text.count("ignored the prefill worker") == 2


async def test_adapter_can_be_used_if_all_workers_have_it(world):
    await world.join(1, b"e1", lora_names=("poet",))
    await until(lambda: len(world.workers.connected) == 1)
    alone = world.workers.all_have_adapter("poet")
    await world.join(2, b"e2")
    await until(lambda: len(world.workers.connected) == 2)
    together = world.workers.all_have_adapter("poet")
    await world.registry.delete(world.key(2))
    await until(lambda: len(world.workers.connected) == 1)

    assert (alone, together, world.workers.all_have_adapter("poet")) == (True, False, True)


async def test_worker_whose_adapters_change_stays_connected(world):
    await world.join(1, b"e1")
    await until(lambda: world.workers.connected == [1])

    await world.join(1, b"e1", lora_names=("poet",))
    await until(lambda: world.workers.all_have_adapter("poet"))
    await world.join(1, b"e1")
    await until(lambda: not world.workers.all_have_adapter("poet"))

    assert world.workers.connected == [1]
    assert world.engine.connected == ["e1"]
    assert world.engine.gone == []


async def test_card_that_is_nested_without_end_is_left_out_and_the_next_one_read(world):
    await world.registry.put(world.key(7), b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    await world.join(0x1F)

    await until(lambda: world.workers.connected == [0x1F])
