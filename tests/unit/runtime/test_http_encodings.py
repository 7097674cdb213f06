"""Compressed bodies: inflated within bounds, or refused by name."""

import gzip
import os
import time

import pytest
from backports import zstd

from dynamo.runtime.http import encodings, exchange, parser, server

TEXT = b'{"model": "m"}' * 1000
COMPRESS = {"gzip": gzip.compress, "zstd": zstd.compress}


class Wire:
    """A connection that keeps what is written, and has room for `room` bytes of bodies."""

    def __init__(self, room=10**9):
        self.text, self.room, self.released = b"", room, []

    def write(self, data):
        self.text += data

    def keep_body(self, num_bytes):
        return num_bytes <= self.room

    def release_body(self, num_bytes):
        self.released.append(num_bytes)


async def ask(body, encoding, *, limit=10**6, room=10**9):
    """Send a body through the inflater; return the wire, and the bodies that the handler got."""
    bodies = []

    def handle(client):
        bodies.append(client.request.body)
        client.respond(200, b"")

    headers = {} if encoding is None else {"content-encoding": encoding}
    wire = Wire(room)
    request = exchange.Request(
        method="POST", path="/", query="", headers=headers, body=body, peer=""
    )
    inflater = encodings.BodyInflater(handle, lambda _: limit, server.plain_error)
    answering = inflater(exchange.Exchange(request, wire, lambda: None))
    if answering is not None:
        await answering
    return wire, bodies


@pytest.mark.parametrize("encoding", COMPRESS)
async def test_compressed_body_is_inflated(encoding):
    compressed = COMPRESS[encoding](TEXT)
    wire, bodies = await ask(compressed, encoding.upper())

    assert bodies == [TEXT]
    assert wire.released == [len(compressed)]


@pytest.mark.parametrize("encoding", COMPRESS)
async def test_members_after_another_are_one_body(encoding):
    _, bodies = await ask(COMPRESS[encoding](b"a") + COMPRESS[encoding](b"b"), encoding)

    assert bodies == [b"ab"]


@pytest.mark.parametrize("encoding", COMPRESS)
async def test_body_of_a_hundred_thousand_members_is_refused_at_once(encoding):
    before = time.process_time()
    wire, bodies = await ask(COMPRESS[encoding](b"") * 100_000, encoding)

    assert bodies == []
    assert b"expected at most 100 members" in wire.text
    assert time.process_time() - before < 0.5


@pytest.mark.parametrize("encoding", [None, "identity"])
async def test_body_without_encoding_is_passed_on(encoding):
    assert (await ask(TEXT, encoding))[1] == [TEXT]


@pytest.mark.parametrize("encoding", COMPRESS)
@pytest.mark.parametrize("limit", [9_999, 100])
async def test_body_that_inflates_beyond_the_limit_is_413(encoding, limit):
    wire, bodies = await ask(COMPRESS[encoding](bytes(10_000)), encoding, limit=limit)

    assert bodies == []
    assert wire.text.startswith(b"HTTP/1.1 413 ")
    assert b"%d bytes when it is inflated" % limit in wire.text


@pytest.mark.parametrize("encoding", COMPRESS)
async def test_bomb_takes_no_more_memory_than_the_limit(encoding):
    bomb = COMPRESS[encoding](bytes(200 * 2**20))
    with pytest.raises(parser.RequestRefused):
        encodings.inflate(bomb, encoding, 1000)
    before = os.times()
    with pytest.raises(parser.RequestRefused):
        encodings.inflate(bomb, encoding, 1000)
    after = os.times()

    assert after.user + after.system - before.user - before.system < 0.2


@pytest.mark.parametrize("encoding", COMPRESS)
@pytest.mark.parametrize("body", [b"plain text", b"", None])
async def test_broken_body_is_400(encoding, body):
    broken = COMPRESS[encoding](TEXT)[:-5] if body is None else body
    wire, bodies = await ask(broken, encoding)

    if broken:
        assert wire.text.startswith(b"HTTP/1.1 400 ")
    else:
        assert bodies == [b""]


async def test_zstd_with_a_huge_window_is_refused():
    options = {zstd.CompressionParameter.window_log: 27}
    wire, _ = await ask(zstd.compress(os.urandom(9 * 2**20), options=options), "zstd", limit=10**8)

    assert wire.text.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip, zstd"])
async def test_other_encodings_are_415_by_name(encoding):
    wire, bodies = await ask(TEXT, encoding)

    assert bodies == []
    assert wire.text.startswith(b"HTTP/1.1 415 ")
    assert b"\r\naccept-encoding: gzip, zstd\r\n" in wire.text
    assert encoding.encode() in wire.text


async def test_inflated_body_without_room_is_503():
    wire, bodies = await ask(gzip.compress(TEXT), "gzip", room=1000)

    assert bodies == []
    assert wire.text.startswith(b"HTTP/1.1 503 ")
