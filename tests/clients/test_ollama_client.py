"""Ollama's Python client: chats, prompts, tools, lists of models, errors."""

import pytest
import questions

ollama = pytest.importorskip("ollama")


@pytest.fixture
def client(server):
    return ollama.Client(host=server.url)


def test_chat_and_generate_answer_whole_and_streamed(client, server):
    chat = client.chat(server.model, messages=questions.SAY)
    stream = list(client.chat(server.model, messages=questions.SAY, stream=True))
    prompt = client.generate(server.model, questions.WHO)

    assert questions.NAME in chat.message.content
    assert questions.NAME in "".join(part.message.content for part in stream)
    assert questions.NAME in prompt.response
    assert stream[-1].done
    assert stream[-1].eval_count > 0


@pytest.mark.parametrize("stream", [False, True])
def test_tool_is_called(client, server, stream):
    asked = {"messages": questions.ASK_TIME, "tools": [questions.TOOL]}
    answer = client.chat(server.model, **asked, options={"temperature": 0}, stream=stream)
    messages = [part.message for part in answer] if stream else [answer.message]
    (call,) = [call for message in messages for call in message.tool_calls or ()]

    assert (call.function.name, call.function.arguments) == ("get_time", {"city": "Paris"})


def test_format_holds_the_answer_to_a_schema(client, server):
    answer = client.chat(server.model, messages=questions.SAY, format=questions.SCHEMA)

    assert answer.message.content.lstrip().startswith("{")


def test_models_are_listed_and_shown(client, server):
    assert [model.model for model in client.list().models] == [server.model]
    assert [model.model for model in client.ps().models] == [server.model]
    assert "tools" in client.show(server.model).capabilities


def test_unknown_model_is_an_error(client):
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat("nope", messages=questions.SAY)

    assert caught.value.status_code == 404
