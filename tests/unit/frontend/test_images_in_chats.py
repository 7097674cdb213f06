"""Images reach a worker that takes them, and no other one, by each API with conversations."""

import base64

import pytest
from frontend_rig import outputs

from dynamo.protocols import generate, model_card

FILE = b"\x89PNG\r\n"
WORDS = {"type": "text", "text": "What is it?"}


def forms(encoded):
    """Return the path, body and place of an image for each API: encoded so in base64, with words."""
    url = f"data:image/png;base64,{encoded}"
    part = {"type": "image_url", "image_url": {"url": url}}
    block = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": encoded},
    }
    input_parts = [
        {"type": "input_text", "text": "What is it?"},
        {"type": "input_image", "image_url": url},
    ]
    asked = {"role": "user", "content": "What is it?", "images": [encoded]}
    return {
        "chat": ("/v1/chat/completions", {"messages": [user(part)]}, "messages[0].content[1]"),
        "messages": (
            "/v1/messages",
            {"max_tokens": 9, "messages": [user(block)]},
            "messages[0].content[1].source",
        ),
        "responses": (
            "/v1/responses",
            {"input": [{"role": "user", "content": input_parts}]},
            "input[0].content[1].image_url",
        ),
        "ollama chat": (
            "/api/chat",
            {"stream": False, "messages": [asked]},
            "messages[0].images[0]",
        ),
        "ollama prompt": (
            "/api/generate",
            {"stream": False, "prompt": "What is it?", "images": [encoded]},
            "images[0]",
        ),
    }


def user(image):
    return {"role": "user", "content": [WORDS, image]}


ENCODED = base64.b64encode(FILE).decode()
SAY = forms(ENCODED)["chat"][1]["messages"]
APIS = list(forms(ENCODED))


@pytest.fixture
async def worker(rig):
    return await rig.worker("sees", runtime_config=model_card.ModelRuntimeConfig(max_images=1))


@pytest.mark.parametrize("api", APIS)
async def test_worker_gets_the_file(rig, worker, api):
    worker.script = outputs("hi", "eos")
    path, body, _ = forms(ENCODED)[api]
    answer = await rig.client.post(path, json={"model": "sees", **body})

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


@pytest.mark.parametrize("api", APIS)
async def test_model_of_text_refuses_an_image_by_its_place(rig, api):
    path, body, place = forms(ENCODED)[api]
    answer = await rig.client.post(path, json={"model": "m", **body})

    assert answer.status_code == 400
    assert f"{place}: this model reads text only" in answer.text
    assert rig.one.requests == []


@pytest.mark.parametrize("api", APIS)
async def test_file_that_is_no_base64_is_refused_by_its_place(rig, worker, api):
    path, body, place = forms("a")[api]
    answer = await rig.client.post(path, json={"model": "sees", **body})

    assert answer.status_code == 400
    file_place = f"{place}.image_url.url" if api == "chat" else place
    assert f"{file_place}: expected base64" in answer.text


async def test_stored_response_keeps_its_images(rig, worker):
    path, body, _ = forms(ENCODED)["responses"]
    first = (await rig.client.post(path, json={"model": "sees", **body})).json()
    more = {"model": "sees", "input": "And now?", "previous_response_id": first["id"]}
    answer = await rig.client.post(path, json=more)

    assert answer.status_code == 200
    assert worker.requests[-1].images == (FILE,)


@pytest.mark.parametrize(
    ("path", "files", "place"),
    [
        ("/api/chat", [5], "messages[0].images[0]"),
        ("/api/chat", "x", "messages[0].images"),
        ("/api/generate", [5], "images[0]"),
    ],
)
async def test_ollamas_images_are_a_list_of_texts(rig, worker, path, files, place):
    fields = {"prompt": "hi", "images": files}
    if path == "/api/chat":
        fields = {"messages": [{"role": "user", "content": "hi", "images": files}]}
    answer = await rig.client.post(path, json={"model": "sees", **fields})

    assert answer.status_code == 400
    assert place in answer.json()["error"]


async def test_models_say_what_they_take(rig, worker):
    await rig.worker("reads")
    models = (await rig.client.get("/v1/models")).json()["data"]
    capabilities = {model["id"]: model["capabilities"] for model in models}

    assert "images" in capabilities["sees"]
    assert "images" not in capabilities["reads"]


async def test_ollama_calls_it_vision(rig, worker):
    seen, read = [
        (await rig.client.post("/api/show", json={"model": name})).json()["capabilities"]
        for name in ("sees", "m")
    ]

    assert "vision" in seen
    assert "vision" not in read
