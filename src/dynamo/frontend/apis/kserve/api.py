"""KServe's v2 inference protocol over HTTP, with Triton's generate and configuration extensions.

GET   /v2                                        name and version of this server
GET   /v2/health/live, /v2/health/ready
GET   /v2/models/{name}[/versions/1]             the model's tensors; .../ready, .../config
POST  /v2/models/{name}[/versions/1]/infer       tensors as JSON; .../generate, .../generate_stream without tensors

The gRPC service (`grpc_server`) answers through the same handlers.
"""

import functools
import re
from collections.abc import Awaitable, Sequence
from typing import Any, NamedTuple

from dynamo.base import distribution, errors
from dynamo.frontend import pipeline
from dynamo.frontend.apis import completions, error_dialects, request_schemas
from dynamo.frontend.apis.kserve import answer, request
from dynamo.frontend.apis.operation import (
    ACCESS_ERRORS,
    ANY_NAME,
    GENERATION_ERRORS,
    ApiContext,
    Operation,
)
from dynamo.frontend.delivery import delivery, sse
from dynamo.frontend.model_registry.registered_model import RegisteredModel
from dynamo.runtime.http import exchange

PREFIX = "/v2"
EXTENSIONS = ["generate", "model_configuration", "binary_tensor_data"]
_MODELS = "/v2/models/"
_MODEL = _MODELS + ANY_NAME
_TARGET = re.compile(
    r"(?P<model>.+?)(/versions/(?P<version>[^/]+))?"
    r"(/(?P<action>ready|config|infer|infer_stream|generate|generate_stream))?"
)
_JSON_LENGTH = "inference-header-content-length"  # where raw tensors follow the JSON
InferApi = pipeline.GenerationApi[request.InferRequest, answer.GenerateFormatter]


class Target(NamedTuple):
    """The model, version and action in a path below /v2/models/."""

    model: str
    version: str
    action: str  # "" for the model itself


def parse_target(path: str) -> Target:
    """Return what a path names. The name of a model may have slashes in it."""
    match = _TARGET.fullmatch(path.removeprefix(_MODELS))
    if match is None:
        return Target("", "", "")
    return Target(match["model"], match["version"] or "", match["action"] or "")


class KserveHandlers:
    """The handlers of all routes."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def show_readiness(self, client: exchange.Exchange) -> None:
        context = self._context
        is_ready = bool(context.models.ready) and not context.drain_state.is_draining
        _respond(client, {"ready": is_ready}, 200 if is_ready else 503)

    def show_model(self, client: exchange.Exchange) -> None:
        target = parse_target(client.request.path)
        try:
            model = self._context.models.find(target.model)
            request.check_version(target.model, target.version)
            model.check_can_generate()
            self._context.admission.check_may_see(client, model.name)
        except errors.DynamoError as error:
            delivery.respond_error(client, error, error_dialects.KSERVE)
            return
        match target.action:
            case "":
                _respond(client, describe_model(model))
            case "config":
                _respond(client, describe_config(model))
            case "ready":
                body = {"name": model.name, "ready": model.is_ready}
                _respond(client, body, 200 if model.is_ready else 503)

    def infer(self, client: exchange.Exchange) -> Awaitable[None] | None:
        target = parse_target(client.request.path)
        header = client.request.headers.get(_JSON_LENGTH, "")
        is_binary = bool(header) and target.action.startswith("infer")
        if not self._context.accept(client, error_dialects.KSERVE, is_binary=is_binary):
            return None
        json_bytes = None
        if is_binary:
            size = len(client.request.body)
            json_bytes = int(header) if re.fullmatch(r"[0-9]{1,12}", header) else size + 1
            if json_bytes > size:
                message = f"expected {_JSON_LENGTH} within the {size} bytes of the body, got {header[:20]!r}"
                _refuse(client, 400, message)
                return None
        return self._context.pipeline.answer(_make_api(target, json_bytes), client)


def _make_api(target: Target, json_bytes: int | None) -> InferApi:
    """Return the API of a route; of a body with raw tensors, the first `json_bytes` are JSON."""
    has_tensors = target.action.startswith("infer")
    decode = functools.partial(
        functools.partial(request.decode_infer, json_bytes=json_bytes)
        if has_tensors
        else request.decode_generate,
        model=target.model,
        version=target.version,
        can_stream=target.action.endswith("_stream"),
    )
    return pipeline.GenerationApi(
        endpoint=completions.API.endpoint,
        decode=decode,
        prepare=completions.prepare,
        make_formatter=answer.InferFormatter if has_tensors else answer.GenerateFormatter,
        stream=answer.KserveStreamDelivery,
        dialect=error_dialects.KSERVE,
    )


def describe_server() -> dict[str, Any]:
    """Return the metadata of the server."""
    return {
        "name": request.PLATFORM,
        "version": distribution.version(),
        "extensions": EXTENSIONS,
    }


def describe_model(model: RegisteredModel) -> dict[str, Any]:
    """Return the metadata of a model: its tensors."""
    return {
        "name": model.name,
        "versions": [request.VERSION],
        "platform": request.PLATFORM,
        "inputs": [_tensor(request.TEXT_INPUT, "BYTES", 1), _tensor(request.STREAMING, "BOOL", 1)],
        "outputs": [
            _tensor(request.TEXT_OUTPUT, "BYTES", -1),
            _tensor(request.FINISH_REASON, "BYTES", -1),
        ],
    }


def describe_config(model: RegisteredModel) -> dict[str, Any]:
    """Return Triton's configuration of a model."""
    return {
        "name": model.name,
        "platform": request.PLATFORM,
        "backend": request.PLATFORM,
        "max_batch_size": 0,
        "input": [
            {"name": request.TEXT_INPUT, "data_type": "TYPE_STRING", "dims": [1]},
            {"name": request.STREAMING, "data_type": "TYPE_BOOL", "dims": [1], "optional": True},
        ],
        "output": [
            {"name": request.TEXT_OUTPUT, "data_type": "TYPE_STRING", "dims": [-1]},
            {"name": request.FINISH_REASON, "data_type": "TYPE_STRING", "dims": [-1]},
        ],
        "model_transaction_policy": {"decoupled": True},
    }


def _describe_tensor(name: str, datatype: str, element: request_schemas.Schema) -> Any:
    return request_schemas.make_object(
        ("name", "datatype", "shape", "data"),
        name={"const": name},
        datatype={"const": datatype},
        shape={"type": "array", "items": {"const": 1}},
        data={
            "anyOf": [element, {"type": "array", "minItems": 1, "maxItems": 1, "items": element}]
        },
    )


_PROMPT = _describe_tensor(request.TEXT_INPUT, "BYTES", request_schemas.SOME_TEXT)
_STREAM = _describe_tensor(request.STREAMING, "BOOL", {"const": False})
_INPUTS = {"type": "array", "minItems": 1, "maxItems": 2, "prefixItems": [_PROMPT, _STREAM]}


_OUTPUT = request_schemas.make_object(
    ("name",), name={"enum": [request.TEXT_OUTPUT, request.FINISH_REASON]}
)
_OUTPUTS = request_schemas.or_null({"type": "array", "items": _OUTPUT})
_TEXT_DETAILS = {
    "text_input": request_schemas.SOME_TEXT,
    "stream": {"enum": [False, None]},
    "parameters": request_schemas.or_null({"type": "object"}),
}


def operations(context: ApiContext) -> Sequence[Operation]:
    """Return the operations of this API."""
    handlers = KserveHandlers(context)
    describe = functools.partial(Operation, tag="KServe", dialect=error_dialects.KSERVE)
    answer_tensors = functools.partial(
        describe,
        method="POST",
        handler=handlers.infer,
        answer=dict[str, Any],
        request=request.InferBody,
        request_details={"inputs": _INPUTS, "outputs": _OUTPUTS},
        errors=GENERATION_ERRORS,
    )
    answer_text = functools.partial(
        answer_tensors,
        request=request.GenerateBody,
        request_details=_TEXT_DETAILS,
        example={"text_input": "Once upon a time", "parameters": {"max_tokens": 60}},
    )
    show_model = functools.partial(
        describe,
        method="GET",
        handler=handlers.show_model,
        answer=dict[str, Any],
        errors=(400, *ACCESS_ERRORS, 404, 503),
    )
    return (
        answer_tensors(path=_MODEL + "/infer", summary="Answer a text in a tensor"),
        answer_tensors(
            path=_MODEL + "/infer_stream", summary="Stream such an answer", events=dict[str, Any]
        ),
        answer_text(path=_MODEL + "/generate", summary="Answer a text"),
        answer_text(
            path=_MODEL + "/generate_stream",
            summary="Stream such an answer",
            events=dict[str, Any],
            request=request.StreamedGenerateBody,
            request_details={**_TEXT_DETAILS, "stream": {"enum": [True, None]}},
        ),
        show_model(path=_MODEL, summary="A model's tensors"),
        show_model(path=_MODEL + "/config", summary="A model's configuration"),
        show_model(path=_MODEL + "/ready", summary="200 if the model is ready, else 503"),
        describe(
            method="GET",
            path=PREFIX,
            handler=lambda client: _respond(client, describe_server()),
            summary="Name and version of this server",
            answer=dict[str, Any],
            errors=ACCESS_ERRORS,
        ),
        describe(
            method="GET",
            path="/v2/health/live",
            handler=lambda client: _respond(client, {"live": True}),
            summary="200 as long as the process runs",
            answer=dict[str, Any],
        ),
        describe(
            method="GET",
            path="/v2/health/ready",
            handler=handlers.show_readiness,
            summary="200 if a model is ready, else 503",
            answer=dict[str, Any],
            other_answers={503: dict[str, Any]},
        ),
    )


def _tensor(name: str, datatype: str, length: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [length]}


def _respond(client: exchange.Exchange, body: Any, status: int = 200) -> None:
    client.respond(status, sse.encode(body))


def _refuse(client: exchange.Exchange, status: int, message: str) -> None:
    client.respond(status, error_dialects.KSERVE.refusal(status, message))
