"""From what vLLM says to outputs, on recorded shapes (vLLM 0.32); without vLLM."""

from types import SimpleNamespace

import pytest

from dynamo.base import errors
from dynamo.engine.adapters.vllm import translation
from dynamo.protocols import blocks, generate, kv_transfer


def result(tokens, *, reason=None, stop_reason=None, logprobs=None, prompt=None, **fields):
    said = SimpleNamespace(
        token_ids=tokens, finish_reason=reason, stop_reason=stop_reason, logprobs=logprobs
    )
    whole = {"num_cached_tokens": 32, "kv_transfer_params": None, "prompt_logprobs": prompt}
    return SimpleNamespace(outputs=[said], **whole | fields)


def logprob(value, rank):
    return SimpleNamespace(logprob=value, rank=rank, decoded_token=None)


def whole(told, *, is_first=False, eos=(2,), **report):
    request = generate.Request(
        id="a",
        model="m",
        token_ids=blocks.pack([1]),
        eos_token_ids=eos,
        output_options=generate.OutputOptions(**report),
    )
    return translation.translate_output(told, 1, request, is_first=is_first)


def test_a_plain_output_has_tokens_and_index():
    assert whole(result([5, 6])) == generate.Output((5, 6), None, 1)


@pytest.mark.parametrize(
    ("reason", "stop_reason", "told"),
    [
        (None, None, (None, None)),
        ("length", None, ("length", None)),
        ("stop", 2, ("eos", None)),
        ("stop", 9, ("stop", 9)),
        ("repetition", "repetition_detected", ("stop", "repetition_detected")),
        ("abort", None, ("cancelled", None)),
    ],
)
def test_each_finish_reason_is_translated(reason, stop_reason, told):
    made = whole(result([5], reason=reason, stop_reason=stop_reason))

    assert (made.finish_reason, made.stop_reason) == told


def test_cached_tokens_are_reported_with_the_first_output():
    assert whole(result([5]), is_first=True).cached_tokens == 32
    assert whole(result([5]), is_first=False).cached_tokens is None
    assert whole(result([5], num_cached_tokens=None), is_first=True).cached_tokens == 0


def test_the_chosen_token_precedes_the_likeliest():
    step = {7: logprob(-3.0, 9), 5: logprob(-0.1, 1), 6: logprob(-0.2, 2)}
    (made,) = whole(result([7], logprobs=[step]), logprobs=2).logprobs

    assert made.logprob == -3.0
    assert made.top == (generate.TopLogprob(5, -0.1), generate.TopLogprob(6, -0.2))


def test_a_chosen_token_may_be_among_the_likeliest():
    step = {5: logprob(-0.1, 1), 6: logprob(-0.2, 2)}
    (made,) = whole(result([5], logprobs=[step]), logprobs=1).logprobs

    assert made.top == (generate.TopLogprob(5, -0.1),)


def test_the_first_prompt_token_has_no_logprob():
    told = result([5], prompt=[None, {5: logprob(-1.0, 1)}, {6: logprob(-2.0, 1)}])
    made = whole(told, prompt_logprobs=0)

    assert made.prompt_logprobs == (generate.TokenLogprobs(-1.0), generate.TokenLogprobs(-2.0))


def test_kv_transfer_params_are_passed_on_unchanged():
    params = {"remote_block_ids": [[1]], "remote_host": "h"}

    assert whole(
        result([5], kv_transfer_params=params), is_first=True
    ).kv_transfer_params == kv_transfer.KvTransferParams(connector=params)


def test_an_unknown_finish_reason_raises_engine_failed():
    with pytest.raises(errors.EngineFailed):
        whole(result([], reason="error"))
