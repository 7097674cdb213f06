"""Anthropic's answers with thoughts and tool calls, whole and streamed."""

import json
import types

import anthropic
import pytest
from frontend_rig import SAID, add_parsed_worker, outputs

from dynamo.frontend.apis.messages import api
from dynamo.frontend.delivery import sse
from dynamo.preprocess.parsers import parser
from dynamo.protocols import model_card
from dynamo.testing import clock

SAY = [{"role": "user", "content": "hi"}]
TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("look", "see")]
THINKING = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture
async def client(rig):
    await add_parsed_worker(rig)
    async with anthropic.AsyncAnthropic(
        base_url=rig.frontend.url, api_key="none", max_retries=0
    ) as made:
        yield made


async def ask(client, **fields):
    return await client.messages.create(
        **{"model": "p", "max_tokens": 2000, "messages": SAY, "tools": TOOLS, **fields}
    )


async def test_message_has_a_block_of_each_kind(client, rig):
    message = await ask(client, thinking=THINKING)
    thought, said, *calls = message.content

    assert (thought.type, thought.thinking, thought.signature) == ("thinking", "hm, so", "")
    assert (said.type, said.text) == ("text", "I look.")
    assert [(call.type, call.name, call.input) for call in calls] == [
        ("tool_use", "look", {"at": "x"}),
        ("tool_use", "see", {}),
    ]
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens == len(SAID) + 1


async def test_streamed_message_equals_the_whole_message(client):
    whole = await ask(client, thinking=THINKING)
    fields = {"model": "p", "max_tokens": 2000, "messages": SAY, "tools": TOOLS}
    async with client.messages.stream(**fields, thinking=THINKING) as stream:
        streamed = await stream.get_final_message()

    def without_ids(message):
        return [block.model_dump(exclude={"id"}) for block in message.content]

    def comparable(blocks):
        return [{key: value for key, value in block.items() if value is not None} for block in blocks]  # fmt: skip

    assert comparable(without_ids(streamed)) == comparable(without_ids(whole))
    assert streamed.stop_reason == "tool_use"
    assert streamed.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.parametrize("thinking", [THINKING, {"type": "disabled"}])
async def test_stop_sequence_within_a_thought_does_not_end_the_message(client, thinking):
    message = await ask(client, thinking=thinking, stop_sequences=["so", "ok."])

    assert [block.text for block in message.content if block.type == "text"] == ["I lo"]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "ok.")


async def test_answer_that_continues_a_text_is_no_thought_of_a_model_that_always_thinks(rig):
    facts = model_card.ModelRuntimeConfig(reasoning_parser="deepseek_r1")
    worker = await rig.worker("r", runtime_config=facts)
    worker.script = outputs(", a city", "eos")
    async with anthropic.AsyncAnthropic(base_url=rig.frontend.url, api_key="none") as made:
        prefill = {"role": "assistant", "content": "It is Paris"}
        message = await ask(made, model="r", max_tokens=9, messages=[*SAY, prefill], tools=[])

    assert [(block.type, block.text) for block in message.content] == [("text", ", a city")]


async def test_content_blocks_are_streamed_sequentially(client, rig):
    answer = await rig.client.post(
        "/v1/messages",
        json={"model": "p", "max_tokens": 2000, "messages": SAY, "tools": TOOLS, "thinking": THINKING, "stream": True},
    )  # fmt: skip
    found = [
        json.loads(part.partition("\ndata: ")[2]) for part in answer.text.split("\n\n") if part
    ]
    told = [
        (event["index"], event["type"].removeprefix("content_block_"), event.get("delta", {}).get("type"))
        for event in found if "index" in event
    ]  # fmt: skip

    assert list(dict.fromkeys(told)) == [
        (0, "start", None), (0, "delta", "thinking_delta"), (0, "delta", "signature_delta"), (0, "stop", None),
        (1, "start", None), (1, "delta", "text_delta"), (1, "stop", None),
        (2, "start", None), (2, "delta", "input_json_delta"), (2, "stop", None),
        (3, "start", None), (3, "delta", "input_json_delta"), (3, "stop", None),
    ]  # fmt: skip
    parts = [
        event["delta"]["partial_json"]
        for event in found
        if event.get("index") == 2 and "delta" in event
    ]
    assert len(parts) > 1
    assert "".join(parts) == '{"at": "x"}'


async def test_unrequested_thinking_is_counted_but_not_shown(client, rig):
    message = await ask(client)
    async with client.messages.stream(
        model="p", max_tokens=2000, messages=SAY, tools=TOOLS
    ) as stream:
        streamed = await stream.get_final_message()

    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
    assert [block.type for block in streamed.content] == ["text", "tool_use", "tool_use"]
    assert message.usage.output_tokens == len(SAID) + 1


async def test_stream_of_thoughts_that_are_not_shown_is_never_silent_for_long():
    time = clock.VirtualClock()
    named = types.SimpleNamespace(request_id="r", model="p", context_length=99, clock=time)
    formatter = api.MessageFormatter(types.SimpleNamespace(shows_thinking=False), named)
    formatter.begin(sse.Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2))
    sent = []
    for _ in range(25):
        sent.append(formatter.piece(parser.Reasoning("hm")))
        await time.advance(1.0)

    assert b"".join(sent) == b'event: ping\ndata: {"type":"ping"}\n\n' * 2


async def test_disabled_parallel_tool_use_limits_a_message_to_one_call(client, rig):
    message = await ask(client, tool_choice={"type": "auto", "disable_parallel_tool_use": True})

    assert [block.type for block in message.content] == ["text", "tool_use"]
    assert message.stop_reason == "tool_use"


async def test_messages_continue_with_tool_results(client, rig):
    message = await ask(client, thinking=THINKING)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "sun"}
        for block in message.content
        if block.type == "tool_use"
    ]
    turns = [
        *SAY,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": results},
    ]
    await ask(client, messages=turns)

    assert rig.two.prompts[-1] == "user: hi\nassistant: I look.\ntool: sun\ntool: sun\n"


async def test_tools_of_a_model_that_cannot_call_are_refused(client):
    with pytest.raises(anthropic.BadRequestError, match="tool calls"):
        await ask(client, model="m", max_tokens=5)
