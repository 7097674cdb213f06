"""`GET /openapi.json`: our API as OpenAPI 3.1 (https://spec.openapis.org/oas/v3.1.0), from the table in `operations`.

The schemas are msgspec's of the very types by which the server decodes, so what they say is what it does.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from dynamo.frontend import operations
from dynamo.frontend.answer import sse
from dynamo.frontend.operations import Operation

_SCHEMAS = "#/components/schemas/"
_OURS = "dynamo.protocols."  # begins the names of types that share their last part
_JSON = "application/json"
_DONE = "[DONE]"
AN_EVENT = "a server-sent event"
_REQUEST_ID = {"type": "string", "pattern": "^[!-~]{1,200}$"}
_HEADERS = (  # whatever is in them, the request is answered: what is broken counts as absent
    ("x-request-id", "the caller's id of this request; without a sane one we make one"),
    ("traceparent", "the trace it belongs to (W3C Trace Context)"),
    ("tracestate", "what tracing vendors keep beside it"),
)
_REASONS = {
    400: "A parameter is wrong or not supported; the message names it",
    401: "No API key, or one that is not known",
    403: "This API key does not allow it",
    404: "There is no such thing, or no such model",
    405: "There is another method at this path",
    408: "The request did not arrive in time",
    413: "The body is too large",
    415: "The body is not JSON",
    429: "Too much in too short a time; Retry-After says when to try again",
    500: "The engine failed",
    503: "Nobody can answer now; Retry-After says when to try again",
    504: "The time is over",
    529: "Every worker is at its limit; Retry-After says when to try again",
}
Refs = Mapping[type, dict[str, Any]]


def document(
    table: Mapping[tuple[str, str], Operation],
    details: Mapping[tuple[type, str], Any],
    version: str,
) -> dict[str, Any]:
    """The description of these operations."""
    refs, schemas = _schemas(table.values(), details)
    paths: dict[str, dict[str, Any]] = {}
    for (method, pattern), operation in table.items():
        described = _operation(method, pattern, operation, refs)
        paths.setdefault(path_of(pattern), {})[method.lower()] = described
    found = {
        "openapi": "3.1.0",
        "info": {"title": "Dynamo", "version": version},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    # two types of one name are told apart by their modules, which a reader need not see in full
    text = msgspec.json.encode(found).replace(_OURS.encode(), b"")
    read: dict[str, Any] = msgspec.json.decode(text)
    return read


def path_of(pattern: str) -> str:
    """The router's pattern, as OpenAPI writes it."""
    return pattern.removesuffix(operations.ANY_ID) + ("{id}" if has_id(pattern) else "")


def has_id(pattern: str) -> bool:
    """Does its last part name something?"""
    return pattern.endswith(operations.ANY_ID)


def _schemas(
    table: Iterable[Operation], details: Mapping[tuple[type, str], Any]
) -> tuple[Refs, dict[str, Any]]:
    types = list(dict.fromkeys(kind for operation in table for kind in _types(operation)))
    found, schemas = msgspec.json.schema_components(types, ref_template=_SCHEMAS + "{name}")
    refs = dict(zip(types, found, strict=True))
    for (kind, name), detail in details.items():
        schema = schemas[refs[kind]["$ref"].removeprefix(_SCHEMAS)]
        schema["properties"][name] = detail
    return refs, schemas


def _types(operation: Operation) -> Iterable[type]:
    named = (operation.request, operation.answer, operation.events, *operation.others.values())
    yield from (kind for kind in named if kind is not None and not isinstance(kind, str))
    if operation.errors:
        yield operation.error_body


def _operation(method: str, pattern: str, operation: Operation, refs: Refs) -> dict[str, Any]:
    words = "_".join(pattern.replace(operations.ANY_ID, "id").replace(".", "_").split("/")[1:])
    found: dict[str, Any] = {
        "operationId": f"{method.lower()}_{words}".rstrip("_"),
        "summary": operation.summary,
        "tags": [operation.tag],
        "responses": _responses(operation, refs),
    }
    if parameters := [*_parameters(pattern, operation)]:
        found["parameters"] = parameters
    if operation.request is not None:
        content = {"schema": refs[operation.request]}
        found["requestBody"] = {"required": True, "content": {_JSON: content}}
    return found


def _parameters(pattern: str, operation: Operation) -> Iterable[dict[str, Any]]:
    if has_id(pattern):
        an_id = {"type": "string", "minLength": 1}
        yield {"name": "id", "in": "path", "required": True, "schema": an_id}
    if operation.request is not None:
        for name, text in _HEADERS:
            kind = {"type": "string"}
            yield {"name": name, "in": "header", "description": text, "schema": kind}


def _responses(operation: Operation, refs: Refs) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if isinstance(operation.answer, str):
        content[operation.answer] = {"schema": {"type": "string"}}
    else:
        content[_JSON] = {"schema": refs[operation.answer]}
    found: dict[str, Any] = {"200": {"description": operation.summary, "content": content}}
    if operation.events is not None:
        found["200"]["description"] += "; a stream of events if `stream` is true"
        content[sse.CONTENT_TYPE] = {"schema": _event(operation, refs, refs[operation.events])}
    if operation.request is not None:
        found["200"]["headers"] = {"x-request-id": {"schema": _REQUEST_ID}}
    for status, kind in operation.others.items():
        found[str(status)] = _answer(operation.summary, refs[kind])
    for status in sorted(operation.errors):
        found[str(status)] = _answer(_REASONS[status], refs[operation.error_body])
    return found


def _event(operation: Operation, refs: Refs, data: dict[str, Any]) -> dict[str, Any]:
    """One server-sent event: before OpenAPI 3.2, the schema of a stream is that of its events."""
    kinds = {"anyOf": [data, refs[operation.error_body]]}
    texts: list[dict[str, Any]] = [{"contentMediaType": _JSON, "contentSchema": kinds}]
    if operation.ends_with_done:
        texts.append({"const": _DONE})
    fields = {"event": {"type": "string"}, "data": {"type": "string", "anyOf": texts}}
    return {"type": "object", "description": AN_EVENT, "properties": fields}


def _answer(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": {_JSON: {"schema": schema}}}
