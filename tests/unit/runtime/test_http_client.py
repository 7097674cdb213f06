"""HTTP requests to other processes: what they send, and how each failure is told."""

import asyncio
import contextlib

import pytest

from dynamo.base import errors
from dynamo.runtime.http import client
from waiting import PATIENT_S


@contextlib.asynccontextmanager
async def serving(answer):
    """Yield the address of a server that answers all requests alike, and the heads of these."""
    heads = []

    async def respond(reader, writer):
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        with contextlib.suppress(ConnectionError):
            writer.write(answer)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heads


async def test_request_has_target_headers_and_length():
    async with serving(b"HTTP/1.0 404 Not Found\r\nx: y\r\n\r\nno\r\n\r\nsuch") as (url, heads):
        answer = await client.request(
            "POST", f"{url}/a/%2F?b=c", b"{}", timeout_s=PATIENT_S, headers={"authorization": "k"}
        )

    assert answer == (404, b"no\r\n\r\nsuch")
    assert heads[0].startswith("POST /a/%2F?b=c HTTP/1.0\r\nhost: 127.0.0.1:")
    assert "authorization: k\r\ncontent-length: 2\r\n" in heads[0]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "expected an HTTP response, got b''"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "expected an HTTP response, got b'SSH"),
        (b"HTTP/1.0 200 OK\r\n\r\n" + b" " * 11, "expected at most 10 bytes"),
    ],
)
async def test_answer_of_another_kind_is_unavailable(answer, reason):
    async with serving(answer) as (url, _):
        with pytest.raises(errors.Unavailable, match=reason):
            await client.request("GET", url, timeout_s=PATIENT_S, max_bytes=10)


async def test_server_that_is_away_or_silent_is_unavailable(unused_tcp_port):
    with pytest.raises(errors.Unavailable, match="does not answer"):
        await client.request("GET", f"http://127.0.0.1:{unused_tcp_port}", timeout_s=PATIENT_S)
    has_ended = asyncio.Event()

    async def say_nothing(reader, writer):
        await reader.read()
        writer.close()
        has_ended.set()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(errors.Unavailable, match=r"no answer within 0\.05 s"):
            await client.request("GET", url, timeout_s=0.05)
        await has_ended.wait()


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host/file", "http://host:port"])
async def test_address_of_another_kind_is_refused(url):
    with pytest.raises(errors.ConfigError, match="expected one such as http"):
        await client.request("GET", url, timeout_s=PATIENT_S)


@pytest.mark.parametrize(
    "url", ["http://a..b", f"http://{'x' * 64}.example", "http://:80", "http://[::1", "ftp://a"]
)
async def test_url_of_no_host_is_refused(url):
    with pytest.raises(errors.ConfigError, match="expected one such as http://127"):
        await client.request("GET", url, timeout_s=PATIENT_S)
