"""A ModelInferRequest through the pipeline, and what comes of it, piece by piece. Knows messages, but no gRPC."""

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from dynamo.base import errors
from dynamo.frontend import pipeline
from dynamo.frontend.kserve import captured, routes, shapes, transcode
from dynamo.protocols import kserve, kserve_errors
from dynamo.runtime.http import exchange

_OK = 200


class Refused(errors.DynamoError):
    """The pipeline answered by an error, with this HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def status_of(error: errors.DynamoError) -> int:
    """The HTTP status of an error of `answer`."""
    return error.status if isinstance(error, Refused) else kserve_errors.status_of(error)


async def answer(
    answers: pipeline.Pipeline,
    request: Any,
    *,
    headers: Mapping[str, str],
    peer: str,
    can_stream: bool,
) -> AsyncGenerator[dict[str, Any], None]:
    """What `shapes.GenerateShape` tells. Raises InvalidRequest or Refused before the first piece.

    Closing it before its end is how a client leaves: the worker is told.
    """
    api = routes.api(
        lambda body: kserve.read_infer(
            body, model=request.model_name, version=request.model_version, can_stream=can_stream
        ),
        shapes.GenerateShape,
    )
    caller = captured.CapturedExchange(_http_request(request, headers, peer))
    try:
        await answers.answer(api, caller)
        async for found in caller.answer():
            if not isinstance(found, captured.Whole):
                yield found
            elif found.status == _OK:
                yield found.body
            else:
                raise Refused(found.status, found.body["error"])
    finally:
        caller.disconnected()  # without effect on a complete answer


def _http_request(request: Any, headers: Mapping[str, str], peer: str) -> exchange.Request:
    """What the pipeline would have seen over HTTP. Raises InvalidRequest."""
    return exchange.Request(
        method="POST",
        path=f"/v2/models/{request.model_name}/infer",
        query="",
        headers=dict(headers),
        body=transcode.body_of(request),
        peer=peer,
    )
