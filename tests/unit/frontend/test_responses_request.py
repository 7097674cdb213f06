"""Responses requests: what is taken, what is refused, and in which words."""

import json

import pytest

from dynamo.base import errors
from dynamo.frontend.apis.responses import request as responses_request

LEAST = {"model": "m", "input": "hi"}


def decode(**fields):
    return responses_request.decode(json.dumps(LEAST | fields).encode())


@pytest.mark.parametrize(
    "harmless",
    [
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "include": []},
        {"text": {"format": {"type": "text"}}, "truncation": "disabled", "background": False},
        {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "service_tier": "auto"},
        {"temperature": 0.5, "top_p": 0.5, "max_output_tokens": 1, "top_logprobs": 0},
        {"stream": True, "stream_options": {"include_obfuscation": False}, "metadata": {"a": "b"}},
        {"reasoning": None, "conversation": None, "prompt": None},
    ],
)
def test_harmless_response_fields_are_accepted(harmless):
    assert decode(**harmless).model == "m"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": None}, "input", "a string or a list"),
        ({"input": []}, "input", "at least one item"),
        ({"max_output_tokens": 0}, "max_output_tokens", "from 1"),
        ({"temperature": 3}, "temperature", "from 0 to 2"),
        ({"background": True}, "background", "not supported"),
        ({"include": ["message.output_text.logprobs"]}, "include", "not supported"),
        ({"tools": [{}] * 129}, "tools", "at most 128"),
        ({"tool_choice": "any"}, "tool_choice", "'auto' or 'none' or 'required'"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "'text', got a string ('xml')"),
        ({"truncation": "auto"}, "truncation", "'disabled'"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "not supported"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "'low'"),
        ({"top_logprobs": 2}, "top_logprobs", "0, got 2"),
        ({"stream_options": {}}, "stream_options", "stream is true"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "false",
        ),
        ({"metadata": {"a": 1}}, "metadata", "a string"),
        ({"messages": []}, "messages", "Unsupported parameter(s): `messages`"),
    ],
)  # fmt: skip
def test_error_for_an_unsupported_response_field_names_the_field(fields, param, words):
    with pytest.raises(errors.InvalidRequest) as caught:
        decode(**fields)

    assert caught.value.param == param
    assert words in str(caught.value)


def test_answer_is_stored_unless_store_is_false():
    assert [decode(**said).is_stored for said in ({}, {"store": True}, {"store": False})] == [
        True,
        True,
        False,
    ]


def test_token_count_request_has_only_prompt_fields():
    body = json.dumps({**LEAST, "instructions": "x", "previous_response_id": "y"}).encode()

    assert responses_request.decode_count(body).instructions == "x"
    with pytest.raises(errors.InvalidRequest, match="temperature"):
        responses_request.decode_count(json.dumps({**LEAST, "temperature": 1}).encode())


@pytest.mark.parametrize("missing", ["name", "schema"])
def test_schema_keeps_its_name(missing):
    form = {"type": "json_schema", "name": "pet", "schema": {}}
    del form[missing]

    with pytest.raises(errors.InvalidRequest, match="required with json_schema") as caught:
        _ = decode(text={"format": form}).response_format
    assert caught.value.param == f"text.format.{missing}"


def test_format_and_tool_choice_are_converted_to_those_of_a_chat():
    form = {"type": "json_schema", "name": "pet", "schema": {"type": "object"}}
    request = decode(text={"format": form}, tool_choice={"type": "function", "name": "f"})

    assert request.response_format.json_schema.schema == {"type": "object"}
    assert request.chat_tool_choice.function.name == "f"
    assert decode(text={"format": {"type": "text"}}).response_format.type == "text"
    assert decode(tool_choice="required").chat_tool_choice == "required"
