"""SageMaker's one path, whose requests go to the API that their fields name."""

import pytest
from frontend_rig import events

from dynamo.base import errors
from dynamo.frontend.apis import invocations

SAY = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"model": "m", "messages": SAY}, "chat.completion"),
        ({"model": "m", "prompt": "x"}, "text_completion"),
        ({"model": "e", "input": "x"}, "list"),
        ({"model": "e", "text_1": "x", "text_2": "y"}, "list"),
        ({"model": "e", "queries": "x", "documents": ["y"]}, "list"),
    ],
)
async def test_request_goes_to_the_api_of_its_fields(rig, fields, kind):
    await rig.embedder()
    answer = await rig.client.post("/invocations", json=fields)

    assert answer.status_code == 200, answer.text
    assert answer.json()["object"] == kind


async def test_documents_are_ranked(rig):
    await rig.embedder()
    fields = {"model": "e", "query": "x", "documents": ["x", "y"]}

    assert (await rig.client.post("/invocations", json=fields)).json()["results"]


async def test_answer_is_streamed(rig):
    body = {"model": "m", "messages": SAY, "stream": True}
    answer = await rig.client.post("/invocations", json=body)

    assert events(answer.text)[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "no valid JSON"),
        (b'{"model": "m"}', "expected one of the fields messages, prompt, input, text_1, query"),
        (b'{"model": "m", "messages": 5}', "messages: expected a list"),
    ],
)
async def test_wrong_request_is_refused_in_a_sentence(rig, body, words):
    answer = await rig.client.post("/invocations", content=body)

    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_lists_are_counted_before_memory_is_spent_on_them():
    body = b'{"model":"m","prompt":[' + b"[]," * 400_000 + b"[]]}"

    with pytest.raises(errors.InvalidRequest, match="300000 lists and objects"):
        invocations._decode(body)
