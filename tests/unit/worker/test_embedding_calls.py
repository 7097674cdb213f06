"""Calls for embeddings, from the request plane to the embedder and back."""

import asyncio

import pytest
from worker_fakes import FakeCall

from dynamo.base import clock, errors, tasks
from dynamo.engine import api
from dynamo.protocols import blocks, embed, instances, model_card, model_errors
from dynamo.worker import embedding_calls, metrics

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
        return [embed.pack(_vector(blocks.unpack(one.token_ids))) for one in batch]


def _vector(token_ids):
    return [float(len(token_ids)), float(token_ids[0])]


@pytest.fixture
def embedder():
    return FakeEmbedder()


@pytest.fixture
async def calls(embedder):
    name = instances.EndpointName("dynamo", "backend", "embed")
    time = clock.SystemClock()
    made = embedding_calls.EmbeddingCalls(
        embedder, FACTS, limit=3, counts=metrics.WorkerMetrics(name, time), clock=time
    )
    async with tasks.Tasks() as running:
        running.start("embed", made.run())
        yield made


def ask(*texts, **fields):
    packed = tuple(map(blocks.pack, texts))
    return FakeCall(embed.Request(id="r", model="m", inputs=packed, **fields))


def told(call):
    """Number → vector, over all replies."""
    found = {}
    for reply in call.sent:
        size = len(reply.data) // len(reply.numbers)
        for place, number in enumerate(reply.numbers):
            assert number not in found
            found[number] = embed.unpack(reply.data[place * size : (place + 1) * size])
    return found


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


async def test_a_call_gets_its_vectors_in_as_many_replies_as_there_are_batches(calls, embedder):
    call = ask([1], [2, 2, 2, 2], [3, 3])

    calls.take(call)
    await until(lambda: call.num_finished)

    assert told(call) == {0: [1, 1], 1: [4, 2], 2: [2, 3]}
    assert len(embedder.batches) == len(call.sent) == 2
    assert len(calls) == 0


async def test_calls_share_a_batch(calls, embedder):
    one, other = ask([1, 1]), ask([2], dimensions=1)

    calls.take(one)
    calls.take(other)
    await until(lambda: one.num_finished and other.num_finished)

    assert [[item.dimensions for item in batch] for batch in embedder.batches] == [[None, 1]]


async def test_the_embedder_is_spared_what_nobody_waits_for(calls, embedder):
    embedder.may_answer.clear()
    gone, there = ask([1] * 6, [2] * 6), ask([3])
    calls.take(gone)
    await embedder.was_asked.wait()

    gone.cancel()
    calls.take(there)
    embedder.may_answer.set()
    await until(lambda: there.num_finished)

    assert not gone.sent
    assert len(embedder.batches) == 2


async def test_a_batch_that_fails_fails_its_calls_and_no_other(calls, embedder):
    embedder.error = errors.EngineFailed("no memory")
    failed, later = ask([1]), ask([2])
    calls.take(failed)
    await until(lambda: failed.error)

    embedder.error = None
    calls.take(later)
    await until(lambda: later.num_finished)

    assert failed.error is not None
    assert str(failed.error) == "no memory"


async def test_more_calls_than_the_limit_are_refused(calls, embedder):
    embedder.may_answer.clear()
    for _ in range(3):
        calls.take(ask([1]))
    refused = ask([1])

    calls.take(refused)

    assert isinstance(refused.error, errors.Overloaded)


async def test_more_tokens_than_memory_is_meant_for_are_refused(calls, embedder, monkeypatch):
    monkeypatch.setattr(embedding_calls, "MAX_WAITING_TOKENS", 10)
    embedder.may_answer.clear()
    calls.take(ask([1] * 6, [1] * 6))
    refused = ask([1])

    calls.take(refused)

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
async def test_what_would_harm_others_in_its_batch_is_refused(calls, body, kind, message):
    call = FakeCall(body)

    calls.take(call)

    assert type(call.error) is kind
    assert message in str(call.error)
