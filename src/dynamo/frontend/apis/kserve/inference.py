"""Inference for gRPC: its requests as requests of the HTTP form, answered by the frontend's own HTTP handler.

So gRPC passes the same authentication, limits, routes and pipeline as HTTP. An exchange without a connection keeps the
answer in a bounded queue: for a reader that is too slow it does what a connection does, and closes as if the client
had disconnected. This module knows the messages, but no gRPC.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, NamedTuple

import msgspec

from dynamo.base import errors
from dynamo.frontend import pipeline
from dynamo.frontend.apis import error_dialects
from dynamo.frontend.apis.kserve import transcode
from dynamo.protocols import model_errors
from dynamo.runtime.http import exchange

MAX_QUEUED_EVENTS = 8192  # of some hundred bytes each
_DATA = b"data: "


class HttpRefusal(Exception):
    """An error status of the HTTP handler. It is no `DynamoError`, because the class of the error is not known."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class WholeAnswer(NamedTuple):
    """An answer that is not streamed."""

    status: int
    body: Any  # decoded


class QueuedExchange(exchange.Exchange):
    """An exchange with an answer that `iterate_answer` reads."""

    __slots__ = ("_pieces",)

    def __init__(self, request: exchange.Request) -> None:
        super().__init__(request, exchange.NoConnection(), lambda: None)
        self._pieces: asyncio.Queue[WholeAnswer | bytes | None] = asyncio.Queue()

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
            self._pieces.put_nowait(WholeAnswer(status, msgspec.json.decode(body)))
            self._finish()

    def start_stream(
        self, status: int, *, content_type: str, headers: exchange.Headers = ()
    ) -> None:
        """Begin to answer piece by piece."""
        del status, content_type, headers
        self._streaming = True

    def write(self, chunk: bytes) -> None:
        """Queue a piece of the stream."""
        if self._closed:
            return
        if self._pieces.qsize() < MAX_QUEUED_EVENTS:
            self._pieces.put_nowait(chunk)
        else:
            self.disconnected()
            self._pieces.put_nowait(None)

    def end(self, chunk: bytes = b"") -> None:
        """Complete the stream with a last piece."""
        if not self._closed:
            self._pieces.put_nowait(chunk)
            self._finish()

    async def iterate_answer(self) -> AsyncIterator[WholeAnswer | Any]:
        """Yield the whole answer, or else the data of each event. Raises Overloaded if the reader was too slow."""
        while not (self._closed and self._pieces.empty()):
            piece = await self._pieces.get()
            if piece is None:
                raise errors.Overloaded("the answer was not read as fast as it came")
            if isinstance(piece, WholeAnswer):
                yield piece
                return
            for event in piece.split(b"\n\n"):
                if event.startswith(_DATA):
                    yield msgspec.json.decode(event.removeprefix(_DATA))


class Inference:
    """Sends requests to the frontend's HTTP handler."""

    def __init__(self, handler: exchange.Handler) -> None:
        self._handler = handler

    async def get(self, path: str, headers: Mapping[str, str], peer: str) -> Any:
        """Return the decoded answer to a GET of this path. Raises HttpRefusal."""
        answers = [answer async for answer in self._send("GET", path, b"", headers, peer)]
        return answers[0]

    async def infer(
        self, request: Any, headers: Mapping[str, str], peer: str, *, can_stream: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the pieces of the answer to a ModelInferRequest. Raises HttpRefusal, mostly before the first.

        Closing the generator early cancels the request at the worker.
        """
        path = model_path(request.model_name, request.model_version)
        path += "/infer_stream" if can_stream else "/infer"
        try:
            body = transcode.encode_body(request)
            answer = self._send("POST", path, body, headers, peer)
            async with contextlib.aclosing(answer) as pieces:
                async for piece in pieces:
                    yield piece
        except errors.DynamoError as error:
            raise HttpRefusal(
                error_dialects.KSERVE.status_of(error), model_errors.client_message(error)
            ) from error

    async def _send(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str], peer: str
    ) -> AsyncGenerator[Any, None]:
        request = exchange.Request(
            method=method,
            path=path,
            query="",
            headers={**headers, "content-type": "application/json"},
            body=body,
            peer=peer,
        )
        client = QueuedExchange(request)
        try:
            handling = self._handler(client)
            if handling is not None:
                await handling
            ignored = {key: text for key, text in client.headers if key == pipeline.IGNORED_HEADER}
            async for piece in client.iterate_answer():
                if isinstance(piece, WholeAnswer) and "error" in piece.body:
                    raise HttpRefusal(piece.status, piece.body["error"])
                answer = piece.body if isinstance(piece, WholeAnswer) else piece
                yield {**answer, "parameters": ignored} if ignored else answer
        finally:
            client.disconnected()  # without effect on a complete answer


def model_path(model: str, version: str) -> str:
    path = f"/v2/models/{model}"
    return f"{path}/versions/{version}" if version else path
