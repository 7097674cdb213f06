"""Bytes in, requests out; whatever the bytes are."""

import itertools
import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dynamo.runtime.http import parser

SMALL = parser.HttpLimits(header_bytes=1000, num_headers=10, body_bytes=100)


def parse(*pieces, limit=SMALL):
    reader = parser.RequestParser(limit, "peer")
    return [item for piece in pieces for item in reader.feed(piece)]


def test_a_request_comes_out_whole():
    (request,) = parse(
        b"POST /v1/x%20y?a=1&b#c HTTP/1.1\r\nHost: h\r\nX-Two: 1\r\nx-two: 2\r\nContent-Length: 2\r\n\r\nhi"
    )

    assert (request.method, request.path, request.query) == ("POST", "/v1/x y", "a=1&b")
    assert request.headers == {"host": "h", "x-two": "1, 2", "content-length": "2"}
    assert (request.body, request.peer) == (b"hi", "peer")
    assert request.keeps_alive
    assert not request.is_http_1_0


def test_a_body_in_one_piece_is_not_copied():
    reader = parser.RequestParser(parser.HttpLimits(), "peer")
    reader.feed(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000\r\n\r\n")
    data = b"x" * 1_000_000
    tracemalloc.start()

    (request,) = reader.feed(data)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert request.body == data
    assert peak_bytes < 1.5 * len(data)  # httptools makes the piece, which is the body


def test_a_chunked_body_is_put_together():
    (request,) = parse(
        b"POST / HTTP/1.1\r\nhost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1;x=y\r\nc\r\n0\r\n\r\n"
    )

    assert request.body == b"abc"


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"http://host:1/a?b", "/a"),
        (b"http://host", "/"),
        (b"/a//b", "/a//b"),
        (b"/%zz%2Fq", "/%zz/q"),
    ],
)
def test_the_path_of_a_target(target, path):
    (request,) = parse(b"GET " + target + b" HTTP/1.1\r\nhost: h\r\n\r\n")

    assert request.path == path


@pytest.mark.parametrize(
    ("head", "is_http_1_0", "keeps_alive"),
    [
        (b"GET / HTTP/1.1\r\nhost: h\r\n", False, True),
        (b"GET / HTTP/1.1\r\nhost: h\r\nConnection: close\r\n", False, False),
        (b"GET / HTTP/1.0\r\n", True, False),
        (b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n", True, True),
    ],
)
def test_http_version_decides_whether_the_connection_is_kept(head, is_http_1_0, keeps_alive):
    (request,) = parse(head + b"\r\n")

    assert (request.is_http_1_0, request.keeps_alive) == (is_http_1_0, keeps_alive)


def test_pipelined_requests_are_parsed_in_order():
    paths = [
        r.path
        for r in parse(
            b"GET /1 HTTP/1.1\r\nhost: h\r\n\r\nGET /2 HTTP/1.1\r\nhost: h\r\n\r\nGET /3 HT"
        )
    ]

    assert paths == ["/1", "/2"]


@pytest.mark.parametrize("cut", [1, 60, 150, 10_000])
def test_offer_of_another_protocol_is_ignored_and_the_body_read(cut):
    data = (
        b"POST /a?b HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: 5\r\nHost: h\r\n"
        b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\nUpgrade: h2c\r\nX-A: 1\r\nx-a: 2\r\n\r\nhello"
        b"GET /next HTTP/1.1\r\nhost: h\r\n\r\n"
    )
    first, second = parse(data[:cut], data[cut:])

    assert (first.method, first.path, first.query, first.body) == ("POST", "/a", "b", b"hello")
    assert first.headers == {"content-length": "5", "host": "h", "x-a": "1, 2"}
    assert first.keeps_alive
    assert (second.path, second.body) == ("/next", b"")


def test_chunked_body_behind_an_offer_is_read():
    (request,) = parse(
        b"POST / HTTP/1.1\r\nhost: h\r\nConnection: upgrade, close\r\nUpgrade: websocket\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"
    )

    assert request.body == b"ab"
    assert not request.keeps_alive


def test_nothing_is_parsed_after_a_tunnel():
    (request,) = parse(
        b"CONNECT h:1 HTTP/1.1\r\nhost: h\r\n\r\n", b"GET / HTTP/1.1\r\nhost: h\r\n\r\n"
    )

    assert request.method == "CONNECT"


def refuse_strangers(head):
    if "x-key" not in head.headers:
        raise parser.RequestRefused(401, "no key", body=b"sorry")
    return 10


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 5\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n",
        b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n",
    ],
)
def test_head_is_checked_before_the_body_comes(framing):
    reader = parser.RequestParser(SMALL, "", refuse_strangers)
    (refusal,) = reader.feed(b"POST / HTTP/1.1\r\nhost: h\r\n" + framing)

    assert (refusal.status, refusal.body) == (401, b"sorry")
    assert not reader.wants_continue
    assert reader.feed(b"hello") == []


def test_route_decides_how_large_a_body_may_be():
    head = b"POST / HTTP/1.1\r\nhost: h\r\nX-Key: 1\r\nContent-Length: %d\r\n\r\n"
    reader = parser.RequestParser(SMALL, "", refuse_strangers)
    (request,) = reader.feed(head % 10 + b"x" * 10)
    (refusal,) = reader.feed(head % 11)

    assert len(request.body) == 10
    assert (refusal.status, "10 bytes" in refusal.message) == (413, True)


def test_body_without_room_is_refused_with_a_time_to_retry():
    asked = []
    limit = parser.HttpLimits(body_bytes=10 * parser.FREE_BODY_BYTES)
    reader = parser.RequestParser(limit, "", None, lambda num: asked.append(num) or len(asked) < 2)
    reader.feed(b"POST / HTTP/1.1\r\nhost: h\r\nContent-Length: 100000\r\n\r\n")
    reader.feed(b"x" * (parser.FREE_BODY_BYTES + 7))
    (refusal,) = reader.feed(b"x" * 5)

    assert asked == [7, 5]
    assert (refusal.status, refusal.headers) == (503, (("retry-after", "1"),))


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: h\r\nbad header\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: h\r\nContent-Length: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: h\r\nContent-Length: -1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (
            b"GET / HTTP/1.1\r\nhost: h\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
            400,
        ),
        (b"POST / HTTP/1.1\r\nhost: h\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: h\r\n" + b"a: b\r\n" * 11 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nhost: h\r\na: " + b"b" * 1001 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nhost: h\r\na: " + b"b" * 3000, 431),
        (b"GET /" + b"b" * 1001, 414),
        (b"POST / HTTP/1.1\r\nhost: h\r\nContent-Length: 101\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nhost: h\r\nContent-Length: 18446744073709551615\r\n\r\n", 413),
        (
            b"POST / HTTP/1.1\r\nhost: h\r\nTransfer-Encoding: chunked\r\n\r\n65\r\n" + b"x" * 101,
            413,
        ),
        (b"POST / HTTP/1.1\r\nhost: h\r\nExpect: wonders\r\n\r\n", 417),
    ],
)
def test_nothing_is_parsed_after_a_refused_request(data, status):
    refusal, *rest = parse(data, b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")

    assert refusal.status == status
    assert refusal.message
    assert rest == []


def test_endless_header_line_is_refused_once():
    reader = parser.RequestParser(SMALL, "")
    reader.feed(b"GET / HTTP/1.1\r\nhost: h\r\na: ")
    items = [item for _ in range(30) for item in reader.feed(b"b" * 100)]

    assert [item.status for item in items] == [431]


CHUNKED = b"POST / HTTP/1.1\r\nhost: h\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_trailers_are_no_headers():
    requests = parse(
        CHUNKED + b"1\r\na\r\n0\r\nx-api-key: k\r\nhost: other\r\n\r\n",
        b"GET /next HTTP/1.1\r\nhost: h\r\n\r\n",
    )

    assert [request.headers for request in requests] == [
        {"host": "h", "transfer-encoding": "chunked"},
        {"host": "h"},
    ]
    assert requests[0].body == b"a"


@pytest.mark.parametrize("line", [b"0\r\nx-trailer: ", b"1;extension="])
def test_endless_line_between_chunks_is_refused_once(line):
    pieces = [CHUNKED + b"1\r\na\r\n" + line, *[b"a" * 500] * 10]

    (refusal,) = parse(*pieces)

    assert refusal.status == 431


def test_lines_of_many_chunks_that_come_by_themselves_are_not_refused():
    pieces = [CHUNKED, *[b"1\r\n", b"a\r\n"] * 1000, b"0\r\n\r\n"]
    limit = parser.HttpLimits(header_bytes=1000, body_bytes=1000)

    (request,) = parse(*pieces, limit=limit)

    assert request.body == b"a" * 1000


def test_tiny_chunks_take_no_more_memory_than_their_bytes():
    reader = parser.RequestParser(parser.HttpLimits(), "peer")
    reader.feed(CHUNKED)
    pieces = b"2\r\nab\r\n" * 5000
    tracemalloc.start()
    try:
        reader.feed(pieces)
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert num_bytes < 40_000


def test_a_long_body_does_not_count_as_head():
    limit = parser.HttpLimits(header_bytes=100, body_bytes=10_000)
    (request,) = parse(
        b"POST / HTTP/1.1\r\nhost: h\r\nContent-Length: 5000\r\n\r\n", b"x" * 5000, limit=limit
    )

    assert len(request.body) == 5000


def test_wants_continue_is_true_until_the_body_arrives():
    reader = parser.RequestParser(SMALL, "")
    reader.feed(b"POST / HTTP/1.1\r\nhost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    before = reader.wants_continue
    reader.feed(b"a")

    assert before
    assert not reader.wants_continue


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=3))
@example(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n", [3])
def test_garbage_never_raises(data, cuts):
    edges = [0, *sorted(cuts), len(data)]
    items = parse(*[data[a:b] for a, b in itertools.pairwise(edges)])

    assert all(isinstance(item, parser.Request | parser.Refusal) for item in items)


PIECES = st.sampled_from(
    [b"GET", b" ", b"/", b"HTTP/1.1", b"\r\n", b"\r\n\r\n", b"Content-Length: ", b"5", b"hello",
     b"Transfer-Encoding: chunked", b"0\r\n\r\n", b"Upgrade: x", b"Connection: upgrade", b"\n", b"\x00",
     b"Expect: 100-continue", b"CONNECT", b"a:b", b"?", b"%"]
)  # fmt: skip


@given(st.lists(PIECES, max_size=30))
def test_malformed_input_parses_alike_however_split(pieces):
    def facts(items):
        return [
            (item.path, item.body) if isinstance(item, parser.Request) else item.status
            for item in items
        ]

    assert facts(parse(*pieces)) == facts(parse(b"".join(pieces)))


@given(st.binary(max_size=100), st.integers(1, 20))
def test_request_parses_alike_however_split(body, step):
    data = b"POST /p HTTP/1.1\r\nhost: h\r\nA: b\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    (whole,) = parse(data)
    (cut,) = parse(*[data[i : i + step] for i in range(0, len(data), step)])

    assert cut == whole
