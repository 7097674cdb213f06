"""A user's engine tells routers by its publishers which KV blocks it holds, and how many are in use."""

import asyncio

import msgspec
import pytest
import zmq

from dynamo.base import clock, errors, tasks
from dynamo.llm import (
    KvEventPublisher,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerMetricsPublisher,
    register_model,
)
from dynamo.protocols import blocks, generate, kv_events, load
from dynamo.router import kv_event_subscriber, prefix_index
from dynamo.runtime import component
from waiting import PATIENT_S, until

NAME = "dynamo.backend.generate"
BLOCK = 2
TOKENS = (1, 2, 3, 4, 5)  # two blocks and a half


@pytest.fixture
async def cluster():
    return component.MemoryCluster()


@pytest.fixture
async def runtime(cluster):
    async with await component.DistributedRuntime.in_memory(
        cluster, item_type=generate.Output
    ) as runtime:
        yield runtime


class Router:
    """What a router knows of the workers."""

    def __init__(self, runtime):
        self.index = prefix_index.PrefixIndex()
        self.subscriber = kv_event_subscriber.KvEventSubscriber(
            runtime,
            self.index,
            namespace="dynamo",
            component_name="backend",
            clock=clock.SystemClock(),
        )

    def cached(self, rank=0, lora_name=None, cache_salt=None, tokens=TOKENS):
        """Return how many of a prompt's first blocks the rank of the one worker has."""
        seed = blocks.seed_of(lora_name, cache_salt)
        names = blocks.sequence_hashes(blocks.local_hashes(blocks.pack(tokens), BLOCK, seed))
        depths = self.index.find_matches(names).by_tier.get(kv_events.DEVICE, {})
        return sum(depth for worker, depth in depths.items() if worker.dp_rank == rank)


@pytest.fixture
async def router(cluster):
    async with await component.DistributedRuntime.in_memory(cluster) as runtime:
        router = Router(runtime)
        await router.subscriber.start()
        yield router
        await router.subscriber.close()


def publisher_of(runtime, **options):
    return KvEventPublisher(runtime.endpoint(NAME), kv_block_size=BLOCK, **options)


async def test_router_knows_the_blocks_that_an_engine_stores_and_removes(runtime, router):
    publisher = publisher_of(runtime)
    publisher.publish_stored([1, 2, 3, 4], [2, 2], [-7, 8])
    await until(lambda: router.cached() == 2)

    publisher.publish_removed([8])
    await until(lambda: router.cached() == 1)

    publisher.publish_stored([3, 4], [2], [9], parent_hash=-7)
    await until(lambda: router.cached() == 2)


async def test_router_that_starts_late_learns_the_blocks_of_each_rank(runtime, cluster):
    publisher_of(runtime).publish_stored(TOKENS[:4], [2, 2], [7, 8])
    publisher_of(runtime, dp_rank=1).publish_stored(TOKENS[:2], [2], [7])
    async with await component.DistributedRuntime.in_memory(cluster) as other:
        router = Router(other)
        await router.subscriber.start()
        await until(lambda: (router.cached(), router.cached(rank=1)) == (2, 1))
        await router.subscriber.close()


@pytest.mark.parametrize("is_model_first", [True, False])
async def test_blocks_of_another_size_than_the_model_has_are_named_once(
    runtime, caplog, is_model_first
):
    async def register():
        endpoint = runtime.endpoint(NAME)
        await register_model(
            ModelInput.Tokens, ModelType.Chat, endpoint, "storyteller", kv_cache_block_size=4
        )

    if is_model_first:
        await register()
    publisher = publisher_of(runtime)
    if not is_model_first:
        await register()
    for number in range(2):
        publisher.publish_stored([1, 2], [2], [number])
    await until(lambda: "of 2 tokens (kv_block_size)" in caplog.text)
    await asyncio.sleep(0)

    (warning,) = [each for each in caplog.messages if "kv_block_size" in each]
    assert "4 (kv_cache_block_size of register_model)" in warning


async def test_batch_is_published_in_order(runtime, router):
    publisher_of(runtime).publish_batch(
        [
            {"type": "stored", "token_ids": [1, 2], "num_block_tokens": [2], "block_hashes": [7]},
            {"type": "removed", "block_hashes": [7]},
            {
                "type": "stored",
                "token_ids": [1, 2, 3, 4],
                "num_block_tokens": [2, 2],
                "block_hashes": [5, 6],
                "cache_salt": "pepper",
            },
        ]
    )
    await until(lambda: router.cached(cache_salt="pepper") == 2)
    assert router.cached() == 0


async def test_any_thread_may_publish(runtime, router):
    publisher = publisher_of(runtime)
    await asyncio.to_thread(publisher.publish_stored, [1, 2], [2], [7])
    await until(lambda: router.cached() == 1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"lora_name": "adapter"}, {"lora_name": "adapter"}),
        ({"cache_salt": "pepper"}, {"cache_salt": "pepper"}),
        (
            {"lora_name": "adapter", "cache_salt": "pepper"},
            {"lora_name": "adapter", "cache_salt": "pepper"},
        ),
    ],
)
async def test_blocks_are_those_of_their_adapter_and_salt(runtime, router, options, expected):
    publisher_of(runtime).publish_stored([1, 2, 3, 4], [2, 2], [7, 8], **options)
    await until(lambda: router.cached(**expected) == 2)
    assert router.cached() == 0


async def test_block_that_no_other_prompt_has_by_its_tokens_alone_is_left_out(runtime, router):
    publisher = publisher_of(runtime)
    image = {"mm_objects": [{"mm_hash": 5}]}
    publisher.publish_stored([9, 9], [2], [3], parent_hash=2)  # of which nobody knows the parent
    publisher.publish_stored(
        [1, 2, 3, 4, 5], [2, 2, 1], [7, 8, 9], block_mm_infos=[None, image, None]
    )
    await until(lambda: router.cached() == 1)
    assert router.index.num_blocks == 1


async def test_block_that_is_not_full_is_left_out(runtime, router):
    publisher_of(runtime).publish_stored(TOKENS, [2, 2, 1], [7, 8, 9])
    await until(lambda: router.cached() == 2)
    assert router.index.num_blocks == 2


async def test_events_of_the_engines_own_publisher_are_relayed(runtime, router):
    with zmq.Context() as context, context.socket(zmq.XPUB) as engine:
        port = engine.bind_to_random_port("tcp://127.0.0.1")
        publisher = publisher_of(
            runtime, zmq_endpoint=f"tcp://127.0.0.1:{port}", zmq_topic="kv", dp_rank=3
        )
        assert await asyncio.to_thread(engine.recv) == b"\x01kv"  # the subscription
        stored = {
            "type": "BlockStored", "block_hashes": [7], "parent_block_hash": None, "token_ids": [1, 2],
            "block_size": BLOCK,
        }  # fmt: skip
        batch = msgspec.msgpack.encode([0.5, [stored], 0])
        engine.send_multipart((b"kv", (0).to_bytes(8, "big"), batch))
        await until(lambda: router.cached(rank=3) == 1)

        publisher.shutdown()
        assert await asyncio.to_thread(engine.recv) == b"\x00kv"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_block_size": 0}, "kv_block_size of at least 1 token, got 0"),
        ({"kv_block_size": 2, "worker_id": 5}, "of this process or none, got 5"),
        ({"kv_block_size": 2, "image_token_id": 5}, "image_token_id is not supported here"),
    ],
)
async def test_publisher_of_nonsense_is_refused(runtime, options, message):
    with pytest.raises(errors.ConfigError, match=message):
        KvEventPublisher(runtime.endpoint(NAME), **options)


async def test_event_that_contradicts_itself_is_refused(runtime, router):
    publisher = publisher_of(runtime)
    with pytest.raises(errors.ConfigError, match="sum up to 3 token_ids, got \\[2, 2\\]"):
        publisher.publish_stored([1, 2, 3], [2, 2], [7, 8])
    with pytest.raises(errors.ConfigError, match="type stored or removed"):
        publisher.publish_batch([{"type": "removed", "block_hashes": [7]}, {"type": "moved"}])
    with pytest.raises(errors.ConfigError, match="with their fields"):
        publisher.publish_batch([{"type": "stored", "token_ids": [1, 2], "block_hashes": [7]}])
    with pytest.raises(errors.ConfigError, match="is_eagle is not supported"):
        publisher.publish_stored([1, 2], [2], [7], is_eagle=True)


@pytest.fixture
async def loads(cluster):
    """The loads that a router of the worker's component hears."""
    async with await component.DistributedRuntime.in_memory(cluster) as runtime:
        heard = []

        def hear(messages):
            heard.extend(msgspec.msgpack.decode(m.payload, type=load.LoadEvent) for m in messages)

        subscription = await runtime.events.subscribe("dynamo/backend/kv_metrics", hear)
        yield heard
        await subscription.close()


async def test_load_has_the_blocks_in_use_of_all_that_the_engine_has(runtime, loads):
    endpoint = runtime.endpoint(NAME)
    described = ModelRuntimeConfig()
    described.total_kv_blocks, described.max_num_seqs = 100, 4
    await register_model(
        ModelInput.Tokens, ModelType.Chat, endpoint, "storyteller", runtime_config=described
    )
    publisher = WorkerMetricsPublisher()
    await publisher.create_endpoint(endpoint)
    publisher.publish(kv_used_blocks=30)
    await until(lambda: loads)
    await asyncio.to_thread(publisher.publish, 1, 40)

    def latest():
        return {event.data.worker_stats.data_parallel_rank: event.data for event in loads}

    await until(lambda: 1 in latest())
    assert loads[0].worker_id == runtime.instance_id
    assert [rank.kv_stats for _, rank in sorted(latest().items())] == [
        load.KvStats(kv_active_blocks=30, kv_total_blocks=100),
        load.KvStats(kv_active_blocks=40, kv_total_blocks=100),
    ]
    assert latest()[0].worker_stats.request_total_slots == 4


async def test_load_has_the_requests_under_way(runtime, loads):
    endpoint = runtime.endpoint(NAME)
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    async def handler(asked):
        has_begun.set()
        await may_end.wait()
        yield asked

    async with tasks.Tasks() as running:
        running.start("serve", endpoint.serve_endpoint(handler))
        publisher = WorkerMetricsPublisher()
        await publisher.create_endpoint(endpoint)
        publisher.publish(active_decode_blocks=1)
        client = await endpoint.client()
        async with asyncio.timeout(PATIENT_S):
            await client.wait_for_instances()
            items = await client.generate({})
            await has_begun.wait()
            await until(lambda: loads and loads[-1].data.worker_stats.request_active_slots == 1)
            may_end.set()
            assert [item.data() async for item in items] == [{}]
            await until(lambda: loads[-1].data.worker_stats.request_active_slots == 0)


async def test_figure_without_an_endpoint_or_a_number_is_refused(runtime):
    publisher = WorkerMetricsPublisher()
    with pytest.raises(errors.ConfigError, match="expected active_decode_blocks or kv_used_blocks"):
        publisher.publish(dp_rank=0)
    with pytest.raises(errors.ConfigError, match="create_endpoint"):
        publisher.publish(kv_used_blocks=1)
