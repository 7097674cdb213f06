"""HTTP/1.1 requests out of bytes, without any I/O; the only door to httptools.

Bytes in, requests out. What cannot be a request, or is larger than the limits, comes out as one `Refusal`, and after
that nothing more: the connection must answer it and close. No input raises.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from urllib.parse import unquote

import httptools
import msgspec

from dynamo.runtime.http.exchange import BodySink, Headers, Request

NUM_CONNECTIONS = 10_000
# of each body, which do not count towards `HttpLimits.kept_body_bytes`
FREE_BODY_BYTES = 16 * 2**10
_OFFER_HEADERS = frozenset(("upgrade", "connection", "http2-settings"))


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """The size, time and number that one HTTP server takes from clients; beyond them a client is refused or cut off."""

    header_bytes: int = 64 * 2**10
    num_headers: int = 100
    body_bytes: int = 8 * 2**20  # of one request, where its route allows no more
    kept_body_bytes: int = 512 * 2**20  # of all requests together
    request_s: float = 60.0  # a request, once begun, must have arrived
    idle_s: float = 75.0  # between two requests of a connection
    write_buffer_bytes: int = 8 * 2**20  # what may wait for a client that does not read
    num_connections: int = NUM_CONNECTIONS
    linger_s: float = 5.0  # a refused client may go on sending before it is cut off
    sweep_s: float = 1.0  # how often, and so how exactly, the times above are looked at


@dataclass(frozen=True, slots=True)
class Refusal:
    """The bytes were no acceptable request: answer with this and close."""

    status: int
    message: str
    path: str = ""  # as far as it is known
    request_headers: dict[str, str] = field(default_factory=dict)  # likewise
    body: bytes | None = None  # of the answer; None: the server makes one from the message
    headers: Headers = ()

    def as_request(self) -> Request:
        """Return what is known of the request, as the last one of its connection."""
        return Request(
            method="",
            path=self.path,
            query="",
            headers=self.request_headers,
            body=b"",
            peer="",
            keeps_alive=False,
        )


NO_ROOM = Refusal(
    503,
    "the bodies of requests that arrive here take all the memory that they may: try again later",
    headers=(("retry-after", "1"),),
)


class RequestRefused(Exception):
    """A request that is refused before its body has come."""

    def __init__(
        self, status: int, message: str, *, body: bytes | None = None, headers: Headers = ()
    ) -> None:
        super().__init__(message)
        self.refusal = Refusal(status, message, body=body, headers=headers)


# returns how many bytes a body may have; raises RequestRefused
CheckHead = Callable[[Request], int]
# returns what takes the body of a request as it arrives; raises RequestRefused
OpenSink = Callable[[Request], BodySink | None]
KeepBytes = Callable[[int], bool]  # takes room for bytes of a body; false: there is none


def counted_bytes(body_bytes: int) -> int:
    """Return how many bytes of a body count towards `HttpLimits.kept_body_bytes`."""
    return max(0, body_bytes - FREE_BODY_BYTES)


class RequestParser:
    """The requests of one connection. `check_head` is asked once the headers of a request with a body are in."""

    def __init__(
        self,
        limit: HttpLimits,
        peer: str,
        check_head: CheckHead | None = None,
        keep_bytes: KeepBytes = lambda num_bytes: True,
        open_sink: OpenSink = lambda request: None,
    ) -> None:
        self._limit = limit
        self._peer = peer
        self._check_head = check_head
        self._keep_bytes = keep_bytes
        self._open_sink = open_sink
        self._sink: BodySink | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._ready: list[Request | Refusal] = []
        self._dead = False
        # a request that offers another protocol is the last one of the connection
        self.takes_upgrades = False
        self.wants_continue = False  # the client waits for "100 Continue" before it sends its body
        self._reset()

    def _reset(self) -> None:
        self.is_midway = False  # a request has begun and is not complete
        self._in_body = False
        self._is_offer = False  # of another protocol
        self._head_bytes = 0
        self._url = b""
        self._headers: dict[str, str] = {}
        self._num_headers = 0
        self._body: bytes | bytearray = b""
        self._body_bytes = 0
        self._max_body_bytes = self._limit.body_bytes
        if self._sink is not None:
            self._sink.close()
            self._sink = None

    @property
    def has_sink(self) -> bool:
        """Return whether the body that arrives goes to a sink."""
        return self._sink is not None

    def feed(self, data: bytes) -> list[Request | Refusal]:
        """Return the requests that became complete with `data`, in order."""
        if self._dead:
            return []
        self._ready = []
        was_in_body, earlier = self._in_body, self._body_bytes
        try:
            self._feed(data)
            if not self._ready and (self._in_body, self._body_bytes) == (was_in_body, earlier):
                self._count_unfinished_line(len(data))
        except httptools.HttpParserCallbackError as error:
            self._refuse(error.__context__)
        except (httptools.HttpParserError, RequestRefused) as error:
            self._refuse(error)
        ready, self._ready = self._ready, []  # keep no body while the connection idles
        return ready

    def _refuse(self, error: BaseException | None) -> None:
        self._dead = True
        self.wants_continue = False
        if isinstance(error, RequestRefused):
            path, _ = _split(self._url)
            self._ready.append(replace(error.refusal, path=path, request_headers=self._headers))
        else:
            self._ready.append(Refusal(400, f"expected an HTTP/1.1 request: {error}"))
        self._reset()  # its body takes no memory while the client is answered

    def abandon(self) -> None:
        """Drop the request that has begun; nothing more is parsed."""
        self._dead = True
        self.wants_continue = False
        self._reset()

    def _feed(self, data: bytes) -> None:
        """Parse, and stay with HTTP/1.1 where the client offers another protocol, as Java's does with h2c.

        httptools takes what follows such an offer for the other protocol, so a new parser gets the same head without
        the offer, and then the body. A tunnel (CONNECT) has no body, and nothing follows its answer.
        """
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if not self._is_offer:
                self._dead = True
                return
            head = self._head_without_offer()
            self._parser = httptools.HttpRequestParser(self)
            self._parser.feed_data(head)
            self._feed(data[offer.args[0] :])

    def _head_without_offer(self) -> bytes:
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self._url, version)]
        for name, text in self._headers.items():
            if name not in _OFFER_HEADERS:
                lines.append(f"{name}: {text}".encode("latin-1"))
        if "close" in self._headers.get("connection", "").lower():
            lines.append(b"connection: close")
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _count_unfinished_line(self, length: int) -> None:
        """A header or trailer without end is never reported by httptools, so count what it swallows."""
        self._head_bytes += length
        if self._head_bytes > 2 * self._limit.header_bytes:
            raise self._head_too_large()

    def _head_too_large(self) -> RequestRefused:
        return RequestRefused(
            431, f"the request's headers exceed {self._limit.header_bytes} bytes: send less"
        )

    # What httptools calls, in the order of a request.

    def on_message_begin(self) -> None:
        if self.is_midway:  # it begins again, without its offer of another protocol
            self._reset()
        self.is_midway = True

    def on_url(self, url: bytes) -> None:
        self._url += url
        if len(self._url) > self._limit.header_bytes:
            raise RequestRefused(414, f"the request's URL exceeds {self._limit.header_bytes} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:  # a trailer, which no one has checked as a header (RFC 9110, 6.5.1)
            return
        self._num_headers += 1
        self._head_bytes += len(name) + len(value)
        if self._num_headers > self._limit.num_headers:
            raise RequestRefused(
                431, f"expected at most {self._limit.num_headers} headers: send fewer"
            )
        if self._head_bytes > self._limit.header_bytes:
            raise self._head_too_large()
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        headers = self._headers
        headers[key] = f"{headers[key]}, {text}" if key in headers else text

    def on_headers_complete(self) -> None:
        method = self._parser.get_method().decode("latin-1")
        is_offer = self._parser.should_upgrade() and method != "CONNECT"
        if is_offer and not self.takes_upgrades:
            self._is_offer = True  # `_feed` begins again without it
            return
        self._in_body = True
        path, query = _split(self._url)
        self._request = Request(
            method=method,
            path=path,
            query=query,
            headers=self._headers,
            body=b"",
            peer=self._peer,
            is_http_1_0=self._parser.get_http_version() == "1.0",
            keeps_alive=self._parser.should_keep_alive() and not is_offer,
        )
        host = self._headers.get("host")
        if (host is None and not self._request.is_http_1_0) or "," in (host or ""):
            message = f"expected the header Host once, got {host or 'none'!r}"
            raise RequestRefused(400, message[:300])
        announced = self._headers.get("content-length", "0")
        if announced != "0" or "transfer-encoding" in self._headers:
            if self._check_head is not None:
                self._max_body_bytes = self._check_head(self._request)
            self._sink = self._open_sink(self._request)
            if self._sink is not None:
                self._max_body_bytes = self._sink.max_bytes
        if announced.isdigit() and int(announced[:20]) > self._max_body_bytes:
            raise self._body_too_large()
        expectation = self._headers.get("expect")
        if expectation is not None and expectation.lower() != "100-continue":
            raise RequestRefused(417, f"cannot meet the expectation {expectation[:100]!r}")
        self.wants_continue = expectation is not None and not self._request.is_http_1_0

    def on_body(self, piece: bytes) -> None:
        self.wants_continue = False
        self._head_bytes = 0  # what comes behind it may be a trailer
        earlier, self._body_bytes = self._body_bytes, self._body_bytes + len(piece)
        if self._body_bytes > self._max_body_bytes:
            raise self._body_too_large()
        if self._sink is not None:
            self._sink.write(piece)
            return
        if self._body_bytes > FREE_BODY_BYTES and not self._keep_bytes(
            counted_bytes(self._body_bytes) - counted_bytes(earlier)
        ):
            raise RequestRefused(NO_ROOM.status, NO_ROOM.message, headers=NO_ROOM.headers)
        if isinstance(self._body, bytearray):  # a list of tiny pieces would take much more
            self._body += piece
        else:  # the first is nearly always all of it, and then never copied
            self._body = bytearray(self._body + piece) if self._body else piece

    def _body_too_large(self) -> RequestRefused:
        return RequestRefused(
            413, f"the request's body exceeds {self._max_body_bytes} bytes: send less"
        )

    def on_message_complete(self) -> None:
        if self._is_offer:
            return
        request = self._request.with_body(bytes(self._body)) if self._body else self._request
        if self._sink is not None:
            request, self._sink = msgspec.structs.replace(request, sink=self._sink), None
        self._ready.append(request)
        self.wants_continue = False
        self._reset()


def _split(url: bytes) -> tuple[str, str]:
    """Path and query of a request's target, which may be a whole URL."""
    target = url.decode("latin-1")
    if not target.startswith("/") and "://" in target:
        target = "/" + target.partition("://")[2].partition("/")[2]
    path, _, query = target.partition("?")
    return (unquote(path) if "%" in path else path), query.partition("#")[0] if query else ""
