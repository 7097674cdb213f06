"""HTTP/1.1 requests out of bytes, without any I/O; the only door to httptools.

Bytes in, requests out. What cannot be a request, or is larger than the limits, comes out as one `Refusal`, and after
that nothing more: the connection must answer it and close. No input raises.
"""

from dataclasses import dataclass, replace
from urllib.parse import unquote

import httptools

from dynamo.runtime.http.exchange import Request

NUM_CONNECTIONS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """The size, time and number that one HTTP server takes from clients; beyond them a client is refused or cut off."""

    header_bytes: int = 64 * 2**10
    num_headers: int = 100
    body_bytes: int = 192 * 2**20
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


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.refusal = Refusal(status, message)


class RequestParser:
    """The requests of one connection."""

    def __init__(self, limit: HttpLimits, peer: str) -> None:
        self._limit = limit
        self._peer = peer
        self._parser = httptools.HttpRequestParser(self)
        self._ready: list[Request | Refusal] = []
        self._dead = False
        self.wants_continue = False  # the client waits for "100 Continue" before it sends its body
        self._reset()

    def _reset(self) -> None:
        self._midway = False
        self._in_body = False
        self._head_bytes = 0
        self._url = b""
        self._headers: dict[str, str] = {}
        self._num_headers = 0
        self._body: list[bytes] = []
        self._body_bytes = 0

    @property
    def is_midway(self) -> bool:
        """A request has begun and is not complete."""
        return self._midway

    def feed(self, data: bytes) -> list[Request | Refusal]:
        """Return the requests that became complete with `data`, in order."""
        if self._dead:
            return []
        self._ready = []
        try:
            self._parser.feed_data(data)
            self._count_unfinished_head(len(data))
        except httptools.HttpParserUpgrade:
            self._stay_with_http_1()
        except httptools.HttpParserCallbackError as error:
            self._refuse(error.__context__)
        except (httptools.HttpParserError, _Refused) as error:
            self._refuse(error)
        ready, self._ready = self._ready, []  # keep no body while the connection idles
        return ready

    def _refuse(self, error: BaseException | None) -> None:
        self._dead = True
        self.wants_continue = False
        if isinstance(error, _Refused):
            self._ready.append(replace(error.refusal, path=_split(self._url)[0]))
        else:
            self._ready.append(Refusal(400, f"expected an HTTP/1.1 request: {error}"))

    def _stay_with_http_1(self) -> None:
        """The client offered another protocol; its request is answered in this one, and then it is over."""
        self._dead = True
        last = self._ready.pop()
        if isinstance(last, Request):
            self._ready.append(last.as_last())

    def _count_unfinished_head(self, length: int) -> None:
        """A header line without end is never reported by httptools, so count what it swallows."""
        if not self._in_body and not self._ready:
            self._head_bytes += length
            if self._head_bytes > 2 * self._limit.header_bytes:
                raise self._head_too_large()

    def _head_too_large(self) -> _Refused:
        return _Refused(
            431, f"the request's headers exceed {self._limit.header_bytes} bytes: send less"
        )

    # What httptools calls, in the order of a request.

    def on_message_begin(self) -> None:
        self._reset()
        self._midway = True

    def on_url(self, url: bytes) -> None:
        self._url += url
        if len(self._url) > self._limit.header_bytes:
            raise _Refused(414, f"the request's URL exceeds {self._limit.header_bytes} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._head_bytes += len(name) + len(value)
        if self._num_headers > self._limit.num_headers:
            raise _Refused(431, f"expected at most {self._limit.num_headers} headers: send fewer")
        if self._head_bytes > self._limit.header_bytes:
            raise self._head_too_large()
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        earlier = self._headers.get(key)
        self._headers[key] = text if earlier is None else f"{earlier}, {text}"

    def on_headers_complete(self) -> None:
        self._in_body = True
        announced = self._headers.get("content-length", "")
        if announced.isdigit() and int(announced[:20]) > self._limit.body_bytes:
            raise self._body_too_large()
        expectation = self._headers.get("expect")
        if expectation is not None and expectation.lower() != "100-continue":
            raise _Refused(417, f"cannot meet the expectation {expectation[:100]!r}")
        self.wants_continue = expectation is not None and self._parser.get_http_version() != "1.0"

    def on_body(self, piece: bytes) -> None:
        self.wants_continue = False
        self._body_bytes += len(piece)
        if self._body_bytes > self._limit.body_bytes:
            raise self._body_too_large()
        self._body.append(piece)

    def _body_too_large(self) -> _Refused:
        return _Refused(
            413, f"the request's body exceeds {self._limit.body_bytes} bytes: send less"
        )

    def on_message_complete(self) -> None:
        path, query = _split(self._url)
        request = Request(
            method=self._parser.get_method().decode("latin-1"),
            path=path,
            query=query,
            headers=self._headers,
            body=self._body[0] if len(self._body) == 1 else b"".join(self._body),
            peer=self._peer,
            is_http_1_0=self._parser.get_http_version() == "1.0",
            keeps_alive=self._parser.should_keep_alive(),
        )
        self._ready.append(request)
        self.wants_continue = False
        self._reset()


def _split(url: bytes) -> tuple[str, str]:
    """Path and query of a request's target, which may be a whole URL."""
    target = url.decode("latin-1")
    if not target.startswith("/") and "://" in target:
        target = "/" + target.partition("://")[2].partition("/")[2]
    path, _, query = target.partition("?")
    return (unquote(path) if "%" in path else path), query.partition("#")[0]
