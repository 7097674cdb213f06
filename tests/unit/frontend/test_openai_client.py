"""The official client, as users have it, against a frontend on loopback."""

import openai
import pytest
from frontend_rig import outputs

from dynamo.base import errors
from dynamo.protocols import generate

SAY = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def client(impatient):
    async with openai.AsyncOpenAI(
        base_url=impatient.frontend.url + "/v1", api_key="none", max_retries=0
    ) as made:
        yield made


async def test_client_gets_a_chat_completion(client):
    answer = await client.chat.completions.create(model="m", messages=SAY)

    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 14
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


async def test_client_streams_a_chat_completion(client):
    stream = await client.chat.completions.create(
        model="m", messages=SAY, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]

    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 5


async def test_client_gets_and_streams_a_completion(client):
    whole = await client.completions.create(model="m", prompt="x")
    stream = await client.completions.create(model="m", prompt="x", stream=True)
    pieces = [chunk.choices[0].text async for chunk in stream]

    assert whole.choices[0].text == "".join(pieces) == "hello"


async def test_logprobs_parse(client, impatient):
    impatient.one.script = [
        generate.Output(
            (104,),
            generate.FinishReason.LENGTH,
            logprobs=(generate.TokenLogprobs(-0.5, (generate.TopLogprob(104, -0.5),)),),
        )
    ]
    answer = await client.chat.completions.create(
        model="m", messages=SAY, logprobs=True, top_logprobs=1
    )
    told = answer.choices[0].logprobs.content[0]

    assert (told.token, told.logprob, told.bytes) == ("h", -0.5, [104])
    assert told.top_logprobs[0].token == "h"


async def test_models(client):
    assert [model.id async for model in client.models.list()] == ["m"]
    assert (await client.models.retrieve("m")).id == "m"


async def test_unknown_model_raises_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="q", messages=SAY)

    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


async def test_invalid_value_raises_bad_request(client):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await client.chat.completions.create(model="m", messages=SAY, temperature=9)


async def test_no_worker_is_a_server_error_that_clients_retry(client, impatient):
    await impatient.one.runtime.close()
    await impatient.until(lambda: not impatient.instances)

    with pytest.raises(openai.InternalServerError) as caught:
        await client.chat.completions.create(model="m", messages=SAY)
    assert caught.value.status_code == 503


async def test_error_within_a_stream_is_raised(client, impatient):
    def script(call, _):
        call.send(generate.Output((104,)))
        call.fail(errors.EngineFailed("out of memory"))

    impatient.one.script = script
    stream = await client.chat.completions.create(model="m", messages=SAY, stream=True)

    with pytest.raises(openai.APIError, match="out of memory"):
        async for _ in stream:
            pass


async def test_leaving_a_stream_stops_the_worker(client, impatient):
    impatient.one.script = outputs("endless", None)
    stream = await client.chat.completions.create(model="m", messages=SAY, stream=True)
    await anext(aiter(stream))
    await stream.close()
    await impatient.until(lambda: impatient.one.num_cancelled == 1)
