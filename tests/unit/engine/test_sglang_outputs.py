"""From what SGLang says to outputs, on shapes as `_handle_batch_output` of SGLang 0.5.23 makes them; without SGLang."""

import pytest

from dynamo.base import errors
from dynamo.engine.adapters.sglang import translation
from dynamo.protocols import blocks, generate


def said(tokens, *, end=None, completed=9, **meta):
    info = {
        "id": "1-0-a",
        "finish_reason": end,
        "prompt_tokens": 3,
        "weight_version": "default",
        "num_retractions": 0,
        "reasoning_tokens": 0,
        "completion_tokens": completed,
        "cached_tokens": 32,
    }
    return {"output_ids": tokens, "meta_info": info | meta}


def translated(told, *, index=0, is_first=False, eos=(2,), stops=(), **report):
    request = generate.Request(
        id="a",
        model="m",
        token_ids=blocks.pack([1]),
        eos_token_ids=eos,
        stop_conditions=generate.StopConditions(stop_token_ids=stops),
        output_options=generate.OutputOptions(**report),
    )
    return translation.translate_output(told, index, request, is_first=is_first)


def test_a_plain_output_has_tokens_and_index():
    assert translated(said([5, 6]), index=3) == generate.Output((5, 6), None, 3)


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ({"type": "length", "length": 5}, ("length", None)),
        ({"type": "stop", "matched": 2}, ("eos", None)),
        ({"type": "stop", "matched": 7}, ("eos", None)),  # an end token that only SGLang knows
        ({"type": "stop", "matched": 9}, ("stop", 9)),
    ],
)
def test_each_finish_reason_is_translated(end, told):
    made = translated(said([5], end=end), stops=(9,))

    assert (made.finish_reason, made.stop_reason) == told


@pytest.mark.parametrize(
    ("status", "error"),
    [(400, errors.InvalidRequest), (503, errors.Overloaded), (500, errors.EngineFailed), (None, errors.EngineFailed)],
)  # fmt: skip
def test_a_request_that_sglang_gave_up_is_an_error_with_its_message(status, error):
    end = {"type": "abort", "message": "too long", "status_code": status, "err_type": None}
    with pytest.raises(error, match="too long"):
        translated(said([], end=end))


def test_cached_tokens_are_reported_with_the_first_output():
    assert translated(said([5]), is_first=True).cached_tokens == 32
    assert translated(said([5], end={"type": "length"}), is_first=False).cached_tokens is None


def test_logprobs_of_sglang_are_translated():
    told = said(
        [7],
        output_token_logprobs=[(-3.0, 7, None)],
        output_top_logprobs=[[(-0.1, 5, None), (-0.2, 6, None), (-0.3, 8, None)]],
    )
    (made,) = translated(told, logprobs=2).logprobs

    assert made == generate.TokenLogprobs(
        -3.0, (generate.TopLogprob(5, -0.1), generate.TopLogprob(6, -0.2))
    )


def test_without_alternatives_only_the_chosen_token_has_a_logprob():
    told = said([7], output_token_logprobs=[(-3.0, 7, None)])

    assert translated(told, logprobs=0).logprobs == (generate.TokenLogprobs(-3.0),)


def test_prompt_logprobs_come_with_the_first_output_of_the_first_choice():
    scores = {"input_token_logprobs": [(None, 1, None), (-1.0, 4, None)]}
    told = said([7], completed=1, **scores)

    assert translated(told, prompt_logprobs=0).prompt_logprobs == (generate.TokenLogprobs(-1.0),)
    assert translated(told, prompt_logprobs=0, index=1).prompt_logprobs is None
    assert translated(said([7], completed=2, **scores), prompt_logprobs=0).prompt_logprobs is None
