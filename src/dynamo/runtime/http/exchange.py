"""One HTTP request and its response, as a handler sees them, and the router that finds the handler.

A handler may answer at once (`respond`), or begin a stream and let callbacks write to it long after the handler has
returned. Nothing here waits: `write` hands bytes to the transport, and a client that does not read is cut off by the
connection when too much is waiting for it. So a token costs one `write`: no task, no queue, no timer. What is
written to all streams within one turn of the event loop goes to the kernel at its end, one call for each stream: that
joins the tokens of an engine that runs ahead, and code and kernel do not push each other out of the caches.
"""

import asyncio
import gzip
import http
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from functools import lru_cache
from typing import Protocol, TypeVar

import msgspec

from dynamo.base import errors

T = TypeVar("T")
Headers = Iterable[tuple[str, str]]
SMALL_BODY_BYTES = 256 * 2**10  # decoded at once, in some milliseconds at most
_COMPRESSED_BYTES = range(2**10, 256 * 2**10)  # of answers; the largest take some milliseconds
_large_bodies = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decode")
_NO_WEIGHT = re.compile(r"\s*q=0(\.0*)?\s*")
_REASONS = {status.value: status.phrase for status in http.HTTPStatus}
_NO_CONTENT = http.HTTPStatus.NO_CONTENT.value


async def decode_apart(
    body: bytes, decode: Callable[[bytes], T], at_once: int = SMALL_BODY_BYTES
) -> T:
    """Return the decoded body. One of more bytes than `at_once` is decoded in a thread, one at a time.

    So the event loop goes on.
    """
    if len(body) <= at_once:
        return decode(body)
    return await asyncio.get_running_loop().run_in_executor(_large_bodies, decode, body)


def encode_apart(encode: Callable[[], bytes]) -> asyncio.Future[bytes]:
    """Encode a large body in the thread that decodes large ones, one at a time."""
    return asyncio.get_running_loop().run_in_executor(_large_bodies, encode)


class BodySink(Protocol):
    """Takes the body of a request while it arrives."""

    max_bytes: int  # that the body may have

    def write(self, piece: bytes) -> None:
        """Take the next bytes. Raises `parser.RequestRefused`."""
        ...

    def close(self) -> None:
        """Delete what was not taken over: the request is answered, or its client is gone. Idempotent."""
        ...


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A complete request. Header names are in lower case; a header that came twice is joined by commas."""

    method: str
    path: str  # percent-decoded, without the query
    query: str  # as it came
    headers: dict[str, str]
    body: bytes
    peer: str
    sink: BodySink | None = None  # has taken the body, which is empty here
    is_http_1_0: bool = False
    keeps_alive: bool = True  # the connection may be used again

    def as_last(self) -> "Request":
        """Return the same request, as the last one before the connection closes."""
        return msgspec.structs.replace(self, keeps_alive=False)

    def with_body(self, body: bytes) -> "Request":
        return msgspec.structs.replace(self, body=body)


class Wire(Protocol):
    """The connection as an `Exchange` uses it, on the event loop's thread."""

    def write(self, data: bytes) -> None:
        """Send it now, after all that waits."""
        ...

    def write_soon(self, data: bytes) -> None:
        """Send it at the end of this turn of the event loop, joined with what else comes until then."""
        ...

    def keep_body(self, num_bytes: int) -> bool:
        """Take room for a body of this length; return False if there is none."""
        ...

    def release_body(self, num_bytes: int) -> None:
        """Take note that the body of the request, of this length, is no longer kept."""
        ...

    async def drain(self) -> None:
        """Wait until the client has read most of what was written, or is gone."""
        ...

    def divert(self, receive: Callable[[bytes], None]) -> None:
        """Pass all further bytes of the client to `receive`."""
        ...


class NoConnection:
    """The connection of an exchange that has none, for a request that this process makes itself."""

    def write(self, data: bytes) -> None:
        raise errors.LocalProtocolError(f"expected no write to a connection, got {len(data)} bytes")

    write_soon = write

    def keep_body(self, num_bytes: int) -> bool:
        """Return True: the maker of the request has bounds of its own."""
        del num_bytes
        return True

    def release_body(self, num_bytes: int) -> None:
        """Do nothing: the maker of the request has bounds of its own."""

    async def drain(self) -> None:
        """Return at once: nothing waits for a client."""

    def divert(self, receive: Callable[[bytes], None]) -> None:
        """Do nothing: no further bytes come."""


class Exchange:
    """Answer exactly once: `respond`, or `start_stream`, any number of `write`s and `end`.

    Once the client is gone (`is_closed`) all of them do nothing, so no check is needed before.
    """

    __slots__ = (
        "_closed",
        "_head",
        "_is_chunked",
        "_is_lost",
        "_on_complete",
        "_on_lost",
        "_streaming",
        "_wire",
        "cors_headers",
        "headers",
        "request",
    )

    def __init__(self, request: Request, wire: Wire, on_complete: Callable[[], None]) -> None:
        self.request = request
        self.headers: Headers = ()  # of every response to it
        self.cors_headers: Headers = ()  # likewise, for a page of another origin in a browser
        self._wire = wire
        self._on_complete = on_complete
        self._on_lost: Callable[[], None] | None = None
        self._head = b""  # waits for the first chunk
        self._is_chunked = not request.is_http_1_0 and request.method != "HEAD"
        self._streaming = False
        self._closed = False
        self._is_lost = False

    @property
    def is_closed(self) -> bool:
        """The answer is complete, or the client is gone."""
        return self._closed

    @property
    def is_streaming(self) -> bool:
        """A stream was started: it is too late for another status."""
        return self._streaming

    async def decode_body(self, decode: Callable[[bytes], T], at_once: int = SMALL_BODY_BYTES) -> T:
        """Return the decoded body, as `decode_apart` does; a large one is kept no longer."""
        try:
            return await decode_apart(self.request.body, decode, at_once)
        finally:
            if len(self.request.body) > SMALL_BODY_BYTES:
                self._drop_body()

    def replace_body(self, body: bytes) -> bool:
        """Put an inflated body in the place of the one that came; return False if there is no room for it."""
        if self._is_lost or not self._wire.keep_body(len(body)):
            return False
        self._wire.release_body(len(self.request.body))
        self.request = self.request.with_body(body)
        return True

    def _drop_body(self) -> None:
        self._wire.release_body(len(self.request.body))
        self.request = self.request.with_body(b"")

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """Call this once if the client goes before the answer is complete; at once if it went already."""
        if self._is_lost:
            callback()
        else:
            self._on_lost = callback

    def respond(
        self,
        status: int,
        body: bytes,
        *,
        content_type: str = "application/json",
        headers: Headers = (),
    ) -> None:
        """Answer with a complete body."""
        if self._closed:
            return
        if self._streaming:
            raise errors.LocalProtocolError("a stream has begun: it cannot get another status")
        if len(body) in _COMPRESSED_BYTES and self._wants_gzip(content_type):
            body = gzip.compress(body, compresslevel=1, mtime=0)
            headers = (*headers, ("content-encoding", "gzip"), ("vary", "accept-encoding"))
        head = self._make_head(status, content_type, headers)
        if status != _NO_CONTENT:  # RFC 9110, 8.6: that one must not have it
            head += b"content-length: %d\r\n" % len(body)
        head += b"\r\n"
        self._wire.write(head if self.request.method == "HEAD" else head + body)
        self._finish()

    def start_stream(self, status: int, *, content_type: str, headers: Headers = ()) -> None:
        """Answer piece by piece. The head goes out with the first piece, in one write."""
        if self._streaming:
            raise errors.LocalProtocolError("this stream has begun already")
        self._streaming = True
        if self.request.is_http_1_0:  # only the end of the connection can end the stream
            self.request = self.request.as_last()
            framing = b"\r\n"
        else:
            framing = b"transfer-encoding: chunked\r\n\r\n"
        self._head = self._make_head(status, content_type, headers) + framing

    def switch_protocol(self, headers: Headers, receive: Callable[[bytes], None]) -> None:
        """Answer 101: from now on `write` sends bytes as they are, and those of the client go to `receive`.

        Only for a server that takes upgrades, and a request that offers one. The connection ends with `end`.
        """
        self._streaming, self._is_chunked = True, False
        self.request = self.request.as_last()
        lines = "".join(f"{name}: {value}\r\n" for name, value in (*self.headers, *headers))
        self._wire.write(f"HTTP/1.1 101 Switching Protocols\r\n{lines}\r\n".encode("latin-1"))
        self._wire.divert(receive)

    def send_head(self) -> None:
        """Send the head of a stream now, because its first piece may come late."""
        if not self._closed:
            self._wire.write(self._framed(b""))

    def write(self, chunk: bytes) -> None:
        """Send a piece of the stream; an empty one sends nothing."""
        if self._closed or not chunk:
            return
        if self._is_chunked and not self._head:
            self._wire.write_soon(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        else:
            self._wire.write(self._framed(chunk))

    async def send(self, chunk: bytes) -> None:
        """Send a piece of a long stream as soon as the client has read most of those before."""
        self.write(chunk)
        if not self._closed:
            await self._wire.drain()

    def end(self, chunk: bytes = b"") -> None:
        """Complete the stream, with a last piece in the same write."""
        if self._closed:
            return
        last = self._framed(chunk)
        if self._is_chunked:
            last += b"0\r\n\r\n"
        self._wire.write(last)
        self._finish()

    def disconnected(self) -> None:
        """For the connection: the client is gone."""
        if self._closed:
            return
        self._closed = self._is_lost = True
        callback, self._on_lost = self._on_lost, None
        if callback is not None:
            callback()

    def _framed(self, chunk: bytes) -> bytes:
        """Return the bytes to send for `chunk`, behind the head if that still waits."""
        head, self._head = self._head, b""
        if self._is_chunked and chunk:
            return b"%b%x\r\n%b\r\n" % (head, len(chunk), chunk)
        return head if self.request.method == "HEAD" else head + chunk

    def _wants_gzip(self, content_type: str) -> bool:
        accepted = self.request.headers.get("accept-encoding", "")
        return content_type.startswith(("application/json", "text/")) and any(
            coding.strip().lower() == "gzip" and _NO_WEIGHT.fullmatch(weight) is None
            for coding, _, weight in (part.partition(";") for part in accepted.split(","))
        )

    def _finish(self) -> None:
        self._closed = True
        self._on_lost = None
        self._on_complete()

    def _make_head(self, status: int, content_type: str, headers: Headers) -> bytes:
        head = _first_lines(status, content_type, int(time.time()))
        for name, value in (*self.cors_headers, *self.headers, *headers):
            head += f"{name}: {value}\r\n"
        if not self.request.keeps_alive:
            head += "connection: close\r\n"
        elif self.request.is_http_1_0:
            head += "connection: keep-alive\r\n"
        return head.encode("latin-1", "replace")


class WrappedExchange(Exchange):
    """Passes everything on to another exchange; a subclass watches or changes what it wants to."""

    __slots__ = ("_inner",)

    def __init__(self, inner: Exchange) -> None:
        self.request = inner.request
        self._inner = inner

    @property
    def headers(self) -> Headers:
        """The headers of every response to the request."""
        return self._inner.headers

    @headers.setter
    def headers(self, headers: Headers) -> None:
        self._inner.headers = headers

    @property
    def is_closed(self) -> bool:
        return self._inner.is_closed

    @property
    def is_streaming(self) -> bool:
        return self._inner.is_streaming

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        self._inner.on_disconnect(callback)

    def respond(
        self,
        status: int,
        body: bytes,
        *,
        content_type: str = "application/json",
        headers: Headers = (),
    ) -> None:
        self._inner.respond(status, body, content_type=content_type, headers=headers)

    def start_stream(self, status: int, *, content_type: str, headers: Headers = ()) -> None:
        self._inner.start_stream(status, content_type=content_type, headers=headers)

    def send_head(self) -> None:
        self._inner.send_head()

    def write(self, chunk: bytes) -> None:
        self._inner.write(chunk)

    async def send(self, chunk: bytes) -> None:
        await self._inner.send(chunk)

    def end(self, chunk: bytes = b"") -> None:
        self._inner.end(chunk)

    def _drop_body(self) -> None:
        self._inner._drop_body()
        self.request = self._inner.request


@lru_cache(maxsize=16)
def _first_lines(status: int, content_type: str, second: int) -> str:
    """Return the lines that the responses of one second have in common."""
    return (
        f"HTTP/1.1 {status} {_REASONS.get(status, 'Unknown')}\r\n"
        f"content-type: {content_type}\r\n"
        f"date: {formatdate(second, usegmt=True)}\r\n"
    )


Handler = Callable[[Exchange], Awaitable[None] | None]
ErrorBody = Callable[[int, str, str], bytes]  # from a status, a message and the requested path


class HttpRouter:
    """A table of (method, path pattern) → handler. A pattern may have one `*`, for one part of a path, or `**` for any.

    An exact path comes first, then the pattern with the longest text before and after its `*`. HEAD is answered by the
    handler of GET, and `OPTIONS *` names the methods of all paths.
    """

    def __init__(self, table: Mapping[tuple[str, str], Handler], *, error_body: ErrorBody) -> None:
        self._exact: dict[str, dict[str, Handler]] = {}
        # by what is around `*`; the end begins with one where it was `**`
        self._patterns: dict[tuple[str, str], dict[str, Handler]] = {}
        self._error_body = error_body
        self.table = frozenset(table)
        for (method, pattern), handler in table.items():
            start, star, end = pattern.partition("*")
            if star:
                self._patterns.setdefault((start, end), {})[method] = handler
            else:
                self._exact.setdefault(pattern, {})[method] = handler

    def __call__(self, exchange: Exchange) -> Awaitable[None] | None:
        request = exchange.request
        handlers = self._exact.get(request.path) or self._by_pattern(request.path)
        if handlers is None and (request.method, request.path) == ("OPTIONS", "*"):
            allowed = _allowed(method for method, _ in self.table)
            exchange.respond(204, b"", headers=(("allow", allowed),))
            return None
        if handlers is None:
            message = f"no such path: {request.method} {request.path}"
            exchange.respond(404, self._error_body(404, message, request.path))
            return None
        method = "GET" if request.method == "HEAD" else request.method
        handler = handlers.get(method)
        if handler is None:
            allowed = _allowed(handlers)
            if method == "OPTIONS":
                exchange.respond(204, b"", headers=(("allow", allowed),))
                return None
            served = ", ".join(sorted(handlers))
            message = f"{request.path} takes {served}, not {request.method}"
            body = self._error_body(405, message, request.path)
            exchange.respond(405, body, headers=(("allow", allowed),))
            return None
        return handler(exchange)

    def _by_pattern(self, path: str) -> dict[str, Handler] | None:
        matching = [
            (start, end)
            for start, end in self._patterns
            if path.startswith(start) and _ends_with(path[len(start) :], end)
        ]
        longest = max(matching, key=lambda around: tuple(map(len, around)), default=None)
        return None if longest is None else self._patterns[longest]


def _allowed(methods: Iterable[str]) -> str:
    """Return the header Allow of a path with handlers for these methods."""
    served = {*methods, "OPTIONS"}
    return ", ".join(sorted(served | {"HEAD"} if "GET" in served else served))


def _ends_with(tail: str, end: str) -> bool:
    """Return whether the rest of a path is what `*` stands for and `end`, or what `**` stands for."""
    if end.startswith("*"):
        return tail.endswith(end[1:])
    return tail.endswith(end) and "/" not in tail.removesuffix(end)
