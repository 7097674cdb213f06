"""langchain-openai: chats, streams, strict tools, structured output, Responses."""

import pytest
import questions

langchain_openai = pytest.importorskip("langchain_openai")
pydantic = pytest.importorskip("pydantic")


class Person(pydantic.BaseModel):
    """A person."""

    name: str
    age: int


def make_model(server, **options):
    return langchain_openai.ChatOpenAI(
        model=server.model, base_url=server.v1, api_key="none", **options
    )


@pytest.mark.parametrize("options", [{}, {"use_responses_api": True}])
def test_model_answers_whole_and_streamed(server, options):
    model = make_model(server, **options)

    assert questions.NAME in str(model.invoke(questions.WHO).content)
    pieces = [chunk.text for chunk in model.stream(questions.WHO)]
    assert questions.NAME in "".join(map(str, pieces))


def test_strict_tool_is_called(server):
    model = make_model(server, temperature=0).bind_tools([questions.TOOL], strict=True)
    (call,) = model.invoke(questions.TIME).tool_calls

    assert (call["name"], call["args"]) == ("get_time", {"city": "Paris"})


def test_output_is_structured(server):
    model = make_model(server).with_structured_output(Person)

    assert isinstance(model.invoke(questions.PERSON), Person)
