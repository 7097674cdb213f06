"""Errors in the form of Anthropic's API: a status, and {"type": "error", "error": {"type", "message"}}.

The anthropic package raises a class per status, and retries 408, 409, 429 and every status from 500 on.
"""

import msgspec

from dynamo.base import errors
from dynamo.protocols import model_errors

_KIND_BY_CLASS: dict[type[errors.DynamoError], tuple[int, str]] = {
    model_errors.ModelNotFound: (404, "not_found_error"),
    errors.Unauthenticated: (401, "authentication_error"),
    errors.Forbidden: (403, "permission_error"),
    errors.RateLimited: (429, "rate_limit_error"),
    errors.Cancelled: (499, "invalid_request_error"),
    errors.RequestError: (400, "invalid_request_error"),
    errors.Overloaded: (529, "overloaded_error"),
    errors.Unavailable: (503, "api_error"),
    errors.WorkerLost: (503, "api_error"),
    errors.DeadlineExceeded: (504, "timeout_error"),
    errors.DynamoError: (500, "api_error"),
}
_REFUSALS = {404: "not_found_error", 413: "request_too_large"}


class MessageErrorObject(msgspec.Struct, frozen=True):
    """Kind and text of the error."""

    type: str
    message: str


class MessageErrorBody(msgspec.Struct, frozen=True):
    """The body of a failed answer, or the data of the last event of a failed stream."""

    type: str
    error: MessageErrorObject


BODY_TYPE = MessageErrorBody


def status_of(error: errors.DynamoError) -> int:
    """Return the HTTP status."""
    return _kind_of(error)[0]


def body_of(error: errors.DynamoError) -> bytes:
    """Return the error as JSON."""
    return _encode(_kind_of(error)[1], str(error))


def refusal(status: int, message: str) -> bytes:
    """Return the JSON of an error of the HTTP server itself (unknown path, wrong method, too large a body)."""
    kind = "api_error" if status >= 500 else "invalid_request_error"
    return _encode(_REFUSALS.get(status, kind), message)


def _kind_of(error: errors.DynamoError) -> tuple[int, str]:
    return next(_KIND_BY_CLASS[cls] for cls in type(error).__mro__ if cls in _KIND_BY_CLASS)


def _encode(kind: str, message: str) -> bytes:
    return msgspec.json.encode(MessageErrorBody("error", MessageErrorObject(kind, message)))
