"""Sampling against plain numpy, and its promise: a seed gives the same tokens whatever shares the batch."""

import math

import msgspec
import numpy as np
import pytest
import torch

from dynamo.base import errors
from dynamo.engine.native import sampler
from dynamo.engine.native.sequence import Sequence
from dynamo.preprocess import inputs
from dynamo.preprocess import options as request_options
from dynamo.protocols import blocks, generate

VOCAB = 200
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 2
GRID = 2000


class Fixed:
    """Options, and the number that decides."""

    def __init__(self, options, uniform):
        self.options, self.uniform = options, uniform
        self.pool = sampler.choose_pool(options)


def make_sequence(
    prompt=(1, 2, 3), output=(), index=0, logprobs=None, eos=(), stop=None, **options
):
    request = generate.Request(
        id="r",
        model="m",
        token_ids=blocks.pack(prompt),
        sampling_options=generate.SamplingOptions(**options),
        stop_conditions=stop or generate.StopConditions(),
        output_options=generate.OutputOptions(logprobs=logprobs),
        eos_token_ids=eos,
    )
    tokens = [*prompt, *output]
    return Sequence(request=request, index=index, token_ids=tokens, prompt_len=len(prompt))


def sample(logits, *sequences):
    return sampler.Sampler().sample(torch.as_tensor(logits).float(), sequences)


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def reference(logits, options):
    """The distribution to draw from: temperature, min-p, top-k, top-p."""
    p = softmax(logits.double().numpy() / options.temperature)
    p[p < options.min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    if options.top_k:
        p[order[options.top_k :]] = 0
    p /= p.sum()
    sums = np.cumsum(p[order])
    p[order[sums - p[order] >= options.top_p]] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 1.7, "top_k": 5},
        {"top_k": 100},
        {"top_k": VOCAB},
        {"top_k": 1000},
        {"top_p": 0.9},
        {"temperature": 3.0, "top_p": 0.99},
        {"top_p": 0.0001},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"top_k": 20, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 30, "top_p": 0.95, "min_p": 0.02},
    ],
)
def test_tokens_are_drawn_from_the_reference_distribution(options):
    options = generate.SamplingOptions(**options)
    drawings = [Fixed(options, (i + 0.5) / GRID) for i in range(GRID)]

    drawn = sampler.draw(LOGITS.expand(GRID, VOCAB), drawings)
    share = np.bincount(drawn, minlength=VOCAB) / GRID
    expected = reference(LOGITS, options)
    assert np.abs(share - expected).max() <= 1.01 / GRID
    assert not share[expected == 0].any()


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-32])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}])
def test_the_ends_of_the_unit_interval_draw_allowed_tokens(uniform, options):
    options = generate.SamplingOptions(**options)
    logits = LOGITS.clone()
    logits[0] = logits[-1] = -math.inf

    (drawn,) = sampler.draw(logits.unsqueeze(0), [Fixed(options, uniform)])
    assert reference(logits, options)[drawn] > 0


def test_a_top_p_of_zero_leaves_the_likeliest():
    options = generate.SamplingOptions(temperature=2.0, top_p=0.0)
    drawn = sampler.draw(LOGITS.expand(3, VOCAB), [Fixed(options, u) for u in (0.0, 0.5, 0.999)])

    assert drawn == [LOGITS.argmax()] * 3


def test_rows_with_different_options_share_a_batch():
    kinds = [{"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.5}, {"top_k": 150}]
    logits = torch.randn(len(kinds), VOCAB, generator=torch.Generator().manual_seed(2))
    sequences = [make_sequence(seed=i, **kind) for i, kind in enumerate(kinds)]

    together = sample(logits, *sequences)
    assert together[0].token_id == logits[0].argmax()
    for i, sequence in enumerate(sequences):
        assert sample(logits[i : i + 1], sequence) == [together[i]]


@pytest.mark.parametrize("kind", [{}, {"top_p": 0.9}, {"top_k": 40}])
def test_a_seed_is_reproducible_in_any_batch_and_after_preemption(kind):
    def answer(neighbours, is_forgotten):
        drawer, sequence = sampler.Sampler(), make_sequence(seed=7, **kind)
        logits = LOGITS.expand(1 + len(neighbours), VOCAB)
        for _ in range(20):
            answers = drawer.sample(logits, [*neighbours, sequence])
            sequence.token_ids.append(answers[-1].token_id)
            if is_forgotten:
                drawer.forget(sequence)
        return sequence.token_ids

    alone = answer([], False)
    others = [make_sequence(seed=i, top_k=i, top_p=0.7) for i in range(40)]
    assert answer(others, False) == alone
    assert answer([], True) == alone
    assert len(set(alone)) > 5


def test_seed_choice_and_position_change_the_draw():
    def draws(**changes):
        return [
            sample(LOGITS.unsqueeze(0), make_sequence(output=[9] * i, **({"seed": 1} | changes)))[0]
            for i in range(20)
        ]

    first = draws()
    assert draws() == first
    assert draws(seed=2) != first
    assert draws(index=1) != first
    assert draws(seed=-1) == draws(seed=2**64 - 1)


def test_without_a_seed_answers_differ():
    logits = torch.zeros(2, VOCAB).repeat(16, 1)
    sequences = [make_sequence() for _ in range(32)]

    assert len({answer.token_id for answer in sample(logits, *sequences)}) > 10


def test_numbers_drawn_are_uniform():
    uniforms = [
        sampler.SamplingState(make_sequence(seed=seed, index=seed % 3)).uniform
        for seed in range(3000)
    ]

    shares = np.histogram(uniforms, bins=10, range=(0, 1))[0] / 3000
    assert np.abs(shares - 0.1).max() < 0.02


class CountedBiases(dict):
    """Biases that count how often their values are read."""

    num_reads = 0

    def values(self):
        self.num_reads += 1
        return super().values()


def test_biases_are_read_for_the_first_token_only():
    """They may be of all tokens of a large vocabulary."""
    biases = CountedBiases({17: 100.0})
    sequence, drawing = make_sequence(temperature=0, logit_bias=biases), sampler.Sampler()
    drawn = [drawing.sample(LOGITS[None], [sequence])[0].token_id for _ in range(3)]

    assert (drawn, biases.num_reads) == ([17, 17, 17], 1)


def test_logit_bias_changes_the_drawn_token():
    assert sample(LOGITS.unsqueeze(0), make_sequence(temperature=0, logit_bias={17: 100.0}))[0] == (
        sampler.Sampled(token_id=17)
    )
    best = int(LOGITS.argmax())
    runner_up = int(LOGITS.topk(2).indices[1])

    (answer,) = sample(LOGITS.unsqueeze(0), make_sequence(temperature=0, logit_bias={best: -100.0}))
    assert answer.token_id == runner_up


def test_only_allowed_tokens_come():
    best, *_, a, b, c, d = LOGITS.argsort(descending=True).tolist()
    allowed, bias = (a, b, c, d), {c: 50.0, best: 100.0}

    (greedy,) = sample(
        LOGITS[None], make_sequence(temperature=0, allowed_token_ids=allowed, logit_bias=bias)
    )
    drawn = sample(
        torch.stack([LOGITS] * 50),
        *(make_sequence(temperature=5.0, seed=n, allowed_token_ids=allowed) for n in range(50)),
    )

    assert greedy.token_id == c
    assert {answer.token_id for answer in drawn} == set(allowed)


def test_penalties_count_among_allowed_tokens_as_among_all():
    logits = torch.full((VOCAB,), -10.0)
    logits[5], logits[6] = 8.0, 7.0
    asked = inputs.GenerationInput(
        model="m", temperature=0, repetition_penalty=1.1, allowed_token_ids=[5, 6]
    )
    made = request_options.make_sampling(asked, request_options.GenerationDefaults(), VOCAB)

    (answer,) = sample(logits[None], make_sequence([5], **msgspec.structs.asdict(made)))
    assert answer.token_id == 5  # 8 / 1.1 > 7


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7},
        {"presence_penalty": 0.8},
        {"frequency_penalty": 0.6},
        {"repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 0.4},
    ],
)
def test_penalties_are_those_of_the_reference(options):
    prompt, output = [0, 1, 1, 2], [2, 3, 3, 3, 4]
    expected = LOGITS.double().numpy().copy()
    r = options.get("repetition_penalty", 1.0)
    for token in {*prompt, *output}:
        expected[token] = expected[token] / r if expected[token] > 0 else expected[token] * r
    for token in set(output):
        expected[token] -= options.get("presence_penalty", 0.0)
        expected[token] -= options.get("frequency_penalty", 0.0) * output.count(token)

    drawer, sequence = sampler.Sampler(), make_sequence(prompt, output[:2], **options)
    drawer.adjust(
        LOGITS.unsqueeze(0), [sampler.SamplingState(sequence)]
    )  # counts half of the output
    sequence.token_ids += output[2:]
    found = drawer.adjust(LOGITS.unsqueeze(0), [sampler.SamplingState(sequence)])
    np.testing.assert_allclose(found[0].numpy(), expected, rtol=1e-5)


def test_penalties_touch_only_their_own_row():
    plain, penalized = (
        make_sequence(temperature=0),
        make_sequence(temperature=0, presence_penalty=100.0),
    )
    best = int(LOGITS.argmax())
    penalized.token_ids.append(best)

    answers = sample(torch.stack([LOGITS, LOGITS]), plain, penalized)
    assert answers[0].token_id == best
    assert answers[1].token_id == int(LOGITS.topk(2).indices[1])


def test_logprobs_are_of_the_models_own_logits():
    sequence = make_sequence(
        temperature=0.3, seed=3, logprobs=4, logit_bias={5: 50.0}, repetition_penalty=2.0
    )
    plain = make_sequence(temperature=0)
    log_p = np.log(softmax(LOGITS.double().numpy()))

    answer, other = sample(torch.stack([LOGITS, LOGITS]), sequence, plain)
    assert answer.token_id == 5
    assert answer.logprobs.logprob == pytest.approx(log_p[5], rel=1e-5)
    assert [top.token_id for top in answer.logprobs.top] == list(np.argsort(-log_p)[:4])
    assert [top.logprob for top in answer.logprobs.top] == pytest.approx(
        np.sort(log_p)[:-5:-1], rel=1e-5
    )
    assert other.logprobs is None


def test_logprobs_without_alternatives_cover_the_chosen_token():
    few, many = make_sequence(temperature=0, logprobs=0), make_sequence(temperature=0, logprobs=3)

    answers = sample(torch.stack([LOGITS, LOGITS]), few, many)
    assert answers[0].logprobs.top == ()
    assert len(answers[1].logprobs.top) == 3
    assert answers[0].logprobs.logprob == answers[1].logprobs.top[0].logprob


@pytest.mark.parametrize(("ignore_eos", "expected"), [(False, [30, 30, 10]), (True, [10, 10, 10])])
def test_end_tokens_are_banned_until_min_tokens(ignore_eos, expected):
    stop = generate.StopConditions(min_tokens=2, stop_token_ids=(20,), ignore_eos=ignore_eos)
    logits = torch.zeros(1, VOCAB)
    logits[0, [10, 20, 30]] = torch.tensor([2.0, 3.0, 1.0])
    drawer, sequence = sampler.Sampler(), make_sequence(temperature=0, eos=(10,), stop=stop)
    for _ in range(2):
        (answer,) = drawer.sample(logits, [sequence])
        sequence.token_ids.append(answer.token_id)
    logits[0, 20] = 0.0
    (answer,) = drawer.sample(logits, [sequence])

    assert [*sequence.token_ids[3:], answer.token_id] == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_p": 0.5}])
def test_a_row_without_finite_logits_is_an_error(bad, options):
    logits = torch.stack([torch.full((VOCAB,), bad), LOGITS])
    sequences = [make_sequence(logprobs=2, **options), make_sequence(seed=1, **options)]

    failed, answer = sample(logits, *sequences)
    assert isinstance(failed, errors.EngineFailed)
    assert sample(LOGITS.unsqueeze(0), sequences[1]) == [answer]


def test_forgetting_an_unknown_sequence_is_no_error():
    sampler.Sampler().forget(make_sequence())


class BrokenGrammar:
    """A grammar that no sequence can follow."""

    def begin(self):
        raise RuntimeError("broken")


def test_sequence_that_cannot_be_drawn_fails_alone():
    good, bad, last = make_sequence(seed=1), make_sequence(seed=2), make_sequence(seed=3)
    bad.grammar = BrokenGrammar()
    rows = torch.stack([LOGITS] * 3)
    alone = [sample(LOGITS[None], sequence)[0] for sequence in (good, last)]
    first, failed, third = sample(rows, good, bad, last)

    assert [first, third] == alone
    assert isinstance(failed, errors.EngineFailed)


def test_allowed_tokens_that_are_all_excluded_are_named():
    options = {"allowed_token_ids": (3,), "logit_bias": {3: -math.inf}}
    (result,) = sample(LOGITS[None], make_sequence(**options))

    assert isinstance(result, errors.InvalidRequest)
    assert result.param == "allowed_token_ids"


@pytest.mark.parametrize("min_tokens", [0, 1])
def test_request_that_excludes_all_tokens_is_invalid(min_tokens):
    param = "min_tokens" if min_tokens else "logit_bias"
    stop = generate.StopConditions(min_tokens=min_tokens, stop_token_ids=tuple(range(VOCAB // 2)))
    bias = dict.fromkeys(range(VOCAB // 2 if min_tokens else 0, VOCAB), -math.inf)
    (result,) = sample(LOGITS[None], make_sequence(stop=stop, logit_bias=bias))

    assert isinstance(result, errors.InvalidRequest)
    assert result.param == param


def test_logits_that_are_not_finite_are_the_models_fault():
    (result,) = sample(torch.full((1, VOCAB), math.nan), make_sequence())

    assert isinstance(result, errors.EngineFailed)
