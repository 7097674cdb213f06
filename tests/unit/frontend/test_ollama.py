"""Ollama's API: chats, prompts, embeddings and lists of models; `tests/clients` has its real client."""

import json
import time

import pytest
from frontend_rig import outputs

from dynamo.base import clock, errors
from dynamo.frontend.apis.ollama import request
from dynamo.protocols import blocks, generate, model_card

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"model": "m", "prompt": "hi"}
PARSED = model_card.ModelRuntimeConfig(
    tool_call_parser="hermes", reasoning_parser="basic", supports_guided=True
)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>'


async def ask(rig, path, body, **fields):
    return await rig.client.post(path, json={**body, **fields})


def lines(answer):
    return [json.loads(line) for line in answer.text.splitlines()]


def without_times(line):
    return {
        name: value
        for name, value in line.items()
        if name != "created_at" and not name.endswith("duration")
    }


async def test_chat_streams_lines_of_json_by_default(rig):
    rig.one.script = outputs("ab", "eos")
    answer = await ask(rig, "/api/chat", CHAT)
    message = {"role": "assistant", "content": ""}

    assert answer.headers["content-type"] == "application/x-ndjson"
    assert [without_times(line) for line in lines(answer)] == [
        {"model": "m", "message": message | {"content": "a"}, "done": False},
        {"model": "m", "message": message | {"content": "b"}, "done": False},
        {
            "model": "m",
            "message": message,
            "done": True,
            "done_reason": "stop",
            "prompt_eval_count": 9,
            "eval_count": 3,
        },
    ]
    assert rig.one.prompts == ["user: hi\n"]


@pytest.mark.parametrize("field", [{"context": [1]}, {"template": "x"}, {"logprobs": True}])
async def test_field_that_is_not_supported_is_refused_in_these_words(rig, field):
    answer = await ask(rig, "/api/generate", PROMPT, **field)

    (name,) = field
    assert answer.json() == {"error": f"{name}: not supported; leave it out"}


@pytest.mark.parametrize("stream", [False, True])
async def test_model_that_fills_in_answers_before_a_suffix(rig, stream):
    able = model_card.ModelRuntimeConfig(infill_format="codestral")
    worker = await rig.worker("coder", runtime_config=able)
    asked = {"model": "coder", "prompt": "hi", "suffix": "s", "system": "x", "stream": stream}
    said = lines(await ask(rig, "/api/generate", asked))
    shown = await rig.client.post("/api/show", json={"model": "coder"})

    assert "".join(line["response"] for line in said) == "hello"
    assert worker.prompts == ["[SUFFIX]s[PREFIX]hi"]
    assert "insert" in shown.json()["capabilities"]


async def test_whole_chat_is_one_object(rig):
    rig.one.script = outputs("hello", "length")
    (line,) = lines(await ask(rig, "/api/chat", CHAT, stream=False))

    assert line["message"] == {"role": "assistant", "content": "hello"}
    assert (line["done"], line["done_reason"], line["eval_count"]) == (True, "length", 5)
    assert line["total_duration"] >= line["eval_duration"] >= 0
    assert line["created_at"].endswith("Z")


async def test_generate_has_its_text_as_the_response(rig):
    rig.one.script = outputs("ab", "eos")
    found = lines(await ask(rig, "/api/generate", PROMPT, system="be kind"))
    (raw,) = lines(await ask(rig, "/api/generate", PROMPT, raw=True, stream=False))

    assert [line["response"] for line in found] == ["a", "b", ""]
    assert raw["response"] == "ab"
    assert rig.one.prompts == ["system: be kind\nuser: hi\n", "hi"]


async def test_options_reach_the_engine(rig):
    chosen = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 7, "num_predict": 4, "stop": ["x"],
        "repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25, "num_ctx": 4096,
    }  # fmt: skip
    answer = await ask(rig, "/api/chat", CHAT, options=chosen, keep_alive="5m", stream=False)
    (request,) = rig.one.requests

    assert "x-dynamo-ignored-parameters" not in answer.headers
    assert request.sampling_options == generate.SamplingOptions(
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        min_p=0.1,
        seed=7,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=0.25,
    )
    assert request.stop_conditions.max_tokens == 4
    assert request.stop_conditions.stop == ("x",)


async def test_seed_of_minus_one_is_none(rig):
    for seed in (-1, 0):
        await ask(rig, "/api/chat", CHAT, options={"seed": seed}, stream=False)

    assert [each.sampling_options.seed for each in rig.one.requests] == [None, 0]


async def test_number_of_tokens_below_one_is_no_limit(rig):
    await ask(rig, "/api/chat", CHAT, options={"num_predict": -1}, stream=False)

    assert rig.one.requests[0].stop_conditions.max_tokens == 200 - len("user: hi\n")


async def test_more_tokens_than_the_context_has_are_as_many_as_fit(rig):
    answer = await ask(rig, "/api/chat", CHAT, options={"num_predict": 4096}, stream=False)

    assert answer.status_code == 200
    assert rig.one.requests[0].stop_conditions.max_tokens == 200 - len("user: hi\n")


@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_and_calls_are_fields_of_the_message(rig, stream):
    two = await rig.worker("p", runtime_config=PARSED)
    two.script = outputs(f"<think>hm</think>I look.{CALL}", "eos")
    answer = await ask(rig, "/api/chat", CHAT, model="p", tools=TOOLS, stream=stream)
    messages = [line["message"] for line in lines(answer)]

    assert "".join(message.get("thinking", "") for message in messages) == "hm"
    assert "".join(message["content"] for message in messages) == "I look."
    (call,) = [call for message in messages for call in message.get("tool_calls", ())]
    assert call == {"id": call["id"], "function": {"name": "look", "arguments": {"at": "x"}}}


@pytest.mark.parametrize("stream", [False, True])
async def test_two_calls_of_one_tool_have_different_ids(rig, stream):
    two = await rig.worker("p", runtime_config=PARSED)
    two.script = outputs(CALL + CALL, "eos")
    answer = await ask(rig, "/api/chat", CHAT, model="p", tools=TOOLS, stream=stream)
    calls = [call for line in lines(answer) for call in line["message"].get("tool_calls", ())]

    assert len(calls) == len({call["id"] for call in calls}) == 2


async def test_call_that_a_model_writes_in_several_lines_is_in_one_line_of_the_stream(rig):
    worker = await rig.worker("p", runtime_config=PARSED)
    arguments = '{\n  "at": "x\\n",\n  "all": [\n    true\n  ]\n}'
    call = f'<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>'
    worker.script = outputs(call, "eos")
    first, _ = lines(await ask(rig, "/api/chat", CHAT, model="p", tools=TOOLS))
    (called,) = first["message"]["tool_calls"]

    assert called["function"]["arguments"] == {"at": "x\n", "all": [True]}


async def test_line_separators_in_a_text_end_no_line_of_the_stream(rig):
    text = "a\u2028b\u2029c\x85d"
    await rig.complete(text)
    rig.one.script = [
        generate.Output((one,)) for one in blocks.unpack(rig.one.requests[0].token_ids)
    ]
    rig.one.script += outputs("!", "eos")
    found = lines(await ask(rig, "/api/chat", CHAT))  # cut as Ollama's client cuts them

    assert "".join(line["message"]["content"] for line in found) == text + "!"


async def test_call_that_breaks_off_is_text_in_a_stream_too(rig):
    worker = await rig.worker("p", runtime_config=PARSED)
    worker.script = outputs(CALL[:-20], "length")
    found = lines(await ask(rig, "/api/chat", CHAT, model="p", tools=TOOLS))

    assert "".join(line["message"]["content"] for line in found) == CALL[:-20]
    assert not any("tool_calls" in line["message"] for line in found)


@pytest.mark.parametrize("think", [False, True])
def test_thinking_is_told_by_both_switches_of_templates(think):
    turn = request.decode_chat(json.dumps(CHAT | {"think": think}).encode())

    assert turn.template_args == {"enable_thinking": think, "thinking": think}


async def test_thoughts_are_left_out_where_they_are_switched_off(rig):
    two = await rig.worker("p", runtime_config=PARSED)
    two.script = outputs("<think>hm</think>yes", "eos")
    (line,) = lines(await ask(rig, "/api/chat", CHAT, model="p", think=False, stream=False))

    assert line["message"] == {"role": "assistant", "content": "yes"}


async def test_format_is_a_grammar(rig):
    two = await rig.worker("p", runtime_config=PARSED)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await ask(rig, "/api/chat", CHAT, model="p", format=schema)
    await ask(rig, "/api/generate", PROMPT, model="p", format="json")
    first, second = [one.sampling_options.guided_decoding for one in two.requests]

    assert json.loads(first.json) == schema
    assert first.param == second.param == "format"


async def test_history_with_calls_and_results_is_sent_back(rig):
    call = {"function": {"name": "look", "arguments": {"at": "x"}}}
    history = [
        CHAT["messages"][0],
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "seen", "tool_name": "look"},
    ]
    answer = await ask(rig, "/api/chat", CHAT, messages=history, stream=False)

    assert answer.status_code == 200
    assert rig.one.prompts == ["user: hi\nassistant: \ntool: seen\n"]


async def test_answer_continues_a_last_message_of_the_assistant(rig):
    begun = [*CHAT["messages"], {"role": "assistant", "content": "Well,"}]
    await ask(rig, "/api/chat", CHAT, messages=begun, stream=False)
    await ask(
        rig, "/api/chat", CHAT, messages=[*begun[:1], begun[1] | {"content": ""}], stream=False
    )

    assert rig.one.prompts == ["user: hi\nassistant: Well,", "user: hi\nassistant: \n"]


def test_calls_and_their_results_have_ids_that_templates_take():
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("see", "look", "look")]
    results = [{"tool_name": "look"}, {"tool_name": "look"}, {}, {"tool_name": "hear"}]
    history = [
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", "content": "", **result} for result in results),
    ]
    asked, *answers = request.decode_chat(
        json.dumps({"model": "m", "messages": history}).encode()
    ).messages
    ids = [call["id"] for call in asked["tool_calls"]]

    assert ids == ["call00000", "call00001", "call00002"]
    assert [answer.get("tool_call_id") for answer in answers] == [ids[1], ids[2], ids[0], None]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [("/api/chat", {"messages": []}, "message"), ("/api/generate", {"prompt": ""}, "response")],
)
async def test_request_without_a_prompt_only_loads_the_model(rig, path, body, field):
    (line,) = lines(await ask(rig, path, {"model": "m"}, **body))
    missing = await ask(rig, path, {"model": "q"}, **body)

    assert line[field] in ("", {"role": "assistant", "content": ""})
    assert (line["done"], line["done_reason"]) == (True, "load")
    assert missing.status_code == 404
    assert rig.one.requests == []


@pytest.mark.parametrize(
    ("keep_alive", "reason"),
    [
        *((zero, "unload") for zero in (0, 0.0, "0", "0s", "-0m", "0h0m0.0s")),
        *((time, "load") for time in (None, 5, -1, "5m", "0h5m", "-1", "", "s", False)),
    ],
)
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_request_without_a_prompt_unloads_a_model_that_is_not_kept(
    rig, path, keep_alive, reason
):
    (line,) = lines(await ask(rig, path, {"model": "m"}, keep_alive=keep_alive))
    missing = await ask(rig, path, {"model": "q"}, keep_alive=keep_alive)

    assert (line["done"], line["done_reason"]) == (True, reason)
    assert missing.status_code == 404


@pytest.mark.parametrize("endless", ["0" * 20_000, "." + "0" * 20_000, "0s" * 20_000])
async def test_duration_without_end_takes_no_time(rig, endless):
    began_s = time.process_time()
    (line,) = lines(await ask(rig, "/api/chat", {"model": "m"}, keep_alive=f"{endless}x"))

    assert line["done_reason"] == "load"
    assert time.process_time() - began_s < 2.0


async def test_prompt_of_a_model_that_is_not_kept_is_answered(rig):
    rig.one.script = outputs("ab", "eos")
    answer = await ask(rig, "/api/generate", PROMPT, keep_alive=0, stream=False)

    assert (answer.json()["response"], answer.json()["done_reason"]) == ("ab", "stop")


async def test_answer_about_a_loaded_model_has_the_time_of_now(rig, monkeypatch):
    monkeypatch.setattr(clock.SystemClock, "wall", staticmethod(lambda: 86_400.0))
    (line,) = lines(await ask(rig, "/api/generate", {"model": "m"}))

    assert line["created_at"] == "1970-01-02T00:00:00Z"


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/api/chat", CHAT | {"model": "q"}, 404, "'q'"),
        ("/api/chat", CHAT | {"messages": [{"role": "user", "content": "x", "images": ["i"]}]}, 400, "images"),
        ("/api/chat", CHAT | {"options": {"temperature": 9}}, 400, "options.temperature"),
        ("/api/generate", PROMPT | {"suffix": "x"}, 400, "suffix: the model 'm' is not known to fill in"),
        ("/api/generate", PROMPT | {"suffix": "x", "images": ["i"]}, 400, "images: not supported together"),
        ("/api/generate", PROMPT | {"context": [1]}, 400, "context"),
        ("/api/embed", {"model": "m", "input": "x"}, 400, "embeddings"),
        ("/api/show", {}, 400, "model"),
        ("/api/show", {"model": "q"}, 404, "'q'"),
    ],
)  # fmt: skip
async def test_error_is_one_sentence(rig, path, body, status, text):
    answer = await rig.client.post(path, json=body)

    assert answer.status_code == status
    assert answer.json().keys() == {"error"}
    assert text in answer.json()["error"]


async def test_failed_stream_ends_with_the_error(rig):
    def script(call, _):
        call.send(generate.Output((104,)))
        call.fail(errors.EngineFailed("out of memory"))

    rig.one.script = script
    found = lines(await ask(rig, "/api/chat", CHAT))

    assert found[-1] == {"error": "out of memory"}
    assert len(found) == 2


async def test_models_are_listed_with_and_without_a_tag(rig):
    await rig.embedder()
    tags = (await rig.client.get("/api/tags")).json()["models"]
    loaded = (await rig.client.get("/api/ps")).json()["models"]
    shown = (await ask(rig, "/api/show", {"model": "m:latest"})).json()
    vectors = (await ask(rig, "/api/show", {"name": "e"})).json()

    assert [model["model"] for model in tags] == [model["name"] for model in loaded]
    assert {model["name"]: model["context_length"] for model in loaded}["m"] == 200
    assert shown["model_info"]["dynamo.context_length"] == 200
    assert shown["capabilities"] == ["completion"]
    assert vectors["capabilities"] == ["embedding"]
    version = (await rig.client.get("/api/version")).json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)  # which VS Code's chat requires


async def test_texts_are_embedded_in_their_order(rig):
    await rig.embedder()
    answer = (await ask(rig, "/api/embed", {"model": "e:latest"}, input=["abc", "b"])).json()
    (single,) = (await ask(rig, "/api/embed", {"model": "e"}, input="a")).json()["embeddings"]

    assert answer["embeddings"] == [[3, 97, 0, 0], [1, 98, 0, 0]]
    assert (answer["model"], answer["prompt_eval_count"]) == ("e", 4)
    assert single == [1, 97, 0, 0]


async def test_text_longer_than_the_context_is_cut_unless_truncate_is_false(rig):
    await rig.embedder()
    long = "x" * 201

    answer = await ask(rig, "/api/embed", {"model": "e"}, input=[long, "a"])
    refusal = await ask(rig, "/api/embed", {"model": "e"}, input=long, truncate=False)

    assert answer.json()["embeddings"] == [[200, 120, 0, 0], [1, 97, 0, 0]]
    assert refusal.status_code == 400
    assert "maximum context length" in refusal.json()["error"]


async def test_old_route_embeds_one_text(rig):
    await rig.embedder()
    answer = await ask(rig, "/api/embeddings", {"model": "e:latest"}, prompt="abc")

    assert answer.json() == {"embedding": [3, 97, 0, 0]}
    assert (await ask(rig, "/api/embeddings", {"model": "e"}, prompt="")).status_code == 400


@pytest.mark.parametrize(("method", "path"), [("POST", "/api/pull"), ("PUT", "/api/chat")])
async def test_route_that_is_not_here_is_refused_in_ollamas_form(rig, method, path):
    answer = await rig.client.request(method, path, json={"model": "m"})

    assert answer.status_code in (404, 405)
    assert path in answer.json()["error"]


def test_result_is_that_of_its_call_behind_any_number_of_others():
    def call(name):
        return {"function": {"name": name, "arguments": {}}}

    result = {"role": "tool", "content": "", "tool_name": "look"}
    calls = [*[call("see")] * 2000, call("look")]
    asked = {"role": "assistant", "content": "", "tool_calls": calls}
    body = json.dumps({"model": "m", "messages": [asked, result, result]}).encode()
    _, first, second = request.decode_chat(body).messages

    assert first["tool_call_id"] == "call02000"
    assert "tool_call_id" not in second
