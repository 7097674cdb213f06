"""Completion requests: what is taken, what is refused, and in which words."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.base import errors
from dynamo.frontend.apis import completions as openai_completions


def decode(prompt="x", **fields):
    body = json.dumps({"model": "m", "prompt": prompt, **fields}).encode()
    return openai_completions.decode(body)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_prompt_is_decoded_from_four_forms(prompt, prompts):
    assert decode(prompt).prompts == prompts


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        ({"prompt": []}, "prompt", "got an empty list"),
        ({"prompt_embeds": "AA=="}, "prompt_embeds", "not supported; leave it out"),
        ({"prompt": ["a", 1]}, "prompt", "got a mixed list"),
        ({"prompt": [[1], 1]}, "prompt", "got a mixed list"),
        ({"prompt": 5}, "prompt", "expected a string or a list, got 5"),
        ({"prompt": [-1]}, "prompt[0]", "got -1"),
        ({"prompt": [[1, "a"]]}, "prompt[0][1]", "expected a whole number from 0 to 4294967295"),
        (
            {"prompt": ["a"] * 2049},
            "prompt",
            "at most 2048 answers to all prompts together, got 2049 prompts and n (or best_of) of 1",
        ),
        ({"prompt": [[1]] * 20, "n": 128}, "prompt", "got 20 prompts and n (or best_of) of 128"),
        ({"logprobs": 6}, "logprobs", "from 0 to 5, got 6"),
        ({"logprobs": True}, "logprobs", "got true"),
        ({"prompt": ["a"] * 120, "best_of": 20}, "prompt", "n (or best_of) of 20"),
        ({"best_of": 21}, "best_of", "from 1 to 20, got 21"),
        ({"best_of": 2, "n": 3}, "best_of", "at least n, which is 3, got 2"),
        ({"best_of": 2, "stream": True}, "best_of", "expected n or nothing when stream is true"),
        ({"max_tokens": 0}, "max_tokens", "0 is only allowed with echo"),
        (
            {"prompt": ["a", "b"], "nvext": {"token_data": [1]}},
            "nvext.token_data",
            "got 2 in prompt",
        ),
        ({"nvext": {"token_data": []}}, "nvext.token_data", "a list"),
        ({"suffix": "s", "echo": True}, "suffix", "not supported together with echo"),
        ({"messages": []}, "messages", "Unsupported parameter(s): `messages`"),
    ],
)
def test_invalid_completion_field_is_named(fields, param, sentence):
    with pytest.raises(errors.InvalidRequest) as caught:
        decode(**fields)

    assert caught.value.param == param
    assert sentence in str(caught.value)


def test_missing_prompt_is_named():
    with pytest.raises(errors.InvalidRequest, match="prompt: required, but missing"):
        openai_completions.decode(b'{"model": "m"}')


@pytest.mark.parametrize(
    "harmless",
    [
        {"best_of": 1, "stream": True},
        {"best_of": 20, "n": 2},
        {"suffix": None},
        {"echo": True, "max_tokens": 0},
        {"logprobs": 0, "echo": True},
    ],
)
def test_harmless_completion_fields_are_accepted(harmless):
    assert decode(**harmless).prompts == ["x"]


def test_log_probabilities_are_a_number():
    assert decode(logprobs=0).num_logprobs == 0
    assert decode().num_logprobs is None


ITEM = st.text(max_size=3) | st.integers(-5, 2**33) | st.lists(st.integers(-5, 2**33), max_size=3)


@given(prompt=ITEM | st.lists(ITEM | st.none(), max_size=4))
def test_any_prompt_is_taken_or_invalid(prompt):
    try:
        prompts = openai_completions.decode(
            msgspec.json.encode({"model": "m", "prompt": prompt})
        ).prompts
    except errors.InvalidRequest as error:
        assert error.param.startswith("prompt")  # noqa: PT017  # either is right
        return

    assert prompts in ([prompt], prompt)


def test_tokens_that_were_made_elsewhere_stand_for_the_prompt():
    request = decode(nvext={"token_data": [1, 2]})

    assert request.prompts == [[1, 2]]
    assert request.prompt_param == "nvext.token_data"
    assert decode(prompt=[5, 6], nvext={"token_data": [1]}).prompts == [[1]]
