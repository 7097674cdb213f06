"""A request whose answer stays in the process: what lets gRPC go through the same pipeline as HTTP.

The pipeline answers an `Exchange` and does not know who reads it. This one keeps the pieces in a queue, which is
bounded: for a reader that is too slow it does what a connection does, and is closed as if the client had gone.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import msgspec

from dynamo.base import errors
from dynamo.runtime.http import exchange

MAX_WAITING = 8192  # events, of some hundred bytes each
_DATA = b"data: "


class Whole(NamedTuple):
    """An answer that is no stream."""

    status: int
    body: Any  # decoded


class CapturedExchange(exchange.Exchange):
    """Answer it as any exchange; read it by `whole` or `events`."""

    __slots__ = ("_pieces",)

    def __init__(self, request: exchange.Request) -> None:
        super().__init__(request, _Nowhere(), _nothing)
        self._pieces: asyncio.Queue[Whole | bytes | None] = asyncio.Queue()

    def respond(
        self,
        status: int,
        body: bytes,
        *,
        content_type: str = "application/json",
        headers: exchange.Headers = (),
    ) -> None:
        """Answer with a complete body."""
        del content_type, headers
        if not self._closed:
            self._pieces.put_nowait(Whole(status, msgspec.json.decode(body)))
            self._finish()

    def start_stream(
        self, status: int, *, content_type: str, headers: exchange.Headers = ()
    ) -> None:
        """Answer piece by piece."""
        del status, content_type, headers
        self._streaming = True

    def write(self, chunk: bytes) -> None:
        """Keep a piece of the stream until it is read."""
        if self._closed:
            return
        if self._pieces.qsize() < MAX_WAITING:
            self._pieces.put_nowait(chunk)
        else:
            self.disconnected()
            self._pieces.put_nowait(None)

    def end(self, chunk: bytes = b"") -> None:
        """Complete the stream."""
        if not self._closed:
            self._pieces.put_nowait(chunk)
            self._finish()

    async def answer(self) -> AsyncIterator[Whole | Any]:
        """The whole answer, if it is one; else the data of each event."""
        while not (self._closed and self._pieces.empty()):
            piece = await self._pieces.get()
            if piece is None:
                raise errors.Overloaded("the answer was not read as fast as it came")
            if isinstance(piece, Whole):
                yield piece
                return
            for event in piece.split(b"\n\n"):
                if event.startswith(_DATA):
                    yield msgspec.json.decode(event.removeprefix(_DATA))


class _Nowhere:
    """The wire of an exchange that has none."""

    def write(self, data: bytes) -> None:
        raise errors.LocalProtocolError(f"nothing is written here, but {len(data)} bytes were")

    write_soon = write


def _nothing() -> None:
    """Nobody waits for the next request of this connection."""
