"""The translation of requests and outputs of TensorRT-LLM (in the shapes of its sources); without TensorRT-LLM."""

from types import SimpleNamespace

import pytest

import fake_trtllm
from dynamo.base import errors
from dynamo.protocols import blocks, generate, kv_transfer

with fake_trtllm.adapter() as trtllm:
    pass


def fields(*, eos=(2, 3), options=None, stop=None, report=None, **request):
    made = generate.Request(
        id="a",
        model="m",
        token_ids=blocks.pack([1, 2]),
        eos_token_ids=eos,
        sampling_options=generate.SamplingOptions(**options or {}),
        stop_conditions=generate.StopConditions(**stop or {}),
        output_options=generate.OutputOptions(**report or {}),
        **request,
    )
    return trtllm.sampling_fields(made, 0, 100)


def test_a_request_without_a_limit_may_fill_the_context():
    assert fields()["max_tokens"] == 98
    assert fields(stop={"max_tokens": 500})["max_tokens"] == 98
    assert fields(stop={"max_tokens": 5})["max_tokens"] == 5


def test_the_first_end_token_is_the_end_token_and_the_others_are_stop_words():
    made = fields(stop={"stop_token_ids": (9,)})

    assert (made["end_id"], made["stop_token_ids"]) == (2, [3, 9])
    assert made["include_stop_str_in_output"]


def test_ignored_end_tokens_end_nothing():
    made = fields(stop={"ignore_eos": True, "stop_token_ids": (9,)})

    assert (made["end_id"], made["stop_token_ids"]) == (-1, [9])


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_p": 0.0}])
def test_greedy_is_top_k_of_one(options):
    made = fields(options=options)

    assert made["top_k"] == 1
    assert "top_p" not in made


def test_a_draw_always_sets_top_p_and_top_k():
    made = fields()

    assert (made["temperature"], made["top_p"], made["top_k"]) == (1.0, 1.0, 0)


def test_logprobs_of_zero_request_one():
    assert fields(report={"logprobs": 0})["logprobs"] == 1
    assert fields()["logprobs"] is None


def test_a_constraint_is_passed_on():
    shape = generate.GuidedDecoding(regex="a+")

    assert fields(options={"guided_decoding": shape})["guided_decoding"] == {"regex": "a+"}


def test_one_end_token_can_be_held_back():
    assert fields(eos=(2,), stop={"min_tokens": 3})["min_tokens"] == 3


@pytest.mark.parametrize(
    ("param", "request_"),
    [
        ("min_tokens", {"stop": {"min_tokens": 3}}),
        ("logit_bias", {"options": {"logit_bias": {5: 1.0}}}),
        ("allowed_token_ids", {"options": {"allowed_token_ids": (5,)}}),
        ("prompt_logprobs", {"report": {"prompt_logprobs": 0}}),
        ("nvext.max_thinking_tokens", {"thinking": generate.ThinkingLimit(max_tokens=4, close_ids=(3,))}),
        ("kv_transfer_params", {"kv_transfer_params": kv_transfer.PREFILL_ONLY}),
    ],
)  # fmt: skip
def test_options_unsupported_by_trtllm_are_refused_by_name(param, request_):
    with pytest.raises(errors.InvalidRequest, match="TensorRT-LLM") as refusal:
        fields(**request_)

    assert refusal.value.param == param


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
    return trtllm.translate_output(told, 1, request, is_first=is_first)


def test_a_plain_output_has_tokens_and_index():
    assert translated(said([5, 6])) == generate.Output((5, 6), None, 1)


@pytest.mark.parametrize(
    ("reason", "stop_reason", "told"),
    [
        ("length", None, ("length", None)),
        ("stop", None, ("eos", None)),  # its end token
        ("stop", 3, ("eos", None)),  # another one of the model's, as a stop word
        ("stop", 9, ("stop", 9)),
    ],
)
def test_each_finish_reason_is_translated(reason, stop_reason, told):
    made = translated(said([5], reason=reason, stop_reason=stop_reason))

    assert (made.finish_reason, made.stop_reason) == told


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        ("timeout", errors.DeadlineExceeded),
        ("not_finished", errors.EngineFailed),
        ("cancelled", errors.EngineFailed),
    ],
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
