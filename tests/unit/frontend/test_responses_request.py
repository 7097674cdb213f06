"""Responses requests: which are accepted, which are refused and in which words, and their items as messages."""

import json

import pytest

from dynamo.base import errors
from dynamo.frontend.apis.responses import request as responses_request
from dynamo.frontend.apis.responses import tools as response_tools
from dynamo.preprocess import images

LEAST = {"model": "m", "input": "hi"}


def decode(**fields):
    return responses_request.decode(json.dumps(LEAST | fields).encode())


@pytest.mark.parametrize(
    "harmless",
    [
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "include": []},
        {"text": {"format": {"type": "text"}}, "truncation": "auto", "background": False},
        {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "service_tier": "auto"},
        {"client_metadata": {"app": "x"}, "context_management": [{"type": "compaction"}]},
        {"temperature": 0.5, "top_p": 0.5, "max_output_tokens": 1, "top_logprobs": 0},
        {"stream": True, "stream_options": {"include_obfuscation": False}, "metadata": {"a": "b"}},
        {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]},
        {"stream_options": {"include_obfuscation": True}, "ignore_eos": True},
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
        ({"use_beam_search": True}, "use_beam_search", "not supported"),
        ({"stop": ["x", ""]}, "stop", "at least one character"),
        ({"tools": [{}] * 1025}, "tools", "at most 1024"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{}] * 1025}},
            "tool_choice.tools", "a list of at most 1024",
        ),
        ({"tool_choice": "any"}, "tool_choice", "'auto' or 'none' or 'required'"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "'text', got a string ('xml')"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "'low'"),
        ({"top_logprobs": 2}, "top_logprobs", "not supported; leave it out"),
        ({"include": ["message.output_text.logprobs"]}, "include", "logprobs is not supported"),
        ({"metadata": {"a": 1}}, "metadata", "a string"),
        ({"messages": []}, "messages", "this API has input instead"),
        ({"response_format": {}}, "response_format", "this API has text.format instead"),
        ({"max_tokens": 5}, "max_tokens", "this API has max_output_tokens instead"),
        ({"nonsense": []}, "nonsense", "Unsupported parameter(s): `nonsense`"),
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


CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,QUE=", "detail": "auto"}


def said(text, kind="output_text"):
    return [{"type": kind, "text": text, "annotations": [], "logprobs": []}]


def test_text_input_is_a_user_message():
    assert responses_request.convert_items("hi") == [{"role": "user", "content": "hi"}]


def test_messages_may_be_short_or_long():
    items = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "input_text", "text": t} for t in ("a", "b")]},
        {"type": "message", "id": "m1", "status": "completed", "role": "assistant", "content": said("c")},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]  # fmt: skip

    assert responses_request.convert_items(items) == [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "no"},
    ]


def test_thoughts_before_and_after_a_text_of_one_turn_are_kept():
    thoughts = [
        {"type": "reasoning", "summary": [], "content": said(text, "reasoning_text")}
        for text in ("hm", "so")
    ]
    (message,) = responses_request.convert_items(
        [thoughts[0], {"role": "assistant", "content": "I look."}, thoughts[1], CALL]
    )

    assert (message["reasoning_content"], message["content"]) == ("hm\nso", "I look.")
    assert message["tool_calls"][0]["function"]["name"] == "f"


def test_images_keep_their_places_in_messages_and_outputs_of_tools():
    items = [
        {"role": "user", "content": [PICTURE, {"type": "input_text", "text": "a"}]},
        CALL,
        {"type": "function_call_output", "call_id": "c1", "output": [PICTURE]},
    ]
    said_with, _, returned = responses_request.convert_items(items)

    assert said_with["content"] == [
        images.make_part(PICTURE["image_url"], "input[0].content[0].image_url"),
        {"type": "text", "text": "a"},
    ]
    assert returned["content"] == [
        images.make_part(PICTURE["image_url"], "input[2].output[0].image_url")
    ]


def test_items_of_an_assistant_turn_become_one_message():
    items = [
        {"type": "reasoning", "id": "r", "summary": [], "content": said("hm", "reasoning_text")},
        {"role": "assistant", "content": said("let me see")},
        CALL,
        {**CALL, "call_id": "c2", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": said("two", "input_text")},
        CALL,
    ]

    def call(number, arguments):
        function = {"name": "f", "arguments": arguments}
        return {"id": f"c{number}", "type": "function", "function": function}

    assert responses_request.convert_items(items) == [
        {
            "role": "assistant",
            "content": "let me see",
            "reasoning_content": "hm",
            "tool_calls": [call(1, '{"a": 1}'), call(2, "")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "assistant", "content": "", "tool_calls": [call(1, '{"a": 1}')]},
    ]


def test_thoughts_that_are_only_summarized_are_left_out():
    assert responses_request.convert_items([{"type": "reasoning", "id": "r", "summary": []}]) == []


@pytest.mark.parametrize(
    ("item", "param", "words"),
    [
        ({"type": "item_reference", "id": "x"}, "input[0].type", "'message', 'function_call'"),
        ({"type": 5}, "input[0].type", "got 5"),
        ({"role": "tool", "content": "x"}, "input[0].role", "'user'"),
        ({"role": "user"}, "input[0].content", "required"),
        ({"role": "user", "content": "x", "y": 1}, "input[0].y", "Unsupported"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[0].content[0].image_url", "required"),
        ({"role": "user", "content": [{**PICTURE, "file_id": "f"}]}, "input[0].content[0].file_id", "not supported"),
        ({"role": "assistant", "content": [PICTURE]}, "input[0].content[0].type", "input_image"),
        ({"role": "user", "content": [{"text": "x"}]}, "input[0].content[0].type", "got null"),
        (
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file"}]},
            "input[0].output[0].type",
            "input_file",
        ),
    ],
)  # fmt: skip
def test_error_for_an_invalid_item_names_its_path(item, param, words):
    with pytest.raises(errors.InvalidRequest) as caught:
        responses_request.convert_items([item])

    assert caught.value.param == param
    assert words in str(caught.value)


def test_tools_in_namespaces_count_among_all():
    tools = [{"type": "function", "name": f"f{number}"} for number in range(1025)]

    with pytest.raises(errors.InvalidRequest, match="at most 1024"):
        response_tools.convert_tools([{"type": "namespace", "name": "n", "tools": tools}])


def test_response_tools_are_converted_to_chat_tools():
    tools = [
        {"type": "function", "name": "f", "description": "does", "parameters": {"type": "object"}, "strict": True},
        {"type": "function", "name": "g"},
    ]  # fmt: skip

    assert response_tools.convert_tools(tools) == [
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"type": "object"}, "description": "does"},
        },
        {"type": "function", "function": {"name": "g", "parameters": {}}},
    ]


def test_tools_of_one_name_are_known_by_their_namespaces():
    look, see = ({"type": "function", "name": name} for name in ("look", "see"))
    tools = [
        look,
        {"type": "namespace", "name": "left eye", "tools": [look, see]},
        {"type": "namespace", "name": "right", "tools": [look]},
    ]
    converted = response_tools.convert_tools(tools)
    names = [tool["function"]["name"] for tool in converted]
    called = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    (message,) = responses_request.convert_items(
        [called, called | {"namespace": "right"}], response_tools.list_renamed(tools)
    )

    assert names == ["look", "left_eye__look", "see", "right__look"]
    assert [response_tools.map_tools(tools)[name].namespace for name in names] == [
        None, "left eye", "left eye", "right",
    ]  # fmt: skip
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["look", "right__look"]


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "file_search"}, "tools[0].type"),
        ({}, "tools[0].type"),
        ({"type": "function"}, "tools[0].name"),
        ({"type": "function", "name": "f", "y": 1}, "tools[0].y"),
    ],
)
def test_invalid_response_tool_is_named(tool, param):
    with pytest.raises(errors.InvalidRequest) as caught:
        response_tools.convert_tools([tool])

    assert caught.value.param == param


def test_tools_that_a_tool_choice_allows_are_those_of_chat_completions():
    choice = responses_request.ResponseToolChoice(
        type="allowed_tools", mode="required", tools=[{"type": "function", "name": "look"}]
    )
    chosen = choice.convert()

    assert (chosen.type, chosen.allowed_tools.mode) == ("allowed_tools", "required")
    assert chosen.allowed_tools.tools == [{"type": "function", "function": {"name": "look"}}]


@pytest.mark.parametrize(("type_", "missing"), [("allowed_tools", "mode"), ("function", "name")])
def test_tool_choice_without_what_it_chooses_is_refused_by_its_place(type_, missing):
    with pytest.raises(errors.InvalidRequest) as caught:
        responses_request.ResponseToolChoice(type=type_).convert()

    assert caught.value.param == f"tool_choice.{missing}"
