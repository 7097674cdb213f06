"""Answers with reasoning and tool calls, streamed and whole, in OpenAI's shapes."""

import json

import openai
import pytest
from frontend_rig import EOS, events, outputs

from dynamo.frontend.delivery import choices, sse, streaming
from dynamo.protocols import generate, model_card

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("look", "see")
]
CALLS = (
    '<think>\nhm\n</think>\n\nI look.\n<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "see", "arguments": {}}\n</tool_call>'
)  # fmt: skip
ONLY_CALL = '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>'


@pytest.fixture
async def parsed(rig):
    """A worker whose model thinks and calls."""
    facts = model_card.ModelRuntimeConfig(tool_call_parser="hermes", reasoning_parser="basic")
    rig.two = await rig.worker("p", runtime_config=facts)
    return rig


def deltas(text):
    return [
        choice["delta"]
        for event in events(text)
        if event != "[DONE]"
        for choice in event["choices"]
    ]


def merged_calls(told):
    """The calls of a stream, each from its parts."""
    calls = {}
    for part in (part for delta in told for part in delta.get("tool_calls", ())):
        if part["index"] not in calls:
            calls[part["index"]] = part
        else:
            assert sorted(part) == ["function", "index"]
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return list(calls.values())


def without_ids(calls):
    assert all(len(call["id"]) == 9 and call["id"].isalnum() for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return [{key: value for key, value in call.items() if key != "id"} for call in calls]


@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_stand_in_the_field_of_the_chosen_name(bare, stream):
    await bare.start(reasoning_field_name="reasoning")
    facts = model_card.ModelRuntimeConfig(reasoning_parser="basic")
    worker = await bare.worker("p", runtime_config=facts)
    worker.script = outputs("<think>hm</think>yes", "eos")
    answer = await bare.chat(model="p", stream=stream)
    told = deltas(answer.text) if stream else [answer.json()["choices"][0]["message"]]

    assert "".join(part.get("reasoning", "") for part in told) == "hm"
    assert not any("reasoning_content" in part for part in told)


@pytest.mark.parametrize("fields", [{}, {"include_reasoning": False}, {"service_tier": "flex"}])
async def test_chunks_from_templates_are_those_that_the_encoder_makes(parsed, fields, monkeypatch):
    text = CALLS.replace('"x"', r'"a \" \n b"')
    parsed.two.script = [*outputs(text, "eos", 0), *outputs(text, "eos", 1)]
    body = {"model": "p", "tools": TOOLS, "stream": True, "n": 2} | fields

    async def chunks():
        drawn = iter(range(10**9))
        monkeypatch.setattr(choices, "new_tool_call_id", lambda: f"call{next(drawn):05}")
        told = [event for event in events((await parsed.chat(**body)).text) if event != "[DONE]"]
        return [{k: v for k, v in event.items() if k not in ("id", "created")} for event in told]

    found = await chunks()
    monkeypatch.setattr(sse, "make_template", lambda *_: None)
    expected = await chunks()

    assert found == expected
    assert len(found) == 56


async def test_whole_answer_is_parsed(parsed):
    parsed.two.script = outputs(CALLS, "eos")
    body = (await parsed.chat(model="p", tools=TOOLS)).json()
    message = body["choices"][0]["message"]

    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert without_ids(message.pop("tool_calls")) == [
        {"type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}},
        {"type": "function", "function": {"name": "see", "arguments": "{}"}},
    ]
    assert message == {
        "role": "assistant", "content": "I look.", "refusal": None, "reasoning_content": "hm",
        "annotations": [], "audio": None,
    }  # fmt: skip
    assert body["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": len("<think>\nhm\n</think>") - len("<think")
    }


async def test_streamed_answer_is_parsed(parsed):
    parsed.two.script = outputs(CALLS, "eos")
    answer = await parsed.chat(
        model="p", tools=TOOLS, stream=True, stream_options={"include_usage": True}
    )
    told, found = deltas(answer.text), events(answer.text)
    calls = merged_calls(told)

    assert told[0] == {"role": "assistant", "reasoning_content": "h"}
    assert "".join(delta.get("reasoning_content", "") for delta in told) == "hm"
    assert "".join(delta.get("content", "") for delta in told) == "I look."
    assert without_ids(calls) == [
        {"index": 0, "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}},
        {"index": 1, "type": "function", "function": {"name": "see", "arguments": "{}"}},
    ]
    assert found[-3]["choices"][0]["finish_reason"] == "tool_calls"
    assert found[-2]["usage"]["completion_tokens_details"]["reasoning_tokens"] == 13
    assert found[-1] == "[DONE]"


async def test_answer_with_only_tool_calls_has_no_content(parsed):
    parsed.two.script = outputs(ONLY_CALL, "eos")
    whole = (await parsed.chat(model="p", tools=TOOLS)).json()["choices"][0]["message"]
    told = deltas((await parsed.chat(model="p", tools=TOOLS, stream=True)).text)

    assert whole["content"] is None
    assert sorted(told[0]) == ["role", "tool_calls"]
    assert all(sorted(delta) == ["tool_calls"] for delta in told[1:-1])
    assert told[-1] == {}


async def test_arguments_are_streamed_while_the_call_goes_on(parsed):
    parsed.two.script = outputs(ONLY_CALL[:50], None)  # a model that does not end its call
    body = {"model": "p", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    told = ""
    async with parsed.client.stream(
        "POST", "/v1/chat/completions", json={**body, "stream": True}
    ) as answer:
        async for line in answer.aiter_lines():
            told += line + "\n"
            if told.count('"arguments"') == 5:
                break

    assert [call["function"] for call in merged_calls(deltas(told))] == [
        {"name": "look", "arguments": '{"at"'}
    ]


async def test_streamed_call_that_is_cut_off_has_begun(parsed):
    parsed.two.script = outputs(ONLY_CALL[:50], "length")
    answer = await parsed.chat(model="p", tools=TOOLS, stream=True)

    assert [call["function"]["arguments"] for call in merged_calls(deltas(answer.text))] == [
        '{"at": "x'
    ]
    assert '"finish_reason":"length"' in answer.text
    assert "tool_call>" not in answer.text


async def test_tool_call_is_content_if_no_tools_are_allowed(parsed):
    parsed.two.script = outputs("<think>hm</think>" + ONLY_CALL, "eos")

    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        body = (await parsed.chat(model="p", **fields)).json()
        assert body["choices"][0]["message"]["content"] == ONLY_CALL
        assert body["choices"][0]["message"]["reasoning_content"] == "hm"
        assert body["choices"][0]["finish_reason"] == "stop"


async def test_truncated_tool_call_is_content(parsed):
    parsed.two.script = outputs(ONLY_CALL[:30], "length")
    choice = (await parsed.chat(model="p", tools=TOOLS)).json()["choices"][0]

    assert choice["message"]["content"] == ONLY_CALL[:30]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"] == []


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_ends_after_one_call_without_parallel_calls(parsed, stream):
    parsed.two.script = outputs(CALLS, None)
    answer = await parsed.chat(model="p", tools=TOOLS, parallel_tool_calls=False, stream=stream)
    await parsed.until(lambda: parsed.two.num_cancelled == 1)

    assert '"look"' in answer.text
    assert '"see"' not in answer.text
    assert '"finish_reason":"tool_calls"' in answer.text


async def test_tools_for_a_model_without_a_known_way_to_call_are_refused(rig):
    answer = await rig.chat(tools=TOOLS)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"
    assert "--dyn-tool-call-parser" in answer.json()["error"]["message"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
async def test_forced_tool_call_is_refused_if_the_engine_cannot_enforce_one(parsed, choice):
    answer = await parsed.chat(model="p", tools=TOOLS, tool_choice=choice)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tool_choice"


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("text", [CALLS, "plain <tool", "<think>a</think> b c", "  x "])
async def test_streamed_and_whole_are_the_same_however_tokens_come(parsed, text, step):
    ids = text.encode()
    cuts = [tuple(ids[at : at + step]) for at in range(0, len(ids), step)]
    ended = generate.Output((EOS,), generate.FinishReason.EOS)
    parsed.two.script = [*(generate.Output(cut) for cut in cuts), ended]
    whole = (await parsed.chat(model="p", tools=TOOLS)).json()["choices"][0]["message"]
    told = deltas((await parsed.chat(model="p", tools=TOOLS, stream=True)).text)

    for key in ("content", "reasoning_content"):
        assert "".join(delta.get(key, "") for delta in told) == (whole.get(key) or "")
    assert [call["function"] for call in merged_calls(told)] == [
        call["function"] for call in whole["tool_calls"] or ()
    ]


async def test_after_reasoning_a_stream_without_tools_is_as_quick_as_any(parsed, monkeypatch):
    slow, deliver = [], streaming.StreamDelivery._deliver_rare

    def counted(self, choice, output):
        slow.append(output.token_ids)
        deliver(self, choice, output)

    monkeypatch.setattr(streaming.StreamDelivery, "_deliver_rare", counted)
    parsed.two.script = outputs("<think>a</think>bcd", "length")
    answer = await parsed.chat(model="p", stream=True)

    assert deltas(answer.text) == [
        {"role": "assistant", "reasoning_content": "a"},
        {"content": "b"}, {"content": "c"}, {"content": "d"}, {},
    ]  # fmt: skip
    assert len(slow) == len("<think>a</think>b") + 1  # and the last


async def test_log_probabilities_are_reported_for_every_token(parsed):
    parsed.two.script = [
        generate.Output((one,), logprobs=(generate.TokenLogprobs(-1.0),))
        for one in b"<think>a</think>b"
    ]
    parsed.two.script.append(generate.Output((EOS,), generate.FinishReason.EOS))
    whole = (await parsed.chat(model="p", logprobs=True)).json()["choices"][0]
    streamed = events((await parsed.chat(model="p", logprobs=True, stream=True)).text)
    told = [
        token["token"]
        for event in streamed[:-1]
        for token in (event["choices"][0]["logprobs"] or {"content": ()})["content"]
    ]

    assert "".join(one["token"] for one in whole["logprobs"]["content"]) == "<think>a</think>b"
    assert "".join(told) == "<think>a</think>b"


async def test_choices_are_parsed_each_by_itself(parsed):
    parsed.two.script = [
        *outputs("<think>a</think>b", "eos"),
        *outputs(ONLY_CALL, "eos", index=1),
    ]
    body = (await parsed.chat(model="p", tools=TOOLS, n=2)).json()

    assert [one["finish_reason"] for one in body["choices"]] == ["stop", "tool_calls"]
    assert body["choices"][0]["message"]["reasoning_content"] == "a"


async def test_openai_client_reads_parsed_answers(parsed):
    parsed.two.script = outputs(CALLS, "eos")
    ask = {"model": "p", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    async with openai.AsyncOpenAI(
        base_url=parsed.frontend.url + "/v1", api_key="none", max_retries=0
    ) as client:
        whole = await client.chat.completions.create(**ask)
        async with client.chat.completions.stream(**ask) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()

    for answer in (whole, final):
        calls = answer.choices[0].message.tool_calls
        assert [call.function.name for call in calls] == ["look", "see"]
        assert json.loads(calls[0].function.arguments) == {"at": "x"}
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.choices[0].message.content == "I look."
    assert whole.choices[0].message.reasoning_content == "hm"
    assert whole.usage.completion_tokens_details.reasoning_tokens == 13
    assert "tool_calls.function.arguments.done" in kinds


async def test_conversation_continues_with_a_tool_result(parsed):
    parsed.two.script = outputs(ONLY_CALL, "eos")
    called = (await parsed.chat(model="p", tools=TOOLS)).json()["choices"][0]["message"]
    parsed.two.script = outputs("done", "eos")
    result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "5"}
    ask = [{"role": "user", "content": "hi"}, called, result]
    answer = await parsed.chat(model="p", tools=TOOLS, messages=ask)

    assert answer.json()["choices"][0]["message"]["content"] == "done"
    assert parsed.two.prompts[-1].endswith("tool: 5\n")


def test_tool_call_ids_are_different_and_have_nine_letters_and_digits():
    call_ids = {choices.new_tool_call_id() for _ in range(100)}

    assert len(call_ids) == 100
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in call_ids)
