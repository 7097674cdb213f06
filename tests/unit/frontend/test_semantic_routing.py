"""The semantic router inside the frontend: two models, chosen by what requests say."""

import asyncio
import json
import logging
import shutil
import threading

import msgspec
import pytest
from frontend_rig import Worker, events, outputs

import collector
from dynamo.base import errors
from dynamo.frontend import dispatch, semantic_routing
from dynamo.protocols import instances, model_card
from dynamo.semantic import service
from semantic_configs import ATTACK, CARD

CONFIG = """
default_model: m
keyword_rules:
  - {name: code, keywords: [python]}
decisions:
  - name: code_decision
    rules: {conditions: [{type: keyword, name: code}]}
    modelRefs: [{model: coder}]
    plugins:
      - {type: pii, configuration: {}}
      - {type: system_prompt, configuration: {system_prompt: Write code.}}
      - {type: semantic-cache, configuration: {}}
prompt_guard: {enabled: true}
semantic_cache: {enabled: true}
"""


@pytest.fixture
async def routed(bare, tmp_path, monkeypatch):
    monkeypatch.setattr(service, "RELOAD_INTERVAL_S", 0.01)
    bare.config = tmp_path / "config.yaml"
    bare.config.write_text(CONFIG)
    await bare.start(semantic_router=str(bare.config))
    bare.general, bare.coder = await bare.worker("m"), await bare.worker("coder")
    bare.coder.script = outputs("print", "eos")
    return bare


async def test_auto_goes_to_the_model_of_the_decision(routed):
    answer = await routed.chat("some python", model="auto")

    assert answer.json()["model"] == "coder"
    assert routed.coder.prompts == ["system: Write code.\nuser: some python\n"]
    assert answer.headers["x-vsr-selected-decision"] == "code_decision"
    assert answer.headers["x-vsr-injected-system-prompt"] == "true"


async def test_text_without_decision_goes_to_the_default_model(routed):
    answer = await routed.chat("hello", model="MoM")

    assert answer.json()["model"] == "m"


@pytest.mark.parametrize(
    ("text", "model", "policy", "outcome", "reason"),
    [
        ("some python", "auto", "code_decision", "coder", "keyword code"),
        ("hello", "auto", "default_model", "m", "no decision applies"),
        ("some python", "m", "requested model", "m", "the request names its model"),
    ],
)
async def test_choice_of_the_model_is_explained(routed, text, model, policy, outcome, reason):
    answer = await routed.chat(text, model=model, nvext={"extra_fields": ["explanation"]})
    of_model, of_worker = answer.json()["nvext"]["explanation"]

    assert of_model == {"kind": "model", "policy": policy, "outcome": outcome, "reason": reason}
    assert "kind" not in of_worker


CODE = {"role": "user", "content": "some python"}
THANKS = [CODE, {"role": "assistant", "content": "print"}, {"role": "user", "content": "thanks"}]


async def test_conversation_keeps_its_model_at_another_frontend(routed):
    first = routed.client
    await routed.start(semantic_router=str(routed.config))
    thanks = {"model": "auto", "messages": [{"role": "user", "content": "thanks"}]}
    named = {"x-session-id": "mine"}

    async def ask_both(code, thanks, headers):
        await first.post("/v1/chat/completions", json=code, headers=headers)
        return await routed.client.post("/v1/chat/completions", json=thanks, headers=headers)

    code = {"model": "auto", "messages": [CODE]}

    async def is_kept():
        return (await ask_both(code, thanks, named)).json().get("model") == "coder"

    await routed.until(is_kept)
    answer = await ask_both(code, thanks | {"messages": THANKS}, {})
    assert answer.json()["model"] == "coder"
    assert answer.headers["x-vsr-conversation"].startswith("stayed")


async def test_stream_carries_the_headers(routed):
    answer = await routed.chat("some python", model="auto", stream=True)

    assert answer.headers["x-vsr-selected-model"] == "coder"
    assert events(answer.text)[-1] == "[DONE]"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_attack_is_answered_without_a_worker(routed, is_stream):
    answer = await routed.chat(ATTACK, model="m", stream=is_stream)

    assert answer.status_code == 200
    assert answer.headers["x-vsr-jailbreak-blocked"] == "true"
    assert routed.general.requests == []


async def test_answers_of_the_router_carry_the_id_of_the_request(routed):
    answers = []
    for text in ("some python", "some python", ATTACK):
        body = {"model": "auto", "messages": [{"role": "user", "content": text}]}
        named = {"x-request-id": "mine"}
        answers.append(await routed.client.post("/v1/chat/completions", json=body, headers=named))

    paths = [answer.headers["x-vsr-response-path"] for answer in answers]
    assert paths == ["upstream", "cache", "blocked"]
    assert {answer.headers["x-request-id"] for answer in answers} == {"mine"}
    assert {answer.headers["x-dynamo-request-id"] for answer in answers} == {"mine"}


async def test_answers_of_the_router_are_counted(routed):
    for text in ("some python", "some python", ATTACK):
        await routed.chat(text, model="auto")

    counted = {
        name.partition('model="')[2].partition('"')[0]: number
        for name, number in (await routed.metrics()).items()
        if name.startswith("dynamo_frontend_requests_total{") and 'status="success"' in name
    }
    assert counted == {"coder": 1, "unknown": 2}


@pytest.mark.parametrize("name", ["auto", "MoM"])
async def test_prompt_is_counted_by_the_default_model_before_one_is_chosen(routed, name):
    body = {"model": name, "messages": [{"role": "user", "content": "some python"}]}
    named = body | {"model": "m"}

    for path in ("/v1/messages/count_tokens", "/tokenize"):
        counted = await routed.client.post(path, json=body)
        assert counted.json() == (await routed.client.post(path, json=named)).json()
        assert counted.status_code == 200


async def test_name_that_asks_for_a_choice_is_among_the_models(routed):
    listed = (await routed.client.get("/v1/models")).json()["data"]
    shown = await routed.client.get("/v1/models/MoM")

    assert [row["id"] for row in listed] == ["coder", "m", "MoM"]
    assert shown.json() == listed[-1]


async def test_name_that_asks_for_a_choice_is_among_the_models_of_ollama(routed):
    listed, loaded = [
        (await routed.client.get(path)).json()["models"] for path in ("/api/tags", "/api/ps")
    ]
    shown = await routed.client.post("/api/show", json={"model": "MoM:latest"})
    model = await routed.client.post("/api/show", json={"model": "m"})
    ready = await routed.client.post("/api/generate", json={"model": "MoM"})

    assert [row["name"] for row in listed] == ["coder", "m", "MoM"]
    assert listed[-1] == listed[1] | {"name": "MoM", "model": "MoM"}
    assert [row["name"] for row in loaded] == ["coder", "m"]  # nothing of that name is in a memory
    assert shown.json()["model_info"]["general.basename"] == "MoM"
    assert shown.json()["capabilities"] == model.json()["capabilities"]
    assert (ready.json()["model"], ready.json()["done_reason"]) == ("MoM", "load")


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/api/generate", {"prompt": "hello"}),
    ],
)
async def test_name_that_asks_for_a_choice_may_have_the_tag_of_ollama(routed, path, prompt):
    answer = await routed.client.post(path, json={"model": "MoM:latest", "stream": False, **prompt})

    assert answer.status_code == 200, answer.text
    assert answer.headers["x-vsr-selected-model"] == "m"


async def test_parameter_that_is_passed_over_does_not_choose_the_decision(routed):
    body = {
        "model": "auto",
        "prompt": f"python {CARD}",
        "messages": [{"role": "user", "content": "hello"}],
    }
    answer = await routed.client.post("/v1/completions", json=body)

    assert answer.status_code == 403
    assert routed.general.requests == []


async def test_personal_data_is_refused_by_its_decision(routed):
    answer = await routed.chat(f"python {CARD}", model="auto")

    assert answer.headers["x-vsr-pii-violation"] == "true"
    assert answer.json()["choices"][0]["finish_reason"] == "content_filter"


async def test_text_of_a_blocked_request_is_recorded_nowhere(bare, tmp_path, caplog):
    """Log, audit, trace, cache, metrics and spans have the words of a request that passes, where they have any."""
    caplog.set_level(logging.DEBUG)
    answers = tmp_path / "answers"
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.replace("cache: {enabled", f"cache: {{directory: {answers}, enabled"))
    with collector.running() as found:
        await bare.start(
            semantic_router=str(path),
            audit_sinks=("jsonl",),
            audit_output_path=str(tmp_path / "audit.jsonl"),
            request_trace=True,
            request_trace_sinks=("jsonl",),
            request_trace_output_path=str(tmp_path / "trace"),
            otel_export_enabled=True,
            otel_exporter_otlp_traces_endpoint=found.endpoint,
        )
        bare.coder = await bare.worker("coder")
        bare.coder.script = outputs("mombasa", "eos")

        blocked = [
            await bare.chat(f"{text} zanzibar", model="auto", stream=is_stream)
            for text in (ATTACK, f"python {CARD}")
            for is_stream in (False, True)
        ]
        passed = await bare.chat("python in mombasa", model="auto", store=True)
        metrics = (await bare.client.get("/metrics")).text
        await bare.frontend._records.close()
        spans = list(found.spans)
    written = {one.name: one.read_bytes() for one in tmp_path.rglob("*") if one.is_file()}
    everything = caplog.text + metrics + "".join(map(repr, (*written.values(), *spans)))

    assert all("x-vsr-response-path" in answer.headers for answer in blocked)
    assert {answer.headers["x-vsr-response-path"] for answer in blocked} == {"blocked"}
    assert passed.headers["x-vsr-response-path"] == "upstream"
    assert "security_block" in caplog.text
    assert "http-request" in {span.name for span in spans}
    assert b"mombasa" in written["audit.jsonl"]
    assert b"mombasa" in written["answers-0"]
    assert "zanzibar" not in everything
    assert CARD not in everything


async def test_other_apis_refuse_in_their_own_way(routed):
    completion = await routed.complete(ATTACK)
    message = await routed.client.post(
        "/v1/messages",
        json={"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": ATTACK}]},
    )

    assert completion.status_code == message.status_code == 403
    assert "jailbreak guard" in completion.json()["error"]["message"]
    assert message.json()["type"] == "error"


def tensor(text):
    return {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [text]}


@pytest.mark.parametrize(("text", "status"), [("hello", 200), (ATTACK, 403)])
async def test_kserve_is_guarded_and_keeps_its_model(routed, text, status):
    generated = await routed.client.post("/v2/models/m/generate", json={"text_input": text})
    inferred = await routed.client.post("/v2/models/m/infer", json={"inputs": [tensor(text)]})
    raw = len(text.encode()).to_bytes(4, "little") + text.encode()
    head = {**tensor(text), "parameters": {"binary_data_size": len(raw)}}
    del head["data"]
    json_part = msgspec.json.encode({"inputs": [head]})
    binary = await routed.client.post(
        "/v2/models/m/infer",
        content=json_part + raw,
        headers={"inference-header-content-length": str(len(json_part))},
    )

    assert [one.status_code for one in (generated, inferred, binary)] == [status] * 3
    assert len(routed.general.requests) == (3 if status == 200 else 0)


async def test_kserve_refuses_a_name_that_asks_for_a_choice(routed):
    answer = await routed.client.post("/v2/models/auto/generate", json={"text_input": "python"})

    assert answer.status_code == 400
    assert answer.json()["error"].startswith("model: 'auto' is a choice")


async def test_unknown_parameter_of_kserve_is_ignored_behind_the_router_too(routed):
    body = {"text_input": "hello", "parameters": {"no_such": 1}}

    answer = await routed.client.post("/v2/models/m/generate", json=body)

    assert answer.status_code == 200
    assert answer.headers["x-dynamo-ignored-parameters"] == "parameters.no_such"


async def test_byte_order_mark_is_passed_over_as_without_the_router(routed):
    body = {"model": "auto", "messages": [{"role": "user", "content": "some python"}]}

    answer = await routed.client.post(
        "/v1/chat/completions",
        content=b"\xef\xbb\xbf" + msgspec.json.encode(body),
        headers={"content-type": "application/json"},
    )

    assert answer.json()["model"] == "coder"


async def test_message_to_the_other_api_is_routed_with_its_system_prompt(routed):
    messages = [{"role": "user", "content": "python"}]
    body = {"model": "auto", "max_tokens": 9, "messages": messages, "system": "Old."}

    answer = await routed.client.post("/v1/messages", json=body)

    assert answer.json()["model"] == "coder"
    assert routed.coder.prompts[0].startswith("system: Write code.")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_same_question_is_answered_from_the_cache(routed, is_stream):
    first = await routed.chat("What is python?", model="auto", stream=is_stream)
    second = await routed.chat("Tell me, what is python", model="auto")

    assert "x-vsr-cache-hit" not in first.headers
    assert second.headers["x-vsr-cache-hit"] == "true"
    assert second.json()["choices"][0]["message"]["content"] == "print"
    assert len(routed.coder.requests) == 1


async def test_cache_is_apart_for_each_key(routed):
    await routed.chat("What is python?", model="auto")
    body = {"model": "auto", "messages": [{"role": "user", "content": "What is python?"}]}

    other = await routed.client.post(
        "/v1/chat/completions", json=body, headers={"authorization": "Bearer other"}
    )

    assert "x-vsr-cache-hit" not in other.headers


async def test_changed_file_takes_effect_without_a_restart(routed):
    routed.config.write_text(CONFIG.replace("[python]", "[haskell]"))

    async def goes_to_coder():
        return (await routed.chat("haskell", model="auto")).json()["model"] == "coder"

    for _ in range(500):
        if await goes_to_coder():
            break
    assert await goes_to_coder()


async def test_metrics_have_the_original_names(routed):
    await routed.chat("some python", model="auto")

    metrics = await routed.metrics()

    assert metrics['llm_model_requests_total{model="coder"}'] == 1
    assert (
        metrics['llm_model_routing_modifications_total{source_model="auto",target_model="coder"}']
        == 1
    )


async def test_usage_of_a_stream_is_counted_if_it_is_reported(routed):
    options = {"include_usage": True}
    await routed.chat("hello", model="auto", stream=True, stream_options=options)
    await routed.chat("hello", model="auto", stream=True)

    metrics = await routed.metrics()

    assert metrics['llm_completion_tokens_per_request_count{model="m"}'] == 1
    assert metrics['llm_model_tokens_total{kind="completion",model="m"}'] > 0


async def test_broken_body_is_refused_as_ever(routed):
    answer = await routed.client.post("/v1/chat/completions", content=b"{")

    assert answer.status_code == 400


async def test_lost_model_is_named_with_its_reason(routed):
    routed.config.write_text("default_model: gone\n")

    for _ in range(500):
        answer = await routed.chat("x", model="auto")
        if answer.status_code == 503:
            break

    assert "gone: no live worker" in answer.json()["error"]["message"]


async def test_model_of_the_decision_is_woken_if_it_lacks_workers_on_purpose(routed):
    start = instances.WorkerStart(
        model="coder", namespace="", estimate_s=9.0, is_on_demand=True, context_length=99
    )
    await routed.coder.runtime.records.withdraw()
    await routed.until(lambda: routed.frontend.models.get("coder") is None)
    elsewhere = await routed.chat("some python", model="auto")
    await routed.general.runtime.discovery.put(f"{instances.STARTS}1", msgspec.json.encode(start))
    await routed.until(lambda: routed.frontend._expected_workers.can_wake())
    answer = routed.start_task(routed.chat("more python", model="auto"))
    await routed.until(lambda: routed.frontend._dispatcher.worker_wait._waiting or answer.done())
    await routed.register(Worker, "coder", routed.coder.name)

    assert elsewhere.json()["model"] == "m"  # while nothing starts it
    assert (await answer).json()["model"] == "coder"


async def test_request_waits_for_the_default_model_as_if_it_had_named_it(routed):
    await routed.general.runtime.records.withdraw()
    await routed.until(lambda: routed.frontend.models.get("m") is None)
    answer = routed.start_task(routed.chat("hello", model="auto"))
    await routed.until(lambda: routed.frontend._dispatcher.worker_wait._waiting or answer.done())
    await routed.register(Worker, "m", routed.general.name)

    assert (await answer).json()["model"] == "m"


async def test_model_that_takes_no_images_is_known_by_its_card(routed):
    await routed.worker("seeing", runtime_config=model_card.ModelRuntimeConfig(max_images=2))

    live = semantic_routing.LiveModels(routed.frontend.models, lambda model: None)

    assert live.find_served("seeing").accepts_images
    assert not live.find_served("m").accepts_images


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


async def test_tools_that_may_be_called_go_to_a_model_whose_calls_are_found(routed):
    """The template of neither model shows how it writes calls; a call that is forced follows a grammar."""
    for model in (routed.general, routed.coder):
        model.script = outputs("print", "eos")
    forced = await routed.chat("python", model="auto", tools=[TOOL], tool_choice="none")
    refused = await routed.chat("python", model="auto", tools=[TOOL])
    facts = model_card.ModelRuntimeConfig(tool_call_parser="hermes")
    await routed.general.runtime.records.withdraw()
    await routed.until(lambda: routed.frontend.models.get("m") is None)
    caller = await routed.worker("m", runtime_config=facts)
    caller.script = outputs("print", "eos")
    answer = await routed.chat("python", model="auto", tools=[TOOL])

    assert forced.json()["model"] == "coder"
    assert refused.status_code == 400
    assert "m: it is not known how it writes tool calls" in refused.json()["error"]["message"]
    assert answer.json()["model"] == "m"


async def test_image_that_no_model_takes_is_the_fault_of_the_request(routed):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUE="}}

    answer = await routed.chat(
        model="auto", messages=[{"role": "user", "content": [image, {"type": "text", "text": "x"}]}]
    )

    assert answer.status_code == 400
    assert "m: it takes no images" in answer.json()["error"]["message"]


def fail_at_once(call, request):
    call.fail(errors.EngineFailed("the engine is out of order"))


@pytest.mark.parametrize("is_stream", [False, True])
async def test_next_model_is_asked_once_when_the_chosen_one_fails_before_its_first_token(
    routed, is_stream
):
    routed.coder.script = fail_at_once

    answer = await routed.chat("some python", model="auto", stream=is_stream)

    assert answer.status_code == 200
    assert answer.headers["x-vsr-selected-model"] == "m"
    assert answer.headers["x-vsr-failed-model"] == "coder"
    assert '"content":"h' in answer.text
    assert len(routed.coder.requests) == len(routed.general.requests) == 1


async def test_failed_model_is_counted_though_another_one_answers(routed):
    routed.coder.script = fail_at_once
    await routed.chat("some python", model="auto")

    metrics = await routed.metrics()

    assert metrics['llm_request_errors_total{model="coder",reason="upstream_5xx"}'] == 1


async def test_failure_of_the_second_model_is_the_answer(routed):
    routed.coder.script = routed.general.script = fail_at_once

    answer = await routed.chat("some python", model="auto")

    assert answer.status_code == 500
    assert len(routed.coder.requests) == len(routed.general.requests) == 1


@pytest.mark.parametrize("has_begun", [False, True])
async def test_fault_of_the_program_ends_the_answer_of_the_second_model(
    routed, monkeypatch, has_begun
):
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    routed.coder.script = fail_at_once
    dispatch_request = dispatch.Dispatcher.dispatch_request

    async def fail_for_second(dispatcher, model, reply, *arguments):
        if model.name == "coder":
            await dispatch_request(dispatcher, model, reply, *arguments)
            return
        if has_begun:
            reply.client.start_stream(200, content_type="text/event-stream")
        raise ZeroDivisionError

    monkeypatch.setattr(dispatch.Dispatcher, "dispatch_request", fail_for_second)

    answer = await routed.chat("some python", model="auto", stream=True)

    assert answer.status_code == (200 if has_begun else 500)
    assert ("an internal error lost the answer" in answer.text) is not has_begun


async def test_no_other_model_is_asked_for_a_model_that_the_client_named(routed):
    routed.coder.script = fail_at_once

    answer = await routed.chat("some python", model="coder")

    assert answer.status_code == 500
    assert routed.general.requests == []


async def test_stream_that_fails_after_its_first_token_is_not_asked_again(routed):
    def fail_late(call, request):
        call.send(outputs("print", "eos")[0])
        fail_at_once(call, request)

    routed.coder.script = fail_late

    answer = await routed.chat("some python", model="auto", stream=True)

    assert "x-vsr-failed-model" not in answer.headers
    assert routed.general.requests == []


@pytest.mark.parametrize("is_stream", [False, True])
async def test_response_that_names_the_one_before_stays_with_its_model(routed, is_stream):
    first = {"model": "auto", "input": "some python", "stream": is_stream}
    answer = await routed.client.post("/v1/responses", json=first)
    text = answer.text
    response_id = text[text.index("resp_") :].partition('"')[0]

    second = await routed.client.post(
        "/v1/responses",
        json={"model": "auto", "input": "commit it", "previous_response_id": response_id},
    )

    assert second.headers["x-vsr-conversation"].startswith("stayed")
    assert second.headers["x-vsr-selected-model"] == "coder"


KEYS = """
[[keys]]
name = "limited"
key = "sk-limited-0000000000"
models = ["m"]
"""


async def test_model_that_a_key_may_not_ask_is_struck_out(bare, tmp_path):
    config, keys = tmp_path / "config.yaml", tmp_path / "keys.toml"
    config.write_text(CONFIG)
    keys.write_text(KEYS)
    await bare.start(semantic_router=str(config), api_keys_file=str(keys))
    await bare.worker("m")
    await bare.worker("coder")
    body = {"model": "auto", "messages": [{"role": "user", "content": "some python"}]}

    answer = await bare.client.post(
        "/v1/chat/completions",
        json=body,
        headers={"authorization": "Bearer sk-limited-0000000000"},
    )

    assert answer.status_code == 200
    assert answer.headers["x-vsr-selected-model"] == "m"


async def test_name_of_choice_tells_no_default_model_that_the_key_may_not_ask(bare, tmp_path):
    config, keys = tmp_path / "config.yaml", tmp_path / "keys.toml"
    config.write_text(CONFIG.replace("default_model: m", "default_model: coder"))
    keys.write_text(KEYS)
    await bare.start(semantic_router=str(config), api_keys_file=str(keys))
    await bare.worker("m")
    await bare.worker("coder")
    headers = {"authorization": "Bearer sk-limited-0000000000"}
    body = {"model": "auto", "messages": [{"role": "user", "content": "hi"}]}
    answers = [
        await bare.client.post("/tokenize", json=body, headers=headers),
        await bare.client.get("/v1/models/MoM", headers=headers),
        await bare.client.post("/api/show", json={"model": "MoM"}, headers=headers),
        await bare.client.get("/v1/models", headers=headers),
        await bare.client.get("/api/tags", headers=headers),
    ]

    assert [answer.status_code for answer in answers] == [404, 404, 404, 200, 200]
    assert not any("coder" in answer.text for answer in answers)


async def test_error_without_a_model_names_none_that_the_key_may_not_ask(bare, tmp_path):
    config, keys = tmp_path / "config.yaml", tmp_path / "keys.toml"
    config.write_text(CONFIG)
    keys.write_text(KEYS.replace('["m"]', '["other"]'))
    await bare.start(semantic_router=str(config), api_keys_file=str(keys))
    await bare.worker("coder")
    body = {"model": "auto", "messages": [{"role": "user", "content": "some python"}]}
    headers = {"authorization": "Bearer sk-limited-0000000000"}

    answer = await bare.client.post("/v1/chat/completions", json=body, headers=headers)

    assert answer.json()["error"]["message"] == (
        "no model can serve this request (not allowed to this key)"
    )


THINKING = model_card.ModelRuntimeConfig(reasoning_parser="basic")
REASONING = """
default_model: m
reasoning_families: {q: {type: chat_template_kwargs, parameter: enable_thinking}}
model_config: {m: {reasoning_family: q}}
keyword_rules: [{name: greeting, keywords: [hello]}]
decisions:
  - name: greeting
    rules: {conditions: [{type: keyword, name: greeting}]}
    modelRefs: [{model: m, use_reasoning: true}]
"""


@pytest.mark.parametrize(
    ("path", "fields", "reasoning"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}, "on"),
        ("/v1/completions", {"prompt": "hello"}, "off"),
        ("/v1/responses", {"input": "hello"}, "on"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}, "on"),
        ("/api/chat", {"messages": [{"role": "user", "content": "hello"}], "stream": False}, "on"),
        ("/api/generate", {"prompt": "hello", "stream": False}, "on"),
        ("/api/generate", {"prompt": "hello", "stream": False, "raw": True}, "off"),
    ],
)  # fmt: skip
async def test_no_api_gets_a_field_of_reasoning_that_it_does_not_have(
    bare, tmp_path, path, fields, reasoning
):
    config = tmp_path / "config.yaml"
    config.write_text(REASONING)
    await bare.start(semantic_router=str(config), unknown_parameters="refuse")
    await bare.worker("m")

    answer = await bare.client.post(path, json={"model": "auto", **fields})

    assert answer.status_code == 200
    assert answer.headers["x-vsr-selected-reasoning"] == reasoning


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}),
        ("/api/chat", {"messages": [{"role": "user", "content": "hello"}], "stream": False}),
        ("/api/generate", {"prompt": "hello", "stream": False}),
    ],
)
@pytest.mark.parametrize(("uses", "expected"), [("true", "ON"), ("false", "OFF")])
async def test_template_gets_the_reasoning_of_the_decision_from_each_api(
    bare, tmp_path, path, fields, uses, expected
):
    template = "{{ 'ON' if enable_thinking else 'OFF' if enable_thinking is false else 'NONE' }}"
    bare.model_dir = shutil.copytree(bare.model_dir, tmp_path / "model")  # others have the former
    (bare.model_dir / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    config = tmp_path / "config.yaml"
    config.write_text(REASONING.replace("use_reasoning: true", f"use_reasoning: {uses}"))
    await bare.start(semantic_router=str(config))
    worker = await bare.worker("m", runtime_config=THINKING)

    answer = await bare.client.post(path, json={"model": "auto", **fields})

    assert answer.headers["x-vsr-selected-reasoning"] == expected.lower()
    assert worker.prompts == [expected]


async def test_long_text_is_read_beside_the_event_loop(routed, monkeypatch):
    route, threads = service.RoutingService.route, []

    def route_in_thread(*arguments, **fields):
        threads.append(threading.current_thread())
        return route(*arguments, **fields)

    monkeypatch.setattr(service.RoutingService, "route", route_in_thread)
    for text in ("word " * 10_000, "word"):
        await routed.chat(text, model="auto")

    assert [thread is threading.main_thread() for thread in threads] == [False, True]
