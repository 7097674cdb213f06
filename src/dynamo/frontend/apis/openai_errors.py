"""Errors in the form of OpenAI's API: a status, and {"error": {"message", "type", "param", "code"}}.

Clients act on these (the openai package retries 429 and 5xx, and raises a class per status), so they are OpenAI's own
wherever it has a word for the error.
"""

import msgspec

from dynamo.base import errors
from dynamo.protocols import model_errors

_KIND_BY_CLASS: dict[type[errors.DynamoError], tuple[int, str]] = {
    errors.InvalidRequest: (400, "invalid_request_error"),
    model_errors.ContextTooLong: (400, "invalid_request_error"),
    model_errors.ModelNotFound: (404, "invalid_request_error"),
    errors.Unauthenticated: (401, "invalid_request_error"),
    errors.Forbidden: (403, "invalid_request_error"),
    errors.RateLimited: (429, "rate_limit_error"),
    errors.Cancelled: (499, "request_cancelled"),
    errors.RequestError: (400, "invalid_request_error"),
    errors.Unavailable: (503, "service_unavailable"),
    errors.WorkerLost: (503, "service_unavailable"),
    errors.DeadlineExceeded: (504, "timeout"),
    errors.DynamoError: (500, "server_error"),
}


class OpenAiErrorObject(msgspec.Struct, frozen=True, kw_only=True):
    """The error; all four keys are always present."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class OpenAiErrorBody(msgspec.Struct, frozen=True):
    """The body of a failed answer, or the data of the last event of a failed stream."""

    error: OpenAiErrorObject


BODY_TYPE = OpenAiErrorBody
_encode = msgspec.json.Encoder().encode


def status_of(error: errors.DynamoError) -> int:
    """Return the HTTP status."""
    return _kind_of(error)[0]


def body_of(error: errors.DynamoError) -> bytes:
    """Return the error as JSON."""
    param = error.param if isinstance(error, errors.RequestError) else None
    return encode(str(error), type=_kind_of(error)[1], param=param, code=error.code)


def refusal(status: int, message: str) -> bytes:
    """Return the JSON of an error of the HTTP server itself (unknown path, wrong method, too large a body)."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return encode(message, type="service_unavailable" if status == 503 else kind)


def encode(message: str, *, type: str, param: str | None = None, code: str | None = None) -> bytes:  # noqa: A002
    """Return the JSON of an error that is none of our classes."""
    return _encode(
        OpenAiErrorBody(OpenAiErrorObject(message=message, type=type, param=param, code=code))
    )


def _kind_of(error: errors.DynamoError) -> tuple[int, str]:
    """Return status and type by the nearest class that has them."""
    return next(_KIND_BY_CLASS[cls] for cls in type(error).__mro__ if cls in _KIND_BY_CLASS)
