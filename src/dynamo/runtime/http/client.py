"""HTTP requests to other processes, each on a connection of its own that ends with the response.

They are HTTP/1.0, so that no response comes in chunks, and few: requests for tokens go over the request plane. Bodies
are JSON. Time is that of the operating system, as everywhere between sockets.
"""

import asyncio
import contextlib
import re
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from urllib import parse

from dynamo.base import errors, local_users

_LIMIT_BYTES = 1 << 24  # of a line, and of a body that is read whole
_PORTS = {"http": 80, "https": 443}
_NO_HEADERS: Mapping[str, str] = {}
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,18})[ \t]*\r\n", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Response:
    """The head of a response with its status, the stream of the body, and how long that is, if the head says it."""

    status: int
    body: asyncio.StreamReader
    length: int | None
    head: bytes = b""


def split_url(url: str) -> tuple[parse.SplitResult, int]:
    """Return the parts and the port of a URL of a server. Raises ConfigError for one of another kind."""
    try:
        parts = parse.urlsplit(url)
        if not (parts.hostname or "").encode("idna"):  # as the look-up of the name will have it
            raise ValueError("no host")  # noqa: TRY301 (as for one that is malformed)
        return parts, parts.port or _PORTS[parts.scheme]
    except (KeyError, ValueError) as error:
        raise errors.ConfigError(f"{url}: expected one such as http://127.0.0.1:8000") from error


@contextlib.asynccontextmanager
async def open_response(
    method: str,
    url: str,
    content: bytes = b"",
    *,
    headers: Mapping[str, str] = _NO_HEADERS,
    socket_path: str | None = None,
) -> AsyncIterator[Response]:
    """Send a request, and yield the response when its head has come.

    With `socket_path` the request goes to that Unix socket, at which a process of our own user must listen.
    Raises ConfigError for a URL of another kind, OSError, or RemoteProtocolError.
    """
    parts, port = split_url(url)
    if socket_path is not None:
        reader, writer = await asyncio.open_unix_connection(socket_path, limit=_LIMIT_BYTES)
    else:
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        reader, writer = await asyncio.open_connection(
            parts.hostname, port, limit=_LIMIT_BYTES, ssl=tls
        )
    try:
        if socket_path is not None and not local_users.is_own_user(writer.transport):
            raise errors.RemoteProtocolError("expected a process of our own user")
        target = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"
        fields = {"host": parts.netloc, "content-type": "application/json", **headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        head = f"{method} {target} HTTP/1.0\r\n{lines}content-length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        yield await _read_head(reader)
    finally:
        writer.close()


async def _read_head(reader: asyncio.StreamReader) -> Response:
    """Read the head of a response, and return the response. Raises RemoteProtocolError."""
    head = b""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        num_bytes = None if length is None else int(length[1])
        return Response(int(head.split(None, 2)[1]), reader, num_bytes, head)
    except asyncio.IncompleteReadError as error:
        head = error.partial
    except (asyncio.LimitOverrunError, ValueError, IndexError):
        pass
    raise errors.RemoteProtocolError(f"expected an HTTP response, got {head[:60]!r}")


async def request(
    method: str,
    url: str,
    content: bytes = b"",
    *,
    timeout_s: float,
    headers: Mapping[str, str] = _NO_HEADERS,
    socket_path: str | None = None,
    max_bytes: int = _LIMIT_BYTES,
    response_headers: dict[str, str] | None = None,
) -> tuple[int, bytes]:
    """Send a request, and return the status and the body of the response.

    The headers of the response are added to `response_headers`, by their names in small letters.
    Raises ConfigError as `open_response`, and Unavailable if there is no whole response in time.
    """
    exchange = open_response(method, url, content, headers=headers, socket_path=socket_path)
    try:
        async with asyncio.timeout(timeout_s), exchange as response:
            if response_headers is not None:
                lines = response.head.decode("latin-1").splitlines()[1:]
                fields = (line.partition(":")[::2] for line in lines if line)
                response_headers.update((name.lower(), value.strip()) for name, value in fields)
            await response.body.readexactly(max_bytes + 1)
    except asyncio.IncompleteReadError as whole:
        if response.length in (None, len(whole.partial)):
            return response.status, whole.partial
        raise errors.Unavailable(f"{url} ended before its answer did") from whole
    except TimeoutError as error:
        raise errors.Unavailable(
            f"{url} does not answer: no answer within {timeout_s:g} s"
        ) from error
    except (OSError, errors.RemoteProtocolError) as error:
        raise errors.Unavailable(f"{url} does not answer: {error}") from error
    raise errors.Unavailable(f"{url}: expected at most {max_bytes} bytes, got more")
