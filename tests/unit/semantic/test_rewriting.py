"""Changes of a request's JSON."""

import msgspec
import pytest

from dynamo.semantic import config, request_view, rewriting
from semantic_configs import chat

KWARGS = config.ReasoningFamily(type="chat_template_kwargs", parameter="think")
EFFORT = config.ReasoningFamily(type="reasoning_effort", parameter="reasoning_effort")


def reason(family, effort, **fields):
    body = msgspec.json.encode(fields)
    return msgspec.json.decode(rewriting.set_reasoning(body, fields, family, effort=effort))


@pytest.mark.parametrize(
    ("family", "effort", "fields", "expected"),
    [
        (None, "high", {"a": 1}, {"a": 1}),
        (EFFORT, "high", {"reasoning_effort": "low"}, {"reasoning_effort": "high"}),
        (EFFORT, None, {}, {"reasoning_effort": "low"}),
        (EFFORT, None, {"reasoning_effort": "max"}, {"reasoning_effort": "max"}),
        (KWARGS, "x", {"reasoning_effort": "low"}, {"chat_template_kwargs": {"think": True}}),
        (KWARGS, None, {"chat_template_kwargs": None}, {"chat_template_kwargs": {"think": False}}),
    ],
)
def test_reasoning_is_set_in_the_way_of_the_family(family, effort, fields, expected):
    assert reason(family, effort, **fields) == expected


def prompt(body, *, is_inserted):
    view = request_view.RequestView(body)
    changed = rewriting.set_system_prompt(body, view, "New.", is_inserted=is_inserted)
    return msgspec.json.decode(changed)


@pytest.mark.parametrize(
    ("content", "is_inserted", "expected"),
    [
        ("Old.", False, "New."),
        ("Old.", True, "New.\n\nOld."),
        (None, True, "New."),
        (
            [{"type": "text", "text": "Old."}],
            True,
            [{"type": "text", "text": "New.\n\n"}, {"type": "text", "text": "Old."}],
        ),
    ],
)
def test_system_message_is_replaced_or_extended(content, is_inserted, expected):
    body = chat([{"role": "system", "content": content, "name": "x"}])

    (message,) = prompt(body, is_inserted=is_inserted)["messages"]

    assert message == {"role": "system", "content": expected, "name": "x"}


def test_other_apis_have_their_own_field():
    answers = msgspec.json.encode({"model": "m", "input": "hi"})
    messages = chat("hi", system="Old.")

    assert prompt(answers, is_inserted=True)["instructions"] == "New."
    assert prompt(messages, is_inserted=True)["system"] == "New.\n\nOld."


@pytest.mark.parametrize("fields", [{"prompt": "x"}, {"messages": 3}, {}])
def test_request_without_messages_stays(fields):
    assert prompt(msgspec.json.encode(fields), is_inserted=False) == fields


def test_developer_prompt_is_replaced_as_the_system_prompt_is():
    body = chat([{"role": "developer", "content": "Old."}, {"role": "user", "content": "hello"}])

    assert prompt(body, is_inserted=False)["messages"][0] == {
        "role": "developer",
        "content": "New.",
    }
