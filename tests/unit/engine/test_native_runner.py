"""The runner against transformers: the same checkpoint must give the same logits, however a prompt is cut."""

import json

import pytest
import safetensors.torch
import torch
import transformers

from checkpoints import LLAMA3_ROPE, YARN_ROPE, make_checkpoint
from devices import COMPUTING
from dynamo.base import errors
from dynamo.engine.native.runner import Runner, cache_bytes_per_block, resolve_dtype
from dynamo.engine.native.sequence import Chunk, Sequence
from dynamo.protocols import blocks, generate

pytestmark = pytest.mark.reference

BLOCK_SIZE = 16
CHECKPOINTS = {
    "llama": ("llama", {}),
    "llama with biases and llama3 rope": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE},
    ),
    "llama with linear rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}},
    ),
    "llama with dynamic rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}},
    ),
    "llama with heads of their own": ("llama", {"num_key_value_heads": 4}),
    "qwen2": ("qwen2", {}),
    "qwen2 with yarn": ("qwen2", {"rope_parameters": YARN_ROPE}),
    "qwen3": ("qwen3", {}),
    "qwen3 of experts": ("qwen3_moe", {}),
    "qwen3 of experts in every other layer": (
        "qwen3_moe",
        {"decoder_sparse_step": 2, "mlp_only_layers": [], "norm_topk_prob": False},
    ),
    "qwen3 tied, in shards": ("qwen3", {"tie_word_embeddings": True, "max_shard_size": "100KB"}),
}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def path(request, tmp_path_factory):
    family, overrides = CHECKPOINTS[request.param]
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), family, **overrides)


@pytest.fixture(scope="module")
def qwen3_path(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")


def make_runner(path, dtype="auto"):
    return Runner(
        path, device=COMPUTING, dtype=dtype, num_blocks=256, block_size=BLOCK_SIZE, threads=1
    )


def make_sequence(length, first_block=0, **options):
    """A sequence with a random prompt; the same for the same length."""
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(512, (length,), generator=generator).tolist()
    request = generate.Request(
        id="r",
        model="m",
        token_ids=blocks.pack(tokens),
        sampling_options=generate.SamplingOptions(**({"temperature": 0.0} | options)),
    )
    num_blocks = -(-(length + 64) // BLOCK_SIZE)
    block_ids = list(range(first_block, first_block + num_blocks))[::-1]
    return Sequence(
        request=request, index=0, token_ids=tokens, prompt_len=length, block_ids=block_ids
    )


def expected_logits(path, sequence, dtype=torch.float32):
    """[tokens, vocabulary]"""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    with torch.inference_mode():
        return model(torch.tensor([sequence.token_ids])).logits[0].float().to(COMPUTING)


def chunk(sequence, start, num_tokens, samples=True):
    return Chunk(sequence=sequence, start=start, num_tokens=num_tokens, samples=samples)


def last_chunk(sequence):
    return chunk(sequence, len(sequence.token_ids) - 1, 1)


def decode(runner, sequences, num_tokens):
    """Greedy continuation of all of them together; their prompts are in the cache but for the last token."""
    for _ in range(num_tokens):
        sampled = runner.run([last_chunk(sequence) for sequence in sequences])
        for sequence, answer in zip(sequences, sampled, strict=True):
            sequence.token_ids.append(answer.token_id)
    return [sequence.token_ids[sequence.prompt_len :] for sequence in sequences]


def fill(runner, sequence):
    """Compute all of the prompt but its last token."""
    runner.run([chunk(sequence, 0, sequence.prompt_len - 1, samples=False)])


def test_logits_are_those_of_transformers_whole_in_chunks_and_token_by_token(path):
    runner, sequence = make_runner(path), make_sequence(150)
    expected = expected_logits(path, sequence)
    (whole,) = runner.logits([chunk(sequence, 0, 150)])
    torch.testing.assert_close(whole, expected[-1], rtol=1e-4, atol=2e-4)
    start = 0
    for count in (5, 60, 1, 1, 1, 70, 12):
        (logits,) = runner.logits([chunk(sequence, start, count)])
        start += count

        torch.testing.assert_close(logits, expected[start - 1], rtol=1e-4, atol=2e-4)


def test_tied_output_layer_of_its_own_is_refused(tmp_path):
    path = make_checkpoint(tmp_path, "qwen3", tie_word_embeddings=False)
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | {"tie_word_embeddings": True}))

    with pytest.raises(errors.ConfigError, match=r"lm_head\.weight.* tie_word_embeddings"):
        make_runner(path)


def test_model_whose_tokens_attend_to_later_ones_is_refused(tmp_path):
    with pytest.raises(errors.ConfigError, match="is_causal false is not supported"):
        make_runner(make_checkpoint(tmp_path, "qwen2", is_causal=False))


def test_tied_output_layer_that_is_stored_as_well_is_accepted(tmp_path):
    path = make_checkpoint(tmp_path, "qwen3", tie_word_embeddings=True)
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    safetensors.torch.save_file(tensors, path / "model.safetensors", {"format": "pt"})
    sequence = make_sequence(20)

    (logits,) = make_runner(path).logits([chunk(sequence, 0, 20)])

    torch.testing.assert_close(logits, expected_logits(path, sequence)[-1], rtol=1e-4, atol=2e-4)


def test_sequences_in_one_batch_keep_their_logits(qwen3_path):
    runner = make_runner(qwen3_path)
    sequences = [make_sequence(n, first_block=20 * i) for i, n in enumerate((1, 20, 40, 70, 90))]
    fill(runner, sequences[2])
    starts = [0, 0, 39, 0, 0]

    batch = [
        chunk(s, start, s.prompt_len - start) for s, start in zip(sequences, starts, strict=True)
    ]
    batch[3] = chunk(sequences[3], 0, 30, samples=False)
    logits = runner.logits(batch)
    for row, i in zip(logits, (0, 1, 2, 4), strict=True):
        expected = expected_logits(qwen3_path, sequences[i])[-1]
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=2e-4)


def test_only_chunks_that_sample_get_a_token(qwen3_path):
    runner = make_runner(qwen3_path)
    first, second = make_sequence(8), make_sequence(9, first_block=10)

    answers = runner.run([chunk(first, 0, 4, samples=False), chunk(second, 0, 9)])
    assert answers[0] is None
    assert answers[1].token_id == expected_logits(qwen3_path, second)[-1].argmax()


def test_a_step_without_samples_only_fills_the_kv_cache(qwen3_path):
    assert make_runner(qwen3_path).run([chunk(make_sequence(8), 0, 4, samples=False)]) == [None]


def test_greedy_answers_are_the_same_alone_and_among_31_others(qwen3_path):
    runner, lengths = make_runner(qwen3_path), range(10, 42)
    together = [make_sequence(n, first_block=8 * i) for i, n in enumerate(lengths)]
    for sequence in together:
        fill(runner, sequence)
    answers = decode(runner, together, 12)
    for length, answer in zip(lengths, answers, strict=True):
        alone = make_sequence(length)
        fill(runner, alone)

        assert decode(runner, [alone], 12) == [answer]


def test_a_block_may_hold_any_number_of_tokens(qwen3_path):
    sequence = make_sequence(100)
    sequence.block_ids = list(range(40))
    runner = Runner(qwen3_path, device=COMPUTING, num_blocks=40, block_size=3, threads=1)
    runner.run([chunk(sequence, 0, 99, samples=False)])

    (logits,) = runner.logits([chunk(sequence, 99, 1)])
    expected = expected_logits(qwen3_path, sequence)[-1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
def test_types_of_checkpoint_and_engine_may_differ(tmp_path, stored, dtype):
    path = make_checkpoint(tmp_path, "qwen3", dtype=stored, initializer_range=0.05)
    sequence = make_sequence(40)

    runner = make_runner(path, dtype)
    (logits,) = runner.logits([chunk(sequence, 0, 40)])
    expected = expected_logits(path, sequence)[-1]
    is_exact = resolve_dtype(runner.config, dtype, COMPUTING) == torch.float32
    tolerance = 1e-4 if is_exact else 0.1
    torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)


def test_infinite_logits_fail_only_their_own_sequence(qwen3_path):
    runner = make_runner(qwen3_path)
    good, bad = make_sequence(8), make_sequence(9, first_block=10, logit_bias={0: float("nan")})

    answers = runner.run([chunk(good, 0, 8), chunk(bad, 0, 9)])
    assert isinstance(answers[1], errors.EngineFailed)
    assert answers[0].token_id == expected_logits(qwen3_path, good)[-1].argmax()


def test_auto_dtype_is_float32_on_a_cpu_and_the_checkpoints_elsewhere(tmp_path):
    make_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16)
    config = make_runner(tmp_path).config

    assert resolve_dtype(config, "auto", "cpu") == torch.float32
    assert resolve_dtype(config, "auto", "cuda") == torch.bfloat16
    assert resolve_dtype(config, "float16", "cpu") == torch.float16
    with pytest.raises(errors.ConfigError, match="int8"):
        resolve_dtype(config, "int8", "cpu")


def test_a_missing_device_is_refused_by_name(qwen3_path):
    with pytest.raises(errors.ConfigError, match="'tpu0'"):
        Runner(qwen3_path, device="tpu0", num_blocks=1, block_size=16)


def test_a_kv_cache_larger_than_memory_is_refused(qwen3_path):
    with pytest.raises(errors.ConfigError, match="GiB"):
        Runner(qwen3_path, num_blocks=10**12, block_size=16)


def test_the_size_of_a_block_is_the_allocated_size(qwen3_path):
    config = make_runner(qwen3_path).config

    assert cache_bytes_per_block(config, torch.bfloat16, 16) == 2 * 3 * 2 * 32 * 16 * 2


def test_tensors_that_config_does_not_describe_are_refused(tmp_path):
    make_checkpoint(tmp_path, "qwen3")
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        text.replace('"num_hidden_layers": 3', '"num_hidden_layers": 2')
    )

    with pytest.raises(errors.ConfigError, match=r"model\.layers\.2"):
        make_runner(tmp_path)


def test_what_others_left_in_its_blocks_changes_no_answer(qwen3_path):
    """Their tokens may have overflowed to infinity: masked or not, that would be in every sum."""
    runner, first, second = make_runner(qwen3_path), make_sequence(40), make_sequence(15, 100)
    answers = []
    for left in (0.0, float("nan")):
        for layer in runner._cache._layers:
            layer.fill_(left)
        for sequence in (first, second):
            del sequence.token_ids[sequence.prompt_len :]
        runner.run([chunk(first, 0, 10, samples=False), chunk(second, 0, 14, samples=False)])
        runner.run([chunk(first, 10, 29, samples=False)])
        answers.append(decode(runner, [first, second], 12))

    assert answers[0] == answers[1]
