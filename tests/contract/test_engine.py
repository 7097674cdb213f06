"""What every engine promises its host, over the mock and the native engine."""

import contextlib
import functools
import json
import math

import hypothesis
import pytest
import safetensors.torch
import torch
from hypothesis import strategies as st

from devices import COMPUTING
from dynamo.base import errors
from dynamo.engine.mock.answers import TokenCycle
from dynamo.engine.mock.batch import MockBatch
from dynamo.engine.mock.engine import MockEngine
from dynamo.engine.mock.settings import MockConfig
from dynamo.engine.native.engine import NativeEngine
from dynamo.engine.native.runner import Runner
from dynamo.engine.native.settings import NativeConfig
from dynamo.protocols import blocks, generate, kv_transfer
from engine_suite import *  # noqa: F403 (the suite's tests, which pytest finds here)
from salt_suite import *  # noqa: F403 (the same)

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
            "device": COMPUTING,
        }
        return NativeEngine(path, NativeConfig(**(shape | settings)))

    return make_native


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


ODD_INTS = st.sampled_from([-(2**63), -1, 0, 1, 2, 7, 255, 256, 2**31, 2**32, 2**40, 2**63 - 1])
ODD_FLOATS = st.sampled_from(
    [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-300, 1e-6, 0.5, 1.0, 2.0, 1e6, 1e39, 1e300]
)
TOKENS = st.lists(st.one_of(st.integers(0, 255), ODD_INTS), max_size=6).map(tuple)
SCHEMAS = st.sampled_from(["", "{", "{}", '{"multipleOf": 1e999}', "[" * 5000, '{"type": "null"}'])


def some(strategy, usual):
    """Draw the usual value mostly, so that a request has two or three odd ones, and gets past the first check."""
    return st.integers(0, 9).flatmap(lambda draw: st.just(usual) if draw else strategy)


ABSURD = st.builds(
    generate.Request,
    id=st.just("absurd"),
    model=st.just("m"),
    token_ids=some(st.binary(max_size=9), blocks.pack([1, 2, 3])),
    eos_token_ids=some(TOKENS, (5,)),
    priority=some(ODD_INTS, 0),
    data_parallel_rank=some(ODD_INTS, None),
    lora_name=some(st.text(max_size=3), None),
    num_resumed=some(ODD_INTS, 0),
    first_choice=some(ODD_INTS, 0),
    stop_conditions=st.builds(
        generate.StopConditions,
        max_tokens=some(ODD_INTS, 3),
        min_tokens=some(ODD_INTS, 0),
        stop=some(st.lists(st.text(), max_size=3).map(tuple), ()),
        stop_token_ids=some(TOKENS, ()),
        ignore_eos=st.booleans(),
    ),
    sampling_options=st.builds(
        generate.SamplingOptions,
        n=some(ODD_INTS, 1),
        temperature=some(ODD_FLOATS, 1.0),
        top_k=some(ODD_INTS, 0),
        top_p=some(ODD_FLOATS, 1.0),
        min_p=some(ODD_FLOATS, 0.0),
        repetition_penalty=some(ODD_FLOATS, 1.0),
        presence_penalty=some(ODD_FLOATS, 0.0),
        frequency_penalty=some(ODD_FLOATS, 0.0),
        seed=some(ODD_INTS, None),
        logit_bias=some(st.dictionaries(st.integers(-1, 256), ODD_FLOATS, max_size=3), {}),
        guided_decoding=some(st.builds(generate.GuidedDecoding, json=SCHEMAS), None),
    ),
    output_options=st.builds(
        generate.OutputOptions, logprobs=some(ODD_INTS, None), prompt_logprobs=some(ODD_INTS, None)
    ),
    thinking=some(
        st.builds(
            generate.ThinkingLimit,
            max_tokens=ODD_INTS,
            close_ids=TOKENS,
            open_ids=TOKENS,
            is_open=st.booleans(),
        ),
        None,
    ),
    kv_transfer_params=some(
        st.builds(
            kv_transfer.KvTransferParams,
            do_remote_decode=st.booleans(),
            do_remote_prefill=st.booleans(),
            remote=some(
                st.builds(
                    kv_transfer.RemoteBlocks,
                    remote_block_ids=TOKENS,
                    remote_hold_id=ODD_INTS,
                    remote_engine_id=st.text(max_size=3),
                    remote_port=ODD_INTS,
                    remote_hold_s=ODD_FLOATS,
                    first_token=some(st.builds(kv_transfer.FirstToken, token_id=ODD_INTS), None),
                ),
                None,
            ),
        ),
        None,
    ),
)


def with_thinking(**fields):
    return generate.Request(
        id="absurd",
        model="m",
        token_ids=blocks.pack([1, 2, 3]),
        thinking=generate.ThinkingLimit(max_tokens=0, is_open=True, **fields),
    )


@hypothesis.settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(request=ABSURD)
@hypothesis.example(with_thinking(close_ids=()))
@hypothesis.example(with_thinking(close_ids=(2**40,)))
@hypothesis.example(with_thinking(close_ids=(-300,)))
async def test_absurd_request_harms_no_other(host, request):
    honest = f"honest {len(host.sink.batches)}"
    with contextlib.suppress(errors.DynamoError):
        host.engine.submit(request)
    tokens = await host.answer(honest, [1, 2, 3, 4], max_tokens=2)
    host.engine.abort("absurd")
    await host.until_idle()

    assert len(tokens) == 2
    assert not host.sink.deaths
