"""What callers ask of an answer's shape reaches the worker; what the worker refuses reaches the callers."""

import json

import anthropic
import openai
import pytest
from frontend_rig import events, outputs

from dynamo.base import errors
from dynamo.protocols import generate, model_card

SAY = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("look", "see")]
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
ARRAY = '[{"name": "look", "arguments": {}}, {"name": "see", "arguments": {"a": [1]}}]'
NAMED = {"type": "function", "function": {"name": "look"}}


@pytest.fixture
async def able(rig):
    """Two workers that can follow grammars: of a model that calls in its own way, and of one that does not call."""
    for name, parser in (("h", "hermes"), ("none", "none")):
        facts = model_card.ModelRuntimeConfig(
            supports_guided=True, tool_call_parser=parser, reasoning_parser="basic"
        )
        setattr(rig, name, await rig.worker(name, runtime_config=facts))
    return rig


@pytest.fixture
async def client(able):
    async with openai.AsyncOpenAI(
        base_url=able.frontend.url + "/v1", api_key="none", max_retries=0
    ) as made:
        yield made


def asked(worker):
    return worker.requests[-1].sampling_options.guided_decoding


async def test_guided_decoding_options_reach_the_worker(able):
    await able.chat(model="h", guided_regex="a+")
    await able.complete(model="none", nvext={"guided_choice": ["a", "b"]})

    assert (asked(able.h).regex, asked(able.none).choice) == ("a+", ("a", "b"))


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, False),
        ({"guided_choice": ["yes", "no"], "guided_regex": None, "max_tokens": 5}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {"thinking": True}}, True),
    ],
)
async def test_structured_answer_thinks_only_if_the_request_says_so(able, fields, thinks):
    await able.chat(model="h", **{"guided_regex": "a+"} | fields)
    thoughts = generate.GuidedReasoning(opens=("<think>",), closes=("</think>",))

    assert asked(able.h).thoughts == (thoughts if thinks else None)


async def test_guided_request_is_refused_if_the_engine_has_no_grammars(able):
    for fields in (
        {"guided_grammar": 'start: "a"'},
        {"response_format": {"type": "json_object"}},
        {"tools": TOOLS, "tool_choice": "required"},
    ):
        answer = await able.chat(**fields)

        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == list(fields)[-1]
    assert able.one.requests == []


async def test_schema_over_a_limit_is_refused_before_any_worker_sees_it(able):
    schema = {"enum": list(range(5_000))}
    for fields in (
        {"guided_json": schema},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": schema},
            }
        },
        {
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"properties": {"a": schema}}},
                }
            ],
            "tool_choice": "required",
        },
    ):
        answer = await able.chat(model="h", **fields)

        assert answer.status_code == 400
        assert "at most 1024 values in all enums, got 5000" in answer.json()["error"]["message"]
    assert able.h.requests == []


async def test_grammar_error_of_the_worker_names_the_callers_parameter(able, client):
    able.h.script = lambda call, request: call.fail(
        errors.InvalidRequest("bad", param=request.sampling_options.guided_decoding.param)
    )
    schema = {"type": "json_schema", "name": "n", "schema": {}}
    chat = await able.chat(model="h", guided_json={})
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="h", input="x", text={"format": schema})

    async with anthropic.AsyncAnthropic(base_url=able.frontend.url, api_key="none") as claude:
        with pytest.raises(anthropic.BadRequestError, match="bad"):
            await claude.messages.create(
                model="h",
                max_tokens=9,
                messages=SAY,
                output_config={"format": {"type": "json_schema", "schema": {"enum": [1]}}},
            )

    assert asked(able.h).param == "output_config.format"
    assert asked(able.h).json == '{"enum":[1]}'
    assert (chat.status_code, chat.json()["error"]["param"]) == (400, "guided_json")
    assert caught.value.param == "text.format"


@pytest.mark.parametrize(
    ("model", "text"), [("h", CALL), ("none", '[{"name": "look", "arguments": {}}]')]
)
@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_forced_tool_call_is_returned_as_a_tool_call(able, model, text, choice):
    getattr(able, model).script = outputs(text, "eos")
    body = (await able.chat(model=model, tools=TOOLS, tool_choice=choice)).json()
    (told,) = body["choices"]

    assert told["finish_reason"] == "tool_calls"
    assert told["message"]["content"] is None
    (call,) = told["message"]["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": "{}"}


@pytest.mark.parametrize(
    ("model", "text"),
    [(name, text[:end]) for name, text in (("h", CALL), ("none", ARRAY)) for end in (1, 4, 20, 30)],
)
async def test_forced_tool_call_that_is_cut_leaves_no_marks_in_the_content(able, model, text):
    getattr(able, model).script = outputs(text, "length")
    body = (await able.chat(model=model, tools=TOOLS, tool_choice="required")).json()
    (choice,) = body["choices"]
    streamed = await able.chat(model=model, tools=TOOLS, tool_choice="required", stream=True)

    assert choice["finish_reason"] == "length"
    assert not choice["message"]["content"]
    assert not any(
        chunk["choices"][0]["delta"].get("content") for chunk in events(streamed.text)[:-1]
    )


async def test_forced_tool_calls_are_streamed_separately(able):
    able.none.script = outputs("<think>hm</think>\n" + ARRAY, "eos")
    answer = await able.chat(model="none", tools=TOOLS, tool_choice="required", stream=True)
    *chunks, done = events(answer.text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [delta["tool_calls"][0] for delta in deltas if delta.get("tool_calls")]
    begins = [one for one in calls if "name" in one["function"]]

    assert [(one["index"], one["function"]["name"]) for one in begins] == [(0, "look"), (1, "see")]
    assert not any(delta.get("content") for delta in deltas)
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "hm"
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert done == "[DONE]"


async def test_parallel_tool_calls_false_limits_the_answer_to_one_call(able):
    able.none.script = outputs(ARRAY, "eos")
    answer = await able.chat(
        model="none", tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    )

    assert len(answer.json()["choices"][0]["message"]["tool_calls"]) == 1
    assert asked(able.none).calls.max_calls == 1


async def test_messages_and_responses_can_force_tool_calls(able, client):
    able.h.script = outputs(CALL, "eos")
    async with anthropic.AsyncAnthropic(base_url=able.frontend.url, api_key="none") as claude:
        message = await claude.messages.create(
            model="h",
            max_tokens=90,
            messages=SAY,
            tools=[{"name": "look", "input_schema": {"type": "object"}}],
            tool_choice={"type": "any"},
        )
    response = await client.responses.create(
        model="h",
        input="x",
        tools=[{"type": "function", "name": "look", "parameters": {}, "strict": True}],
        tool_choice={"type": "function", "name": "look"},
    )

    assert (message.stop_reason, message.content[0].name) == ("tool_use", "look")
    assert (response.output[0].type, response.output[0].name) == ("function_call", "look")
    assert [one.sampling_options.guided_decoding.calls.max_calls for one in able.h.requests] == [
        32,
        1,
    ]


async def test_response_repeats_the_requested_format(able, client):
    able.h.script = outputs('{"a": 1}', "eos")
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    form = {"type": "json_schema", "name": "pet", "schema": schema, "strict": True}
    response = await client.responses.create(model="h", input="x", text={"format": form})

    assert response.text.format.name == "pet"
    assert json.loads(asked(able.h).json) == schema
    assert json.loads(response.output_text) == {"a": 1}
