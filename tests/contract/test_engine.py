"""What every engine promises its host, over the mock and the native engine."""

import functools
import json

import pytest
import safetensors.torch
import torch

from dynamo.engine.mock.answers import TokenCycle
from dynamo.engine.mock.batch import MockBatch
from dynamo.engine.mock.engine import MockEngine
from dynamo.engine.mock.settings import MockConfig
from dynamo.engine.native.engine import NativeEngine
from dynamo.engine.native.runner import Runner
from dynamo.engine.native.settings import NativeConfig
from engine_suite import *  # noqa: F403 (the suite's tests, which pytest finds here)
from engine_suite import Host, Sink

WORDS = tuple(range(100, 150))


def make_mock(**settings):
    defaults = {
        "block_size": 16,
        "num_gpu_blocks_override": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "speedup_ratio": 0,
    }
    settings = MockConfig(**(defaults | settings))
    return MockEngine(settings, cycle=TokenCycle(WORDS), context_length=512)


def random_qwen3(directory):
    """A checkpoint of one layer. It is written by hand, because importing transformers takes longer than this suite."""
    hidden, heads, head_dim, vocabulary = 32, 2, 16, 256
    fields = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(fields))
    layer = "model.layers.0."
    attention = {f"{layer}self_attn.{x}_proj.weight": (hidden, hidden) for x in "qkvo"}
    mlp = {f"{layer}mlp.{x}_proj.weight": (hidden, hidden) for x in ("gate", "up", "down")}
    norms = {
        f"{layer}self_attn.q_norm.weight": (head_dim,),
        f"{layer}self_attn.k_norm.weight": (head_dim,),
        f"{layer}input_layernorm.weight": (hidden,),
        f"{layer}post_attention_layernorm.weight": (hidden,),
        "model.norm.weight": (hidden,),
    }
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden)} | attention | mlp | norms
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    safetensors.torch.save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return random_qwen3(tmp_path_factory.mktemp("qwen3"))


MOCK_MODES = {
    "mock": {},
    "mock-fifo": {"preemption_mode": "fifo"},
    "mock-whole-prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 512},
    "mock-two-ranks": {"data_parallel_size": 2},
}


@pytest.fixture(params=[*MOCK_MODES, "native"])
def make_engine(request):
    if request.param in MOCK_MODES:
        return functools.partial(make_mock, **MOCK_MODES[request.param])
    path = request.getfixturevalue("checkpoint")

    def make_native(**settings):
        shape = {
            "num_gpu_blocks_override": 64,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "threads": 1,
        }
        return NativeEngine(path, NativeConfig(**(shape | settings)))

    return make_native


@pytest.fixture
async def host(make_engine):
    engine, sink = make_engine(), Sink()
    yield Host(engine, sink, await engine.start(sink))
    await engine.stop()

    assert not sink.deaths


@pytest.fixture
def break_down(monkeypatch):
    def fail(*args):
        raise RuntimeError("out of order")

    def break_all(engine):
        monkeypatch.setattr(MockBatch, "schedule", fail)
        monkeypatch.setattr(Runner, "run", fail)
        return "out of order"

    return break_all


async def test_start_returns_the_facts(host, request):
    facts = host.facts
    num_batched = 512 if "whole-prompts" in request.node.name else 64

    assert (facts.context_length, facts.kv_block_size, facts.total_kv_blocks) == (512, 16, 64)
    assert (facts.max_num_seqs, facts.max_num_batched_tokens) == (8, num_batched)
