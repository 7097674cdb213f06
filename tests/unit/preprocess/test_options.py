"""Who decides how to sample and when to stop: the root, nvext, the model's files, OpenAI's defaults."""

import pytest

from dynamo.base import errors
from dynamo.frontend.apis import completions as openai_completions
from dynamo.preprocess import inputs, options
from dynamo.protocols import generate, model_errors

VOCAB = 100
NOTHING = options.GenerationDefaults()
MODEL = options.GenerationDefaults(
    temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.1
)


def asked(**fields):
    return openai_completions.CompletionRequest(model="m", prompt="x", **fields)


def nvext(**fields):
    return inputs.NvExt(**fields)


def test_request_without_options_has_openais_defaults():
    assert options.make_sampling(asked(), NOTHING, VOCAB) == generate.SamplingOptions()
    assert options.make_stop_conditions(asked(), 7, VOCAB) == generate.StopConditions(max_tokens=7)


def test_model_defaults_apply_to_absent_request_fields():
    expected = generate.SamplingOptions(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.1
    )

    assert options.make_sampling(asked(), MODEL, VOCAB) == expected


def test_request_overrides_nvext_which_overrides_the_model():
    request = asked(top_k=3, nvext=nvext(top_k=5, repetition_penalty=1.5), temperature=0, min_p=0)
    sampling = options.make_sampling(request, MODEL, VOCAB)

    assert (sampling.top_k, sampling.repetition_penalty) == (3, 1.5)
    assert (sampling.temperature, sampling.min_p) == (0, 0)


def test_top_k_of_minus_one_means_all_tokens():
    assert options.make_sampling(asked(top_k=-1), MODEL, VOCAB).top_k == 0


def test_greedy_sampling_is_temperature_zero():
    request = asked(temperature=1.5, nvext=nvext(greed_sampling=True))

    assert options.make_sampling(request, MODEL, VOCAB).temperature == 0


def test_other_options_are_passed_on():
    request = asked(n=3, presence_penalty=1, frequency_penalty=-1, seed=5, logit_bias={7: -100.0})
    expected = generate.SamplingOptions(
        n=3, presence_penalty=1, frequency_penalty=-1, seed=5, logit_bias={7: -100.0}
    )

    assert options.make_sampling(request, NOTHING, VOCAB) == expected


@pytest.mark.parametrize(("stop", "expected"), [("a", ("a",)), (["a", "b"], ("a", "b")), ([], ())])
def test_stop_conditions(stop, expected):
    request = asked(stop=stop, min_tokens=2, stop_token_ids=[9], nvext=nvext(ignore_eos=True))

    assert options.make_stop_conditions(request, 7, VOCAB) == generate.StopConditions(
        max_tokens=7, min_tokens=2, stop=expected, stop_token_ids=(9,), ignore_eos=True
    )


def test_root_field_can_disable_an_nvext_option():
    request = asked(ignore_eos=False, nvext=nvext(ignore_eos=True))

    assert not options.make_stop_conditions(request, 7, VOCAB).ignore_eos


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_tokens": 8}, "min_tokens"),
        ({"stop_token_ids": [5, VOCAB]}, "stop_token_ids"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"logit_bias": {5: 1.0, -1: 1.0}}, "logit_bias"),
    ],
)
def test_token_outside_the_vocabulary_is_refused_with_its_parameter(fields, param):
    read = options.make_sampling if param == "logit_bias" else options.make_stop_conditions
    limit = NOTHING if param == "logit_bias" else 7
    with pytest.raises(errors.InvalidRequest, match=param) as caught:
        read(asked(**fields), limit, VOCAB)

    assert caught.value.param == param


@pytest.mark.parametrize(
    ("wanted", "default", "expected"),
    [(None, None, 90), (5, None, 5), (90, 7, 90), (None, 16, 16), (None, 500, 90)],
)
def test_length_of_the_answer(wanted, default, expected):
    assert (
        options.limit_answer_len(
            requested=wanted, default=default, prompt_len=10, context_length=100, param="prompt"
        )
        == expected
    )


@pytest.mark.parametrize(
    ("wanted", "prompt_len", "sentence"),
    [
        (
            91,
            10,
            r"length is 100 tokens.*requested 101 tokens \(10 in the prompt, 91 in the completion",
        ),
        (None, 100, r"length is 100 tokens.*resulted in 100 tokens"),
        (None, 5000, r"resulted in 5000 tokens"),
    ],
)
def test_too_long_a_context_names_limit_and_lengths(wanted, prompt_len, sentence):
    with pytest.raises(model_errors.ContextTooLong, match=sentence) as caught:
        options.limit_answer_len(
            requested=wanted,
            default=None,
            prompt_len=prompt_len,
            context_length=100,
            param="prompt",
        )

    assert caught.value.param == "prompt"


def test_an_empty_prompt_is_refused():
    with pytest.raises(errors.InvalidRequest, match="at least one token"):
        options.limit_answer_len(
            requested=1, default=None, prompt_len=0, context_length=9, param="prompt"
        )
