"""What an exchange writes, byte by byte, without a socket."""

import gzip

import pytest

from dynamo.base import errors
from dynamo.runtime.http.exchange import Exchange, Request


class Wire:
    def __init__(self):
        self.writes = []

    def write(self, data):
        self.writes.append(data)

    def write_soon(self, data):
        self.writes.append(data)

    @property
    def text(self):
        return b"".join(self.writes)


class Rig:
    """An exchange, what it wrote, and how often it said that it was done."""

    def __init__(self, **request):
        self.wire, self.num_done = Wire(), 0
        fields = {"method": "GET", "path": "/", "query": "", "headers": {}, "body": b"", "peer": ""}
        self.exchange = Exchange(Request(**fields | request), self.wire, self.done)

    def done(self):
        self.num_done += 1


def head_and_body(text):
    head, _, body = text.partition(b"\r\n\r\n")
    return head.decode().split("\r\n"), body


def test_response_is_one_write_with_its_content_length():
    rig = Rig()
    rig.exchange.respond(404, b"gone", content_type="text/plain", headers=(("x-a", "b"),))
    head, body = head_and_body(rig.wire.text)

    assert head[:2] == ["HTTP/1.1 404 Not Found", "content-type: text/plain"]
    assert head[2].startswith("date: ")
    assert head[2].endswith(" GMT")
    assert head[3:] == ["x-a: b", "content-length: 4"]
    assert body == b"gone"
    assert len(rig.wire.writes) == 1
    assert rig.num_done == 1


def test_response_without_content_has_no_content_length():
    rig = Rig(method="OPTIONS")
    rig.exchange.respond(204, b"")
    head, body = head_and_body(rig.wire.text)

    assert not any(line.startswith("content-length") for line in head)
    assert (body, rig.num_done) == (b"", 1)


def test_response_to_head_has_a_content_length_but_no_body():
    rig = Rig(method="HEAD")
    rig.exchange.respond(200, b"{}")
    head, body = head_and_body(rig.wire.text)

    assert "content-length: 2" in head
    assert body == b""


def test_stream_head_is_sent_with_the_first_chunk():
    rig = Rig()
    rig.exchange.start_stream(200, content_type="text/event-stream")
    before = list(rig.wire.writes)
    rig.exchange.write(b"data: 1\n\n")
    head, body = head_and_body(rig.wire.text)

    assert before == []
    assert len(rig.wire.writes) == 1
    assert head[-1] == "transfer-encoding: chunked"
    assert body == b"9\r\ndata: 1\n\n\r\n"


def test_last_chunk_is_sent_with_the_end_of_the_stream():
    rig = Rig()
    rig.exchange.start_stream(200, content_type="text/plain")
    rig.exchange.write(b"a")
    rig.exchange.write(b"x" * 16)
    rig.exchange.end(b"z")

    assert rig.wire.writes[1:] == [b"10\r\n" + b"x" * 16 + b"\r\n", b"1\r\nz\r\n0\r\n\r\n"]
    assert rig.num_done == 1


def test_empty_piece_is_not_sent_as_a_chunk():
    rig = Rig()
    rig.exchange.start_stream(200, content_type="text/plain")
    rig.exchange.write(b"")

    assert rig.wire.writes == []


def test_a_stream_without_pieces_is_complete_too():
    rig = Rig()
    rig.exchange.start_stream(200, content_type="text/plain")
    rig.exchange.end()

    assert head_and_body(rig.wire.text)[1] == b"0\r\n\r\n"


def test_stream_to_an_http_1_0_client_ends_by_closing_the_connection():
    rig = Rig(is_http_1_0=True, keeps_alive=True)
    rig.exchange.start_stream(200, content_type="text/plain")
    rig.exchange.write(b"a")
    rig.exchange.write(b"b")
    rig.exchange.end(b"c")
    head, body = head_and_body(rig.wire.text)

    assert "connection: close" in head
    assert not any(line.startswith("transfer-encoding") for line in head)
    assert body == b"abc"
    assert not rig.exchange.request.keeps_alive


def test_response_to_an_http_1_0_client_says_keep_alive():
    rig = Rig(is_http_1_0=True, keeps_alive=True)
    rig.exchange.respond(200, b"")

    assert "connection: keep-alive" in head_and_body(rig.wire.text)[0]


def test_stream_in_response_to_head_has_no_body():
    rig = Rig(method="HEAD")
    rig.exchange.start_stream(200, content_type="text/plain")
    rig.exchange.write(b"a")
    rig.exchange.write(b"b")
    rig.exchange.end(b"c")

    assert head_and_body(rig.wire.text)[1] == b""


def test_writes_after_the_end_are_dropped():
    rig = Rig()
    rig.exchange.respond(200, b"1")
    rig.exchange.respond(200, b"2")
    rig.exchange.write(b"3")
    rig.exchange.end(b"4")

    assert head_and_body(rig.wire.text)[1] == b"1"
    assert rig.num_done == 1


def test_a_second_status_for_a_stream_is_a_bug_of_ours():
    rig = Rig()
    rig.exchange.start_stream(200, content_type="text/plain")

    with pytest.raises(errors.LocalProtocolError):
        rig.exchange.respond(500, b"")
    with pytest.raises(errors.LocalProtocolError):
        rig.exchange.start_stream(200, content_type="text/plain")


def test_disconnect_calls_its_listener_once():
    rig, told = Rig(), []
    rig.exchange.on_disconnect(lambda: told.append(1))
    rig.exchange.disconnected()
    rig.exchange.disconnected()
    rig.exchange.write(b"x")

    assert told == [1]
    assert rig.exchange.is_closed
    assert rig.wire.writes == []


def test_a_disconnect_that_came_first_is_told_at_once():
    rig, told = Rig(), []
    rig.exchange.disconnected()
    rig.exchange.on_disconnect(lambda: told.append(1))

    assert told == [1]


def test_a_disconnect_after_the_answer_is_nobodys_affair():
    rig, told = Rig(), []
    rig.exchange.on_disconnect(lambda: told.append(1))
    rig.exchange.respond(200, b"")
    rig.exchange.disconnected()

    assert told == []


@pytest.mark.parametrize("accepted", ["gzip", "br, GZIP;q=0.5, *;q=0", "deflate, gzip"])
def test_answer_is_compressed_for_a_client_that_asks(accepted):
    rig = Rig(headers={"accept-encoding": accepted})
    text = b"word " * 1000
    rig.exchange.respond(200, text, content_type="text/plain")
    head, body = head_and_body(rig.wire.text)

    assert gzip.decompress(body) == text
    assert {"content-encoding: gzip", "vary: accept-encoding"} <= set(head)
    assert f"content-length: {len(body)}" in head


@pytest.mark.parametrize(
    ("accepted", "size", "content_type"),
    [
        ("", 5000, "text/plain"),
        ("gzip;q=0", 5000, "text/plain"),
        ("identity", 5000, "text/plain"),
        ("gzip", 1000, "text/plain"),
        ("gzip", 300_000, "text/plain"),
        ("gzip", 5000, "image/png"),
    ],
)
def test_other_answers_are_not_compressed(accepted, size, content_type):
    rig = Rig(headers={"accept-encoding": accepted})
    rig.exchange.respond(200, b"x" * size, content_type=content_type)

    assert head_and_body(rig.wire.text)[1] == b"x" * size


def test_stream_is_not_compressed():
    rig = Rig(headers={"accept-encoding": "gzip"})
    rig.exchange.start_stream(200, content_type="text/event-stream")
    rig.exchange.end(b"x" * 5000)

    assert b"x" * 5000 in rig.wire.text
