"""The semantic router's order of steps."""

import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import semantic_configs
from dynamo.base import errors
from dynamo.semantic import cache, immediate, model_choice, request_view
from dynamo.testing import clock
from semantic_configs import ATTACK, CARD, SUM, chat, make_router

IMAGE_BLOCK = {"type": "image", "source": {}}
SESSION = {"x-session-id": "1"}


def fields_of(outcome):
    return msgspec.json.decode(outcome.body)


def headers_of(outcome):
    return dict(outcome.explanation.headers())


def test_keyword_selects_model_reasoning_and_headers():
    outcome = make_router().route(chat("How do I sort in C++?"), {})

    assert fields_of(outcome)["model"] == "coder"
    assert fields_of(outcome)["reasoning_effort"] == "high"
    assert headers_of(outcome)["x-vsr-selected-decision"] == "code_decision"
    assert headers_of(outcome)["x-vsr-selected-reasoning"] == "on"
    assert outcome.explanation.reasons == ("keyword code",)


def test_decision_sets_system_prompt_reasoning_endpoint_and_key():
    outcome = make_router().route(chat(SUM, chat_template_kwargs={"a": 1}), {})

    fields = fields_of(outcome)
    assert fields["messages"][0] == {"role": "system", "content": "You calculate."}
    assert fields["chat_template_kwargs"] == {"a": 1, "enable_thinking": True}
    assert ("x-vsr-destination-endpoint", "10.0.0.1:8000") in outcome.upstream_headers
    assert ("authorization", "Bearer secret") in outcome.upstream_headers
    assert ("x-team", "sums") in outcome.upstream_headers
    assert outcome.removed_headers == ["x-old"]


@pytest.mark.parametrize("name", ["a\r\nx-admin: 1", "a" * 2000])
def test_name_that_is_no_header_is_not_made_one(name):
    outcome = make_router().route(chat("hello", name), {})

    assert outcome.upstream_headers == []


@pytest.mark.parametrize(("weight", "address"), [(0.5, "10.0.0.1:8000"), (2, "10.0.0.2:8000")])
def test_endpoint_with_the_highest_weight_is_asked(weight, address):
    west = f"  - {{name: west, address: 10.0.0.2, port: 8000, weight: {weight}}}"
    text = semantic_configs.CONFIG.replace("endpoints: [east]", "endpoints: [east, west]")
    made = make_router(text.replace("keyword_rules:", f"{west}\nkeyword_rules:"))

    headers = dict(made.route(chat(SUM), {}).upstream_headers)

    assert headers["x-vsr-destination-endpoint"] == address


def test_adapter_is_asked_at_the_address_of_its_model():
    text = semantic_configs.CONFIG.replace("{model: mathy,", "{model: mathy, lora_name: sums,")

    outcome = make_router(text).route(chat(SUM), {})

    assert fields_of(outcome)["model"] == "sums"
    assert ("x-vsr-destination-endpoint", "10.0.0.1:8000") in outcome.upstream_headers


def test_header_says_whether_a_request_had_a_place_for_the_system_prompt():
    prompt = msgspec.json.encode({"model": "MoM", "prompt": SUM})
    plain = make_router().route(prompt, {}, api="other")
    messages = make_router().route(chat(SUM), {}, api="messages")

    assert headers_of(plain)["x-vsr-injected-system-prompt"] == "false"
    assert headers_of(messages)["x-vsr-injected-system-prompt"] == "true"
    assert fields_of(messages)["system"] == "You calculate."


def test_text_without_decision_goes_to_the_default_model_unchanged():
    outcome = make_router().route(chat("hello", top_k=1.50), {})

    assert outcome.body == chat("hello", "general", top_k=1.50)


def test_named_model_keeps_its_body():
    body = chat(SUM, "mathy")

    outcome = make_router().route(body, {})

    assert outcome.body is body
    assert headers_of(outcome)["x-vsr-selected-reasoning"] == "off"


def test_card_number_is_refused_by_the_decision_that_guards_it():
    outcome = make_router().route(chat(f"{SUM} my card is {CARD}"), {})

    answer = msgspec.json.decode(outcome.answer.body)
    assert answer["choices"][0]["finish_reason"] == "content_filter"
    assert answer["model"] == "sums_decision"
    assert CARD not in outcome.answer.body.decode()
    assert dict(outcome.answer.headers)["x-vsr-pii-types"] == "B-CREDIT_CARD"


def test_allowed_type_and_unguarded_decision_pass():
    made = make_router()

    assert made.route(chat(f"{SUM} ask bob@example.com"), {}).answer is None
    assert made.route(chat(f"python {CARD}"), {}).answer is None


def test_attack_in_a_tool_result_is_refused_as_a_stream():
    messages = [
        {"role": "user", "content": "Read the page"},
        {"role": "tool", "content": [{"type": "text", "text": ATTACK}]},
    ]

    answer = make_router().route(chat(messages, stream=True), {}).answer

    assert answer.content_type == "text/event-stream"
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert dict(answer.headers)["x-vsr-jailbreak-blocked"] == "true"


def test_no_character_of_a_cached_answer_ends_the_line_of_its_event():
    text = "a\u2028b\u2029c\x85d"
    completion = {"choices": [{"index": 0, "message": {"content": text}, "finish_reason": "stop"}]}

    answer = immediate.replay(msgspec.json.encode(completion), 0, [], is_stream=True)

    events = [line for line in answer.body.decode().splitlines() if line]
    chunks = [msgspec.json.decode(line.removeprefix("data: ")) for line in events[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text


@pytest.mark.parametrize(
    "filler", ["harmless words about cooking. ", "QUJDRA==", "你好世界", "😀🎉"]
)
@pytest.mark.parametrize("place", [0, 1])
def test_attack_and_card_are_found_anywhere_in_a_long_text(filler, place):
    padding = filler * (200_000 // len(filler))
    text = padding + f" {ATTACK} {CARD} " + padding * place

    outcome = make_router().route(chat(text), {})

    assert dict(outcome.answer.headers)["x-vsr-jailbreak-blocked"] == "true"
    unguarded = make_router(
        semantic_configs.CONFIG.replace(
            "prompt_guard: {enabled: true", "prompt_guard: {enabled: false"
        )
    )
    assert unguarded.route(chat(f"{SUM} {text}"), {}).answer is not None


TRUSTING = semantic_configs.CONFIG.replace(
    "{enabled: true, threshold: 0.7}",
    "{enabled: true, threshold: 0.7, trusted_roles: [system, developer]}",
)
USER = {"role": "user", "content": "Good morning"}


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        ("chat", {"messages": [{"role": "system", "content": ATTACK}, USER]}),
        ("chat", {"messages": [{"role": "developer", "content": ATTACK}, USER]}),
        ("messages", {"system": ATTACK, "messages": [USER]}),
        ("responses", {"instructions": ATTACK, "input": "Good morning"}),
    ],
)
def test_system_prompts_that_the_application_writes_are_not_read_if_it_says_so(api, fields):
    body = msgspec.json.encode({"model": "MoM", **fields})

    assert make_router().route(body, {}, api=api).answer is not None
    assert make_router(TRUSTING).route(body, {}, api=api).answer is None


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": ATTACK}]},
        {"messages": [USER, {"role": "tool", "tool_call_id": "1", "content": ATTACK}]},
        {"messages": [USER], "chat_template_kwargs": {"note": ATTACK}},
        {
            "messages": [{"role": "system", "content": ATTACK}, USER],
            "chat_template": "{{ messages }}",
        },
    ],
)
def test_what_users_and_tools_say_is_read_beside_trusted_system_prompts(fields):
    body = msgspec.json.encode({"model": "MoM", **fields})

    assert make_router(TRUSTING).route(body, {}).answer is not None


def test_observed_guard_changes_nothing_but_the_headers():
    text = semantic_configs.CONFIG.replace(
        "{enabled: true, threshold: 0.7}", "{enabled: true, mode: observe}"
    )

    outcome = make_router(text).route(chat(ATTACK), {})

    assert outcome.answer is None
    assert float(headers_of(outcome)["x-vsr-jailbreak-observed"]) > 0.7


def test_routing_guard_sends_an_attack_to_its_model():
    text = semantic_configs.CONFIG.replace("threshold: 0.7}", "mode: route, route_to: general}")

    outcome = make_router(text).route(chat(f"python {ATTACK}"), {})

    assert fields_of(outcome)["model"] == "general"


def test_attack_goes_to_no_other_model_than_that_of_its_guard():
    text = semantic_configs.CONFIG.replace("threshold: 0.7}", "mode: route, route_to: apart}")

    with pytest.raises(errors.NoWorkers, match="apart: no live worker"):
        make_router(text, Served("general", "coder")).route(chat(ATTACK), {})


def test_conversation_is_guarded_by_the_decision_that_it_keeps():
    made = make_router()
    made.route(chat(SUM), SESSION)

    outcome = made.route(chat(f"and with my card {CARD}"), SESSION)

    assert dict(outcome.answer.headers)["x-vsr-pii-types"] == "B-CREDIT_CARD"
    assert dict(outcome.answer.headers)["x-vsr-selected-decision"] == "sums_decision"


HARMLESS = {"role": "user", "content": "hello"}
ESCAPES = "".join(f"\\u{ord(sign):04x}" for sign in ATTACK)  # in JSON that a template decodes
ESCAPED_CALL = {"function": {"name": "f", "arguments": f'{{"a": "{ESCAPES}"}}'}}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [HARMLESS], "prompt": ATTACK},
        {"messages": [HARMLESS], "input": [{"role": "user", "content": ATTACK}]},
        {"messages": [HARMLESS], "documents": [{"body": ATTACK}]},
        {"messages": [HARMLESS], "chat_template_kwargs": {"note": [ATTACK]}},
        {"messages": [HARMLESS, {"role": "assistant", "reasoning_content": ATTACK}]},
        {"messages": [HARMLESS, {"function_call": {"name": "f", "arguments": ATTACK}}]},
        {"messages": [{"content": [{"type": "tool_use", "input": {"a": [ATTACK]}}]}]},
        {"messages": [{"content": [{"source": {"type": "text", "data": ATTACK}}]}]},
        {"input": [{"type": "function_call", "arguments": ATTACK}, HARMLESS]},
        {"prompt": "hello", "suffix": ATTACK},
        {"messages": [HARMLESS, {"role": "assistant", "tool_calls": [{"function": {"name": ATTACK}}]}]},
        {"messages": [HARMLESS, {"role": "assistant", "tool_calls": [{"custom": {"input": ATTACK}}]}]},
        {"messages": [HARMLESS, {"role": "assistant", "tool_calls": [ESCAPED_CALL]}]},
        {"messages": [{**HARMLESS, "name": ATTACK}]},
        {"messages": [HARMLESS, {"role": "tool", "tool_call_id": ATTACK, "content": "1"}]},
        {"messages": [{"content": [{"type": "tool_use", "name": ATTACK, "input": {}}]}]},
        {"messages": [HARMLESS, {"role": ATTACK, "content": "1"}]},
        {"messages": [HARMLESS, {"role": "assistant", "tool_calls": [{"id": ATTACK}]}]},
        {"messages": [{"content": [{"type": "tool_result", "tool_use_id": ATTACK}]}]},
        {"messages": [{"content": [{"type": "tool_use", "input": {ATTACK: 1}}]}]},
        {"messages": [HARMLESS], "documents": [{ATTACK: 1}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": sign} for sign in ATTACK]}]},
        {"messages": [HARMLESS], "system": [{"type": "text", "text": sign} for sign in ATTACK]},
        {"input": [{"type": "reasoning", "summary": [{"text": ATTACK}]}, HARMLESS]},
        {"messages": [HARMLESS, {"role": "tool", "tool_name": ATTACK, "content": "1"}]},
        {"messages": [HARMLESS, {"role": "assistant", "tool_plan": ATTACK}]},
    ],
)  # fmt: skip
def test_attack_is_found_wherever_a_model_would_see_it(fields):
    body = msgspec.json.encode({"model": "general", **fields})

    assert make_router().route(body, {}).explanation.path == "blocked"


def test_refused_request_tells_why_its_decision_applies():
    outcome = make_router().route(chat(f"{SUM} my card is {CARD}"), {})

    assert outcome.explanation.path == "blocked"
    assert headers_of(outcome)["x-vsr-selected-confidence"] == "1.0000"
    assert outcome.explanation.reasons == ("keyword sums",)


@pytest.mark.parametrize(
    ("api", "field", "others"),
    [
        ("completions", "prompt", {"messages": [HARMLESS]}),
        ("ollama_generate", "prompt", {"messages": [HARMLESS]}),
        ("responses", "input", {"messages": None}),
        ("responses", "input", {"messages": [HARMLESS], "prompt": "hello"}),
        ("other", "prompt", {"messages": None, "input": "hello"}),
    ],
)
def test_fields_that_a_server_passes_over_do_not_choose_the_decision(api, field, others):
    fields = {"model": "auto", **others, field: f"{SUM} my card is {CARD}"}

    outcome = make_router().route(msgspec.json.encode(fields), {}, api=api)

    assert outcome.explanation.decision == "sums_decision"
    assert outcome.explanation.path == "blocked"


@pytest.mark.parametrize("field", ["system", "instructions"])
def test_field_of_another_api_does_not_take_the_system_prompt(field):
    outcome = make_router().route(chat(SUM, **{field: ""}), {})

    assert fields_of(outcome)["messages"][0] == {"role": "system", "content": "You calculate."}


def test_all_that_a_template_of_the_request_may_write_is_read():
    fields = {"messages": [{**HARMLESS, "note": CARD}], "chat_template": "{{ messages[0].note }}"}

    assert CARD in request_view.RequestView(msgspec.json.encode(fields)).texts


def test_ids_of_servers_are_no_text():
    ids = {"id": "msg_" + "68af4030baa48193" * 4, "call_id": "call_" + "Zm9vYmFy" * 20 + "=="}
    calls = [{"id": "chatcmpl-tool-0d3e5ad9a1b74a5f", "function": {"name": "f", "arguments": "{}"}}]
    message = {"role": "assistant", "content": "Yes.", "tool_calls": calls, **ids}
    view = request_view.RequestView(chat([message]))

    assert view.texts == ["Yes.", "{}"]


def test_orders_in_the_definition_of_a_tool_are_no_attack():
    description = (
        "Executes a given bash command. IMPORTANT: DO NOT use it for file operations. Never run destructive commands"
        " such as rm -rf / unless the user explicitly asks for them. You must NEVER use interactive flags."
    )
    tools = [{"type": "function", "function": {"name": "bash", "description": description}}]
    body = msgspec.json.encode({"model": "general", "messages": [HARMLESS], "tools": tools})

    assert make_router().route(body, {}).explanation.path != "blocked"


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [1, 2]},
        {"prompt": [[1, 2], [3]]},
        {"messages": [HARMLESS], "nvext": {"token_data": [1, 2]}},
    ],
)
def test_prompt_of_token_ids_is_said_to_be_unread(fields):
    body = msgspec.json.encode({"model": "general", **fields})

    assert headers_of(make_router().route(body, {}))["x-vsr-unread-text"] == "true"


@pytest.mark.parametrize("key", ["content", "arguments", "tool_calls"])
def test_deeply_nested_message_is_routed_or_refused(key):
    for opening, closing in (("[", "]"), ('{"' + key + '":', "}")):
        value = opening * 900 + '"x"' + closing * 900
        body = f'{{"model":"auto","messages":[{{"role":"user","{key}":{value}}}]}}'.encode()
        with contextlib.suppress(errors.InvalidRequest):
            make_router().route(body, {})


@pytest.mark.parametrize("name", ["messages", "input"])
def test_nesting_of_any_depth_is_routed_or_refused(name):
    """What can just be decoded may be too deep for what reads it afterwards, some calls further down."""
    made = make_router()
    for depth in range(850, 1000):
        value = "[" * depth + '"x"' + "]" * depth
        body = {
            "messages": f'{{"model":"auto","messages":[{{"role":"user","content":{value}}}]}}',
            "input": f'{{"model":"auto","messages":[],"input":{value}}}',
        }[name]
        with contextlib.suppress(errors.InvalidRequest):
            made.route(body.encode(), {})
        with contextlib.suppress(errors.InvalidRequest):
            view = request_view.RequestView(body.encode())
            made.list_inputs(view)
            cache.make_key(view, {}, "")


def test_observed_decision_is_named_and_not_followed():
    text = semantic_configs.CONFIG.replace("priority: 20", "priority: 20\n    mode: observe")

    outcome = make_router(text).route(chat("python"), {})

    assert fields_of(outcome)["model"] == "general"
    assert headers_of(outcome)["x-vsr-observed-decision"] == "code_decision"


@pytest.mark.parametrize(("on_error", "is_blocked"), [("block", True), ("pass", False)])
def test_failing_guard_follows_the_configuration(on_error, is_blocked, monkeypatch):
    made = make_router(
        semantic_configs.CONFIG.replace("threshold: 0.7}", f"on_error: {on_error}}}")
    )
    monkeypatch.setattr(made._classifiers, "classify_attack", lambda _: 1 / 0)

    answer = made.route(chat("python"), {}).answer
    assert (answer is not None) == is_blocked
    assert answer is None or b"guard that reads it first has failed" in answer.body


class Served:
    """Serves the models it is given."""

    def __init__(self, *models):
        self.models = models

    def find_served(self, model):
        return model_choice.ServedModel() if model in self.models else None


def test_model_without_images_or_context_is_struck_out():
    part = {"type": "image_url", "image_url": {"url": "data:"}}
    made = make_router()

    with_image = made.route(
        chat([{"role": "user", "content": [{"type": "text", "text": "python"}, part]}]), {}
    )
    too_long = made.route(chat("python", max_tokens=6000), {})

    assert fields_of(with_image)["model"] == fields_of(too_long)["model"] == "general"
    assert with_image.explanation.struck_out == {"coder": "it takes no images"}


@pytest.mark.parametrize(
    "fields",
    [
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        {"input": [{"type": "function_call_output", "output": [{"type": "input_image"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [IMAGE_BLOCK]}]}]},
        {"messages": [{"role": "user", "content": "x", "images": ["QUE="]}]},
        {"prompt": "x", "images": ["QUE="]},
    ],
)  # fmt: skip
def test_images_of_each_api_are_seen(fields):
    assert request_view.RequestView(msgspec.json.encode(fields)).has_images


def test_text_beside_an_image_is_read():
    blocks = [IMAGE_BLOCK, {"type": "text", "text": "python"}]
    view = request_view.RequestView(chat([{"role": "user", "content": blocks}]))

    assert view.user_text == "python"
    assert view.texts == ["python"]


def test_request_that_no_model_can_serve_names_the_reason_of_each():
    with pytest.raises(errors.NoWorkers, match="coder: no live worker; general: no live worker"):
        make_router(served=Served("mathy")).route(chat("python"), {})


def test_request_that_each_model_could_serve_if_it_were_another_is_at_fault():
    text = semantic_configs.CONFIG.replace("general: {}", "general: {accepts_images: false}")
    image = [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "python"}]
    reasons = "coder: it takes no images; general: it takes no images"
    body = chat([{"role": "user", "content": image}])

    with pytest.raises(errors.InvalidRequest, match=reasons):
        make_router(text).route(body, {})
    with pytest.raises(errors.NoWorkers, match="coder: no live worker; general: it takes no"):
        make_router(text, Served("general")).route(body, {})


def turns(*texts):
    messages = [{"role": "user", "content": texts[0]}]
    for text in texts[1:]:
        messages += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": text}]
    return messages


def test_conversation_keeps_its_model():
    made = make_router()
    made.route(chat("Sort a list in python"), {})

    outcome = made.route(chat(turns("Sort a list in python", "commit it")), {})

    assert fields_of(outcome)["model"] == "coder"
    assert headers_of(outcome)["x-vsr-conversation"].startswith("stayed")


def test_conversation_follows_another_decision_with_the_model_that_it_keeps():
    named = "{model: coder, use_reasoning: true, reasoning_effort: high}"
    made = make_router(semantic_configs.CONFIG.replace(named, "{model: mathy}"))
    made.route(chat(SUM), SESSION)

    outcome = made.route(chat("python"), SESSION)

    assert outcome.explanation.decision == "code_decision"
    assert outcome.explanation.reasoning == "off"
    assert fields_of(outcome)["model"] == "mathy"
    assert headers_of(outcome)["x-vsr-conversation"].startswith("stayed")


def test_conversation_keeps_no_decision_that_is_only_observed_by_now():
    made, session = make_router(), {"x-session-id": "1"}
    made.route(chat(SUM), session)
    text = semantic_configs.CONFIG.replace("priority: 10", "priority: 10\n    mode: observe")

    outcome = made.with_config(make_router(text).loaded).route(chat("and now?"), session)

    assert outcome.explanation.decision == ""
    assert fields_of(outcome)["messages"][0]["role"] == "user"


def test_conversation_that_begins_with_a_cached_answer_keeps_its_model():
    made, session = make_router(), {"x-session-id": "1"}
    made.cache.store(made.route(chat(SUM), {}).cache_key, semantic_configs.COMPLETION)

    assert made.route(chat(SUM), session).explanation.path == "cache"
    assert fields_of(made.route(chat("and now?"), session))["model"] == "mathy"


def test_observed_decision_holds_no_conversation():
    rules = "rules: {conditions: [{type: keyword, name: code}]}, modelRefs: [{model: mathy}]"
    trial = f"  - {{name: trial, mode: observe, {rules}}}\nprompt_guard:"
    made = make_router(semantic_configs.CONFIG.replace("prompt_guard:", trial))
    made.route(chat(SUM), SESSION)

    assert fields_of(made.route(chat("python"), SESSION))["model"] == "coder"


def test_conversation_switches_for_a_much_better_model():
    made = make_router()
    made.route(chat("Sort a list in python"), SESSION)

    outcome = made.route(chat(SUM), SESSION)

    assert fields_of(outcome)["model"] == "mathy"
    assert headers_of(outcome)["x-vsr-conversation"].startswith("switched")


def test_tool_result_goes_to_the_model_that_called_the_tool():
    made = make_router()
    question = turns("Sort a list in python")
    made.route(chat(question), {})

    result = [*question, {"role": "assistant", "tool_calls": []}, {"role": "tool", "content": SUM}]

    assert fields_of(made.route(chat(result), {}))["model"] == "coder"


def test_conversations_of_one_user_are_apart():
    made = make_router()
    made.route(chat(SUM, user="u"), {})

    outcome = made.route(chat("hello", user="u"), {})

    assert fields_of(outcome)["model"] == "general"
    assert "x-vsr-conversation" not in headers_of(outcome)


async def test_idle_conversation_is_decided_anew():
    at = clock.VirtualClock()
    made = make_router(at=at)
    made.route(chat("python"), SESSION)

    await at.advance(3600)

    assert fields_of(made.route(chat("hello"), SESSION))["model"] == "general"


def test_conversations_of_two_tenants_are_apart():
    made = make_router()
    made.route(chat("python"), SESSION, "one")

    assert fields_of(made.route(chat("hello"), SESSION, "two"))["model"] == "general"


@settings(max_examples=60, deadline=None)
@given(
    st.binary(max_size=60)
    | st.text(max_size=60).map(chat)
    | st.lists(
        st.dictionaries(
            st.sampled_from(["role", "content", "type", "tool_calls"]),
            st.none()
            | st.text(max_size=8)
            | st.lists(
                st.integers()
                | st.dictionaries(
                    st.sampled_from(["type", "text"]), st.none() | st.text(max_size=5)
                ),
                max_size=2,
            ),
            max_size=3,
        ),
        max_size=3,
    ).map(chat)
)
def test_any_body_is_routed_or_refused(body):
    try:
        outcome = ROUTER.route(body, {})
    except errors.InvalidRequest:
        pass
    else:
        assert outcome.answer is not None or fields_of(outcome)["model"]


@pytest.mark.parametrize("body", [b"{}", b'{"":""}', b'{"model":""}', b'{"model":7}'])
def test_body_without_a_model_is_refused_with_the_name_that_has_one_chosen(body):
    with pytest.raises(errors.InvalidRequest, match=r'"model": expected the name .* or "MoM"'):
        ROUTER.route(body, {})


ROUTER = make_router()


def test_many_texts_are_read_in_groups_but_for_the_last():
    said = [f"word {number}" for number in range(5000)]
    view = request_view.RequestView(chat([{"role": "user", "content": text} for text in said]))

    assert view.texts[-request_view.MANY_TEXTS :] == said[-request_view.MANY_TEXTS :]
    assert len(view.texts) < request_view.MANY_TEXTS + 50
    assert "\n\n".join(view.texts) == "\n\n".join(said)


def test_attack_among_many_messages_is_refused():
    said = ["What a day."] * 1000 + [ATTACK] + ["What a day."] * 2000
    body = chat([{"role": "user", "content": each} for each in said])

    assert make_router().route(body, {}).answer is not None


def test_prompt_of_token_ids_is_one_message():
    body = msgspec.json.encode({"model": "general", "prompt": [7] * 1000})

    assert len(request_view.RequestView(body, "completions").messages) == 1


@pytest.mark.parametrize(
    "fields",
    [{"input": ["a"] * 100_001}, {"prompt": [[[]]] * 150_001}, {"messages": [0.5] * 100_001}],
)
def test_more_messages_or_lists_than_any_request_has_are_refused(fields):
    with pytest.raises(errors.InvalidRequest, match=r"expected at most \d00000"):
        request_view.RequestView(msgspec.json.encode({"model": "MoM", **fields}))
