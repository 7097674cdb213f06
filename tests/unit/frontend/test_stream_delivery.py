"""Streamed answers, byte by byte."""

import json

import pytest
from frontend_rig import events, outputs

from dynamo.base import errors
from dynamo.protocols import blocks, generate, model_card


def contents(text):
    """What each chunk of a chat stream says."""
    return [
        choice["delta"].get("content")
        for event in events(text)
        if event != "[DONE]"
        for choice in event["choices"]
    ]


def texts(text, index=0):
    """What the chunks of a completion stream say for one choice."""
    return [
        choice["text"]
        for event in events(text)
        if event != "[DONE]"
        for choice in event["choices"]
        if choice["index"] == index
    ]


async def test_chat_stream_is_exact_to_the_byte(rig):
    rig.one.script = [
        generate.Output((ord("a"),)),
        generate.Output((ord('"'),)),
        generate.Output((ord("\n"),), generate.FinishReason.LENGTH),
    ]
    answer = await rig.chat(stream=True)
    head = json.loads(answer.text.partition("\n\n")[0].removeprefix("data: "))
    start = (
        f'data: {{"id":"{head["id"]}","object":"chat.completion.chunk","created":{head["created"]},'
        f'"model":"m","system_fingerprint":"{head["system_fingerprint"]}","choices":[{{"index":0,"delta":'
    )

    assert head["id"].startswith("chatcmpl-")
    assert answer.text == (
        start + '{"role":"assistant","content":"a"},"logprobs":null,"finish_reason":null}]}\n\n'
        + start + '{"content":"\\""},"logprobs":null,"finish_reason":null}]}\n\n'
        + start + '{"content":"\\n"},"logprobs":null,"finish_reason":null}]}\n\n'
        + start + '{},"logprobs":null,"finish_reason":"length"}]}\n\n'
        + "data: [DONE]\n\n"
    )  # fmt: skip


async def test_completion_stream_is_exact_to_the_byte(rig):
    rig.one.script = outputs("ab", "eos")
    answer = await rig.complete(stream=True)
    head = json.loads(answer.text.partition("\n\n")[0].removeprefix("data: "))
    start = (
        f'data: {{"id":"{head["id"]}","object":"text_completion","created":{head["created"]},'
        f'"model":"m","system_fingerprint":"{head["system_fingerprint"]}","choices":[{{"index":0,"text":'
    )

    assert head["id"].startswith("cmpl-")
    assert answer.text == (
        start + '"a","logprobs":null,"finish_reason":null}]}\n\n'
        + start + '"b","logprobs":null,"finish_reason":null}]}\n\n'
        + start + '"","logprobs":null,"finish_reason":"stop"}]}\n\n'
        + "data: [DONE]\n\n"
    )  # fmt: skip


async def test_stream_has_event_stream_headers(rig):
    answer = await rig.chat(stream=True)

    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["transfer-encoding"] == "chunked"


async def test_requested_usage_comes_last_and_is_null_in_other_chunks(rig):
    rig.one.script = [
        generate.Output((104,), cached_tokens=3),
        generate.Output((256,), generate.FinishReason.EOS),
    ]
    found = events((await rig.chat(stream=True, stream_options={"include_usage": True})).text)

    assert found[-1] == "[DONE]"
    assert found[-2]["choices"] == []
    assert found[-2]["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 2,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert [event["usage"] for event in found[:-2]] == [None, None]


async def test_without_asking_no_chunk_speaks_of_usage(rig):
    found = events((await rig.chat(stream=True)).text)

    assert not any("usage" in event for event in found[:-1])


async def test_character_of_several_tokens_is_one_chunk(rig):
    await rig.complete("é")
    byte_ids = blocks.unpack(rig.one.requests[0].token_ids)
    rig.one.script = [
        generate.Output((byte_ids[0],)),
        generate.Output((byte_ids[1],)),
        generate.Output((33,), generate.FinishReason.LENGTH),
    ]
    answer = await rig.chat(stream=True)

    assert len(byte_ids) == 2
    assert contents(answer.text) == ["é", "!", None]


async def test_stream_without_text_has_a_role_and_finish_reason(rig):
    rig.one.script = [generate.Output((256,), generate.FinishReason.EOS)]
    found = events((await rig.chat(stream=True)).text)

    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert found[1]["choices"][0]["finish_reason"] == "stop"
    assert found[2] == "[DONE]"


@pytest.mark.parametrize("step", [1, 2, 3, 7])
async def test_stop_string_across_outputs_ends_the_stream(rig, step):
    text = b"one STOP two"
    rig.one.script = [
        generate.Output(tuple(text[at : at + step])) for at in range(0, len(text), step)
    ]
    answer = await rig.chat(stream=True, stop=["STOP"])
    await rig.until(lambda: rig.one.num_cancelled == 1)
    found = events(answer.text)

    assert "".join(filter(None, contents(answer.text))) == "one "
    assert found[-2]["choices"][0]["finish_reason"] == "stop"
    assert found[-2]["choices"][0]["stop_reason"] == "STOP"
    assert found[-1] == "[DONE]"


async def test_prefix_of_a_stop_string_is_sent_at_the_end(rig):
    rig.one.script = outputs("abST", "length")
    answer = await rig.chat(stream=True, stop=["STOP"])

    assert "".join(filter(None, contents(answer.text))) == "abST"


async def test_choices_of_a_prompt_have_distinct_indices(rig):
    rig.one.script = [
        one for pair in zip(outputs("abc"), outputs("xyz", index=1), strict=True) for one in pair
    ]
    answer = await rig.complete(stream=True, n=2)

    assert texts(answer.text, 0) == ["a", "b", "c", ""]
    assert texts(answer.text, 1) == ["x", "y", "z", ""]
    assert answer.text.count("[DONE]") == 1


async def test_each_choice_of_a_chat_begins_with_its_role(rig):
    rig.one.script = [*outputs("ab"), *outputs("xy", index=1)]
    found = events((await rig.chat(stream=True, n=2)).text)[:-1]
    roles = [
        choice["index"]
        for event in found
        for choice in event["choices"]
        if "role" in choice["delta"]
    ]

    assert roles == [0, 1]


async def test_stop_string_of_a_choice_does_not_end_other_choices(rig):
    rig.one.script = [
        generate.Output(tuple(b"aXbbb")),
        generate.Output(tuple(b"cc"), index=1),
        generate.Output(tuple(b"dd"), generate.FinishReason.LENGTH, index=1),
        generate.Output(tuple(b"more")),
    ]
    answer = await rig.complete(stream=True, n=2, stop="X")
    await rig.until(lambda: rig.one.num_cancelled == 1)

    assert texts(answer.text, 0) == ["a", ""]
    assert texts(answer.text, 1) == ["cc", "dd", ""]


async def test_several_prompts_are_merged_into_one_stream(rig):
    def script(call, request):
        letter = {"p": "P", "q": "Q"}[bytes(request.token_ids[:1]).decode()]
        for index in range(2):
            for output in outputs(letter + str(index), index=index):
                call.send(output)
        call.finish()

    rig.one.script = script
    answer = await rig.complete(prompt=["p", "q"], n=2, stream=True)

    assert ["".join(texts(answer.text, index)) for index in range(4)] == ["P0", "P1", "Q0", "Q1"]
    assert sorted(request.id[-2:] for request in rig.one.requests) == ["-0", "-1"]
    assert answer.text.count("[DONE]") == 1


async def test_echo_stands_before_the_first_text(rig):
    rig.one.script = outputs("ab")
    answer = await rig.complete(prompt="say ", stream=True, echo=True)

    assert texts(answer.text) == ["say a", "b", ""]


async def test_chat_logprobs_come_with_their_text(rig):
    top = (generate.TopLogprob(104, -0.5), generate.TopLogprob(105, float("-inf")))
    rig.one.script = [
        generate.Output((104,), logprobs=(generate.TokenLogprobs(-0.5, top),)),
        generate.Output((256,), generate.FinishReason.EOS, logprobs=(generate.TokenLogprobs(-1),)),
    ]
    found = events((await rig.chat(stream=True, logprobs=True, top_logprobs=2)).text)

    assert found[0]["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "h",
                "logprob": -0.5,
                "bytes": [104],
                "top_logprobs": [
                    {"token": "h", "logprob": -0.5, "bytes": [104]},
                    {"token": "i", "logprob": -9999.0, "bytes": [105]},
                ],
            }
        ],
        "refusal": None,
    }
    assert found[1]["choices"][0]["logprobs"] is None
    assert rig.one.requests[0].output_options.logprobs == 2


async def test_error_before_the_first_token_has_an_http_status(rig):
    rig.one.script = lambda call, _: call.fail(errors.Overloaded("all slots are taken"))
    answer = await rig.chat(stream=True)

    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "all slots are taken"
    assert answer.headers["retry-after"] == "1"


async def test_error_after_the_first_token_is_the_last_event(rig):
    def script(call, _):
        call.send(generate.Output((104,)))
        call.fail(errors.EngineFailed("out of memory"))

    rig.one.script = script
    answer = await rig.chat(stream=True)
    found = events(answer.text)

    assert answer.status_code == 200
    assert found[-1] == {
        "error": {
            "message": "out of memory",
            "type": "server_error",
            "param": None,
            "code": "engine_failed",
        }
    }


async def test_worker_stream_without_a_finish_reason_is_an_error(rig):
    def script(call, _):
        call.send(generate.Output((104,)))
        call.finish()

    rig.one.script = script
    found = events((await rig.chat(stream=True)).text)

    assert found[-1]["error"]["code"] == "stream_broken"


async def test_failed_prompt_cancels_the_other_prompts(rig):
    def script(call, request):
        if request.id.endswith("-1"):
            call.fail(errors.EngineFailed("no"))

    rig.one.script = script
    answer = await rig.complete(prompt=["a", "b"])
    await rig.until(lambda: rig.one.num_cancelled == 1)

    assert answer.status_code == 500


async def test_disconnected_client_of_a_stream_cancels_the_worker(rig):
    rig.one.script = [generate.Output((104,))]
    async with rig.client.stream(
        "POST",
        "/v1/chat/completions",
        json={"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True},
    ) as answer:
        await anext(answer.aiter_bytes())
    await rig.until(lambda: rig.one.num_cancelled == 1)
    counted = await rig.metrics()

    assert counted["dynamo_frontend_disconnected_clients"] == 1
    assert counted['dynamo_frontend_inflight_requests{model="m"}'] == 0


LINE_ENDS = "\u2028\u2029\x85"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "hi\u2028"}],
                "nvext": {"annotations": ["formatted_prompt"]},
            },
        ),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 150}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 150, "stop": ["."]}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 150, "logprobs": 1}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 150}),
        ("/v2/models/p/generate_stream", {"text_input": "hi", "parameters": {"max_tokens": 150}}),
    ],
)
async def test_no_character_of_an_answer_ends_a_line_for_clients_that_use_splitlines(
    rig, path, body
):
    facts = model_card.ModelRuntimeConfig(tool_call_parser="hermes", reasoning_parser="basic")
    parsed = await rig.worker("p", runtime_config=facts)
    text = (
        f"<think>a{LINE_ENDS}</think>b{LINE_ENDS}"
        f'<tool_call>{{"name": "look", "arguments": {{"at": "c{LINE_ENDS}"}}}}</tool_call>'
    )
    await rig.complete(text)
    byte_ids = blocks.unpack(rig.one.requests[0].token_ids)
    parsed.script = [*(generate.Output((one,)) for one in byte_ids), *outputs("", "eos")]
    named = {} if path.startswith("/v2") else {"model": "p", "stream": True}
    answer = await rig.client.post(path, json={**body, **named})
    data = [
        json.loads(line.removeprefix("data: "))
        for line in answer.text.splitlines()
        if line.startswith("data: ") and line != "data: [DONE]"
    ]

    assert answer.status_code == 200
    assert set(LINE_ENDS).isdisjoint(answer.text)
    assert set(LINE_ENDS) <= set(json.dumps(data, ensure_ascii=False))


async def test_annotations_come_first_each_as_an_event_with_a_comment(rig):
    asked = ["request_id", "formatted_prompt", "token_ids"]
    answer = await rig.chat(stream=True, nvext={"annotations": asked})
    request = rig.one.requests[0]

    assert answer.text.partition("data: ")[0] == (
        f'event: request_id\n: "{request.id}"\n\n'
        'event: formatted_prompt\n: "user: hi\\n"\n\n'
        'event: token_ids\n: "[117,115,101,114,58,32,104,105,10]"\n\n'
    )
