"""API keys and limits apply to embeddings and to KServe over HTTP and gRPC."""

import numpy
import pytest
from tritonclient import utils
from tritonclient.grpc import InferInput
from tritonclient.grpc import aio as triton

KEYS = """
[[keys]]
name = "all"
key = "sk-every-1"
admin = true

[[keys]]
name = "few"
key = "sk-afew-12"
requests_per_minute = 1
models = ["e"]

[[keys]]
name = "tok"
key = "sk-token-1"
tokens_per_minute = 20
"""
INFER = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hi"]}]}


def as_(key):
    return {"authorization": f"Bearer {key}"}


ALL, FEW, TOK = map(as_, ("sk-every-1", "sk-afew-12", "sk-token-1"))


@pytest.fixture
async def keyed(bare, tmp_path):
    """A frontend with keys and gRPC, a worker for text (m) and one for vectors (e)."""
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    await bare.start(api_keys_file=str(path), kserve_grpc_server=True, kserve_grpc_port=0)
    bare.one = await bare.worker()
    bare.two = await bare.embedder()
    return bare


@pytest.fixture
async def client(keyed):
    async with triton.InferenceServerClient(f"127.0.0.1:{keyed.frontend.grpc_port}") as made:
        yield made


def text_input():
    made = InferInput("text_input", [1], "BYTES")
    made.set_data_from_numpy(numpy.array([b"hi"], dtype=object))
    return made


async def embed(rig, headers, text="hi"):
    body = {"model": "e", "input": text}
    return await rig.client.post("/v1/embeddings", json=body, headers=headers)


async def test_embeddings_need_a_key_and_are_charged(keyed):
    assert (await embed(keyed, {})).status_code == 401
    assert [(await embed(keyed, FEW)).status_code for _ in range(2)] == [200, 429]
    assert [(await embed(keyed, TOK, "x" * 15)).status_code for _ in range(2)] == [200, 429]


async def test_embeddings_obey_the_concurrency_limit(bare):
    await bare.start(rejection_frontend_request_concurrency_limit=1)
    worker = await bare.embedder()
    worker.script = lambda call, request: None
    first = bare.start_task(bare.embed("a"))
    await bare.until(lambda: worker.calls)

    refused = await bare.embed("b")
    first.cancel()
    await bare.until(lambda: worker.num_cancelled)
    worker.script = None

    assert refused.status_code == 503
    assert (await bare.embed("c")).status_code == 200


async def test_kserve_http_needs_a_key_that_allows_the_model(keyed):
    post = keyed.client.post
    assert (await post("/v2/models/m/infer", json=INFER)).status_code == 401
    assert (await post("/v2/models/m/infer", json=INFER, headers=FEW)).status_code == 404
    assert (await post("/v2/models/m/infer", json=INFER, headers=ALL)).status_code == 200
    assert (await keyed.client.get("/v2/models/m", headers=FEW)).status_code == 404
    assert (await keyed.client.get("/v2/models/m")).status_code == 401
    assert (await keyed.client.get("/v2/health/ready")).status_code == 200


@pytest.mark.parametrize(("headers", "code"), [({}, "UNAUTHENTICATED"), (FEW, "NOT_FOUND")])
async def test_kserve_grpc_needs_the_same_key(keyed, client, headers, code):
    for ask in (
        lambda: client.infer("m", [text_input()], headers=headers),
        lambda: client.get_model_config("m", headers=headers),
    ):
        with pytest.raises(utils.InferenceServerException) as caught:
            await ask()
        assert caught.value.status() in (f"StatusCode.{code}", "StatusCode.RESOURCE_EXHAUSTED")
    assert not keyed.one.calls


async def test_readiness_over_kserve_grpc_is_that_of_models_that_the_key_may_ask(client):
    with pytest.raises(utils.InferenceServerException) as caught:
        await client.is_model_ready("m")

    assert caught.value.status() == "StatusCode.UNAUTHENTICATED"
    assert not await client.is_model_ready("m", headers=FEW)
    assert await client.is_model_ready("m", headers=ALL)


async def test_kserve_grpc_with_a_key_is_answered_and_limited(client):
    answer = await client.infer("m", [text_input()], headers=ALL)
    await client.infer("m", [text_input()], headers=TOK, parameters={"max_tokens": 5})
    tired = None
    for _ in range(20):
        try:
            await client.infer("m", [text_input()], headers=TOK, parameters={"max_tokens": 5})
        except utils.InferenceServerException as error:
            tired = error.status()

    assert answer.as_numpy("text_output")[0] == b"hello"
    assert tired == "StatusCode.RESOURCE_EXHAUSTED"
    assert await client.is_server_live()
