"""The openai package: chat, Responses, streams, tools, parsed answers."""

import json

import pytest
import questions

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")


class Person(pydantic.BaseModel):
    name: str
    age: int


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.v1, api_key="none") as client:
        yield client


def test_chat_is_answered_whole_and_streamed(client, server):
    whole = client.chat.completions.create(model=server.model, messages=questions.SAY)
    stream = client.chat.completions.create(
        model=server.model,
        messages=questions.SAY,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)

    assert questions.NAME in whole.choices[0].message.content
    assert questions.NAME in "".join(
        choice.delta.content or "" for chunk in chunks for choice in chunk.choices
    )
    assert chunks[-1].usage.total_tokens > 0


def test_tool_is_called_and_its_result_sent_back(client, server):
    first = client.chat.completions.create(
        model=server.model, messages=questions.ASK_TIME, tools=[questions.TOOL], temperature=0
    )
    message = first.choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is noon."}
    second = client.chat.completions.create(
        model=server.model,
        messages=[*questions.ASK_TIME, message, result],
        tools=[questions.TOOL],
        tool_choice="none",  # the built-in model would rather ask again
    )

    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert first.choices[0].finish_reason == "tool_calls"
    assert second.choices[0].message.content


def test_tool_call_is_streamed(client, server):
    with client.chat.completions.stream(
        model=server.model, messages=questions.ASK_TIME, tools=[questions.TOOL], temperature=0
    ) as stream:
        for _ in stream:
            pass
        (call,) = stream.get_final_completion().choices[0].message.tool_calls

    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_answers_are_parsed_into_a_model(client, server):
    chat = client.chat.completions.parse(
        model=server.model,
        messages=[{"role": "user", "content": questions.PERSON}],
        response_format=Person,
    )
    response = client.responses.parse(
        model=server.model, input=questions.PERSON, text_format=Person
    )

    assert isinstance(chat.choices[0].message.parsed, Person)
    assert isinstance(response.output_parsed, Person)


def test_response_is_continued_listed_and_streamed(client, server):
    first = client.responses.create(model=server.model, input=questions.WHO)
    second = client.responses.create(
        model=server.model, input=questions.TIME, previous_response_id=first.id
    )
    items = list(client.responses.input_items.list(first.id))
    with client.responses.stream(model=server.model, input=questions.WHO) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_response()

    assert questions.NAME in first.output_text
    assert second.previous_response_id == first.id
    assert [item.content[0].text for item in items] == [questions.WHO]
    assert questions.NAME in streamed.output_text


def test_response_calls_a_tool(client, server):
    response = client.responses.create(
        model=server.model,
        input=questions.TIME,
        tools=[{"type": "function", **questions.FUNCTION}],
        temperature=0,
    )

    assert json.loads(response.output[-1].arguments) == {"city": "Paris"}
