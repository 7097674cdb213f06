"""Which models can serve a request, and the bounds of the memory of conversations."""

import collections

import msgspec
import pytest

from dynamo.semantic import config, model_choice, request_view
from dynamo.testing import clock
from semantic_configs import chat

SETTINGS = config.SemanticConfig(
    model_config={
        "plain": config.ModelSettings(
            accepts_tools=False, accepts_structured_output=False, context_length=100
        )
    }
)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"tools": [{}]}, "it calls no tools"),
        ({"response_format": {"type": "json_object"}}, "it cannot hold an answer to a schema"),
        ({"response_format": {"type": "text"}}, None),
        ({"text": {"format": {"type": "json_schema"}}}, "it cannot hold an answer to a schema"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "it cannot hold an answer to a schema"),
        ({"output_config": {"effort": "low"}}, None),
        ({"format": "json"}, "it cannot hold an answer to a schema"),
        ({"format": ""}, None),
        ({"nvext": {"guided_regex": "a+"}}, "it cannot hold an answer to a schema"),
        ({"guided_regex": "a+"}, "it cannot hold an answer to a schema"),
        ({"structured_outputs": {"regex": "a+"}}, "it cannot hold an answer to a schema"),
        ({"max_output_tokens": 10**6}, "the request needs some 1000000 tokens, it has 100"),
    ],
)  # fmt: skip
def test_limit_of_the_configuration_refuses(fields, reason):
    view = request_view.RequestView(msgspec.json.encode({"prompt": "hi", **fields}))
    served = model_choice.ConfiguredModels(SETTINGS)

    assert model_choice.refusal_of("plain", view, served, SETTINGS) == reason


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 100}] * 3}]},
        {"prompt": "x" * 300, "chat_template": "x" * 300},
    ],
)
def test_text_that_guards_read_twice_or_no_model_sees_needs_no_more_context(fields):
    view = request_view.RequestView(msgspec.json.encode(fields))
    served = model_choice.ConfiguredModels(SETTINGS)

    assert view.least_context == 75
    assert model_choice.refusal_of("plain", view, served, SETTINGS) is None


def test_model_that_is_not_configured_has_no_limits():
    view = request_view.RequestView(chat("hi", tools=[{}]))
    served = model_choice.ConfiguredModels(SETTINGS)

    assert model_choice.refusal_of("other", view, served, SETTINGS) is None


def test_adapter_has_the_limits_of_the_model_that_it_changes():
    reference = config.ModelReference(model="plain", lora_name="sql")
    decision = config.DecisionSettings(name="d", modelRefs=[reference])
    settings = msgspec.structs.replace(SETTINGS, decisions=[decision])
    view = request_view.RequestView(chat("hi", tools=[{}]))
    served = model_choice.ConfiguredModels(settings)

    assert model_choice.refusal_of("sql", view, served, settings) == "it calls no tools"


def test_oldest_conversation_is_forgotten():
    settings = config.Conversations(max_conversations=2)
    memory = model_choice.ConversationMemory(settings, clock.VirtualClock())
    for key in "abc":
        memory.remember([key], "decision", "model")

    assert len(memory) == 2
    assert memory.previous_turn(["a"]) is None
    assert memory.previous_turn(["a", "c"]).model == "model"


def test_turn_that_another_thread_forgets_meanwhile_is_no_fault():
    class ForgottenAtOnce(collections.OrderedDict):
        def __setitem__(self, key, turn):
            super().__setitem__(key, turn)
            self.pop(key)

    memory = model_choice.ConversationMemory(config.Conversations(), clock.VirtualClock())
    memory._turns = ForgottenAtOnce()

    memory.remember(["a"], "decision", "model")

    assert memory.previous_turn(["a"]) is None


def test_request_without_user_has_no_key_of_its_own():
    view = request_view.RequestView(chat([], previous_response_id="r"))

    assert model_choice.conversation_keys(view, {}, "t") == (
        [model_choice.conversation_key("t", "r")],
        [],
    )


@pytest.mark.parametrize("body", [b"[]", b"3", b"{", b"\xff", b"[" * 100_000])
def test_body_that_is_no_object_is_refused(body):
    with pytest.raises(request_view.errors.InvalidRequest):
        request_view.RequestView(body)


def test_texts_of_all_parts_and_tool_calls_are_read():
    call = {"function": {"name": "f", "arguments": "three"}}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "one"}]},
        {"role": "assistant", "content": None, "tool_calls": [call, 3]},
        {"role": "user", "content": [{"type": "tool_result", "content": "four"}, 5]},
    ]
    view = request_view.RequestView(chat(messages, system="two"))

    assert sorted(view.texts) == ["four", "one", "three", "two"]
    assert view.is_tool_result


def test_mark_that_moves_along_with_the_turns_does_not_end_a_conversation():
    def say(text):
        mark = {"cache_control": {"type": "ephemeral"}}
        return {"role": "user", "content": [{"type": "text", "text": text, **mark}]}

    earlier = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    first, second = (
        request_view.RequestView(chat(messages)) for messages in ([say("a")], [*earlier, say("c")])
    )

    _, noted = model_choice.conversation_keys(first, {}, "")
    assert model_choice.conversation_keys(second, {}, "")[0] == noted


@pytest.mark.parametrize("is_list", [False, True])
def test_line_that_changes_with_each_request_of_claude_code_does_not_end_a_conversation(is_list):
    def ask(number, prompt, *messages):
        texts = [f"x-anthropic-billing-header: cc_version=2.1; cch={number};", prompt]
        blocks = [{"type": "text", "text": text} for text in texts]
        system = blocks if is_list else "\n".join(texts)
        return request_view.RequestView(chat([*messages], system=system), "messages")

    question = {"role": "user", "content": "a"}
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "b"}
    turn = [question, {"role": "assistant", "content": [call]}]
    turn += [{"role": "user", "content": [result]}]

    _, noted = model_choice.conversation_keys(ask(1, "You code.", question), {}, "")
    assert model_choice.conversation_keys(ask(2, "You code.", *turn), {}, "")[0] == noted
    assert model_choice.conversation_keys(ask(2, "You sing.", *turn), {}, "")[0] != noted


@pytest.mark.parametrize("kind", ["function_call_output", "custom_tool_call_output"])
def test_result_of_each_kind_of_call_is_a_result(kind):
    body = msgspec.json.encode({"input": [{"type": kind, "call_id": "c", "output": "x"}]})

    assert request_view.RequestView(body, "responses").is_tool_result
