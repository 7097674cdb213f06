"""Responses with thoughts and tool calls, whole and streamed."""

import json

import pytest
from frontend_rig import SAID, add_parsed_worker, outputs

TOOLS = [
    {"type": "function", "name": name, "parameters": {"type": "object"}, "strict": False}
    for name in ("look", "see")
]


@pytest.fixture
async def client(rig, client):
    await add_parsed_worker(rig)
    return client


def summary(output):
    """What each item says."""
    return [
        (item.type, item.name, item.arguments)
        if item.type == "function_call"
        else (item.type, item.content[0].text)
        for item in output
    ]


ALL = [
    ("reasoning", "hm, so"),
    ("message", "I look."),
    ("function_call", "look", '{"at": "x"}'),
    ("function_call", "see", "{}"),
]
PART = (
    "output_item.added",
    "content_part.added",
    "{}.delta",
    "{}.done",
    "content_part.done",
    "output_item.done",
)
THOUGHT = [step.format("reasoning_text") for step in PART]
WORDS = [step.format("output_text") for step in PART]
CALL = [step.format("function_call_arguments") for step in PART if "content_part" not in step]


async def test_response_has_an_item_of_each_kind(client):
    response = await client.responses.create(model="p", input="hi", tools=TOOLS)

    assert summary(response.output) == ALL
    assert [item.status for item in response.output] == ["completed"] * 4
    assert len({item.id for item in response.output}) == 4
    assert response.status == "completed"
    assert response.tools[0].name == "look"
    assert response.usage.output_tokens_details.reasoning_tokens > 0


async def test_streamed_response_equals_the_whole_response(client):
    async with client.responses.stream(model="p", input="hi", tools=TOOLS) as stream:
        kinds = [event.type async for event in stream]
        response = await stream.get_final_response()

    assert summary(response.output) == ALL
    assert [kind for at, kind in enumerate(kinds) if kind != kinds[at - 1]] == [
        "response." + kind
        for kind in ("created", "in_progress", *THOUGHT, *WORDS, *CALL, *CALL, "completed")
    ]


async def test_sequence_numbers_of_a_stream_are_consistent(rig, client):
    answer = await rig.client.post(
        "/v1/responses", json={"model": "p", "input": "hi", "tools": TOOLS, "stream": True}
    )
    found = [
        json.loads(part.partition("\ndata: ")[2]) for part in answer.text.split("\n\n") if part
    ]
    output = found[-1]["response"]["output"]
    done = [event for event in found if event["type"] == "response.output_item.done"]

    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [event["output_index"] for event in done] == [0, 1, 2, 3]
    assert [event["item"] for event in done] == output
    for event in found:
        if "item_id" in event:
            assert output[event["output_index"]]["id"] == event["item_id"]


async def test_response_truncated_in_reasoning_has_one_incomplete_item(rig, client):
    rig.two.script = outputs("<think>hm", "length")
    response = await client.responses.create(model="p", input="hi")

    assert summary(response.output) == [("reasoning", "hm")]
    assert response.output[0].status == response.status == "incomplete"


@pytest.mark.parametrize("after", ["", "</tool_call>", "</tool_call> so"])
async def test_streamed_call_that_breaks_off_is_an_incomplete_item(rig, client, after):
    rig.two.script = outputs(f'<tool_call>{{"name": "look", "arguments": {{"at": {after}', "eos")
    async with client.responses.stream(model="p", input="hi", tools=TOOLS) as stream:
        done = [event.item async for event in stream if event.type == "response.output_item.done"]
        response = await stream.get_final_response()

    assert (done[0].type, done[0].status) == ("function_call", "incomplete")
    assert response.output[0].status == "incomplete"
    assert response.status == "completed"


async def test_responses_continue_with_tool_results(rig, client):
    first = await client.responses.create(model="p", input="hi", tools=TOOLS)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sun"}
        for item in first.output
        if item.type == "function_call"
    ]
    await client.responses.create(model="p", input=results, previous_response_id=first.id)
    say = {"role": "user", "content": "hi"}
    await client.responses.create(model="p", input=[say, *first.output, *results])

    assert rig.two.prompts[1] == rig.two.prompts[2]
    assert rig.two.prompts[1] == "user: hi\nassistant: I look.\ntool: sun\ntool: sun\n"


async def test_parallel_tool_calls_false_limits_a_response_to_one_call(client):
    response = await client.responses.create(
        model="p", input="hi", tools=TOOLS, parallel_tool_calls=False
    )

    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert response.parallel_tool_calls is False


PATCH = {"type": "custom", "name": "patch", "format": {"type": "text"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tool", [PATCH, {"type": "namespace", "name": "eyes", "tools": [PATCH]}])
async def test_call_of_a_custom_tool_has_its_input_as_text(rig, client, tool, stream):
    called = {"name": "patch", "arguments": {"input": "*** Begin Patch"}}
    call = f"<tool_call>\n{json.dumps(called)}\n</tool_call>"
    rig.two.script = outputs(call, "eos")
    body = {
        "model": "p",
        "input": "hi",
        "tools": [tool],
        "stream": stream,
    }
    answer = await rig.client.post("/v1/responses", json=body)
    last = answer.text.strip().splitlines()[-1].removeprefix("data: ")
    response = json.loads(last)["response"] if stream else answer.json()
    (item,) = response["output"]
    body["input"] = [
        {"role": "user", "content": "hi"},
        item,
        {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"},
    ]
    again = await rig.client.post("/v1/responses", json=body)

    assert (item["type"], item["input"]) == ("custom_tool_call", "*** Begin Patch")
    assert item.get("namespace") == ("eyes" if tool is not PATCH else None)
    assert again.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_call_of_a_name_that_two_namespaces_have_is_told_by_its_own(rig, client, stream):
    rig.two.script = outputs(
        '<tool_call>{"name": "left__look", "arguments": {}}</tool_call>', "eos"
    )
    tools = [{"type": "namespace", "name": name, "tools": TOOLS[:1]} for name in ("left", "right")]
    body = {"model": "p", "input": "hi", "tools": tools, "stream": stream}
    answer = await rig.client.post("/v1/responses", json=body)
    last = answer.text.strip().splitlines()[-1].removeprefix("data: ")
    response = json.loads(last)["response"] if stream else answer.json()
    (item,) = response["output"]

    assert (item["name"], item["namespace"]) == ("look", "left")


async def test_call_of_a_tool_in_a_namespace_names_both(client, rig):
    rig.two.script = outputs(SAID, "eos")
    tools = [{"type": "namespace", "name": "eyes", "tools": TOOLS}, {"type": "web_search"}]
    asked = {"model": "p", "input": "hi", "tools": tools}
    answer = await rig.client.post("/v1/responses", json=asked)
    item = answer.json()["output"][2]
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "seen"}
    history = [{"role": "user", "content": "hi"}, item, result]
    again = await rig.client.post("/v1/responses", json={**asked, "input": history})

    assert (item["name"], item["namespace"]) == ("look", "eyes")
    assert answer.headers["x-dynamo-ignored-parameters"] == "tools[1].web_search"
    assert again.status_code == 200
