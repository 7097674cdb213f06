"""Official clients ask the built-in model for answers of a shape."""

from typing import Annotated, Literal

import anthropic
import httpx
import openai
import pydantic
import pytest
from deployment import MODEL, chat

ASK = [{"role": "user", "content": "What time is it in Paris?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "London"]}},
    "required": ["city"],
    "additionalProperties": False,
}
ADD = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/n"}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_time", "parameters": CITY}},
    {"type": "function", "function": {"name": "add", "parameters": ADD}},
]


class Pet(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    age: Annotated[int, pydantic.Field(ge=0, le=30)]
    friends: Annotated[list[Literal["Ida", "Gus"]], pydantic.Field(max_length=3)]


class Answer(pydantic.BaseModel):
    city: Literal["Paris", "London"]


@pytest.fixture
def url(deployment):
    deployment.native()
    frontend = deployment.frontend()
    frontend.await_models([MODEL])
    return frontend.url


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_openai_client_parses_a_structured_answer(client):
    asked = {"model": MODEL, "messages": ASK, "max_tokens": 200, "temperature": 0}
    whole = client.chat.completions.parse(**asked, response_format=Pet)
    with client.chat.completions.stream(**asked, response_format=Pet) as stream:
        streamed = stream.get_final_completion()
    response = client.responses.parse(
        model=MODEL, input="a cat", max_output_tokens=200, text_format=Pet, temperature=0
    )

    assert isinstance(whole.choices[0].message.parsed, Pet)
    assert isinstance(streamed.choices[0].message.parsed, Pet)
    assert isinstance(response.output_parsed, Pet)


@pytest.mark.parametrize("seed", range(3))
def test_forced_calls_are_made_and_fit_their_schema(client, seed):
    asked = {"model": MODEL, "messages": ASK, "tools": TOOLS, "max_tokens": 300, "seed": seed}
    asked["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
    required = client.chat.completions.create(
        **asked, tool_choice="required", parallel_tool_calls=False
    )
    named = {"type": "function", "function": {"name": "add"}}
    with client.chat.completions.stream(**asked, tool_choice=named) as stream:
        streamed = stream.get_final_completion()

    (call,) = required.choices[0].message.tool_calls
    assert required.choices[0].finish_reason == "tool_calls"
    if call.function.name == "get_time":
        Answer.model_validate_json(call.function.arguments)
    (call,) = streamed.choices[0].message.tool_calls
    numbers = pydantic.TypeAdapter(dict[Literal["a", "b"], int]).validate_json(
        call.function.arguments
    )
    assert numbers.keys() == {"a", "b"}


def test_anthropic_client_parses_a_structured_answer(url):
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as claude:
        message = claude.messages.parse(
            model=MODEL, max_tokens=200, messages=ASK, output_format=Answer
        )

    assert isinstance(message.parsed_output, Answer)


def test_anthropic_client_forces_a_tool(url):
    tools = [{"name": "get_time", "input_schema": CITY}, {"name": "add", "input_schema": ADD}]
    asked = {"model": MODEL, "max_tokens": 200, "messages": ASK, "tools": tools}
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as claude:
        any_tool = claude.messages.create(
            **asked, tool_choice={"type": "any", "disable_parallel_tool_use": True}
        )
        with claude.messages.stream(**asked, tool_choice={"type": "tool", "name": "add"}) as stream:
            named = stream.get_final_message()

    assert (any_tool.stop_reason, any_tool.content[-1].type) == ("tool_use", "tool_use")
    assert named.content[-1].name == "add"
    assert named.content[-1].input.keys() == {"a", "b"}


def test_refused_grammar_has_a_reason_and_the_worker_continues(url):
    refused = {
        "guided_regex": "(ab",
        "guided_json": {"not": {}},
        "guided_grammar": "start: nobody",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"type": "x"}},
        },
    }
    for param, value in refused.items():
        answer = httpx.post(f"{url}/v1/chat/completions", json=chat("x", **{param: value}))

        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
    answer = httpx.post(
        f"{url}/v1/completions", json={"model": MODEL, "prompt": "x", "guided_choice": ["yes"]}
    )
    assert answer.json()["choices"][0]["text"] == "yes"
