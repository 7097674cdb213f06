"""Messages of the API in the form of chat templates."""

import copy
import json

import pytest

from dynamo.base import errors
from dynamo.preprocess import conversation

USER = {"role": "user", "content": "Hi"}


def calling(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def adapt(message, **rest):
    before = copy.deepcopy(message)
    (adapted,) = conversation.adapt_for_template([message], **rest)

    assert message == before  # the request is left as it came
    return adapted


def test_plain_message_is_unchanged():
    assert adapt(USER) is USER


def test_prompt_is_searched_for_an_instruction_behind_those_before_it():
    rules = [{"role": "system", "content": text} for text in ("Be kind.", "Be brief.")]

    assert conversation.has_instructions("Be kind. Hi. Be brief.", rules)
    assert conversation.has_instructions("Be kind. Hi.", [rules[0], USER, rules[0]])
    assert not conversation.has_instructions("Be brief. Be kind.", rules)
    assert not conversation.has_instructions("Be kind.", rules)


def test_text_parts_are_joined_by_lines():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    assert adapt({"role": "user", "content": parts}) == {"role": "user", "content": "a\nb"}


@pytest.mark.parametrize(("knows", "role"), [(False, "system"), (True, "developer")])
def test_developer_role_becomes_system_if_the_template_lacks_developers(knows, role):
    message = {"role": "developer", "content": "Be brief"}

    assert adapt(message, knows_developer=knows) == {"role": role, "content": "Be brief"}


def test_null_fields_other_than_content_are_removed():
    message = {"role": "assistant", "content": None, "tool_calls": None, "name": None}

    assert adapt(message) == {"role": "assistant", "content": None}


def test_content_that_a_call_leaves_out_is_null():
    message = calling("{}")
    del message["content"]

    assert adapt(message) == adapt(calling("{}"))
    assert adapt(message)["content"] is None


def test_content_of_a_call_is_an_empty_text_for_a_template_that_reads_no_null():
    assert adapt(calling("{}"), reads_null=False) == {**adapt(calling("{}")), "content": ""}


def test_empty_text_of_a_call_is_null_for_a_template_that_reads_it():
    message = {**calling("{}"), "content": ""}

    assert adapt(message)["content"] is None
    assert adapt({"role": "assistant", "content": "", "name": "a"})["content"] == ""


def test_empty_list_of_tool_calls_is_removed():
    message = {"role": "assistant", "content": "Hi", "tool_calls": []}

    assert adapt(message) == {"role": "assistant", "content": "Hi"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": [1]}', {"a": [1]}), ({"a": 1}, {"a": 1}), ("", {}), (None, {})],
)
def test_arguments_of_a_tool_call_become_an_object(arguments, expected):
    assert adapt(calling(arguments))["tool_calls"][0]["function"]["arguments"] == expected


@pytest.mark.parametrize(
    "arguments", ["{", "[1]", "{" * 5000 + "}", '{"a":' * 5000 + "1" + "}" * 5000]
)
def test_arguments_that_are_no_object_are_left_out(arguments):
    assert adapt(calling(arguments))["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_of_an_answer_have_the_names_that_templates_read(name):
    message = {"role": "assistant", "content": "Hi", name: "hm"}
    both = {**message, "reasoning_content": "hm", "reasoning": "hm"}

    assert adapt(message) == both
    assert adapt(message, reads_thinking=True) == {**both, "thinking": "hm"}
    assert adapt({**message, name: [1]}, reads_thinking=True) == {**message, name: [1]}


def test_thoughts_of_a_call_are_thinking_unless_it_has_content():
    message = {**calling("{}"), "reasoning_content": "hm"}

    assert adapt(message, reads_thinking=True)["thinking"] == "hm"
    assert "thinking" not in adapt({**message, "content": "I look."}, reads_thinking=True)


def test_arguments_of_calls_have_no_more_lists_than_a_body_may_have():
    """In a text they are not counted before, and a template gets them decoded."""
    few = '{"a": [' + "[]," * 150_000 + '"[[["]}'

    conversation.check_messages([USER, calling(few)])
    with pytest.raises(errors.InvalidRequest, match="300000 lists and objects"):
        conversation.check_messages([USER, calling(few), calling(few)])


def test_brackets_in_strings_of_arguments_are_no_lists():
    code = json.dumps({"code": "{" * 400_000})

    conversation.check_messages([USER, calling(code)])


def result_of(call_id, content="3"):
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def test_split_calls_are_followed_by_their_results():
    turn, calls = calling("{}"), [{"id": name, "function": {"name": name}} for name in "abc"]
    turn |= {"content": "Look", "tool_calls": calls}
    stray, answer = result_of("x"), {"role": "assistant", "content": "Done"}
    messages = [USER, turn, result_of("b"), result_of("a"), stray, result_of("a", "4"), answer]
    before = copy.deepcopy(messages)

    split = conversation.split_calls(messages)

    assert split == [
        USER,
        {**turn, "tool_calls": calls[:1]},
        result_of("a"),
        result_of("a", "4"),
        {"role": "assistant", "content": None, "tool_calls": calls[1:2]},
        result_of("b"),
        {"role": "assistant", "content": None, "tool_calls": calls[2:]},
        stray,
        answer,
    ]
    assert messages == before


def test_messages_with_one_call_each_are_not_split():
    messages = [USER, calling("{}"), result_of("1"), calling("{}"), result_of("1"), USER]

    assert conversation.split_calls(messages) == messages


def test_joined_turns_have_the_text_or_parts_of_both():
    image = {"role": "user", "content": [{"type": "image"}]}
    text = {"type": "text", "text": "Hi"}

    assert conversation.to_turns([USER, USER]) == [{**USER, "content": "Hi\n\nHi"}]
    assert conversation.to_turns([USER, image, USER]) == [
        {**USER, "content": [text, {"type": "image"}, text]}
    ]


def test_calls_and_results_are_not_joined():
    messages = [USER, calling("{}"), result_of("1"), result_of("1"), calling("{}"), calling("{}")]

    assert conversation.to_turns(messages) is None


@pytest.mark.parametrize("results", [[result_of("1")], [result_of("1"), result_of("1")], []])
def test_an_answer_stands_between_a_result_and_the_next_turn(results):
    before = [{"role": "system", "content": "Be kind."}, USER, calling("{}"), *results]

    assert conversation.to_turns([*before, USER, USER]) == [
        *before,
        {"role": "assistant", "content": "Understood."},
        {**USER, "content": "Hi\n\nHi"},
    ]
