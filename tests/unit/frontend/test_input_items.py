"""Items become the messages that say the same."""

import pytest

from dynamo.base import errors
from dynamo.frontend.apis.responses import input_items

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}


def said(text, kind="output_text"):
    return [{"type": kind, "text": text, "annotations": [], "logprobs": []}]


def test_text_input_is_a_user_message():
    assert input_items.convert_items("hi") == [{"role": "user", "content": "hi"}]


def test_messages_may_be_short_or_long():
    items = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "input_text", "text": t} for t in ("a", "b")]},
        {"type": "message", "id": "m1", "status": "completed", "role": "assistant", "content": said("c")},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]  # fmt: skip

    assert input_items.convert_items(items) == [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "no"},
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

    assert input_items.convert_items(items) == [
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
    assert input_items.convert_items([{"type": "reasoning", "id": "r", "summary": []}]) == []


@pytest.mark.parametrize(
    ("item", "param", "words"),
    [
        ({"type": "item_reference", "id": "x"}, "input[0].type", "'message', 'function_call'"),
        ({"type": 5}, "input[0].type", "got 5"),
        ({"role": "tool", "content": "x"}, "input[0].role", "'user'"),
        ({"role": "user"}, "input[0].content", "required"),
        ({"role": "user", "content": "x", "y": 1}, "input[0].y", "Unsupported"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[0].content[0].type", "models read text only"),
        ({"role": "user", "content": [{"text": "x"}]}, "input[0].content[0].type", "got null"),
        ({**CALL, "arguments": "{"}, "input[0].arguments", "written as JSON"),
        (
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file"}]},
            "input[0].output[0].type",
            "input_file",
        ),
    ],
)  # fmt: skip
def test_error_for_an_invalid_item_names_its_path(item, param, words):
    with pytest.raises(errors.InvalidRequest) as caught:
        input_items.convert_items([item])

    assert caught.value.param == param
    assert words in str(caught.value)


def test_response_tools_are_converted_to_chat_tools():
    tools = [
        {"type": "function", "name": "f", "description": "does", "parameters": {"type": "object"}, "strict": True},
        {"type": "function", "name": "g"},
    ]  # fmt: skip

    assert input_items.convert_tools(tools) == [
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"type": "object"}, "description": "does"},
        },
        {"type": "function", "function": {"name": "g", "parameters": {}}},
    ]


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "web_search"}, "tools[0].type"),
        ({}, "tools[0].type"),
        ({"type": "function"}, "tools[0].name"),
        ({"type": "function", "name": "f", "y": 1}, "tools[0].y"),
    ],
)
def test_invalid_response_tool_is_named(tool, param):
    with pytest.raises(errors.InvalidRequest) as caught:
        input_items.convert_tools([tool])

    assert caught.value.param == param
