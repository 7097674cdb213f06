"""Bodies before keys, large bodies, and offers of another protocol, at the port of a frontend."""

import asyncio
import json

import grpc
import pytest

from waiting import PATIENT_S

KEYS = '[[keys]]\nname = "alice"\nkey = "sk-alice-1"\n'


@pytest.fixture
async def guarded(bare, tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    await bare.start(api_keys_file=str(path))
    await bare.worker()
    return bare


async def send(rig, head, body=b""):
    """The answer to these bytes, with its head, until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.frontend.port)
    try:
        async with asyncio.timeout(PATIENT_S):
            writer.write(head.encode() + body)
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v2/models/m/infer"])
async def test_key_is_checked_before_the_body_comes(guarded, path):
    answer = await send(
        guarded,
        f"POST {path} HTTP/1.1\r\nhost: h\r\nexpect: 100-continue\r\ncontent-length: 5000000\r\n\r\n",
    )

    assert answer.startswith(b"HTTP/1.1 401")
    assert b"expected an API key" in answer
    assert b"100 Continue" not in answer


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer", "ModelMetadata"])
async def test_key_is_checked_before_a_message_comes_over_grpc(bare, tmp_path, method):
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    await bare.start(api_keys_file=str(path), kserve_grpc_server=True, kserve_grpc_port=0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{bare.frontend.grpc_port}") as channel:
        call = channel.stream_stream(f"/inference.GRPCInferenceService/{method}")()
        async with asyncio.timeout(PATIENT_S):
            code = await call.code()  # nothing was sent

    assert code is grpc.StatusCode.UNAUTHENTICATED


async def test_request_with_a_key_may_send_its_body(guarded):
    body = b'{"model":"m","prompt":"hi"}'
    answer = await send(
        guarded,
        "POST /v1/completions HTTP/1.1\r\nhost: h\r\nauthorization: Bearer sk-alice-1\r\nconnection: close\r\n"
        f"content-length: {len(body)}\r\n\r\n",
        body,
    )

    assert answer.startswith(b"HTTP/1.1 200")


async def test_offer_of_http_2_is_answered_in_http_1(rig):
    body = b'{"model":"m","prompt":"hi"}'
    answer = await send(
        rig,
        "POST /v1/completions HTTP/1.1\r\nhost: h\r\nconnection: Upgrade, HTTP2-Settings, close\r\n"
        f"content-length: {len(body)}\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\nupgrade: h2c\r\n\r\n",
        body,
    )

    assert answer.startswith(b"HTTP/1.1 200")
    assert b"hello" in answer


async def test_57_megabytes_of_lists_are_refused_by_their_head(rig):
    answer = await send(
        rig, "POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 57000000\r\n\r\n"
    )

    assert answer.startswith(b"HTTP/1.1 413")
    assert b"8388608 bytes" in answer


async def test_many_lists_within_the_limit_of_bytes_are_an_error_that_names_the_bound(rig):
    body = b'{"model":"m","prompt":[' + b"[]," * 2_000_000 + b"[]]}"
    answer = await rig.client.post("/v1/completions", content=body)

    assert answer.status_code == 400
    assert "300000 lists and objects" in answer.json()["error"]["message"]


async def test_embeddings_may_have_larger_bodies(rig):
    path = "/v1/embeddings"
    size = 9 * 2**20
    body = json.dumps({"model": "m", "input": "x" * size}).encode()
    answer = await rig.client.post(path, content=body)

    assert answer.status_code == 400
    assert "characters in all inputs together" in answer.json()["error"]["message"]


async def test_prompts_of_half_a_megabyte_reach_their_model(rig):
    body = json.dumps({"model": "m", "prompt": "x" * 500_000}).encode()
    answer = await rig.client.post("/v1/completions", content=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
