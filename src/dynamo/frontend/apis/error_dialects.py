"""The forms of errors: OpenAI's, Anthropic's, and KServe's v2 protocol's. Each is a `delivery.ErrorDialect`.

Clients act on statuses and types (the openai package retries 429 and 5xx, the anthropic package 408, 409, 429 and 5xx,
and both raise a class per status), so they are the API's own wherever it has a word for the error.
"""  # decider

from collections.abc import Mapping
from typing import Any

import msgspec

from dynamo.base import errors
from dynamo.protocols import model_errors

_encode = msgspec.json.Encoder().encode
_ErrorTypes = Mapping[type[errors.DynamoError], tuple[int, str]]  # status and type by class
_INVALID = "invalid_request_error"
_OPENAI_TYPES: _ErrorTypes = {
    model_errors.ModelNotFound: (404, _INVALID),
    model_errors.ObjectNotFound: (404, _INVALID),
    errors.Conflict: (409, _INVALID),
    errors.Unauthenticated: (401, _INVALID),
    errors.Forbidden: (403, _INVALID),
    errors.RateLimited: (429, "rate_limit_error"),
    errors.Cancelled: (499, "request_cancelled"),
    errors.RequestError: (400, _INVALID),
    errors.Unavailable: (503, "service_unavailable"),
    errors.WorkerLost: (503, "service_unavailable"),
    errors.DeadlineExceeded: (504, "timeout"),
    errors.DynamoError: (500, "server_error"),
}
_ANTHROPIC_TYPES: _ErrorTypes = {
    model_errors.ModelNotFound: (404, "not_found_error"),
    errors.Unauthenticated: (401, "authentication_error"),
    errors.Forbidden: (403, "permission_error"),
    errors.RateLimited: (429, "rate_limit_error"),
    errors.Cancelled: (499, _INVALID),
    errors.RequestError: (400, _INVALID),
    errors.Overloaded: (529, "overloaded_error"),
    errors.Unavailable: (503, "api_error"),
    errors.WorkerLost: (503, "api_error"),
    errors.DeadlineExceeded: (504, "timeout_error"),
    errors.DynamoError: (500, "api_error"),
}
_ANTHROPIC_REFUSALS = {404: "not_found_error", 413: "request_too_large"}


class ThreadUnsupported(errors.RequestError):
    """The message belongs to a conversation that the server would have to keep; the client sends the whole instead."""

    code = "thread_unsupported_request"


class OpenAiErrorObject(msgspec.Struct, frozen=True, kw_only=True):
    """The error; all four keys are always present."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class OpenAiErrorBody(msgspec.Struct, frozen=True):
    """The body of a failed answer, or the data of the last event of a failed stream."""

    error: OpenAiErrorObject


class AnthropicErrorObject(msgspec.Struct, frozen=True, omit_defaults=True):
    """Kind and text of the error; `details` only where Anthropic's clients act on them."""

    type: str
    message: str
    details: dict[str, Any] | None = None


class AnthropicErrorBody(msgspec.Struct, frozen=True):
    """The body of a failed answer, or the data of the last event of a failed stream."""

    type: str
    error: AnthropicErrorObject


class KserveErrorBody(msgspec.Struct, frozen=True):
    """The body of a failed answer, or the data of the last event of a failed stream."""

    error: str


class OpenAiErrors:
    """{"error": {"message", "type", "param", "code"}}."""

    BODY_TYPE: type = OpenAiErrorBody
    types = _OPENAI_TYPES

    def status_of(self, error: errors.DynamoError) -> int:
        return self._kind_of(error)[0]

    def body_of(self, error: errors.DynamoError) -> bytes:
        param = error.param if isinstance(error, errors.RequestError) else None
        return self.encode(
            model_errors.client_message(error),
            self._kind_of(error)[1],
            param=param,
            code=error.code,
        )

    def refusal(self, status: int, message: str) -> bytes:
        """Return the JSON of an error of the HTTP server itself (unknown path, wrong method, too large a body)."""
        kind = "server_error" if status >= 500 else _INVALID
        return self.encode(message, "service_unavailable" if status == 503 else kind)

    def encode(
        self, message: str, kind: str, *, param: str | None = None, code: str | None = None
    ) -> bytes:
        """Return the JSON of an error of this type."""
        error = OpenAiErrorObject(message=message, type=kind, param=param, code=code)
        return _encode(OpenAiErrorBody(error))

    def _kind_of(self, error: errors.DynamoError) -> tuple[int, str]:
        """Return status and type by the nearest class that has them."""
        return next(self.types[cls] for cls in type(error).__mro__ if cls in self.types)


class AnthropicErrors(OpenAiErrors):
    """{"type": "error", "error": {"type", "message"}}."""

    BODY_TYPE: type = AnthropicErrorBody
    types = _ANTHROPIC_TYPES

    def refusal(self, status: int, message: str) -> bytes:
        kind = "api_error" if status >= 500 else _INVALID
        return self.encode(message, _ANTHROPIC_REFUSALS.get(status, kind))

    def encode(
        self, message: str, kind: str, *, param: str | None = None, code: str | None = None
    ) -> bytes:
        details = None
        if (
            code == model_errors.ContextTooLong.code
        ):  # clients compact a conversation at these words
            message = f"prompt is too long: {message}"
        if code == ThreadUnsupported.code:
            details = {"error_code": code, "unsupported": [param]}
        return _encode(AnthropicErrorBody("error", AnthropicErrorObject(kind, message, details)))


class KserveErrors(OpenAiErrors):
    """{"error": "a sentence"}, with OpenAI's statuses: the protocol has no list of its own."""

    BODY_TYPE: type = KserveErrorBody

    def encode(
        self, message: str, kind: str, *, param: str | None = None, code: str | None = None
    ) -> bytes:
        del kind, param, code
        return _encode(KserveErrorBody(message))


OPENAI = OpenAiErrors()
ANTHROPIC = AnthropicErrors()
KSERVE = OLLAMA = KserveErrors()  # both are one sentence
