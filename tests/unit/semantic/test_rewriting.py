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


SWITCH = config.ReasoningFamily(type="chat_template_kwargs", parameter="enable_thinking")
ENABLED = {"type": "enabled", "budget_tokens": 2000}


@pytest.mark.parametrize(
    ("api", "family", "effort", "fields", "expected"),
    [
        ("responses", EFFORT, "high", {}, {"reasoning": {"effort": "high"}}),
        (
            "responses",
            SWITCH,
            "high",
            {"reasoning": {"effort": "none", "summary": "auto"}},
            {"reasoning": {"effort": "high", "summary": "auto"}},
        ),
        ("responses", SWITCH, None, {"reasoning": None}, {"reasoning": {"effort": "none"}}),
        ("responses", EFFORT, None, {}, {"reasoning": {"effort": "low"}}),
        (
            "responses",
            EFFORT,
            None,
            {"reasoning": {"effort": "max"}},
            {"reasoning": {"effort": "max"}},
        ),
        ("messages", SWITCH, "high", {}, {"thinking": {"type": "adaptive"}}),
        ("messages", SWITCH, "high", {"thinking": ENABLED}, {"thinking": ENABLED}),
        ("messages", SWITCH, None, {"thinking": ENABLED}, {"thinking": {"type": "disabled"}}),
        (
            "messages",
            SWITCH,
            None,
            {"output_config": {"effort": "max", "format": {}}},
            {"output_config": {"format": {}}, "thinking": {"type": "disabled"}},
        ),
        (
            "messages",
            EFFORT,
            "minimal",
            {"output_config": {"format": {}}},
            {"output_config": {"format": {}, "effort": "low"}, "thinking": {"type": "adaptive"}},
        ),
        ("messages", EFFORT, None, {}, {"output_config": {"effort": "low"}}),
        (
            "messages",
            EFFORT,
            None,
            {"output_config": {"effort": "max"}},
            {"output_config": {"effort": "max"}},
        ),
        ("ollama", SWITCH, "high", {"think": False}, {"think": True}),
        ("ollama", SWITCH, None, {"think": "max"}, {"think": False}),
        ("ollama", EFFORT, "xhigh", {}, {"think": "max"}),
        ("ollama", EFFORT, None, {"think": "medium"}, {"think": "medium"}),
        ("ollama", EFFORT, None, {"think": True}, {"think": "low"}),
        ("ollama", None, "high", {"think": True}, {"think": True}),
    ],
)
def test_each_api_has_its_own_field_of_reasoning(api, family, effort, fields, expected):
    body = msgspec.json.encode(fields)
    changed = rewriting.set_reasoning(body, fields, family, effort=effort, api=api)

    assert msgspec.json.decode(changed) == expected


@pytest.mark.parametrize(
    ("api", "fields", "family", "expected"),
    [
        ("chat", {}, KWARGS, True),
        ("responses", {}, KWARGS, False),
        ("responses", {}, SWITCH, True),
        ("messages", {}, EFFORT, True),
        ("ollama", {}, None, True),
        ("ollama", {"raw": True}, SWITCH, False),
        ("other", {}, None, False),
    ],
)
def test_switch_that_an_api_does_not_know_is_not_set(api, fields, family, expected):
    assert rewriting.can_set_reasoning(api, fields, family) == expected


def prompt(body, *, is_inserted, api="chat"):
    view = request_view.RequestView(body)
    changed = rewriting.set_system_prompt(body, view, "New.", is_inserted=is_inserted, api=api)
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
    assert prompt(messages, is_inserted=True, api="messages")["system"] == "New.\n\nOld."


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        (
            "messages",
            {"messages": [{"role": "user", "content": "hi"}]},
        ),  # it knows no role `system`
        ("ollama", {"prompt": "hi"}),
    ],
)
def test_api_gets_the_field_that_a_request_does_not_have(api, fields):
    changed = prompt(msgspec.json.encode(fields), is_inserted=False, api=api)

    assert changed == {**fields, "system": "New."}


def test_raw_prompt_of_ollama_stays():
    fields = {"prompt": "hi", "raw": True}

    assert prompt(msgspec.json.encode(fields), is_inserted=False, api="ollama") == fields


@pytest.mark.parametrize("fields", [{"prompt": "x"}, {"messages": 3}, {}])
def test_request_without_messages_stays(fields):
    assert prompt(msgspec.json.encode(fields), is_inserted=False) == fields


def test_developer_prompt_is_replaced_as_the_system_prompt_is():
    body = chat([{"role": "developer", "content": "Old."}, {"role": "user", "content": "hello"}])

    assert prompt(body, is_inserted=False)["messages"][0] == {
        "role": "developer",
        "content": "New.",
    }
