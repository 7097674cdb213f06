"""The translation of requests and outputs of SGLang (in the shapes of its sources, 0.5.23); without SGLang."""

import json

import pytest

import fake_sglang
from dynamo.base import errors
from dynamo.protocols import blocks, generate, kv_transfer

with fake_sglang.adapter() as sglang:
    pass

WITH_TOKENIZER = sglang.SglangFeatures(has_tokenizer=True)


def planned(*, index=0, features=WITH_TOKENIZER, options=None, stop=None, report=None, **fields):
    request = generate.Request(
        id="a",
        model="m",
        token_ids=blocks.pack([1, 2]),
        eos_token_ids=(2,),
        sampling_options=generate.SamplingOptions(**options or {}),
        stop_conditions=generate.StopConditions(**stop or {}),
        output_options=generate.OutputOptions(**report or {}),
        **fields,
    )
    return sglang.generate_arguments(request, index, features)


def params(**request):
    return planned(**request)["sampling_params"]


def test_every_option_has_sglangs_name():
    made = params(
        options={"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "logit_bias": {7: 1.5}},
        stop={"max_tokens": 5, "min_tokens": 2, "stop_token_ids": (9,)},
    )  # fmt: skip

    assert made["temperature"] == 0.5
    assert (made["top_p"], made["top_k"], made["min_p"]) == (0.9, 3, 0.1)
    assert (made["max_new_tokens"], made["min_new_tokens"]) == (5, 2)
    assert made["stop_token_ids"] == [9, 2]
    assert made["logit_bias"] == {"7": 1.5}
    assert made["ignore_eos"] is False


def test_allowed_tokens_become_biases_among_which_those_of_the_request_count():
    made = params(options={"allowed_token_ids": (7, 8), "logit_bias": {7: -50.0, 9: 100.0}})

    assert made["logit_bias"] == {"7": 100.0, "8": 150.0}


@pytest.mark.parametrize(("max_tokens", "limit"), [(7, 7), (8, None), (None, None)])
def test_answer_that_may_fill_the_context_has_no_limit_that_sglang_would_refuse(max_tokens, limit):
    features = sglang.SglangFeatures(context_length=10)  # of which the prompt has 2

    assert params(features=features, stop={"max_tokens": max_tokens})["max_new_tokens"] == limit


def test_top_k_of_all_tokens_is_minus_one():
    assert params()["top_k"] == -1


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_p": 0.0}])
def test_greedy_is_temperature_zero_with_a_valid_top_p(options):
    made = params(options=options)

    assert made["temperature"] == 0.0
    assert 0 < made["top_p"] <= 1


def test_each_choice_has_a_seed_of_its_own():
    seeds = [params(index=i, options={"seed": 5, "n": 2})["sampling_seed"] for i in range(2)]

    assert seeds == [5, 6]


def test_only_the_first_choice_requests_prompt_logprobs():
    report = {"logprobs": 2, "prompt_logprobs": 4}
    first, second = planned(report=report), planned(report=report, index=1)

    assert (first["logprob_start_len"], first["top_logprobs_num"]) == (0, 4)
    assert (second["logprob_start_len"], second["top_logprobs_num"]) == (-1, 2)
    assert planned()["return_logprob"] is False


@pytest.mark.parametrize(
    ("shape", "field", "value"),
    [
        ({"json": "{}"}, "json_schema", "{}"),
        ({"regex": "a+"}, "regex", "a+"),
        ({"grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
    ],
)
def test_each_constraint_has_a_field_of_its_own(shape, field, value):
    assert params(options={"guided_decoding": generate.GuidedDecoding(**shape)})[field] == value


def test_a_choice_of_texts_is_a_structural_tag():
    shape = generate.GuidedDecoding(choice=("yes", "no"))
    made = json.loads(params(options={"guided_decoding": shape})["structural_tag"])

    assert [one["value"] for one in made["format"]["elements"]] == ["yes", "no"]


@pytest.mark.parametrize(
    ("features", "told"),
    [
        (sglang.SglangFeatures(), None),
        (sglang.SglangFeatures(has_priority=True), 3),
        (sglang.SglangFeatures(has_priority=True, is_low_first=True), -3),
    ],
)
def test_priority_follows_sglangs_order(features, told):
    assert planned(features=features, priority=3)["priority"] == told


@pytest.mark.parametrize(
    ("param", "request_"),
    [
        ("ignore_eos", {"stop": {"ignore_eos": True, "stop_token_ids": (9,)}}),
        ("min_tokens", {"stop": {"min_tokens": 3}, "features": sglang.SglangFeatures()}),
        ("nvext.max_thinking_tokens", {"thinking": generate.ThinkingLimit(max_tokens=4, close_ids=(3,))}),
        ("kv_transfer_params", {"kv_transfer_params": kv_transfer.PREFILL_ONLY}),
        ("guided_decoding", {"options": {"guided_decoding": generate.GuidedDecoding(json="{}")}, "num_resumed": 1}),
    ],
)  # fmt: skip
def test_options_unsupported_by_sglang_are_refused_by_name(param, request_):
    with pytest.raises(errors.InvalidRequest, match="SGLang") as refusal:
        planned(**request_)

    assert refusal.value.param == param


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
    return sglang.translate_output(told, index, request, is_first=is_first)


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
