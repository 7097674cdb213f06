"""The tree of errors of this project, each named for what its catcher will do.

    DynamoError
    ├── ConfigError              a flag, variable or file is wrong → one sentence, exit 2
    ├── RequestError             the caller's fault → 4xx
    │   ├── InvalidRequest           a field is wrong or unsupported           400
    │   ├── Unauthenticated          no API key, or an unknown one             401
    │   ├── Forbidden                this key may not do that                  403
    │   ├── Conflict                 does not fit the present state            409
    │   ├── RateLimited              this key has used up its share            429
    │   └── Cancelled                the caller went away                      499
    ├── Unavailable              cannot be answered now → 503
    │   ├── Overloaded               all are busy, try later (retry_after_s)
    │   └── NoWorkers                no instance serves this endpoint
    ├── WorkerLost               try another instance → migrate
    │   └── StreamBroken             the connection broke in the middle of a response
    │       └── WorkerDied               because the worker's process or engine ended
    ├── TransferError            a copy between processes failed → do without it
    ├── DeadlineExceeded         the time limit of the request passed → 504
    ├── EngineFailed             the handler's machinery failed or died → 500
    ├── LocalProtocolError       this process broke the wire protocol → a bug here
    └── RemoteProtocolError      the peer broke the wire protocol → log it and drop the peer

Base classes exist to be caught. A layer above adds classes of its own: `protocols.model_errors`; for Anthropic's API
ThreadUnsupported (a RequestError); for Kubernetes KindMissing (a ConfigError), ObjectMissing (a RequestError) and
LeaseLost (an Unavailable: another operator may act). Foreign exceptions are translated where they enter the program,
with their cause chained. A message says what was expected, what came and what to do.

`code` names an error on the wire between processes (`from_wire`). A class with a `code` of its own can be sent and
received as soon as its module is imported.
"""

from typing import Any, ClassVar, Self

_class_by_code: dict[str, type["DynamoError"]] = {}


class DynamoError(Exception):
    """The base of all errors that this project raises on purpose."""

    code: ClassVar[str] = "internal"

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "code" in cls.__dict__:
            _class_by_code[cls.code] = cls


class ConfigError(DynamoError):
    """A flag, an environment variable, a file or the machine is not as it must be."""

    code = "config"


class RequestError(DynamoError):
    """The request is at fault. `param` names the field of the request, where there is one."""

    code = "request"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    @classmethod
    def of_param(cls, param: str, problem: str) -> Self:
        """Return an error whose message is this problem behind the name of the field."""
        return cls(f"{param}: {problem}", param=param)


class InvalidRequest(RequestError):
    """A field is wrong, unsupported or missing."""

    code = "invalid_request"


class Unauthenticated(RequestError):
    """The request has no API key, or an unknown one."""

    code = "invalid_api_key"


class Forbidden(RequestError):
    """The key is known, but may not do this."""

    code = "forbidden"


class Conflict(RequestError):
    """The request does not fit the present state of the server; it may fit later."""

    code = "conflict"


class RateLimited(RequestError):
    """The key or its tenant has used up its share; retry after `retry_after_s` seconds."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Cancelled(RequestError):
    """The caller went away and no longer waits for the response."""

    code = "cancelled"


class Unavailable(DynamoError):
    """The request cannot be answered now; retry after `retry_after_s` seconds."""

    code = "unavailable"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(Unavailable):
    """Every instance that could answer is busy."""

    code = "overloaded"


class NoWorkers(Unavailable):
    """No instance serves this endpoint."""

    code = "no_workers"


class WorkerLost(DynamoError):
    """The worker that had the request is gone; another may take it."""

    code = "worker_lost"


class StreamBroken(WorkerLost):
    """The connection to the worker broke before its response was complete."""

    code = "stream_broken"


class WorkerDied(StreamBroken):
    """The worker's process or its engine ended before its response was complete; the request may be the reason."""

    code = "worker_died"


class TransferError(DynamoError):
    """Memory could not be copied from or to another process; the caller can do without it."""

    code = "transfer"


class DeadlineExceeded(DynamoError):
    """The time limit of the request has passed."""

    code = "deadline_exceeded"


class EngineFailed(DynamoError):
    """The machinery behind a handler could not carry out the request, or died."""

    code = "engine_failed"


class LocalProtocolError(DynamoError):
    """This process was about to send, or asked for, something that the protocol does not allow."""

    code = "local_protocol"


class RemoteProtocolError(DynamoError):
    """The peer sent something that the protocol does not allow."""

    code = "remote_protocol"


def from_wire(
    code: str, message: str, *, param: str | None = None, retry_after_s: float | None = None
) -> DynamoError:
    """Make the error that a peer named by `code`; an unknown code gives a plain DynamoError."""
    error = _class_by_code.get(code, DynamoError)(message)
    if isinstance(error, RequestError):
        error.param = param
    if isinstance(error, Unavailable | RateLimited) and retry_after_s is not None:
        error.retry_after_s = retry_after_s
    return error
