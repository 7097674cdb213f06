"""Answers of the native engine equal those of transformers in any batch, after preemption and with a cached prefix."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoints import make_checkpoint
from dynamo.engine.native.assemble import assemble
from dynamo.engine.native.settings import NativeConfig
from dynamo.protocols import blocks, generate

pytestmark = pytest.mark.reference
NUM_TOKENS = 24


class Judge:
    """A checkpoint, and what transformers makes of it."""

    def __init__(self, path):
        self.path = path
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.vocab_size = self.model.config.vocab_size

    def answer(self, prompt, num_tokens=NUM_TOKENS):
        prompt = torch.tensor([prompt])
        generated = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return generated[0, prompt.shape[1] :].tolist()

    def prompt(self, length, seed=0):
        draw = random.Random(seed)
        return [draw.randrange(self.vocab_size) for _ in range(length)]


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "qwen3_moe"])
def family(request, tmp_path_factory):
    return Judge(make_checkpoint(tmp_path_factory.mktemp(request.param), request.param))


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    return Judge(make_checkpoint(tmp_path_factory.mktemp("judge"), "qwen3"))


class Engine:
    """The engine's parts, stepped by hand."""

    def __init__(self, judge, **settings):
        shape = {"num_gpu_blocks_override": 256, "threads": 1}
        self.parts = assemble(judge.path, NativeConfig(**(shape | settings)))
        self.tokens, self.cached, self.num_steps, self.num_chunks = {}, {}, 0, 0
        self.num_resumed = 0

    def submit(self, request_id, prompt, *, max_tokens=NUM_TOKENS, **sampling):
        self.parts.scheduler.submit(
            generate.Request(
                id=request_id,
                model="m",
                token_ids=blocks.pack(prompt),
                stop_conditions=generate.StopConditions(max_tokens=max_tokens),
                sampling_options=generate.SamplingOptions(**({"temperature": 0.0} | sampling)),
            )
        )

    def step(self):
        scheduler, runner = self.parts.scheduler, self.parts.runner
        chunks = scheduler.schedule()
        self.num_steps += 1
        self.num_chunks += len(chunks)
        self.num_resumed += sum(
            chunk.sequence.num_output and chunk.num_tokens > 1 for chunk in chunks
        )
        result = scheduler.commit(chunks, runner.run(chunks))
        for sequence in result.ended:
            runner.forget(sequence)
        for request, output, _ in result.outputs:
            self.tokens.setdefault((request.id, output.index), []).extend(output.token_ids)
            if output.cached_tokens is not None:
                self.cached[request.id] = output.cached_tokens

    def run(self):
        while self.parts.scheduler.has_work:
            self.step()
        return self.tokens

    def answer(self, prompt, **options):
        self.submit("only", prompt, **options)
        return self.run()["only", 0]


@pytest.mark.parametrize("prompt_len", [1, 15, 16, 17, 100])
def test_greedy_answers_are_those_of_transformers(family, prompt_len):
    prompt = family.prompt(prompt_len)
    engine = Engine(family, max_num_batched_tokens=32, max_num_seqs=8)  # chunks of two blocks

    assert engine.answer(prompt) == family.answer(prompt)


def test_chunks_may_end_within_a_block(judge):
    prompt = judge.prompt(100)
    engine = Engine(judge, max_num_batched_tokens=7, max_num_seqs=7)

    assert engine.answer(prompt) == judge.answer(prompt)
    assert engine.num_steps == 15 + NUM_TOKENS - 1


def test_answers_in_a_batch_of_32_equal_answers_alone(judge):
    prompts = {f"{i}": judge.prompt(1 + 3 * i, seed=i) for i in range(32)}
    engine = Engine(judge, max_num_batched_tokens=200, max_num_seqs=32)
    for request_id, prompt in prompts.items():
        engine.submit(request_id, prompt)
    together = engine.run()

    assert together == {
        (request_id, 0): judge.answer(prompt) for request_id, prompt in prompts.items()
    }


def test_a_cached_prefix_does_not_change_the_answer(judge):
    prompt = judge.prompt(60)
    engine = Engine(judge)
    engine.submit("first", prompt)
    engine.run()
    engine.submit("same", prompt)
    engine.submit("longer", prompt + judge.prompt(30, seed=1))
    engine.run()

    assert engine.cached == {"first": 0, "same": 48, "longer": 48}
    assert engine.tokens["same", 0] == judge.answer(prompt)
    assert engine.tokens["longer", 0] == judge.answer(prompt + judge.prompt(30, seed=1))


def test_a_preemption_does_not_change_the_answer(judge):
    prompts = {name: judge.prompt(40, seed=seed) for seed, name in enumerate("abcd")}
    engine = Engine(
        judge, num_gpu_blocks_override=18, block_size=8, max_model_len=128, max_num_seqs=4
    )
    for name, prompt in prompts.items():
        engine.submit(name, prompt, max_tokens=50)
    engine.run()

    assert engine.num_resumed  # at least one request was preempted and resumed
    assert engine.tokens == {
        (name, 0): judge.answer(prompt, 50) for name, prompt in prompts.items()
    }


def test_greedy_choices_of_one_request_are_equal(judge):
    prompt = judge.prompt(50)
    engine = Engine(judge)
    engine.submit("a", prompt, n=4)
    engine.run()

    assert engine.tokens == {("a", i): judge.answer(prompt) for i in range(4)}


def test_a_seed_gives_the_same_answer_in_any_batch(judge):
    prompt, options = judge.prompt(20), {"temperature": 1.5, "seed": 7, "n": 2}
    alone = Engine(judge)
    alone.submit("a", prompt, **options)
    expected = alone.run()
    crowded = Engine(
        judge, num_gpu_blocks_override=24, block_size=8, max_model_len=128, max_num_seqs=6
    )
    for i in range(5):
        crowded.submit(f"{i}", judge.prompt(9 + i, seed=i), temperature=1.0)
    crowded.submit("a", prompt, **options)
    crowded.run()

    assert {key: crowded.tokens[key] for key in expected} == expected
    assert expected["a", 0] != expected["a", 1]


def test_an_abort_does_not_change_other_answers(judge):
    engine = Engine(judge)
    engine.submit("gone", judge.prompt(30, seed=1))
    engine.submit("stays", judge.prompt(30, seed=2))
    for _ in range(5):
        engine.step()
    for sequence in engine.parts.scheduler.abort("gone"):
        engine.parts.runner.forget(sequence)
    engine.run()

    assert len(engine.tokens["gone", 0]) == 5
    assert engine.tokens["stays", 0] == judge.answer(judge.prompt(30, seed=2))
    assert engine.parts.scheduler.load().kv_stats.kv_active_blocks == 0
