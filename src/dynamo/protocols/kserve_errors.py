"""How KServe's v2 protocol says that something went wrong: a status, and {"error": "a sentence"}."""

import msgspec

from dynamo.base import errors
from dynamo.protocols import openai_errors


class ErrorBody(msgspec.Struct, frozen=True):
    """The whole body of a failed answer, or the data of the last event of a failed stream."""

    error: str


def status_of(error: errors.DynamoError) -> int:
    """The HTTP status: the protocol has no list of its own."""
    return openai_errors.status_of(error)


def body_of(error: errors.DynamoError) -> bytes:
    """The error as JSON."""
    return msgspec.json.encode(ErrorBody(str(error)))


def refusal(status: int, message: str) -> bytes:
    """What the HTTP server refuses by itself, as JSON."""
    del status
    return msgspec.json.encode(ErrorBody(message))
