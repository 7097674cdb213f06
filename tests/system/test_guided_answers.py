"""Official clients ask the built-in model for answers of a shape."""

import pathlib
import signal
from concurrent import futures
from typing import Annotated, Literal

import anthropic
import httpx
import openai
import pydantic
import pytest
from deployment import MODEL, Deployment, chat

import processes
from waiting import PATIENT_S, eventually

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


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    deployment = Deployment(tmp_path_factory.mktemp("guided"))
    deployment.native()
    frontend = deployment.frontend()
    frontend.await_models([MODEL])
    yield frontend.url
    deployment.end()


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
        answer = httpx.post(
            f"{url}/v1/chat/completions", json=chat("x", **{param: value}), timeout=PATIENT_S
        )

        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
    answer = httpx.post(
        f"{url}/v1/completions",
        json={"model": MODEL, "prompt": "x", "guided_choice": ["yes"]},
        timeout=PATIENT_S,
    )
    assert answer.json()["choices"][0]["text"] == "yes"


# Within the limits of size, and compiled for ever.
_PATTERNS = [{"pattern": f".*a.{{{i}}}b.*"} for i in range(16)]
ENDLESS = {"type": "string", "allOf": [{"allOf": _PATTERNS[:8]}, {"allOf": _PATTERNS[8:]}]}


def ask_for(url, schema, timeout_s=PATIENT_S):
    body = {"model": MODEL, "messages": ASK, "max_tokens": 100, "guided_json": schema}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=timeout_s)


def test_schema_that_is_compiled_for_ever_is_refused_while_others_are_answered(url):
    with futures.ThreadPoolExecutor() as threads:
        endless = threads.submit(ask_for, url, ENDLESS)
        honest = ask_for(url, CITY)
        was_first = not endless.done()
        refused = endless.result()

    assert honest.status_code == 200
    assert was_first
    assert refused.status_code == 400
    assert "2 s of processor time" in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "guided_json"


def test_trial_ends_with_its_client_and_with_its_worker(deployment):
    worker = deployment.native()
    frontend = deployment.frontend()
    frontend.await_models([MODEL])
    assert ask_for(frontend.url, CITY).status_code == 200
    num_idle = len(processes.descendants(worker.pid))
    is_idle = lambda: len(processes.descendants(worker.pid)) <= num_idle  # noqa: E731
    with pytest.raises(httpx.TimeoutException):
        ask_for(frontend.url, ENDLESS, timeout_s=0.5)
    eventually(is_idle, what="the trial ends with its client")

    with futures.ThreadPoolExecutor() as threads:
        answer = threads.submit(ask_for, frontend.url, ENDLESS)
        eventually(lambda: not is_idle(), what="the trial begins")
        below = processes.descendants(worker.pid)
        worker.signal(signal.SIGTERM)
        assert worker.exit_code() == 0
        assert answer.result().status_code >= 400
    eventually(
        lambda: not [pid for pid in below if pathlib.Path(f"/proc/{pid}").exists()],
        what="the trial ends with its worker",
    )
