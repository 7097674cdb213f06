"""Anthropic's messages API: bodies and events to the byte, errors, and the official client."""

import json

import anthropic
import pytest
from frontend_rig import outputs

from dynamo.base import errors
from dynamo.protocols import generate

SAY = [{"role": "user", "content": "hi"}]
LEAST = {"model": "m", "max_tokens": 50, "messages": SAY}
PATH = "/v1/messages"


@pytest.fixture
async def client(rig):
    async with anthropic.AsyncAnthropic(
        base_url=rig.frontend.url, api_key="none", max_retries=0
    ) as made:
        yield made


async def ask(rig, path=PATH, **fields):
    return await rig.client.post(path, json=LEAST | fields)


def typed(text):
    """Each event's name and data."""
    parts = [part.partition("\n") for part in text.split("\n\n") if part]
    return [
        (name.removeprefix("event: "), json.loads(data.removeprefix("data: ")))
        for name, _, data in parts
    ]


OF_WHOLE_MESSAGES = {"cache_creation": None, "service_tier": "standard", "inference_geo": None}


async def test_whole_message_has_all_fields(rig):
    rig.one.script = outputs("hello", "eos")
    answer = await ask(rig, system="be kind")
    body = answer.json()

    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "hello", "citations": []}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "diagnostics": None,
        "usage": {
            "input_tokens": 25,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 6,
            "output_tokens_details": {"thinking_tokens": 0},
            "server_tool_use": None,
            **OF_WHOLE_MESSAGES,
        },
    }
    assert rig.one.prompts == ["system: be kind\nuser: hi\n"]
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_message_stream_is_exact_to_the_byte(rig):
    rig.one.script = [
        generate.Output((ord("a"),), cached_tokens=4),
        generate.Output((ord('"'),)),
        generate.Output((ord("b"),), generate.FinishReason.LENGTH),
    ]
    answer = await ask(rig, stream=True)
    message_id = typed(answer.text)[0][1]["message"]["id"]
    start = (
        'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
        '"delta":{"type":"text_delta","text":'
    )

    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.text == (
        'event: message_start\ndata: {"type":"message_start","message":{"id":"' + message_id + '",'
        '"type":"message","role":"assistant","model":"m","content":[],"stop_reason":null,'
        '"stop_sequence":null,"stop_details":null,"container":null,"diagnostics":null,'
        '"usage":{"input_tokens":5,"cache_creation_input_tokens":0,'
        '"cache_read_input_tokens":4,"output_tokens":0,"output_tokens_details":{"thinking_tokens":0},'
        '"server_tool_use":null,"cache_creation":null,"service_tier":"standard",'
        '"inference_geo":null}}}\n\n'
        'event: content_block_start\ndata: {"type":"content_block_start","index":0,'
        '"content_block":{"type":"text","text":"","citations":[]}}\n\n'
        + start + '"a"}}\n\n' + start + '"\\""}}\n\n' + start + '"b"}}\n\n'
        'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
        'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"max_tokens",'
        '"stop_sequence":null,"stop_details":null,"container":null},'
        '"usage":{"input_tokens":5,"cache_creation_input_tokens":0,'
        '"cache_read_input_tokens":4,"output_tokens":3,"output_tokens_details":{"thinking_tokens":0},'
        '"server_tool_use":null}}\n\n'
        'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    )  # fmt: skip


async def test_stream_without_text_has_no_content_block(rig):
    rig.one.script = [generate.Output((256,), generate.FinishReason.EOS)]
    found = typed((await ask(rig, stream=True)).text)

    assert [name for name, _ in found] == ["message_start", "message_delta", "message_stop"]
    assert found[1][1]["delta"]["stop_reason"] == "end_turn"
    assert (await ask(rig)).json()["content"] == []


@pytest.mark.parametrize("step", [1, 3, 20])
async def test_stop_sequence_ends_the_message(rig, step):
    text = b"one STOP two"
    rig.one.script = [
        generate.Output(tuple(text[at : at + step])) for at in range(0, len(text), step)
    ]
    whole = (await ask(rig, stop_sequences=["END", "STOP"])).json()
    found = typed((await ask(rig, stop_sequences=["END", "STOP"], stream=True)).text)
    await rig.until(lambda: rig.one.num_cancelled == 2)
    said = [data["delta"]["text"] for name, data in found if name == "content_block_delta"]

    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "STOP")
    assert whole["content"][0]["text"] == "".join(said) == "one "
    assert found[-2][1]["delta"] == {
        "stop_reason": "stop_sequence",
        "stop_sequence": "STOP",
        "stop_details": None,
        "container": None,
    }


async def test_all_counts_agree(rig):
    body = {key: LEAST[key] for key in ("model", "messages")} | {"system": "x"}
    counted = (await rig.client.post(PATH + "/count_tokens", json=body)).json()
    whole = (await ask(rig, system="x")).json()["usage"]
    found = typed((await ask(rig, system="x", stream=True)).text)

    assert counted == {"input_tokens": 19}
    assert whole["input_tokens"] == 19
    assert found[0][1]["message"]["usage"]["input_tokens"] == 19
    assert found[-2][1]["usage"] | OF_WHOLE_MESSAGES == whole


async def test_prompt_longer_than_the_context_can_be_counted(rig):
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 300}]}

    assert (await rig.client.post(PATH + "/count_tokens", json=body)).json()["input_tokens"] == 307


@pytest.mark.parametrize("path", [PATH, PATH + "/count_tokens"])
@pytest.mark.parametrize(
    ("fields", "status", "kind", "words"),
    [
        ({"messages": "x"}, 400, "invalid_request_error", "messages: expected a list"),
        ({"model": "q"}, 404, "not_found_error", "'q' does not exist"),
    ],
)
async def test_invalid_request_is_answered_in_anthropics_form(
    rig, path, fields, status, kind, words
):
    body = {"model": "m", "messages": SAY, **fields} | ({"max_tokens": 1} if path == PATH else {})
    answer = await rig.client.post(path, json=body)

    assert answer.status_code == status
    assert answer.json().keys() == {"type", "error"}
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == kind
    assert words in answer.json()["error"]["message"]


async def test_refusal_by_the_http_server_is_an_anthropic_error(bare):
    await bare.start(http_body_limit_mb=1)
    wrong_method = await bare.client.get(PATH)
    too_large = await bare.client.post(PATH, content=b"x" * (2**20 + 1))
    headers = {"content-type": "text/csv"}
    wrong_type = await bare.client.post(PATH, content=b"model,m", headers=headers)

    assert wrong_method.status_code == 405
    assert wrong_method.json()["error"]["type"] == "invalid_request_error"
    assert too_large.status_code == 413
    assert too_large.json()["error"]["type"] == "request_too_large"
    assert wrong_type.status_code == 415
    assert wrong_type.json()["type"] == "error"


async def test_prompt_beyond_the_context_is_a_bad_request(rig):
    answer = await ask(rig, messages=[{"role": "user", "content": "x" * 200}])

    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith("prompt is too long: ")  # at which agents compact a conversation
    assert "maximum context length is 200 tokens" in message


async def test_answer_ends_where_the_context_is_full(rig):
    rig.one.script = outputs("x" * 191, "length")
    whole = (await ask(rig, max_tokens=500)).json()
    found = typed((await ask(rig, max_tokens=500, stream=True)).text)

    assert rig.one.requests[0].stop_conditions.max_tokens == 191
    assert whole["stop_reason"] == "model_context_window_exceeded"
    assert found[-2][1]["delta"]["stop_reason"] == "model_context_window_exceeded"


async def test_thread_is_refused_so_that_the_client_sends_all_messages(rig):
    error = (await ask(rig, thread={"type": "create"})).json()["error"]

    assert error["type"] == "invalid_request_error"
    assert error["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }


async def test_overloaded_worker_is_a_529_with_retry_after(rig):
    rig.one.script = lambda call, _: call.fail(errors.Overloaded("all slots are taken"))
    answer = await ask(rig, stream=True)

    assert answer.status_code == 529
    assert answer.json()["error"]["type"] == "overloaded_error"
    assert answer.headers["retry-after"] == "1"


async def test_error_in_a_stream_is_the_last_event(rig):
    def script(call, _):
        call.send(generate.Output((104,)))
        call.fail(errors.EngineFailed("out of memory"))

    rig.one.script = script
    found = typed((await ask(rig, stream=True)).text)

    assert [name for name, _ in found] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "error",
    ]
    assert found[-1][1]["error"] == {"type": "api_error", "message": "out of memory"}


async def test_requests_are_counted_by_endpoint(rig):
    await ask(rig)
    await ask(rig, stream=True)
    await ask(rig, max_tokens=0)
    counted = await rig.metrics()

    def total(model, kind, status, error=""):
        return counted[
            f'dynamo_frontend_requests_total{{endpoint="messages",error_type="{error}",'
            f'model="{model}",request_type="{kind}",status="{status}"}}'
        ]

    assert total("m", "unary", "success") == 1
    assert total("m", "stream", "success") == 1
    assert total("unknown", "unary", "error", "validation") == 1


async def test_anthropic_client_gets_a_message(client):
    message = await client.messages.create(
        model="m", max_tokens=9, system="x", messages=SAY, stop_sequences=["zz"],
        metadata={"user_id": "u"}, thinking={"type": "disabled"},
        extra_body={"temperature": 0.5, "top_k": 5, "top_p": 0.9},
    )  # fmt: skip

    assert message.content[0].text == "hello"
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 5
    assert message._request_id


async def test_anthropic_client_streams_a_message(client):
    async with client.messages.stream(model="m", max_tokens=9, messages=SAY) as stream:
        said = [text async for text in stream.text_stream]
        message = await stream.get_final_message()

    assert "".join(said) == message.content[0].text == "hello"
    assert message.stop_reason == "max_tokens"
    assert message.usage.input_tokens == 9
    assert message.usage.output_tokens == 5


async def test_anthropic_client_can_send_a_received_message_back(client, rig):
    first = await client.messages.create(model="m", max_tokens=9, messages=SAY)
    turns = [*SAY, {"role": "assistant", "content": first.content}, *SAY]
    await client.messages.create(model="m", max_tokens=9, messages=turns)

    assert rig.one.prompts[1] == "user: hi\nassistant: hello\nuser: hi\n"


async def test_anthropic_client_counts_tokens(client):
    counted = await client.messages.count_tokens(model="m", messages=SAY)

    assert counted.input_tokens == 9


async def test_anthropic_client_raises_the_matching_error_class(client, rig):
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(model="q", max_tokens=9, messages=SAY)
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        await client.messages.create(
            model="m", max_tokens=9, messages=SAY, tool_choice={"type": "any"}
        )
    rig.one.script = lambda call, _: call.fail(errors.Overloaded("no"))
    with pytest.raises(anthropic.InternalServerError) as caught:
        await client.messages.create(model="m", max_tokens=9, messages=SAY)
    assert caught.value.status_code == 529


async def test_anthropic_client_raises_an_error_within_a_stream(client, rig):
    def script(call, _):
        call.send(generate.Output((104,)))
        call.fail(errors.EngineFailed("out of memory"))

    rig.one.script = script
    stream = await client.messages.create(model="m", max_tokens=9, messages=SAY, stream=True)

    with pytest.raises(anthropic.APIError, match="out of memory"):
        async for _ in stream:
            pass


async def test_leaving_a_stream_stops_the_worker(client, rig):
    rig.one.script = outputs("endless", None)
    stream = await client.messages.create(model="m", max_tokens=9, messages=SAY, stream=True)
    await anext(aiter(stream))
    await stream.close()
    await rig.until(lambda: rig.one.num_cancelled == 1)
