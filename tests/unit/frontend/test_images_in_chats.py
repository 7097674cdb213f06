"""Images in a chat reach a worker that takes them, and no other one."""

import base64

import pytest
from frontend_rig import outputs

from dynamo.protocols import generate, model_card

FILE = b"\x89PNG\r\n"
IMAGE = {
    "type": "image_url",
    "image_url": {"url": f"data:image/png;base64,{base64.b64encode(FILE).decode()}"},
}
SAY = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, IMAGE]}]


@pytest.fixture
async def worker(rig):
    return await rig.worker("sees", runtime_config=model_card.ModelRuntimeConfig(max_images=1))


async def test_worker_gets_the_file(rig, worker):
    answer = await rig.chat(model="sees", messages=SAY)

    assert answer.status_code == 200
    assert worker.requests[-1].images == (FILE,)


async def test_usage_has_the_length_that_the_engine_counted(rig, worker):
    worker.script = [
        generate.Output((104,), None, cached_tokens=40, prompt_len=1000),
        *outputs("i"),
    ]
    usage = (await rig.chat(model="sees", messages=SAY)).json()["usage"]

    assert usage["prompt_tokens"] == 1000
    assert usage["prompt_tokens_details"]["cached_tokens"] == 40
    assert usage["total_tokens"] == 1000 + usage["completion_tokens"]


async def test_model_of_text_refuses_an_image_by_name(rig):
    await rig.worker("reads")
    answer = await rig.chat(model="reads", messages=SAY)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[1].type"


async def test_models_say_what_they_take(rig, worker):
    await rig.worker("reads")
    models = (await rig.client.get("/v1/models")).json()["data"]
    capabilities = {model["id"]: model["capabilities"] for model in models}

    assert "images" in capabilities["sees"]
    assert "images" not in capabilities["reads"]
