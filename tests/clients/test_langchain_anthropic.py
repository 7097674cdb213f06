"""langchain-anthropic: messages, streams, strict tools."""

import pytest
import questions

langchain_anthropic = pytest.importorskip("langchain_anthropic")


@pytest.fixture
def model(server):
    return langchain_anthropic.ChatAnthropic(
        model=server.model, base_url=server.url, api_key="none", temperature=0
    )


def test_model_answers_whole_and_streamed(model):
    assert questions.NAME in str(model.invoke(questions.WHO).content)
    assert questions.NAME in "".join(str(chunk.text) for chunk in model.stream(questions.WHO))


def test_strict_tool_is_called(model):
    (call,) = model.bind_tools([questions.TOOL], strict=True).invoke(questions.TIME).tool_calls

    assert (call["name"], call["args"]) == ("get_time", {"city": "Paris"})
