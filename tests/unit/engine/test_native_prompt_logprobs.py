"""Prompt logprobs equal those of transformers, with any chunks."""

import pytest
import torch
import transformers

from checkpoints import make_checkpoint
from devices import COMPUTING
from dynamo.engine.native.runner import PromptLogprobs, Runner
from dynamo.engine.native.sequence import Chunk, Sequence
from dynamo.protocols import blocks, generate

pytestmark = pytest.mark.reference
LENGTH = 150  # more than are looked at together


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture
def runner(path):
    return Runner(path, device=COMPUTING, num_blocks=64, block_size=16, threads=1)


def make_sequence(num_logprobs=2, index=0):
    generator = torch.Generator().manual_seed(LENGTH)
    tokens = torch.randint(512, (LENGTH,), generator=generator).tolist()
    request = generate.Request(
        id="r",
        model="m",
        token_ids=blocks.pack(tokens),
        sampling_options=generate.SamplingOptions(temperature=0.0),
        output_options=generate.OutputOptions(prompt_logprobs=num_logprobs),
    )
    return Sequence(
        request=request,
        index=index,
        token_ids=tokens,
        prompt_len=LENGTH,
        block_ids=list(range(16)),
    )


def run(runner, sequence, start, num_tokens):
    is_last = start + num_tokens == len(sequence.token_ids)
    chunk = Chunk(sequence=sequence, start=start, num_tokens=num_tokens, samples=is_last)
    return runner.run([chunk])[0]


def expected(path, sequence):
    """[tokens - 1, vocabulary]"""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([sequence.token_ids])).logits[0].float()
    return logits[:-1].log_softmax(-1)


@pytest.mark.parametrize("cuts", [(LENGTH,), (1, 64, 1, 70, 14), (149, 1)])
def test_each_prompt_token_but_the_first_has_a_logprob(path, runner, cuts):
    sequence, start = make_sequence(), 0
    for count in cuts:
        sampled = run(runner, sequence, start, count)
        start += count
    reference = expected(path, sequence)
    own = reference.gather(1, torch.tensor(sequence.token_ids[1:]).unsqueeze(1)).squeeze(1)
    best = reference.topk(2)

    told = sampled.prompt_logprobs
    torch.testing.assert_close(torch.tensor([t.logprob for t in told]), own, rtol=1e-4, atol=2e-4)
    tops = torch.tensor([[top.logprob for top in t.top] for t in told])
    torch.testing.assert_close(tops, best.values, rtol=1e-4, atol=2e-4)


def test_prompt_logprobs_are_reported_once_after_a_preemption(runner):
    once, again = make_sequence(), make_sequence()
    whole = run(runner, once, 0, LENGTH).prompt_logprobs
    run(runner, again, 0, 70)  # then it is preempted
    told = run(runner, again, 0, LENGTH).prompt_logprobs
    again.token_ids.append(1)
    later = run(runner, again, 0, LENGTH + 1)

    assert [one.top[0].token_id for one in told] == [one.top[0].token_id for one in whole]
    assert len(told) == LENGTH - 1
    assert later.prompt_logprobs is None


def test_only_the_first_choice_reports_prompt_logprobs(runner):
    assert run(runner, make_sequence(index=1), 0, LENGTH).prompt_logprobs is None
    assert run(runner, make_sequence(None), 0, LENGTH).prompt_logprobs is None


def test_logprobs_of_a_sequence_that_has_ended_are_dropped():
    logprobs, sequence = PromptLogprobs(), make_sequence()
    chunk = Chunk(sequence=sequence, start=0, num_tokens=10, samples=False)
    logprobs.add_chunk(chunk, 0, lambda rows: torch.zeros(len(rows), 512))
    logprobs.forget(sequence)
    drawn = logprobs.add_to(sequence, "drawn")

    assert drawn == "drawn"
