"""Errors in the form of KServe's v2 protocol: a status, and {"error": "a sentence"}."""

import msgspec

from dynamo.base import errors
from dynamo.frontend.apis import openai_errors


class KserveErrorBody(msgspec.Struct, frozen=True):
    """The body of a failed answer, or the data of the last event of a failed stream."""

    error: str


BODY_TYPE = KserveErrorBody
status_of = openai_errors.status_of  # the protocol has no list of its own


def body_of(error: errors.DynamoError) -> bytes:
    """Return the error as JSON."""
    return msgspec.json.encode(KserveErrorBody(str(error)))


def refusal(status: int, message: str) -> bytes:
    """Return the JSON of an error of the HTTP server itself."""
    del status
    return msgspec.json.encode(KserveErrorBody(message))
