"""KServe's v2 inference protocol over HTTP, with Triton's generate and configuration extensions.

GET   /v2                                        name and version of this server
GET   /v2/health/live, /v2/health/ready
GET   /v2/models/{name}[/versions/1]             the model's tensors; .../ready, .../config
POST  /v2/models/{name}[/versions/1]/infer       tensors as JSON; .../generate, .../generate_stream without tensors

Answers are tensors (`infer`), or plain fields (Triton's `generate`). The gRPC service (`grpc_server`) answers through
the same handlers.
"""

import functools
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from dynamo.base import distribution, errors
from dynamo.frontend import pipeline
from dynamo.frontend.apis import completions, error_dialects, openapi
from dynamo.frontend.apis.kserve import request as kserve
from dynamo.frontend.apis.operation import (
    ACCESS_ERRORS,
    ANY_NAME,
    GENERATION_ERRORS,
    Operation,
    Operations,
    RequestHandlers,
)
from dynamo.frontend.delivery import delivery, sse, streaming
from dynamo.frontend.model_registry.registered_model import RegisteredModel
from dynamo.protocols import model_errors
from dynamo.runtime.http import exchange, json_body


class GenerateFormatter:
    """Formats an answer as plain fields; several choices are lists."""

    def __init__(self, request: kserve.InferRequest, answer_identity: sse.Identity) -> None:
        self._head = {"model_name": answer_identity.model, "model_version": kserve.VERSION}
        if request.infer_id:
            self._head["id"] = request.infer_id

    def chunk(self, part: sse.ChoicePart) -> dict[str, Any]:
        """Return the chunk for a part of the only choice; the last one has a finish reason."""
        reasons = [] if part.finish_reason is None else [part.finish_reason]
        return self._outputs([completions.content_of(part.piece)], reasons)

    def usage_chunk(self, usage: sse.Usage) -> dict[str, Any]:
        """Raise LocalProtocolError: the protocol has no usage, so no request can ask for it."""
        raise errors.LocalProtocolError(f"KServe's protocol does not tell usage, got {usage}")

    def whole(self, answers: Sequence[sse.WholeChoice], usage: sse.Usage) -> dict[str, Any]:
        del usage
        texts = ["".join(map(completions.content_of, answer.pieces)) for answer in answers]
        return self._outputs(texts, [answer.finish_reason for answer in answers])

    def _outputs(self, texts: list[str], reasons: list[str]) -> dict[str, Any]:
        outputs: dict[str, Any] = {**self._head, kserve.TEXT_OUTPUT: _unwrap(texts)}
        return {**outputs, kserve.FINISH_REASON: _unwrap(reasons)} if reasons else outputs


class InferFormatter(GenerateFormatter):
    """Formats an answer as tensors."""

    def _outputs(self, texts: list[str], reasons: list[str]) -> dict[str, Any]:
        tensors = [_text_tensor(kserve.TEXT_OUTPUT, texts)]
        if reasons:
            tensors.append(_text_tensor(kserve.FINISH_REASON, reasons))
        return {**self._head, "outputs": tensors}


class KserveStreamDelivery(streaming.StreamDelivery):
    """A stream that ends without OpenAI's `[DONE]`."""

    last_event = b""


def _unwrap(elements: list[str]) -> str | list[str]:
    """Return the only element, or the list of several."""
    return elements[0] if len(elements) == 1 else elements


def _text_tensor(name: str, elements: list[str]) -> dict[str, Any]:
    return {"name": name, "datatype": "BYTES", "shape": [len(elements)], "data": elements}


EXTENSIONS = ["generate", "model_configuration", "binary_tensor_data"]
_MODELS = "/v2/models/"
_MODEL = _MODELS + ANY_NAME
_TARGET = re.compile(
    r"(?P<model>.+?)(/versions/(?P<version>[^/]+))?"
    r"(/(?P<action>ready|config|infer|infer_stream|generate|generate_stream))?"
)
_JSON_LENGTH = "inference-header-content-length"  # where raw tensors follow the JSON
InferApi = pipeline.GenerationApi[kserve.InferRequest, GenerateFormatter]


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

    def __init__(self, handlers: RequestHandlers, can_wake: Callable[[], bool]) -> None:
        """`can_wake` says whether a request wakes a model that has no worker on purpose."""
        self._handlers = handlers
        self._can_wake = can_wake

    def show_readiness(self, client: exchange.Exchange) -> None:
        can_answer = bool(self._handlers.models.ready) or self._can_wake()
        is_ready = can_answer and not self._handlers.is_leaving
        _respond(client, {"ready": is_ready}, 200 if is_ready else 503)

    def show_model(self, client: exchange.Exchange) -> None:
        target = parse_target(client.request.path)
        try:
            self._check_path(client, target.model)
            may_see = self._handlers.rights.model_filter(client)
            model = self._handlers.models.find(target.model, may_see)
            kserve.check_version(target.model, target.version)
            model.check_can_generate()
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

    def _check_path(self, client: exchange.Exchange, name: str) -> None:
        """Raise ObjectNotFound if the name is that of a model that the client may see and more, and no model's."""
        models = self._handlers.models
        owner = models.get(name.rpartition("/")[0])
        is_known = owner is not None and self._handlers.rights.may_see(client, owner.name)
        if is_known and models.get(name) is None:
            raise model_errors.ObjectNotFound(f"no such path: GET {client.request.path}")

    def infer(self, client: exchange.Exchange) -> Awaitable[None] | None:
        target = parse_target(client.request.path)
        header = client.request.headers.get(_JSON_LENGTH, "")
        is_binary = bool(header) and target.action.startswith("infer")
        if not self._handlers.accept(client, error_dialects.KSERVE, is_binary=is_binary):
            return None
        json_bytes = None
        if is_binary:
            size = len(client.request.body)
            json_bytes = int(header) if re.fullmatch(r"[0-9]{1,12}", header) else size + 1
            if json_bytes > size:
                message = f"expected {_JSON_LENGTH} within the {size} bytes of the body, got {header[:20]!r}"
                client.respond(400, error_dialects.KSERVE.refusal(400, message))
                return None
        return self._handlers.pipeline.answer(_make_api(target, json_bytes), client)


def _make_api(target: Target, json_bytes: int | None) -> InferApi:
    """Return the API of a route; of a body with raw tensors, the first `json_bytes` are JSON."""
    has_tensors = target.action.startswith("infer")
    decode = functools.partial(
        functools.partial(kserve.decode_infer, json_bytes=json_bytes)
        if has_tensors
        else kserve.decode_generate,
        model=target.model,
        version=target.version,
        can_stream=target.action.endswith("_stream"),
    )

    def read_texts(body: bytes) -> bytes:
        token = json_body.ignored_names.set(
            []
        )  # unknown parameters are judged where the body is decoded again
        try:
            request = decode(body)
        finally:
            json_body.ignored_names.reset(token)
        return msgspec.json.encode({"model": target.model, "prompt": request.prompt})

    return pipeline.GenerationApi(
        endpoint=completions.API.endpoint,
        decode=decode,
        prepare=completions.prepare,
        make_formatter=InferFormatter if has_tensors else GenerateFormatter,
        stream=KserveStreamDelivery,
        dialect=error_dialects.KSERVE,
        read_texts=read_texts,
    )


def describe_model(model: RegisteredModel) -> dict[str, Any]:
    """Return the metadata of a model: its tensors."""
    return {
        "name": model.name,
        "versions": [kserve.VERSION],
        "platform": kserve.PLATFORM,
        "inputs": [_tensor(kserve.TEXT_INPUT, "BYTES", 1), _tensor(kserve.STREAMING, "BOOL", 1)],
        "outputs": [
            _tensor(kserve.TEXT_OUTPUT, "BYTES", -1),
            _tensor(kserve.FINISH_REASON, "BYTES", -1),
        ],
    }


def describe_config(model: RegisteredModel) -> dict[str, Any]:
    """Return Triton's configuration of a model."""
    return {
        "name": model.name,
        "platform": kserve.PLATFORM,
        "backend": kserve.PLATFORM,
        "max_batch_size": 0,
        "input": [
            {"name": kserve.TEXT_INPUT, "data_type": "TYPE_STRING", "dims": [1]},
            {"name": kserve.STREAMING, "data_type": "TYPE_BOOL", "dims": [1], "optional": True},
        ],
        "output": [
            {"name": kserve.TEXT_OUTPUT, "data_type": "TYPE_STRING", "dims": [-1]},
            {"name": kserve.FINISH_REASON, "data_type": "TYPE_STRING", "dims": [-1]},
        ],
        "model_transaction_policy": {"decoupled": True},
    }


def _describe_tensor(name: str, datatype: str, element: openapi.Schema) -> Any:
    return openapi.make_object(
        ("name", "datatype", "shape", "data"),
        name={"const": name},
        datatype={"const": datatype},
        shape={"type": "array", "items": {"const": 1}},
        data={
            "anyOf": [element, {"type": "array", "minItems": 1, "maxItems": 1, "items": element}]
        },
    )


_PROMPT = _describe_tensor(kserve.TEXT_INPUT, "BYTES", openapi.SOME_TEXT)
_STREAM = _describe_tensor(kserve.STREAMING, "BOOL", {"const": False})
_INPUTS = {"type": "array", "minItems": 1, "maxItems": 2, "prefixItems": [_PROMPT, _STREAM]}


_OUTPUT = openapi.make_object(("name",), name={"enum": [kserve.TEXT_OUTPUT, kserve.FINISH_REASON]})
_OUTPUTS = openapi.or_null({"type": "array", "items": _OUTPUT})
_TEXT_DETAILS = {
    "text_input": openapi.SOME_TEXT,
    "stream": {"enum": [False, None]},
    "parameters": openapi.or_null({"type": "object"}),
}


def operations(
    request_handlers: RequestHandlers, can_wake: Callable[[], bool]
) -> Sequence[Operation]:
    """Return the operations of this API; `can_wake` says whether a request wakes a model without workers."""
    handlers = KserveHandlers(request_handlers, can_wake)
    api = Operations(tag="KServe", dialect=error_dialects.KSERVE, answer=dict[str, Any])
    answer_tensors = functools.partial(
        api.post,
        request=kserve.InferBody,
        request_details={"inputs": _INPUTS, "outputs": _OUTPUTS},
        errors=GENERATION_ERRORS,
    )
    answer_text = functools.partial(
        answer_tensors,
        request=kserve.GenerateBody,
        request_details=_TEXT_DETAILS,
        example={"text_input": "Once upon a time", "parameters": {"max_tokens": 60}},
    )
    for declare in (
        answer_tensors(_MODEL + "/infer", "Answer a text in a tensor"),
        answer_tensors(_MODEL + "/infer_stream", "Stream such an answer", events=dict[str, Any]),
        answer_text(_MODEL + "/generate", "Answer a text"),
        answer_text(
            _MODEL + "/generate_stream",
            "Stream such an answer",
            events=dict[str, Any],
            request=kserve.StreamedGenerateBody,
            request_details={**_TEXT_DETAILS, "stream": {"enum": [True, None]}},
        ),
    ):
        declare(handlers.infer)
    for path, summary in (
        (_MODEL, "A model's tensors"),
        (_MODEL + "/config", "A model's configuration"),
        (_MODEL + "/ready", "200 if the model is ready, else 503"),
    ):
        api.get(path, summary, errors=(400, *ACCESS_ERRORS, 404, 503))(handlers.show_model)
    api.get(
        "/v2/health/ready",
        "200 if a model is ready, or a request would wake one; else 503",
        other_answers={503: dict[str, Any]},
    )(handlers.show_readiness)

    @api.get("/v2", "Name and version of this server", errors=ACCESS_ERRORS)
    def show_server(client: exchange.Exchange) -> None:
        version = distribution.version()
        _respond(client, {"name": kserve.PLATFORM, "version": version, "extensions": EXTENSIONS})

    @api.get("/v2/health/live", "200 as long as the process runs")
    def show_live(client: exchange.Exchange) -> None:
        _respond(client, {"live": True})

    return api.entries


def _tensor(name: str, datatype: str, length: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [length]}


def _respond(client: exchange.Exchange, body: Any, status: int = 200) -> None:
    client.respond(status, sse.encode(body))
