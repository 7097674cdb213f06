"""Content encodings: compressed bodies of requests, and answers compressed for clients that ask for it.

A body is inflated in a thread, one at a time, and never beyond the bytes that a body may have: a few kilobytes can
stand for gigabytes. Streams are not compressed, because each token is to arrive at once, nor is what is so small that
nothing is gained, or so large that compressing it would hold up the event loop.
"""

import asyncio
import sys
import zlib
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from dynamo.runtime.http.exchange import ErrorBody, Exchange, Handler, Request
from dynamo.runtime.http.parser import NO_ROOM, RequestRefused

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_ENCODINGS = ("gzip", "zstd")
_MAX_MEMBERS = 100  # of one body: behind each, all that follows is copied
_GZIP_WBITS = 31  # of zlib: gzip's head and checksum
_MAX_WINDOW_LOG = 23  # 8 MiB, as RFC 9659 has it for the web
_inflating = ThreadPoolExecutor(max_workers=1, thread_name_prefix="inflate")


def inflate(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Return the body that was compressed by this encoding, a member after another.

    Raises RequestRefused for more than `max_bytes` or `_MAX_MEMBERS`, and for what the encoding has not made.
    """
    inflated, remaining, num_members = bytearray(), body, 0
    try:
        while remaining:
            num_members += 1
            if num_members > _MAX_MEMBERS:
                message = f"expected at most {_MAX_MEMBERS} members of {encoding} in one body"
                raise RequestRefused(400, message)
            member = _decompressor(encoding)
            inflated += member.decompress(remaining, max_bytes + 1 - len(inflated))
            if len(inflated) > max_bytes:
                message = f"the request's body exceeds {max_bytes} bytes when it is inflated"
                raise RequestRefused(413, f"{message}: send less")
            if not member.eof:
                raise RequestRefused(
                    400, f"expected a complete body of Content-Encoding {encoding}"
                )
            remaining = member.unused_data
    except (zlib.error, zstd.ZstdError) as error:
        message = f"expected a body of Content-Encoding {encoding}, got other bytes: {error}"
        raise RequestRefused(400, message) from error
    return bytes(inflated)


def _decompressor(encoding: str) -> "zlib._Decompress | zstd.ZstdDecompressor":
    if encoding == "gzip":
        return zlib.decompressobj(_GZIP_WBITS)
    return zstd.ZstdDecompressor(
        options={zstd.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG}
    )


def read_encoding(value: str) -> str:
    """Return the encoding that a header names, empty for none. Raises RequestRefused (415) for an unknown one."""
    encoding = value.strip().lower().removeprefix("x-")
    if encoding in ("identity", "") or encoding in _ENCODINGS:
        return encoding.removeprefix("identity")
    names = ", ".join(_ENCODINGS)
    message = f"expected Content-Encoding to be one of {names}, or none, got {encoding[:100]!r}"
    raise RequestRefused(415, message, headers=(("accept-encoding", names),))


async def inflate_apart(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Inflate a body in the thread that does so. Raises RequestRefused."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_inflating, inflate, body, encoding, max_bytes)


class BodyInflater:
    """A handler that inflates compressed bodies for another one, and refuses encodings that it does not know."""

    def __init__(
        self, handler: Handler, max_body_bytes: Callable[[Request], int], error_body: ErrorBody
    ) -> None:
        self._handler = handler
        self._max_body_bytes = max_body_bytes
        self._error_body = error_body

    def __call__(self, client: Exchange) -> Awaitable[None] | None:
        encoding = client.request.headers.get("content-encoding")
        if encoding is None:  # nearly always so
            return self._handler(client)
        try:
            encoding = read_encoding(encoding)
        except RequestRefused as error:
            self._refuse(client, error)
            return None
        return self._inflate(client, encoding) if encoding else self._handler(client)

    async def _inflate(self, client: Exchange, encoding: str) -> None:
        request = client.request
        try:
            body = await inflate_apart(request.body, encoding, self._max_body_bytes(request))
        except RequestRefused as error:
            self._refuse(client, error)
            return
        if not client.replace_body(body):
            self._refuse(client, RequestRefused(503, NO_ROOM.message, headers=NO_ROOM.headers))
            return
        answering = self._handler(client)
        if answering is not None:
            await answering

    def _refuse(self, client: Exchange, error: RequestRefused) -> None:
        refusal = error.refusal
        body = self._error_body(refusal.status, refusal.message, client.request.path)
        client.respond(refusal.status, body, headers=refusal.headers)
