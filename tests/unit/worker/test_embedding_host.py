"""An embedder as a worker: its requests in flight, and its host."""

import asyncio
import contextlib

import httpx
import pytest
from worker_fakes import FakeCall

from dynamo.base import clock, errors, tasks
from dynamo.base import clock as clocks
from dynamo.engine import api
from dynamo.engine.mock.engine import MockEmbedder
from dynamo.protocols import blocks, encoders, generate, instances, model_card, model_errors
from dynamo.runtime import component, requests
from dynamo.worker import card, embedding_host, health, host, main, model_source, settings
from waiting import PATIENT_S

FACTS = api.EmbedderFacts(
    context_length=8,
    max_num_batched_tokens=6,
    vectors=model_card.EmbeddingFacts(dimensions=2),
    vocab_size=100,
)


class FakeEmbedder:
    """Gives [number of tokens, first token] for each text, when it is let."""

    def __init__(self):
        self.batches = []
        self.error = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.was_asked = asyncio.Event()

    async def embed(self, batch):
        self.batches.append(batch)
        self.was_asked.set()
        await asyncio.sleep(0)
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return [encoders.pack(_vector(blocks.unpack(one.token_ids))) for one in batch]


def _vector(token_ids):
    return [float(len(token_ids)), float(token_ids[0])]


@pytest.fixture
def embedder():
    return FakeEmbedder()


@pytest.fixture
async def calls(embedder):
    name = instances.EndpointName("dynamo", "backend", "embed")
    time = clock.SystemClock()
    made = embedding_host.EmbeddingRequests(
        embedder, FACTS, limit=3, counters=health.WorkerMetrics(name, time), clock=time
    )
    async with tasks.Tasks() as running:
        running.start("embed", made.run())
        yield made


def make_call(*texts, **fields):
    packed = tuple(map(blocks.pack, texts))
    return FakeCall(encoders.EmbeddingRequest(id="r", model="m", inputs=packed, **fields))


def told(call):
    """Number → vector, over all replies."""
    found = {}
    for reply in call.sent:
        size = len(reply.data) // len(reply.numbers)
        for place, number in enumerate(reply.numbers):
            assert number not in found
            found[number] = encoders.unpack(reply.data[place * size : (place + 1) * size])
    return found


async def until(condition):
    async with asyncio.timeout(PATIENT_S):
        while not condition():
            await asyncio.sleep(0)


async def test_call_gets_one_reply_for_each_batch(calls, embedder):
    call = make_call([1], [2, 2, 2, 2], [3, 3])

    calls.handle(call)
    await until(lambda: call.num_finished)

    assert told(call) == {0: [1, 1], 1: [4, 2], 2: [2, 3]}
    assert len(embedder.batches) == len(call.sent) == 2
    assert len(calls) == 0


async def test_calls_share_a_batch(calls, embedder):
    one, other = make_call([1, 1]), make_call([2], dimensions=1)

    calls.handle(one)
    calls.handle(other)
    await until(lambda: one.num_finished and other.num_finished)

    assert [[item.dimensions for item in batch] for batch in embedder.batches] == [[None, 1]]


async def test_input_of_a_cancelled_call_is_not_embedded(calls, embedder):
    embedder.may_answer.clear()
    gone, there = make_call([1] * 6, [2] * 6), make_call([3])
    calls.handle(gone)
    await embedder.was_asked.wait()

    gone.cancel()
    calls.handle(there)
    embedder.may_answer.set()
    await until(lambda: there.num_finished)

    assert not gone.sent
    assert len(embedder.batches) == 2


async def test_failed_batch_fails_only_its_calls(calls, embedder):
    embedder.error = errors.EngineFailed("no memory")
    failed, later = make_call([1]), make_call([2])
    calls.handle(failed)
    await until(lambda: failed.error)

    embedder.error = None
    calls.handle(later)
    await until(lambda: later.num_finished)

    assert failed.error is not None
    assert str(failed.error) == "no memory"


async def test_more_calls_than_the_limit_are_refused(calls, embedder):
    embedder.may_answer.clear()
    for _ in range(3):
        calls.handle(make_call([1]))
    refused = make_call([1])

    calls.handle(refused)

    assert isinstance(refused.error, errors.Overloaded)


async def test_call_beyond_the_bound_of_waiting_tokens_is_refused(calls, embedder, monkeypatch):
    monkeypatch.setattr(embedding_host, "MAX_WAITING_TOKENS", 10)
    embedder.may_answer.clear()
    calls.handle(make_call([1] * 6, [1] * 6))
    refused = make_call([1])

    calls.handle(refused)

    assert isinstance(refused.error, errors.Overloaded)


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (b"\xc0", errors.RemoteProtocolError, "expected a request to embed"),
        ({"id": "r", "model": "m", "inputs": []}, errors.InvalidRequest, "at least one, got none"),
        ({"id": "r", "model": "m", "inputs": [b"abc"]}, errors.InvalidRequest, "got 3 bytes"),
        ({"id": "r", "model": "m", "inputs": [b""]}, errors.InvalidRequest, "got 0 bytes"),
        (
            {"id": "r", "model": "m", "inputs": [blocks.pack([1] * 9)]},
            model_errors.ContextTooLong,
            "at most 8 tokens, got 9",
        ),
        (
            {"id": "r", "model": "m", "inputs": [blocks.pack([100])]},
            errors.InvalidRequest,
            "token ids below 100, got 100",
        ),
        (
            {"id": "r", "model": "m", "inputs": [blocks.pack([1])], "dimensions": 3},
            errors.InvalidRequest,
            "from 1 to 2, got 3",
        ),
    ],
)
async def test_request_that_would_harm_its_batch_is_refused(calls, body, kind, message):
    call = FakeCall(body)

    calls.handle(call)

    assert type(call.error) is kind
    assert message in str(call.error)


ENDPOINT = instances.EndpointName("dynamo", "backend", "embed")


@pytest.fixture
async def world(tmp_path):
    """A host that has not started, and a runtime of one who asks."""
    cluster = component.MemoryCluster()
    (tmp_path / "config.json").write_text("{}")
    async with contextlib.AsyncExitStack() as stack:
        worker, asker = [
            await stack.enter_async_context(
                await component.DistributedRuntime.in_memory(cluster, item_type=generate.Output)
            )
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
    await client.wait_for_instances(PATIENT_S)
    (worker,) = client.instances.values()
    request = encoders.EmbeddingRequest(id="r", model="e", inputs=tuple(map(blocks.pack, texts)))
    return await requests.call(
        asker.requests,
        worker.transport["memory"],
        ENDPOINT.path,
        request,
        reply_type=encoders.Vectors,
        timeout_s=PATIENT_S,
    )


async def test_embedding_host_answers_and_publishes_its_dimensions(world):
    host, asker = world
    found = await host.start()

    vectors = await ask(asker, [1, 2], [3])

    assert sorted(vectors.numbers) == [0, 1]
    assert len(vectors.data) == 2 * 8 * encoders.FLOAT_BYTES
    assert found.model_type == ("embeddings",)
    assert (found.embedding.dimensions, found.context_length, found.created) == (8, 64, 7)
    assert list(found.files) == ["config.json"]


async def test_system_port_of_an_embedding_host_reports_readiness(world):
    host, _ = world
    port = await host.system_port.start("127.0.0.1", 0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENT_S) as client:
        before = await client.get("/health")
        await host.start()
        after = await client.get("/health")
        metrics = await client.get("/metrics")

    assert (before.status_code, after.status_code) == (503, 200)
    assert 'dynamo_endpoint="embed"' in metrics.text


async def test_stopped_embedding_host_is_not_in_discovery(world):
    host, asker = world
    await host.start()
    stop = asyncio.Event()
    stop.set()

    await host.run_until(stop)
    await host.stop(1)

    client = asker.client(ENDPOINT)
    with pytest.raises(errors.NoWorkers):
        await client.wait_for_instances(0.01)


async def test_request_that_outlives_the_drain_is_handed_over_to_another_worker(world, monkeypatch):
    host, asker = world
    was_asked = asyncio.Event()

    async def never(embedder, batch):
        was_asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(MockEmbedder, "embed", never)
    await host.start()
    asked = asyncio.ensure_future(ask(asker, [1]))
    await asyncio.wait_for(was_asked.wait(), PATIENT_S)
    await host.stop(0.01)

    with pytest.raises(errors.WorkerLost, match="the worker stops: ask another") as caught:
        await asyncio.wait_for(asked, PATIENT_S)
    assert type(caught.value) is errors.WorkerLost


async def test_embedding_host_with_an_embedder_that_hangs_stops(world, monkeypatch):
    embedding_worker, _ = world

    async def hang(embedder):
        await asyncio.Event().wait()

    monkeypatch.setattr(MockEmbedder, "stop", hang)
    monkeypatch.setattr(host, "ENGINE_STOP_S", 0)
    await embedding_worker.start()

    await asyncio.wait_for(embedding_worker.stop(1), PATIENT_S)


async def test_request_to_an_embedder_that_is_lost_is_handed_over_at_once(world, monkeypatch):
    host, asker = world

    async def die(embedder, batch):
        raise TypeError("no such kernel")

    monkeypatch.setattr(MockEmbedder, "embed", die)
    await host.start()

    with pytest.raises(errors.WorkerDied, match="engine is lost: no such kernel"):
        await asyncio.wait_for(ask(asker, [1]), PATIENT_S)
    with pytest.raises(errors.WorkerLost, match="engine is lost"):
        await ask(asker, [1])
    with pytest.raises(TypeError):
        await host.run_until(asyncio.Event())


async def test_card_of_an_embedding_worker_has_the_template_of_its_flag(tmp_path):
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    worker = settings.WorkerConfig(custom_jinja_template=str(tmp_path / "own.jinja"))
    embedder = MockEmbedder(context_length=64, dimensions=8)
    async with await component.DistributedRuntime.in_memory(component.MemoryCluster()) as runtime:
        host = main.make_embedding_host(worker, embedder, runtime, model_source.built_in())
        found = await host.start()
        await host.stop(1)

    assert found.files["chat_template.jinja"].path == str(tmp_path / "own.jinja")
