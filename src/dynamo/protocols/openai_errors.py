"""How OpenAI's API says that something went wrong: a status, and {"error": {"message", "type", "param", "code"}}.

Clients choose by these (the openai package retries 429 and 5xx, and raises a class per status), so they are the
original's wherever it has a word for it.
"""

from dataclasses import dataclass

import msgspec

from dynamo.base import errors
from dynamo.protocols import model_errors


@dataclass(frozen=True, slots=True)
class Kind:
    """How one class of errors is told, beside its own `code`."""

    status: int
    type: str


_KIND_BY_CLASS: dict[type[errors.DynamoError], Kind] = {
    errors.InvalidRequest: Kind(400, "invalid_request_error"),
    model_errors.ContextTooLong: Kind(400, "invalid_request_error"),
    model_errors.ModelNotFound: Kind(404, "invalid_request_error"),
    errors.Unauthenticated: Kind(401, "invalid_request_error"),
    errors.Forbidden: Kind(403, "invalid_request_error"),
    errors.RateLimited: Kind(429, "rate_limit_error"),
    errors.Cancelled: Kind(499, "request_cancelled"),
    errors.RequestError: Kind(400, "invalid_request_error"),
    errors.Unavailable: Kind(503, "service_unavailable"),
    errors.WorkerLost: Kind(503, "service_unavailable"),
    errors.DeadlineExceeded: Kind(504, "timeout"),
    errors.DynamoError: Kind(500, "server_error"),
}


class ErrorObject(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong. All four keys are always there."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The whole body of a failed answer, or the last event of a failed stream."""

    error: ErrorObject


_encode = msgspec.json.Encoder().encode
_REFUSALS = {503: "service_unavailable"}


def kind_of(error: errors.DynamoError) -> Kind:
    """Status and type of this error, by the nearest class that has them."""
    return next(_KIND_BY_CLASS[cls] for cls in type(error).__mro__ if cls in _KIND_BY_CLASS)


def status_of(error: errors.DynamoError) -> int:
    """The HTTP status."""
    return kind_of(error).status


def body_of(error: errors.DynamoError) -> bytes:
    """The error as JSON."""
    kind = kind_of(error)
    param = error.param if isinstance(error, errors.RequestError) else None
    return encode(str(error), type=kind.type, param=param, code=error.code)


def refusal(status: int, message: str) -> bytes:
    """What the HTTP server refuses by itself (unknown path, wrong method, too large a body ...), as JSON."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return encode(message, type=_REFUSALS.get(status, kind))


def encode(message: str, *, type: str, param: str | None = None, code: str | None = None) -> bytes:  # noqa: A002
    """An error that is none of our classes, as JSON."""
    return _encode(ErrorBody(ErrorObject(message=message, type=type, param=param, code=code)))
