"""An operation of the HTTP API: one method of one path, with its handler and its description.

Each API has a function `operations` that gets the services which it uses and returns its operations; `service` calls
these functions. Routes, `/openapi.json` and `/docs` are all made from that one list, so there is no route without a
description.
"""

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from dynamo.base import errors, ids
from dynamo.frontend.apis import error_dialects
from dynamo.frontend.delivery import delivery, sse
from dynamo.frontend.model_registry.registered_model import RegisteredModel
from dynamo.frontend.pipeline import REQUEST_ID_HEADERS, GenerationApi, Pipeline, client_request_id
from dynamo.runtime.http import exchange

R = TypeVar("R")


class ModelRequest(Protocol):
    """A request that names its model, unless there is only one."""

    @property
    def model(self) -> str | None:
        """The name or an alias of the model."""
        ...


M = TypeVar("M", bound=ModelRequest)
ANY_ID = "*"  # in the place of an id in a path
ANY_NAME = "**"  # in the place of a name, which may have slashes
ACCESS_ERRORS = (401, 403, 429)  # where API keys are required
READ_ERRORS = (400, *ACCESS_ERRORS, 404, 408, 413, 415, 503)  # of a request with a body
GENERATION_ERRORS = (*READ_ERRORS, 500, 504)  # of a request that goes to a worker
HTML = "text/html; charset=utf-8"
HELLO = ({"role": "user", "content": "What is the capital of France?"},)  # messages of examples
_JSON = "application/json"
_TYPES = (_JSON, "application/x-www-form-urlencoded")  # of `curl -d`; `browsers` refuses forms


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path. `path` may have `ANY_ID` or `ANY_NAME` in one place."""

    method: str
    path: str
    handler: exchange.Handler
    summary: str
    tag: str
    # the type of its JSON, or the media type of its text; None: it refuses
    answer: type | str | None
    request: type | None = None
    request_media_type: str = _JSON
    body_factor: int = 1  # its body may be larger than others by this factor
    request_details: Mapping[str, Any] = field(default_factory=dict)  # JSON schemas by field name
    request_rules: Sequence[Mapping[str, Any]] = ()  # JSON schemas that hold between the fields
    events: type | None = None  # of the data of a streamed answer
    streams_lines: bool = False  # a streamed answer is lines, each of the type of the answer
    ends_with_done: bool = False  # the last event of a stream is [DONE]
    other_answers: Mapping[int, type] = field(default_factory=dict)  # by status
    errors: Sequence[int] = ()  # statuses
    dialect: delivery.ErrorDialect = error_dialects.OPENAI
    example: Mapping[str, Any] = field(default_factory=dict)  # a body without `model`


class App:
    """The routes of one frontend for its clients."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = operations
        # the paths of an API with errors of its own, for requests that no handler takes
        self._dialect_by_prefix = {
            _api_prefix(entry.path): entry.dialect
            for entry in self.operations
            if entry.dialect is not error_dialects.OPENAI
        }
        self._dialect_by_path = {entry.path: entry.dialect for entry in self.operations}
        self._body_factor_by_path = {entry.path: entry.body_factor for entry in self.operations}
        self.routes = exchange.HttpRouter(
            {(entry.method, entry.path): entry.handler for entry in self.operations},
            error_body=self.error_body,
        )

    def body_factor_of(self, path: str) -> int:
        """Return by which factor a body may be larger at this path than at others."""
        return self._body_factor_by_path.get(path, 1)

    def error_body(self, status: int, message: str, path: str) -> bytes:
        """Return the body of an error that the HTTP server itself answers at this path."""
        return self.dialect_of(path).refusal(status, message)

    def dialect_of(self, path: str) -> delivery.ErrorDialect:
        """Return how the API at this path encodes errors."""
        if path in self._dialect_by_path:  # `/v2/rerank` is none of KServe's
            return self._dialect_by_path[path]
        for prefix, dialect in self._dialect_by_prefix.items():
            if path.startswith(prefix):
                return dialect
        return error_dialects.OPENAI


def _api_prefix(path: str) -> str:
    """Return what all paths of an API begin with: its first folder, but below /v1 several APIs share one."""
    folder = path.split("/")[1]
    return path.partition(ANY_ID)[0] if folder == "v1" else f"/{folder}"


F = TypeVar("F", bound=Callable[..., Any])


class Operations:
    """The operations of one API, declared one by one; `common` are the fields of `Operation` that all of them have.

    `wrap` makes a handler of what is declared, unless the declaration names a `wrap` of its own.
    """

    def __init__(
        self, *, wrap: Callable[..., exchange.Handler] = lambda handler: handler, **common: Any
    ) -> None:
        self.entries: list[Operation] = []
        self._wrap = wrap
        self._common = common

    def get(self, path: str, summary: str, **fields: Any) -> Callable[[F], F]:
        """Return a decorator that declares a function as the handler of GET."""
        return self.declare("GET", path, summary, **fields)

    def post(self, path: str, summary: str, **fields: Any) -> Callable[[F], F]:
        """Return a decorator that declares a function as the handler of POST."""
        return self.declare("POST", path, summary, **fields)

    def declare(
        self,
        method: str,
        path: str,
        summary: str,
        *,
        wrap: Callable[..., exchange.Handler] | None = None,
        **fields: Any,
    ) -> Callable[[F], F]:
        """Return a decorator that declares a function as the handler of a method; `fields` are those of `Operation`."""

        def add(function: F) -> F:
            handler = (wrap or self._wrap)(function)
            described = {"summary": summary, **self._common, **fields}
            self.entries.append(Operation(method=method, path=path, handler=handler, **described))
            return function

        return add


class RequestHandlers:
    """Makes the handlers of several APIs, none of which takes a request once the frontend `is_draining`.

    Before that it `is_leaving`: probes are told so, and requests are still taken. It has what a handler needs to find a
    model that the client may use, and to have a request answered.
    """

    def __init__(self, requests: Pipeline) -> None:
        self.pipeline = requests
        self.models = requests.models
        self.rights = requests.admission.rights
        self.is_leaving = self.is_draining = False

    def generate(self, api: GenerationApi[Any, Any]) -> exchange.Handler:
        """Return a handler that answers by generated text."""
        return self.accepted(functools.partial(self.pipeline.answer, api), api.dialect)

    def compute(
        self, decode: Callable[[bytes], R], answer: Callable[[R], Awaitable[Any]]
    ) -> exchange.Handler:
        """Return a handler that answers the decoded request by what `answer` returns, without a worker."""
        return self._compute(decode, lambda _, decoded: answer(decoded), error_dialects.OPENAI)

    def compute_by_model(
        self,
        decode: Callable[[bytes], M],
        answer: Callable[[M, RegisteredModel], Awaitable[Any]],
        dialect: delivery.ErrorDialect = error_dialects.OPENAI,
    ) -> exchange.Handler:
        """Return the same for requests that need the tokenizer of a model, which the client's key has to allow.

        The model is waited for while its first worker is expected.
        """

        async def find_and_answer(client: exchange.Exchange, decoded: M) -> Any:
            return await answer(decoded, await self.find_or_wait(client, decoded.model))

        return self._compute(decode, find_and_answer, dialect)

    def _compute(
        self,
        decode: Callable[[bytes], R],
        answer: Callable[[exchange.Exchange, R], Awaitable[Any]],
        dialect: delivery.ErrorDialect,
    ) -> exchange.Handler:
        async def handle(client: exchange.Exchange) -> None:
            if not self.accept(client, dialect):
                return
            try:
                decoded = await self.pipeline.unknown.decode(client, decode)
                body = sse.encode(await answer(client, decoded))
            except errors.DynamoError as error:
                delivery.respond_error(client, error, dialect)
            else:
                client.respond(200, body)

        return add_request_id(handle)

    async def find_or_wait(self, client: exchange.Exchange, name: str | None) -> RegisteredModel:
        """Return the model of this name; without a name, the only one. Raises as `Pipeline.find_model`."""
        name = None if name is None else self.default_of(client, name)
        is_expected = self.pipeline.worker_wait.is_expected
        if name is not None and is_expected(self.models.announced_name(name)):
            return await self.pipeline.find_model(name, client)
        if name is not None:
            return self.models.find(name, self.rights.model_filter(client))
        visible = [model for model in self.list_visible(client) if model.base is None]
        if len(visible) == 1:
            return visible[0]
        names = ", ".join(repr(model.name) for model in visible)
        raise errors.InvalidRequest.of_param(
            "model", f"required where not exactly one is served. Served here: {names or 'none'}."
        )

    def default_of(self, client: exchange.Exchange, name: str) -> str:
        """Return the default model for a name that asks the semantic router to choose; any other name stays.

        So does each that stands for a model which the client may not ask: no error names that. Raises Unauthenticated.
        """
        semantic = self.pipeline.semantic
        if semantic is None or (default := semantic.default_of(name)) == name:
            return name
        default = self.models.served_name(default)
        return default if self.rights.may_see(client, default) else name

    def list_visible(self, client: exchange.Exchange) -> Sequence[RegisteredModel]:
        """Return the ready models that the client's API key allows, by name. Raises Unauthenticated."""
        may_see = self.rights.model_filter(client)
        return [model for model in self.models.ready if may_see is None or may_see(model.name)]

    def accepted(
        self, handler: exchange.Handler, dialect: delivery.ErrorDialect = error_dialects.OPENAI
    ) -> exchange.Handler:
        """Return a handler that gives `handler` the requests that `accept` takes."""
        return lambda client: handler(client) if self.accept(client, dialect) else None

    def accept(
        self,
        client: exchange.Exchange,
        dialect: delivery.ErrorDialect,
        *,
        is_binary: bool = False,
    ) -> bool:
        """Return whether the frontend takes this request with a JSON body; if not, it has been answered.

        With `is_binary` more than JSON is in the body, and its type is not checked.
        """
        if self.is_draining:
            error = errors.Unavailable("this frontend is shutting down: try again")
            delivery.respond_error(client, error, dialect)
            return False
        content_type = client.request.headers.get("content-type", _JSON)
        if is_binary:
            return True
        if content_type != _JSON and content_type.partition(";")[0].strip().lower() not in _TYPES:
            message = (
                f"expected the header Content-Type: application/json, got {content_type[:100]!r}"
            )
            client.respond(415, dialect.refusal(415, message))
            return False
        return True


def add_request_id(handler: exchange.Handler) -> exchange.Handler:
    """Return the handler with the request's id in the headers of its answers, as generated answers have it."""

    def handle(client: exchange.Exchange) -> Awaitable[None] | None:
        request_id = client_request_id(client) or ids.new_request_id()
        client.headers = (*client.headers, *((name, request_id) for name in REQUEST_ID_HEADERS))
        return handler(client)

    return handle
