"""The thinking budget ends a thought at its limit and changes nothing else."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamo.engine.native import sampler
from dynamo.engine.native.sequence import Sequence
from dynamo.protocols import blocks, generate

OPEN, CLOSE, OTHER_CLOSE = 1, 2, 3


def make_sequence(max_tokens, *, is_open=False, prompt=(9, 9)):
    limit = generate.ThinkingLimit(
        max_tokens=max_tokens, open_ids=(OPEN,), close_ids=(CLOSE, OTHER_CLOSE), is_open=is_open
    )
    request = generate.Request(
        id="r",
        model="m",
        token_ids=blocks.pack(prompt),
        thinking=limit,
        sampling_options=generate.SamplingOptions(temperature=0.0),
    )
    return Sequence(request=request, index=0, token_ids=list(prompt), prompt_len=len(prompt))


def written(model, max_tokens, length, *, is_open=False):
    """What comes of a model that wants to write these tokens."""
    sequence = make_sequence(max_tokens, is_open=is_open)
    draw = sampler.Sampler()
    for step in range(length):
        logits = torch.zeros(1, 10)
        logits[0, model[step % len(model)]] = 5.0
        (drawn,) = draw.sample(logits, [sequence])
        sequence.token_ids.append(drawn.token_id)
    return sequence.token_ids[sequence.prompt_len :]


@pytest.mark.parametrize(
    ("model", "max_tokens", "is_open", "expected"),
    [
        ([OPEN, 7, 7, 7, 7, 7], 2, False, [OPEN, 7, 7, CLOSE, 7, 7]),
        ([7, 7, 7, 7], 2, True, [7, 7, CLOSE, 7]),
        ([7, 7, 7], 0, True, [CLOSE, 7, 7]),
        ([OPEN, 7, OTHER_CLOSE, 7, 7, 7], 2, False, [OPEN, 7, OTHER_CLOSE, 7, 7, 7]),
        ([8, OPEN, 7, 7], 1, False, [8, OPEN, 7, CLOSE]),
        ([8, 8, 8, 8, 8, OPEN, 7, 7], 1, False, [8, 8, 8, 8, 8, OPEN, 7, 7]),
        ([7, 7, 7], 1, False, [7, 7, 7]),
    ],
)
def test_the_closing_mark_is_forced_at_the_limit(model, max_tokens, is_open, expected):
    assert written(model, max_tokens, len(expected), is_open=is_open) == expected


@given(st.lists(st.integers(1, 9), max_size=30), st.integers(0, 5), st.booleans())
def test_the_budget_is_the_same_read_at_once_or_stepwise(tokens, limit, is_open):
    stepwise, at_once = (make_sequence(limit, is_open=is_open) for _ in range(2))
    watch = sampler.ThinkingBudget(stepwise, stepwise.request.thinking)
    for token in tokens:
        forced = watch.forced_id()
        stepwise.token_ids.append(token if forced is None else forced)
    at_once.token_ids[:] = stepwise.token_ids
    fresh = sampler.ThinkingBudget(at_once, at_once.request.thinking)
    answer = stepwise.token_ids[stepwise.prompt_len :]
    thought = list(itertools.takewhile(lambda token: token not in (CLOSE, OTHER_CLOSE), answer))

    assert not is_open or len(thought) <= limit
    assert fresh.forced_id() == watch.forced_id()
