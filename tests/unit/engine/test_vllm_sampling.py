"""From a request to vLLM's sampling parameters; without vLLM."""

import pytest

from dynamo.base import errors
from dynamo.engine.adapters import guided_decoding
from dynamo.engine.adapters.vllm import translation
from dynamo.protocols import blocks, generate, kv_transfer

PARAMS = {"do_remote_decode": True}


def fields(index=0, *, stop=None, options=None, report=None, **request):
    made = generate.Request(
        id="a",
        model="m",
        token_ids=blocks.pack([1, 2, 3]),
        stop_conditions=generate.StopConditions(**stop or {}),
        sampling_options=generate.SamplingOptions(**options or {}),
        output_options=generate.OutputOptions(**report or {}),
        **request,
    )
    return translation.sampling_fields(made, index, guided_decoding.GuidedSupport())


def test_default_options_are_neutral():
    made = fields()

    assert made["temperature"] == made["top_p"] == made["repetition_penalty"] == 1.0
    assert made["top_k"] == made["min_p"] == made["presence_penalty"] == made["min_tokens"] == 0
    assert made["stop_token_ids"] == []
    for name in (
        "seed",
        "logit_bias",
        "max_tokens",
        "logprobs",
        "structured_outputs",
        "extra_args",
    ):
        assert made[name] is None


def test_every_sampling_option_is_passed_on():
    told = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {5: 1.0},
    }

    assert told.items() <= fields(options=told).items()


def test_top_p_of_zero_is_greedy():
    made = fields(options={"top_p": 0.0, "temperature": 0.7})

    assert (made["temperature"], made["top_p"]) == (0.0, 1.0)


def test_only_the_requests_own_end_tokens_end_an_answer():
    made = fields(stop={"stop_token_ids": (7,)}, eos_token_ids=(8, 9))

    assert made["ignore_eos"] is True
    assert made["stop_token_ids"] == [7, 8, 9]


def test_ignore_eos_drops_the_end_tokens():
    made = fields(stop={"stop_token_ids": (7,), "ignore_eos": True}, eos_token_ids=(8, 9))

    assert made["stop_token_ids"] == [7]


def test_choices_and_resumed_answers_have_different_seeds():
    options = {"seed": 40}
    first, second = (fields(index, options=options)["seed"] for index in (0, 1))
    goes_on = fields(options=options, num_resumed=1)["seed"]

    assert (first, second) == (40, 41)
    assert fields(options=options, first_choice=1)["seed"] == second
    assert goes_on not in (first, second)


@pytest.mark.parametrize("seed", [-1, 2**64 - 1, -(2**63)])
def test_every_seed_is_mapped_to_vllms_range(seed):
    assert 0 <= fields(options={"seed": seed})["seed"] < 2**63


def test_prompt_logprobs_and_kv_transfer_are_the_first_choices():
    asked = {
        "report": {"prompt_logprobs": 1, "logprobs": 2},
        "kv_transfer_params": kv_transfer.PREFILL_ONLY,
    }
    first, second = (fields(index, **asked) for index in (0, 1))

    assert first["prompt_logprobs"] == 1
    assert first["extra_args"] == {"kv_transfer_params": PARAMS}
    assert second["prompt_logprobs"] is second["extra_args"] is None
    assert second["logprobs"] == 2


def test_a_thinking_limit_is_vllms_thinking_token_budget():
    limit = generate.ThinkingLimit(max_tokens=5, close_ids=(4,))

    assert fields(thinking=limit)["thinking_token_budget"] == 5


def test_a_resumed_guided_answer_is_refused_with_the_callers_parameter():
    guided = generate.GuidedDecoding(regex="a", param="guided_regex")
    with pytest.raises(errors.InvalidRequest, match="guided_regex") as refusal:
        fields(options={"guided_decoding": guided}, num_resumed=2)

    assert refusal.value.param == "guided_regex"
