"""The anthropic package: messages, streams, the runner of tools, the list of models."""

import pytest
import questions

anthropic = pytest.importorskip("anthropic")


@pytest.fixture
def client(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none") as client:
        yield client


def test_message_is_answered_whole_and_streamed(client, server):
    asked = {"model": server.model, "max_tokens": 4096, "messages": questions.SAY}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = "".join(stream.text_stream)

    assert questions.NAME in whole.content[0].text
    assert questions.NAME in streamed


def test_tool_runner_runs_the_tool_and_sends_its_result(client, server):
    cities = []

    @anthropic.beta_tool
    def get_time(city: str) -> str:
        """Tell the time.

        Args:
            city: the city
        """
        cities.append(city)
        return "It is noon."

    runner = client.beta.messages.tool_runner(
        model=server.model,
        max_tokens=300,
        extra_body={"temperature": 0},
        tools=[get_time],
        messages=questions.ASK_TIME,
    )
    messages = list(runner)

    assert cities == ["Paris"]
    assert messages[0].stop_reason == "tool_use"
    assert messages[-1].content[0].type == "text"


def test_models_have_anthropics_form(client, server):
    (model,) = client.models.list()

    assert model.id == server.model == client.models.retrieve(server.model).id
    assert model.type == "model"


def test_tokens_are_counted(client, server):
    counted = client.messages.count_tokens(model=server.model, messages=questions.SAY)

    assert counted.input_tokens > 0
