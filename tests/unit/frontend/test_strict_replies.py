"""Every reply is what the official clients' own types allow: no field missing, none unknown, none of another type."""

import json

import anthropic.types
import openai.types
import openai.types.chat
import openai.types.responses
import pydantic
import pytest
from frontend_rig import events, outputs

from dynamo.protocols import generate, model_card

# OpenAI says `store` and penalties of a response, which its own types do not know; `context_window` of a model is the
# original's, `reasoning_content` of a message and `max_model_len`, `root` and `parent` of a model are vLLM's.
OURS = {
    "store", "context_window", "reasoning_content", "presence_penalty", "frequency_penalty",
    "max_model_len", "root", "parent", "capabilities", "num_workers", "adapters",
}  # fmt: skip
_CHUNK = openai.types.chat.ChatCompletionChunk
_EVENT = pydantic.TypeAdapter(openai.types.responses.ResponseStreamEvent)
_MESSAGE_EVENT = pydantic.TypeAdapter(anthropic.types.RawMessageStreamEvent)


def unknown(value):
    """Fields, at any depth, that the type of their object does not know."""
    if isinstance(value, list):
        return {name for one in value for name in unknown(one)}
    if not isinstance(value, pydantic.BaseModel):
        return set()
    inner = [getattr(value, name) for name in type(value).model_fields]
    return set(value.model_extra or ()) | unknown(inner)


def check(model, data):
    """It is one of these, to the letter."""
    if isinstance(model, pydantic.TypeAdapter):
        read = model.validate_json(json.dumps(data), strict=True)
    else:
        read = model.model_validate_json(json.dumps(data), strict=True)
    assert unknown(read) <= OURS, data
    return read


def reporting():
    """Outputs with log probabilities."""
    top = (generate.TopLogprob(104, -0.5), generate.TopLogprob(105, -1.5))
    return [
        generate.Output(
            one.token_ids, one.finish_reason, logprobs=(generate.TokenLogprobs(-0.5, top),)
        )
        for one in outputs("hello")
    ]


ASKED = [
    {},
    {"n": 1, "seed": 1, "user": "u", "metadata": {"k": "v"}, "service_tier": "auto"},
    {"logprobs": True, "top_logprobs": 2},
]


@pytest.mark.parametrize("fields", ASKED)
async def test_chat_response_matches_openais_schema(rig, fields):
    rig.one.script = reporting()
    whole = (await rig.chat(**fields)).json()
    usage = {"include_usage": True}
    stream = await rig.chat(stream=True, stream_options=usage, **fields)
    chunks = [check(_CHUNK, event) for event in events(stream.text) if event != "[DONE]"]

    read = check(openai.types.chat.ChatCompletion, whole)
    message = whole["choices"][0]["message"]
    assert (message["refusal"], message["content"]) == (None, "hello")
    assert "logprobs" in whole["choices"][0]
    assert read.usage.prompt_tokens_details.cached_tokens == 0
    assert read.usage.completion_tokens_details.reasoning_tokens == 0
    assert chunks[-1].usage == read.usage


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}, {"best_of": 1, "echo": True}])
async def test_completion_response_matches_openais_schema(rig, fields):
    rig.one.script = reporting()
    whole = (await rig.complete(**fields)).json()
    stream = await rig.complete(stream=True, stream_options={"include_usage": True}, **fields)

    assert "logprobs" in whole["choices"][0]
    check(openai.types.Completion, whole)
    for event in events(stream.text)[:-1]:
        check(openai.types.Completion, lenient(event))


def lenient(event):
    """OpenAI's type has no name for the reason of a choice that goes on; its servers say null, as we do."""
    for choice in event["choices"]:
        if choice["finish_reason"] is None:
            choice["finish_reason"] = "stop"
    return event


async def test_response_matches_openais_schema(rig):
    asked = {"model": "m", "input": "hi", "metadata": {"k": "v"}}
    whole = (await rig.client.post("/v1/responses", json=asked)).json()
    stream = await rig.client.post("/v1/responses", json=asked | {"stream": True})

    check(openai.types.responses.Response, whole)
    for part in filter(None, stream.text.split("\n\n")):
        check(_EVENT, json.loads(part.partition("data: ")[2]))


LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tool_choice", {"type": "function", "name": "look"}),
        ("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "look"}]}),
        ("text", {"format": {"type": "text"}, "verbosity": "low"}),
        ("prompt_cache_retention", "24h"),
        ("max_tool_calls", 3),
    ],
)
async def test_response_repeats_the_parameter_in_openais_form(rig, name, value):
    facts = model_card.ModelRuntimeConfig(tool_call_parser="hermes", supports_guided=True)
    await rig.worker("p", runtime_config=facts)
    body = {"model": "p", "input": "hi", "tools": [LOOK], name: value}
    whole = (await rig.client.post("/v1/responses", json=body)).json()

    check(openai.types.responses.Response, whole)
    assert whole[name] == value


async def test_message_matches_anthropics_schema(rig):
    asked = {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "hi"}],
        "service_tier": "auto",
        "metadata": {"user_id": "u"},
    }
    whole = (await rig.client.post("/v1/messages", json=asked)).json()
    stream = await rig.client.post("/v1/messages", json=asked | {"stream": True})

    check(anthropic.types.Message, whole)
    for part in filter(None, stream.text.split("\n\n")):
        check(_MESSAGE_EVENT, json.loads(part.partition("data: ")[2]))


async def test_model_list_and_error_match_openais_schema(rig):
    check(openai.types.Model, (await rig.client.get("/v1/models/m")).json())
    error = (await rig.chat(temperature=9)).json()

    assert error["error"].keys() == {"message", "type", "param", "code"}
