"""instructor: answers as objects, by a forced tool and by a JSON schema."""

import pytest
import questions

instructor = pytest.importorskip("instructor")
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")


class Person(pydantic.BaseModel):
    name: str
    age: int


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_answer_is_an_object(server, mode):
    client = instructor.from_openai(
        openai.OpenAI(base_url=server.v1, api_key="none"), mode=instructor.Mode[mode]
    )
    person = client.chat.completions.create(
        model=server.model,
        response_model=Person,
        max_retries=0,
        messages=[{"role": "user", "content": questions.PERSON}],
    )

    assert isinstance(person, Person)
