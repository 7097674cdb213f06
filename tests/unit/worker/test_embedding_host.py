"""A worker that embeds, within the process: memory planes, and the simulated embedder."""

import asyncio
import contextlib

import httpx
import pytest

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.engine.mock.embedder import MockEmbedder
from dynamo.protocols import blocks, embed, instances
from dynamo.runtime import component, requests
from dynamo.worker import card, embedding_host

ENDPOINT = instances.EndpointName("dynamo", "backend", "embed")


@pytest.fixture
async def world(tmp_path):
    """A host that has not started, and a runtime of one who asks."""
    cluster = component.MemoryCluster()
    (tmp_path / "config.json").write_text("{}")
    async with contextlib.AsyncExitStack() as stack:
        worker, asker = [
            await stack.enter_async_context(await component.DistributedRuntime.in_memory(cluster))
            for _ in range(2)
        ]
        made = embedding_host.EmbeddingHost(
            MockEmbedder(context_length=64, dimensions=8),
            worker,
            ENDPOINT,
            make_card=lambda facts: card.build_embedding(
                tmp_path, name="e", facts=facts, created=7
            ),
            request_limit=8,
            clock=clocks.SystemClock(),
        )
        stack.push_async_callback(made.stop, 1)
        yield made, asker


async def ask(asker, *texts):
    client = asker.client(ENDPOINT)
    await client.wait_for_instances(1)
    (worker,) = client.instances.values()
    request = embed.Request(id="r", model="e", inputs=tuple(map(blocks.pack, texts)))
    return await requests.ask(
        asker.requests,
        worker.transport["memory"],
        ENDPOINT.path,
        request,
        reply_type=embed.Vectors,
        timeout_s=5,
    )


async def test_it_answers_and_its_card_tells_of_its_vectors(world):
    host, asker = world
    found = await host.start()

    vectors = await ask(asker, [1, 2], [3])

    assert sorted(vectors.numbers) == [0, 1]
    assert len(vectors.data) == 2 * 8 * embed.FLOAT_BYTES
    assert found.model_type == ("embeddings",)
    assert (found.embedding.dimensions, found.context_length, found.created) == (8, 64, 7)
    assert list(found.files) == ["config.json"]


async def test_its_system_port_tells_whether_it_is_ready(world):
    host, _ = world
    port = await host.open_system_port("127.0.0.1", 0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        before = await client.get("/health")
        await host.start()
        after = await client.get("/health")
        metrics = await client.get("/metrics")

    assert (before.status_code, after.status_code) == (503, 200)
    assert 'dynamo_endpoint="embed"' in metrics.text


async def test_it_serves_until_it_is_told_to_stop_and_then_is_found_no_more(world):
    host, asker = world
    await host.start()
    stop = asyncio.Event()
    stop.set()

    await host.run_until(stop)
    await host.stop(1)

    client = asker.client(ENDPOINT)
    with pytest.raises(errors.NoWorkers):
        await client.wait_for_instances(0.01)
