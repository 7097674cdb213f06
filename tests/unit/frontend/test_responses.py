"""OpenAI's Responses API: objects and events to the byte, what is kept, errors, and the official client."""

import json
import threading
import types

import openai
import pytest
from frontend_rig import outputs

from dynamo.base import errors
from dynamo.frontend.apis.responses import api, request
from dynamo.frontend.batches import runner
from dynamo.frontend.processes import response_store
from dynamo.protocols import generate
from dynamo.runtime.http import exchange

PATH = "/v1/responses"


async def ask(rig, path=PATH, **fields):
    return await rig.client.post(path, json={"model": "m", "input": "hi", **fields})


def typed(text):
    """Each event's data; its name is in it."""
    parts = [part.partition("\n") for part in text.split("\n\n") if part]
    found = [json.loads(data.removeprefix("data: ")) for _, _, data in parts]
    assert [name.removeprefix("event: ") for name, _, _ in parts] == [one["type"] for one in found]
    return found


async def test_whole_response_has_all_fields(rig):
    rig.one.script = outputs("hello", "eos")
    body = (await ask(rig, instructions="be kind", metadata={"a": "b"}, max_output_tokens=9)).json()
    number = body["id"].removeprefix("resp_")

    assert body.pop("completed_at") >= body.pop("created_at") > 1_700_000_000
    assert body == {
        "id": f"resp_{number}",
        "object": "response",
        "status": "completed",
        "output": [
            {
                "type": "message",
                "id": f"msg_{number}00",
                "role": "assistant",
                "status": "completed",
                "content": [
                    {"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}
                ],
            }
        ],
        "usage": {
            "input_tokens": 25,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 6,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 31,
        },
        "error": None,
        "incomplete_details": None,
        "model": "m",
        "background": False,
        "conversation": None,
        "instructions": "be kind",
        "max_output_tokens": 9,
        "max_tool_calls": None,
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt": None,
        "prompt_cache_key": None,
        "prompt_cache_retention": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "temperature": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "user": None,
    }
    assert rig.one.prompts == ["system: be kind\nuser: hi\n"]
    assert rig.one.requests[0].stop_conditions.max_tokens == 9


async def test_truncated_response_is_incomplete(rig):
    body = (await ask(rig)).json()

    assert body["status"] == body["output"][0]["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_stream_events_are_in_order(rig):
    rig.one.script = [
        generate.Output((ord("a"),)),
        generate.Output((ord('"'),)),
        generate.Output((256,), generate.FinishReason.EOS),
    ]
    answer = await ask(rig, stream=True)
    found = typed(answer.text)
    first, last = found[0]["response"], found[-1]["response"]
    place = {"item_id": last["output"][0]["id"], "output_index": 0, "content_index": 0}
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    said = part | {"text": 'a"'}
    item = {"type": "message", "id": place["item_id"], "role": "assistant"}
    opened = {**item, "status": "in_progress", "content": []}
    closed = {**item, "status": "completed", "content": [said]}
    delta = {"type": "response.output_text.delta", **place, "logprobs": []}

    assert answer.headers["content-type"] == "text/event-stream"
    assert [one.pop("sequence_number") for one in found] == list(range(10))
    assert found == [
        {"type": "response.created", "response": first},
        {"type": "response.in_progress", "response": first},
        {"type": "response.output_item.added", "output_index": 0, "item": opened},
        {"type": "response.content_part.added", **place, "part": part},
        {**delta, "delta": "a"},
        {**delta, "delta": '"'},
        {"type": "response.output_text.done", **place, "text": 'a"', "logprobs": []},
        {"type": "response.content_part.done", **place, "part": said},
        {"type": "response.output_item.done", "output_index": 0, "item": closed},
        {"type": "response.completed", "response": last},
    ]  # fmt: skip
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert first["completed_at"] is None
    later = ("status", "output", "usage", "completed_at")
    assert first | {key: last[key] for key in later} == last
    assert last["usage"]["output_tokens"] == 3


async def test_text_delta_event_is_exact_to_the_byte(rig):
    rig.one.script = outputs("ab", "eos")
    text = (await ask(rig, stream=True)).text
    item_id = typed(text)[-1]["response"]["output"][0]["id"]

    assert (
        "event: response.output_text.delta\n"
        f'data: {{"type":"response.output_text.delta","item_id":"{item_id}","output_index":0,'
        '"content_index":0,"delta":"b","logprobs":[],"sequence_number":5}\n\n'
    ) in text


async def test_truncated_stream_ends_with_response_incomplete(rig):
    last = typed((await ask(rig, stream=True)).text)[-1]

    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_failed_stream_ends_with_the_partial_response(rig):
    def script(call, _):
        call.send(generate.Output((104,)))
        call.fail(errors.EngineFailed("out of memory"))

    rig.one.script = script
    last = typed((await ask(rig, stream=True)).text)[-1]

    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "out of memory"}
    assert last["response"]["output"][0]["content"][0]["text"] == "h"


async def test_instructions_are_not_inherited_from_the_previous_response(rig):
    rig.one.script = outputs("hello", "eos")
    first = (await ask(rig, instructions="be kind")).json()
    second = (await ask(rig, input="and?", previous_response_id=first["id"])).json()
    streamed = await ask(rig, input="so?", previous_response_id=second["id"], stream=True)
    third = typed(streamed.text)[-1]["response"]
    await ask(rig, input="!", previous_response_id=third["id"], instructions="be short")

    assert second["previous_response_id"] == first["id"]
    assert rig.one.prompts[1] == "user: hi\nassistant: hello\nuser: and?\n"
    assert rig.one.prompts[3] == (
        "system: be short\nuser: hi\nassistant: hello\nuser: and?\nassistant: hello\n"
        "user: so?\nassistant: hello\nuser: !\n"
    )


async def test_items_of_stored_responses_can_be_named_in_the_place_of_themselves(rig):
    rig.one.script = outputs("hello", "eos")
    first = (await ask(rig)).json()
    (said,) = (await rig.client.get(f"{PATH}/{first['id']}/input_items")).json()["data"]
    named = [{"type": "item_reference", "id": item["id"]} for item in (said, *first["output"])]
    second = (await ask(rig, input=[*named, {"role": "user", "content": "and?"}])).json()
    listed = (await rig.client.get(f"{PATH}/{second['id']}/input_items?order=asc")).json()["data"]

    assert rig.one.prompts[1] == "user: hi\nassistant: hello\nuser: and?\n"
    assert listed[:2] == [said, *first["output"]]


async def test_reference_to_no_stored_item_is_refused_by_name(rig):
    (item,) = (await ask(rig)).json()["output"]
    unknown = [item["id"][:-1] + "f", "msg_1", ""]
    for ids, status in (*(([one], 404) for one in unknown), ([7], 400), ([item["id"]] * 2, 400)):
        answer = await ask(rig, input=[{"type": "item_reference", "id": one} for one in ids])

        assert answer.status_code == status
        assert answer.json()["error"]["param"] == f"input[{len(ids) - 1}].id"


async def test_stored_response_can_be_retrieved_and_deleted(rig):
    body = (await ask(rig)).json()
    where = f"{PATH}/{body['id']}"
    shown = await rig.client.get(where)
    deleted = await rig.client.delete(where)
    again = await rig.client.delete(where)
    gone = await rig.client.get(where)

    assert shown.json() == body
    assert deleted.json() == {"id": body["id"], "object": "response", "deleted": True}
    assert (again.status_code, gone.status_code) == (404, 404)
    assert gone.json()["error"] == {
        "message": f"Response with id '{body['id']}' not found.",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }


async def test_stored_response_is_shown_whatever_a_client_wants_included(rig):
    body = (await ask(rig)).json()
    where = f"{PATH}/{body['id']}"
    hints = "include[]=reasoning.encrypted_content&include_obfuscation=true&stream=false"
    shown = await rig.client.get(f"{where}?{hints}")
    streamed = await rig.client.get(f"{where}?stream=true")

    assert shown.json() == body
    assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, "stream")


async def test_input_items_of_a_stored_response_are_listed_in_pages(rig):
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "7"}
    said = {"role": "assistant", "content": "well"}
    body = (await ask(rig, input=[{"role": "user", "content": "hi"}, said, call, result])).json()
    where = f"{PATH}/{body['id']}/input_items"
    forward = (await rig.client.get(f"{where}?order=asc&limit=3")).json()
    rest = (await rig.client.get(f"{where}?order=asc&after={forward['last_id']}")).json()
    backward = (await rig.client.get(where)).json()

    assert [item["type"] for item in forward["data"]] == ["message", "message", "function_call"]
    assert forward["data"][0]["content"] == [{"type": "input_text", "text": "hi"}]
    assert forward["data"][1]["content"] == [{"type": "output_text", "text": "well"}]
    assert forward["data"][2] | call == forward["data"][2]
    assert (forward["has_more"], rest["has_more"]) == (True, False)
    assert forward["data"] + rest["data"] == backward["data"][::-1]
    assert backward["first_id"] == rest["last_id"] == backward["data"][0]["id"]


async def test_text_input_is_listed_as_one_message(client, rig):
    made = await client.responses.create(model="m", input="hi")
    listed = await client.responses.input_items.list(made.id)

    assert [item.content[0].text async for item in listed] == ["hi"]


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=101", "limit"), ("order=up", "order"), ("after=x", "after")],
)
async def test_wrong_page_of_input_items_is_refused_by_name(rig, query, param):
    body = (await ask(rig)).json()
    answer = await rig.client.get(f"{PATH}/{body['id']}/input_items?{query}")

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_only_a_stored_response_can_fail_to_be_cancelled(client, rig):
    made = await client.responses.create(model="m", input="hi")
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        await client.responses.cancel(made.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.cancel("resp_x")
    with pytest.raises(openai.NotFoundError):
        await client.responses.input_items.list("resp_x")


@pytest.mark.parametrize("path", ["/v1/responses/compact", "/v1/conversations"])
async def test_unsupported_routes_of_openai_are_not_found(rig, path):
    assert (await rig.client.post(path, json={"model": "m", "input": "hi"})).status_code == 404


async def test_tools_come_back_with_all_their_keys(rig):
    tools = [{"type": "function", "name": "f"}, {"type": "custom", "name": "g"}]
    body = (await ask(rig, tools=tools, tool_choice="none")).json()

    assert body["tools"] == [
        {**tools[0], "description": None, "parameters": None, "strict": True},
        {**tools[1], "description": None, "format": {"type": "text"}},
    ]


async def test_requested_summary_of_reasoning_comes_back(rig):
    body = (await ask(rig, reasoning={"summary": "auto"})).json()

    assert body["reasoning"] == {"effort": None, "summary": "auto"}


async def test_response_tells_the_sampling_that_applied(rig):
    body = (await ask(rig, temperature=0.5, presence_penalty=0.25)).json()

    assert (body["temperature"], body["top_p"], body["presence_penalty"]) == (0.5, 1.0, 0.25)


@pytest.mark.parametrize("stream", [False, True])
async def test_response_ends_before_a_stop_string(rig, stream):
    rig.one.script = outputs("hello", "eos")
    answer = await ask(rig, stop=["ll"], stream=stream)
    body = typed(answer.text)[-1]["response"] if stream else answer.json()

    assert body["output"][0]["content"][0]["text"] == "he"
    assert body["status"] == "completed"
    assert "x-dynamo-ignored-parameters" not in answer.headers


async def test_response_with_store_false_is_not_stored(rig):
    body = (await ask(rig, store=False)).json()

    assert body["store"] is False
    assert (await rig.client.get(f"{PATH}/{body['id']}")).status_code == 404


async def test_number_of_stored_responses_is_bounded(bare):
    await bare.start(response_store_items=1)
    await bare.worker()
    ids = [(await ask(bare)).json()["id"] for _ in range(2)]

    assert [(await bare.client.get(f"{PATH}/{one}")).status_code for one in ids] == [404, 200]


@pytest.mark.parametrize("path", [PATH, PATH + "/input_tokens"])
async def test_unknown_previous_response_is_refused(rig, path):
    answer = await ask(rig, path, previous_response_id="resp_x")

    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "previous_response_not_found"
    assert answer.json()["error"]["param"] == "previous_response_id"


async def test_counted_input_tokens_equal_those_of_usage(rig):
    rig.one.script = outputs("hello", "eos")
    first = (await ask(rig, instructions="x")).json()
    fields = {"previous_response_id": first["id"], "instructions": "y"}
    counted = (await ask(rig, PATH + "/input_tokens", **fields)).json()
    usage = (await ask(rig, **fields)).json()["usage"]

    assert counted == {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "input[0].content[0].image_url"),
        ({"background": True}, 400, "background"),
        ({"max_output_tokens": 500}, 400, "input"),
        ({"model": "q"}, 404, "model"),
    ],
)  # fmt: skip
async def test_error_for_an_invalid_response_field_names_the_field(rig, fields, status, param):
    answer = await ask(rig, **fields)

    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


async def test_showing_in_another_way_is_refused(rig):
    answer = await rig.client.get(f"{PATH}/resp_x?stream=true")

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream"


async def test_requests_are_counted_by_endpoint(rig):
    await ask(rig)

    assert (await rig.metrics())[
        'dynamo_frontend_requests_total{endpoint="responses",error_type="",model="m",'
        'request_type="unary",status="success"}'
    ] == 1


async def test_openai_client_continues_retrieves_counts_and_deletes(client, rig):
    rig.one.script = outputs("hello", "eos")
    first = await client.responses.create(model="m", input="hi", temperature=0.5)
    second = await client.responses.create(
        model="m", input="and?", previous_response_id=first.id, store=False
    )
    shown = await client.responses.retrieve(first.id)
    counted = await client.responses.input_tokens.count(model="m", input="hi")
    await client.responses.delete(first.id)

    assert first.output_text == second.output_text == shown.output_text == "hello"
    assert counted.input_tokens == first.usage.input_tokens
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError):
        await client.responses.create(model="m", input="x", previous_response_id=first.id)


async def test_openai_client_can_send_received_items_back(client, rig):
    rig.one.script = outputs("hello", "eos")
    first = await client.responses.create(model="m", input="hi")
    say = {"role": "user", "content": "hi"}
    await client.responses.create(model="m", input=[say, *first.output, say])

    assert rig.one.prompts[1] == "user: hi\nassistant: hello\nuser: hi\n"


async def test_openai_client_streams_a_response(client, rig):
    rig.one.script = outputs("hello", "eos")
    async with client.responses.stream(model="m", input="hi") as stream:
        said = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()

    assert "".join(said) == final.output_text == "hello"
    assert final.status == "completed"
    assert final.usage.total_tokens == 15


async def test_large_input_is_listed_beside_the_event_loop(monkeypatch):
    list_input, threads = request.list_input, []

    def list_in_thread(items, digits):
        threads.append(threading.current_thread())
        return list_input(items, digits)

    monkeypatch.setattr(request, "list_input", list_in_thread)
    items = json.dumps([{"role": "user", "content": "x" * 300_000}]).encode()
    store = response_store.ResponseStore(max_items=1, max_bytes=2**20)
    store.put("resp_1", response_store.StoredResponse(b"{}", b"[]", "", items))
    path = f"{PATH}/resp_1/input_items"
    asked = exchange.Request(method="GET", path=path, query="", headers={}, body=b"", peer="")
    client = runner.LineExchange(asked)
    handlers = types.SimpleNamespace(rights=types.SimpleNamespace(tenant_of=lambda _: ""))
    listing = api.Responses(handlers, store).list_input_items(client)
    if listing is not None:
        await listing

    assert json.loads((await client.response).body)["first_id"] == "msg_100in"
    assert [thread is threading.main_thread() for thread in threads] == [False]


async def test_input_is_not_walked_through_unless_it_is_listed(rig, monkeypatch):
    monkeypatch.setattr(request, "list_input", None)
    body = (await ask(rig)).json()
    where = f"{PATH}/{body['id']}"

    assert (await rig.client.get(where)).status_code == 200
    assert (await ask(rig, previous_response_id=body["id"])).status_code == 200
