"""What every embedder promises its host, over each implementation."""

import contextlib
import operator

import pytest

import checkpoints
from devices import COMPUTING
from dynamo.engine import api
from dynamo.engine.mock.engine import MockEmbedder
from dynamo.engine.native.embedder import NativeEmbedder
from dynamo.engine.native.settings import NativeConfig
from dynamo.protocols import blocks, encoders

pytestmark = pytest.mark.reference  # transformers, which makes the checkpoint, takes long to import


@pytest.fixture(scope="session")
def encoder(tmp_path_factory):
    return checkpoints.make_encoder(
        tmp_path_factory.mktemp("bert"), "bert", matryoshka_dimensions=[16, 32]
    )


@pytest.fixture(params=["native", "mock"])
async def embedder(request):
    if request.param == "native":
        made = NativeEmbedder(request.getfixturevalue("encoder"), NativeConfig(device=COMPUTING))
    else:
        made = MockEmbedder(context_length=100, dimensions=64)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(made.stop)
        yield made


def inputs(*texts, dimensions=None):
    return [api.EmbedInput(blocks.pack(text), dimensions) for text in texts]


def cosine(one, other):
    return sum(map(operator.mul, encoders.unpack(one), encoders.unpack(other)))


async def test_each_input_gets_a_unit_vector(embedder):
    facts = await embedder.start()

    found = await embedder.embed(inputs([1, 2, 3], [4]))

    assert facts.vectors.dimensions == 64
    assert [len(one) for one in found] == [64 * encoders.FLOAT_BYTES] * 2
    assert [cosine(one, one) for one in found] == pytest.approx([1, 1], abs=1e-5)


async def test_equal_texts_have_equal_vectors_and_others_differ(embedder):
    await embedder.start()

    (alone,) = await embedder.embed(inputs([1, 2, 3]))
    other, among = await embedder.embed(inputs([7, 8, 9, 10], [1, 2, 3]))

    assert cosine(alone, among) == pytest.approx(1, abs=1e-5)
    assert cosine(alone, other) < 0.999


async def test_vector_can_be_shortened_where_supported(embedder):
    facts = await embedder.start()

    long, short = await embedder.embed(inputs([1, 2]) + inputs([1, 2], dimensions=16))

    assert facts.vectors.can_shorten
    assert (len(long), len(short)) == (64 * encoders.FLOAT_BYTES, 16 * encoders.FLOAT_BYTES)
    assert cosine(short, short) == pytest.approx(1, abs=1e-5)


async def test_input_as_long_as_the_context_is_embedded(embedder):
    facts = await embedder.start()

    (found,) = await embedder.embed(inputs([5] * facts.context_length))

    assert cosine(found, found) == pytest.approx(1, abs=1e-5)


async def test_stop_may_come_twice_and_before_start(embedder):
    await embedder.stop()
    await embedder.stop()
