"""gRPC's requests as requests of the HTTP form, through the same doors: keys, limits, routes and pipeline.

Knows messages, but no gRPC.
"""

import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from dynamo.base import errors
from dynamo.frontend.apis.kserve import captured, transcode
from dynamo.frontend.apis.kserve import errors as kserve_errors
from dynamo.runtime.http import exchange


class Refused(Exception):
    """HTTP would have answered by this status. No `DynamoError`: what that was, is known no more."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Inference:
    """Asks the frontend's own HTTP handler."""

    def __init__(self, handler: exchange.Handler) -> None:
        self._handler = handler

    async def look(self, path: str, headers: Mapping[str, str], peer: str) -> Any:
        """What a GET of this path tells. Raises Refused."""
        told = [found async for found in self._ask("GET", path, b"", headers, peer)]
        return told[0]

    async def answer(
        self, request: Any, headers: Mapping[str, str], peer: str, *, can_stream: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The pieces of the answer to a ModelInferRequest. Raises Refused, most often before the first.

        Closing it before its end is how a client leaves: the worker is told.
        """
        path = path_of(request.model_name, request.model_version)
        path += "/infer_stream" if can_stream else "/infer"
        try:
            body = transcode.body_of(request)
            asked = self._ask("POST", path, body, headers, peer)
            async with contextlib.aclosing(asked) as pieces:
                async for piece in pieces:
                    yield piece
        except errors.DynamoError as error:
            raise Refused(kserve_errors.status_of(error), str(error)) from error

    async def _ask(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str], peer: str
    ) -> AsyncGenerator[Any, None]:
        asked = exchange.Request(
            method=method,
            path=path,
            query="",
            headers={**headers, "content-type": "application/json"},
            body=body,
            peer=peer,
        )
        caller = captured.CapturedExchange(asked)
        try:
            handling = self._handler(caller)
            if handling is not None:
                await handling
            async for found in caller.answer():
                yield _checked(found)
        finally:
            caller.disconnected()  # without effect on a complete answer


def path_of(model: str, version: str) -> str:
    """Where HTTP speaks of this model."""
    path = f"/v2/models/{model}"
    return f"{path}/versions/{version}" if version else path


def _checked(found: Any) -> Any:
    if not isinstance(found, captured.Whole):
        return found
    if "error" in found.body:
        raise Refused(found.status, found.body["error"])
    return found.body
