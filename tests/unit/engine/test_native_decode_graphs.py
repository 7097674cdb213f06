"""Steps of a fixed shape give the logits of ordinary steps; as CUDA graphs only where there is a GPU."""

import pytest
import torch
from test_native_runner import chunk, fill, last_chunk, make_sequence

from checkpoints import make_checkpoint
from devices import DEVICE, HAS_GPU
from dynamo.engine.native import decode_graphs
from dynamo.engine.native.decode_graphs import Shape
from dynamo.engine.native.runner import Runner
from dynamo.engine.native.sequence import Chunk

LENGTHS = (1, 20, 40, 70, 90)


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    path = make_checkpoint(tmp_path_factory.mktemp("graphs"), "qwen3")
    return Runner(path, device=DEVICE, num_blocks=256, block_size=16, threads=1)


def make_steps(runner, lengths):
    sequences = [make_sequence(n, first_block=20 * i) for i, n in enumerate(lengths)]
    for sequence in sequences:
        if sequence.prompt_len > 1:
            fill(runner, sequence)
    return [last_chunk(sequence) for sequence in sequences]


@pytest.mark.parametrize("shape", [Shape(8, 128), Shape(8, 256), Shape(5, 100)])
def test_logits_of_a_fixed_batch_are_those_of_each_step_alone(runner, shape):
    steps = make_steps(runner, LENGTHS)
    batch = decode_graphs.FixedBatch(runner._cache, shape)
    graphs = decode_graphs.DecodeGraphs(runner._decoder, runner._cache, runner._cos, runner._sin)
    with torch.inference_mode():
        batch.fill(steps)
        together = graphs._compute(batch)[: len(steps)]
    runner._graphs = None
    alone = torch.cat([runner.logits([step]) for step in steps])

    torch.testing.assert_close(together, alone, rtol=1e-4, atol=2e-4)


@pytest.mark.skipif(not HAS_GPU, reason="CUDA graphs need a GPU: make test-gpu")
def test_replayed_graph_follows_its_inputs(runner):
    graphs = decode_graphs.DecodeGraphs(runner._decoder, runner._cache, runner._cos, runner._sin)
    runner._graphs = None
    for lengths in (LENGTHS, LENGTHS[::-1], (33,), (200, 7), (34,), LENGTHS):
        steps = make_steps(runner, lengths)
        replayed = graphs.logits(steps)

        torch.testing.assert_close(replayed, runner.logits(steps), rtol=1e-4, atol=2e-4)
    assert sorted(graphs._graphs) == [(1, 64), (2, 256), (8, 128)]


def test_only_decoding_steps_have_a_shape_of_powers_of_two():
    first, second = make_sequence(20), make_sequence(130)
    assert decode_graphs.choose_shape([last_chunk(first)]) == (1, 64)
    assert decode_graphs.choose_shape([last_chunk(first), last_chunk(second)]) == (2, 256)
    assert decode_graphs.choose_shape([last_chunk(second)] * 5) == (8, 256)
    assert decode_graphs.choose_shape([last_chunk(first), chunk(second, 0, 130)]) is None
    assert decode_graphs.choose_shape([chunk(first, 19, 1, samples=False)]) is None


def test_span_ends_with_the_key_of_the_last_token():
    sequence = make_sequence(128)
    at = lambda start: Chunk(sequence=sequence, start=start, num_tokens=1, samples=True)  # noqa: E731
    assert decode_graphs.choose_shape([at(127)]) == (1, 128)
    assert decode_graphs.choose_shape([at(128)]) == (1, 256)
