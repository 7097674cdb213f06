"""From what TensorRT-LLM says to outputs, on shapes as its `executor/result.py` makes them; without TensorRT-LLM."""

from types import SimpleNamespace

import pytest

from dynamo.base import errors
from dynamo.engine.adapters.trtllm import translation
from dynamo.protocols import blocks, generate


def said(tokens, *, reason=None, stop_reason=None, logprobs=()):
    answer = SimpleNamespace(
        token_ids_diff=tokens, finish_reason=reason, stop_reason=stop_reason, logprobs_diff=logprobs
    )
    return SimpleNamespace(outputs=[answer], cached_tokens=32)


def logprob(value, rank):
    return SimpleNamespace(logprob=value, rank=rank)


def translated(told, *, is_first=False, eos=(2, 3), **report):
    request = generate.Request(
        id="a",
        model="m",
        token_ids=blocks.pack([1]),
        eos_token_ids=eos,
        output_options=generate.OutputOptions(**report),
    )
    return translation.translate_output(told, 1, request, is_first=is_first)


def test_a_plain_output_has_tokens_and_index():
    assert translated(said([5, 6])) == generate.Output((5, 6), None, 1)


@pytest.mark.parametrize(
    ("reason", "stop_reason", "told"),
    [
        ("length", None, ("length", None)),
        ("stop", None, ("eos", None)),  # its end token
        ("stop", 3, ("eos", None)),  # another one of the model's, as a stop word
        ("stop", 9, ("stop", 9)),
        ("cancelled", None, ("cancelled", None)),
    ],
)
def test_each_finish_reason_is_translated(reason, stop_reason, told):
    made = translated(said([5], reason=reason, stop_reason=stop_reason))

    assert (made.finish_reason, made.stop_reason) == told


@pytest.mark.parametrize(
    ("reason", "error"),
    [("timeout", errors.DeadlineExceeded), ("not_finished", errors.EngineFailed)],
)
def test_a_failed_finish_reason_is_an_error(reason, error):
    with pytest.raises(error):
        translated(said([5], reason=reason))


def test_cached_tokens_are_reported_with_the_first_output():
    assert translated(said([5]), is_first=True).cached_tokens == 32
    assert translated(said([5], reason="length")).cached_tokens is None


def test_the_chosen_token_may_have_any_rank():
    step = {5: logprob(-0.1, 1), 6: logprob(-0.2, 2), 7: logprob(-3.0, 9)}
    (made,) = translated(said([7], logprobs=[step]), logprobs=1).logprobs

    assert made == generate.TokenLogprobs(-3.0, (generate.TopLogprob(5, -0.1),))
