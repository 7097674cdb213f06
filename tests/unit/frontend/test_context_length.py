"""A prompt that does not fit the context is a 400 that names both numbers, in every API, streamed or not."""

import re

import pytest

TEXT = "x" * 300  # a token for each character; the context has 200
CHAT = [{"role": "user", "content": TEXT}]
TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [TEXT]}
REQUESTS = {
    "chat": ("/v1/chat/completions", {"messages": CHAT}),
    "streamed chat": ("/v1/chat/completions", {"messages": CHAT, "stream": True}),
    "text": ("/v1/completions", {"prompt": TEXT}),
    "token ids": ("/v1/completions", {"prompt": [1] * 300}),
    "second of two texts": ("/v1/completions", {"prompt": ["a", TEXT]}),
    "scored text": ("/v1/completions", {"prompt": TEXT, "echo": True, "max_tokens": 0}),
    "response": ("/v1/responses", {"input": TEXT}),
    "message": ("/v1/messages", {"messages": CHAT, "max_tokens": 1}),
    "tensor": ("/v2/models/m/infer", {"inputs": [TENSOR]}),
    "plain field": ("/v2/models/m/generate", {"text_input": TEXT}),
    "streamed plain field": ("/v2/models/m/generate_stream", {"text_input": TEXT}),
}


@pytest.mark.parametrize(("path", "fields"), REQUESTS.values(), ids=REQUESTS)
async def test_prompt_over_the_context_is_an_error_that_names_both_lengths(rig, path, fields):
    fields = fields if path.startswith("/v2") else {"model": "m", **fields}
    answer = await rig.client.post(path, json=fields)

    assert answer.status_code == 400
    numbers = [int(number) for number in re.findall(r"\d+", answer.text)]
    assert 200 in numbers
    assert any(300 <= number < 350 for number in numbers)
    assert rig.one.requests == []


async def test_embedding_input_over_the_context_is_an_error_that_names_both_lengths(rig):
    await rig.embedder()
    answer = await rig.embed("a", TEXT)

    assert answer.status_code == 400
    assert "length is 200 tokens" in answer.text
    assert "has 300 tokens" in answer.text


async def test_answer_that_does_not_fit_behind_its_prompt_is_an_error_that_names_both(rig):
    answer = await rig.complete("x" * 150, max_tokens=51)

    assert answer.status_code == 400
    assert "150 in the prompt, 51 in the completion" in answer.text
