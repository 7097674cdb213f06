"""Every failure of the system, named for what its catcher will do.

    DynamoError
    ├── ConfigError              a flag, variable or file of ours is wrong → one sentence, exit 2
    ├── RequestError             the caller's fault → 4xx
    │   ├── InvalidRequest           a field is wrong or unsupported           400
    │   ├── ContextTooLong           prompt and answer exceed the context      400
    │   ├── ModelNotFound            nobody serves this name                   404
    │   ├── ResponseNotFound         an earlier answer is not kept (any more)  400
    │   ├── Unauthenticated          no key, or one that nobody gave out       401
    │   ├── Forbidden                this key may not do that                  403
    │   ├── Conflict                 it does not fit the state of things       409
    │   ├── RateLimited              this key has had its share                429
    │   └── Cancelled                the caller went away                      499
    ├── Unavailable              nobody can answer now → 503
    │   ├── Overloaded               all are busy, try later (retry_after_s)
    │   └── NoWorkers                no instance serves this endpoint
    ├── WorkerLost               try elsewhere → migrate
    │   └── StreamBroken             its connection broke in the middle of an answer
    ├── TransferError            KV blocks did not come → compute them here
    ├── DeadlineExceeded         the caller's or our time limit passed → 504
    ├── EngineFailed             the engine could not do it, or died → 500
    ├── LocalProtocolError       we broke the wire → a bug of ours
    └── RemoteProtocolError      the peer broke the wire → its bug, log it and drop the peer

Bases exist to be caught. Foreign exceptions are translated at the door through which they come in, with
their cause chained. A message says what was expected, what came and what to do.

`code` is how an error is named on the wire, where it crosses processes (`from_wire`).
"""

from typing import ClassVar


class DynamoError(Exception):
    """Base of all errors that this project raises on purpose."""

    code: ClassVar[str] = "internal"


class ConfigError(DynamoError):
    """A flag, an environment variable, a file or the machine is not as it must be."""

    code = "config"


class RequestError(DynamoError):
    """The caller's fault. `param` names the field of the request, where there is one."""

    code = "request"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    """A field is wrong, unsupported or missing."""

    code = "invalid_request"


class ContextTooLong(RequestError):
    """The prompt, or the prompt and the asked-for answer, exceed the model's context."""

    code = "context_length_exceeded"


class ModelNotFound(RequestError):
    """Nobody serves a model of this name."""

    code = "model_not_found"


class ResponseNotFound(RequestError):
    """The answer to go on from is not kept, or not any more."""

    code = "previous_response_not_found"


class Unauthenticated(RequestError):
    """The request has no API key, or one that is not known."""

    code = "invalid_api_key"


class Forbidden(RequestError):
    """The key is known, but may not do this."""

    code = "forbidden"


class Conflict(RequestError):
    """What is asked for does not fit the state that things are in; it may later."""

    code = "conflict"


class RateLimited(RequestError):
    """The key or its tenant has used up what it may; `retry_after_s` says when it is worth trying again."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Cancelled(RequestError):
    """The caller went away; nobody waits for the answer."""

    code = "cancelled"


class Unavailable(DynamoError):
    """Nobody can answer now; `retry_after_s` says when it is worth trying again."""

    code = "unavailable"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(Unavailable):
    """Everybody who could answer is busy."""

    code = "overloaded"


class NoWorkers(Unavailable):
    """No instance serves this endpoint."""

    code = "no_workers"


class WorkerLost(DynamoError):
    """The worker that had the request is gone; another may take it."""

    code = "worker_lost"


class StreamBroken(WorkerLost):
    """The connection to the worker broke before its answer was complete."""

    code = "stream_broken"


class TransferError(DynamoError):
    """KV blocks could not be moved from or to another worker; whoever needs them can compute them."""

    code = "transfer"


class DeadlineExceeded(DynamoError):
    """The time that the request was given is over."""

    code = "deadline_exceeded"


class EngineFailed(DynamoError):
    """The engine could not carry out the request, or died."""

    code = "engine_failed"


class LocalProtocolError(DynamoError):
    """We were about to send, or asked for, what the protocol does not allow."""

    code = "local_protocol"


class RemoteProtocolError(DynamoError):
    """The peer sent what the protocol does not allow."""

    code = "remote_protocol"


def _descendants(cls: type[DynamoError]) -> list[type[DynamoError]]:
    return [cls, *(d for sub in cls.__subclasses__() for d in _descendants(sub))]


_CLASS_BY_CODE = {cls.code: cls for cls in _descendants(DynamoError)}


def from_wire(
    code: str, message: str, *, param: str | None = None, retry_after_s: float | None = None
) -> DynamoError:
    """The error that a peer named by `code`; an unknown code is a plain DynamoError."""
    error = _CLASS_BY_CODE.get(code, DynamoError)(message)
    if isinstance(error, RequestError):
        error.param = param
    if isinstance(error, Unavailable | RateLimited) and retry_after_s is not None:
        error.retry_after_s = retry_after_s
    return error
