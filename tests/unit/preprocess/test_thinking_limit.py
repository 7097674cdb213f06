"""A limit to thinking becomes tokens, or is refused."""

import json

import pytest

from dynamo.base import errors
from dynamo.frontend.apis import chat as openai_chat
from dynamo.frontend.apis.messages import request as message_request
from dynamo.preprocess import options
from dynamo.preprocess.parsers import formats
from dynamo.protocols import generate

THINK = formats.AnswerFormat(reasoning=formats.REASONING_FORMATS["qwen3"])
IDS = {"<think>": 5, "</think>": 6}.get


def chat(**nvext):
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "nvext": nvext}
    return openai_chat.decode(json.dumps(body).encode())


def message():
    body = {
        "model": "m",
        "max_tokens": 5000,
        "messages": [{"role": "user", "content": "x"}],
        "thinking": {"type": "enabled", "budget_tokens": 2000},
    }
    return message_request.decode(json.dumps(body).encode())


def test_request_without_a_thinking_limit_has_none():
    assert options.make_thinking_limit(chat(), "p", THINK, IDS) is None


@pytest.mark.parametrize(("prompt", "is_open"), [("p", False), ("p<think>\n", True)])
def test_thinking_limit_names_the_marks_as_tokens(prompt, is_open):
    found = options.make_thinking_limit(chat(max_thinking_tokens=7), prompt, THINK, IDS)

    assert found == generate.ThinkingLimit(
        max_tokens=7, close_ids=(6,), open_ids=(5,), is_open=is_open
    )


@pytest.mark.parametrize(
    ("form", "ids"),
    [
        (formats.AnswerFormat(), IDS),
        (THINK, {}.get),
        (formats.AnswerFormat(reasoning=formats.REASONING_FORMATS["gpt_oss"]), IDS),
    ],
)
def test_unenforceable_thinking_limit_is_refused_unless_optional(form, ids):
    with pytest.raises(errors.InvalidRequest, match="no token of this model") as caught:
        options.make_thinking_limit(chat(max_thinking_tokens=7), "p", form, ids)

    assert caught.value.param == "nvext.max_thinking_tokens"
    assert options.make_thinking_limit(message(), "p", form, ids) is None


def test_limit_that_an_engine_cannot_keep_is_refused_unless_optional():
    with pytest.raises(errors.InvalidRequest, match="the engine of this model cannot limit"):
        options.make_thinking_limit(chat(max_thinking_tokens=7), "p", THINK, IDS, can_limit=False)

    assert options.make_thinking_limit(message(), "p", THINK, IDS, can_limit=False) is None


def test_error_names_the_limit_as_the_request_does():
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    request = openai_chat.decode(json.dumps(body | {"thinking_token_budget": 7}).encode())
    with pytest.raises(errors.InvalidRequest) as caught:
        options.make_thinking_limit(request, "p", formats.AnswerFormat(), IDS)

    assert caught.value.param == "thinking_token_budget"


def test_thinking_budget_of_a_message_is_the_limit():
    assert options.make_thinking_limit(message(), "p", THINK, IDS).max_tokens == 2000
