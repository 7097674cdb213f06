"""The description of the HTTP API as OpenAPI 3.1 (https://spec.openapis.org/oas/v3.1.0), made from its operations.

The schemas are msgspec's, of the very types by which the server decodes, so they cannot differ from what it accepts.

Messages, tools and texts are decoded as plain values and checked afterwards (`preprocess.conversation`, and the `check`
of each request), so schemas that say more than the types are written here. A rule holds between the fields of one
request.
"""  # decider

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from dynamo.frontend.apis.operation import ANY_ID, ANY_NAME, Operation
from dynamo.frontend.delivery import sse, streaming
from dynamo.preprocess import conversation, images, inputs

_SCHEMAS = "#/components/schemas/"
# in names of types that share a name
_OWN_MODULES = re.compile(rb"dynamo\.(frontend\.apis|preprocess)\.")
_JSON = "application/json"
EVENT = "a server-sent event"
_DONE = "[DONE]"
_REQUEST_ID = {"type": "string", "pattern": "^[!-~]{1,200}$"}
_HEADERS = (  # a malformed value counts as absent, so it is never an error
    (
        "x-request-id",
        "the client's id of this request; without a printable one the frontend makes one",
    ),
    ("traceparent", "the trace it belongs to (W3C Trace Context)"),
    ("tracestate", "data of tracing vendors for that trace"),
)
_REASONS = {
    400: "A parameter is wrong or not supported; the message names it",
    401: "No API key, or an unknown one",
    403: "This API key does not allow it",
    404: "There is no such thing, or no such model",
    409: "Its present state does not allow it",
    405: "There is another method at this path",
    408: "The request did not arrive in time",
    413: "The body is too large",
    415: "The body is not JSON",
    429: "Too much in too short a time; Retry-After says when to try again",
    500: "The engine failed",
    503: "No worker can answer now; Retry-After says when to try again",
    504: "The time limit has passed",
    529: "Every worker is at its limit; Retry-After says when to try again",
}
Refs = Mapping[type, dict[str, Any]]


def make_document(operations: Sequence[Operation], version: str) -> dict[str, Any]:
    """Return the OpenAPI document of these operations."""
    refs, schemas = _make_schemas(operations)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        described = _describe(operation, refs)
        paths.setdefault(openapi_path(operation.path), {})[operation.method.lower()] = described
    document = {
        "openapi": "3.1.0",
        "info": {"title": "Dynamo", "version": version},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    # types of one name are distinguished by their modules, which a reader need not see in full
    shortened = _OWN_MODULES.sub(b"", msgspec.json.encode(document))
    decoded: dict[str, Any] = msgspec.json.decode(shortened)
    return decoded


def openapi_path(path: str) -> str:
    """Return an operation's path as OpenAPI writes it."""
    return path.replace(ANY_NAME, ANY_ID).replace(ANY_ID, "{id}")


def _make_schemas(operations: Iterable[Operation]) -> tuple[Refs, dict[str, Any]]:
    """Return references to the schemas of all types, and the schemas by name."""
    types = list(dict.fromkeys(kind for operation in operations for kind in _types(operation)))
    references, schemas = msgspec.json.schema_components(types, ref_template=_SCHEMAS + "{name}")
    refs = dict(zip(types, references, strict=True))
    for operation in operations:
        if operation.request is None:
            continue
        schema = schemas[refs[operation.request]["$ref"].removeprefix(_SCHEMAS)]
        schema["properties"].update(_with_references(operation.request_details, refs))
        if operation.request_rules:
            schema["allOf"] = _with_references(list(operation.request_rules), refs)
    for schema in schemas.values():
        schema.pop("additionalProperties", None)  # what is unknown is accepted, and has no effect
    return refs, schemas


def _types(operation: Operation) -> Iterable[type]:
    named = (operation.request, operation.answer, operation.events)
    details = _types_in([operation.request_details, *operation.request_rules])
    for kind in (*named, *operation.other_answers.values(), *details):
        if kind is not None and not isinstance(kind, str):
            yield kind
    if operation.errors:
        yield operation.dialect.BODY_TYPE


def _types_in(details: Any) -> Iterable[type]:
    """Yield the types that stand in these schemas in the places of their own schemas."""
    if isinstance(details, type):
        yield details
    elif isinstance(details, Mapping | list):
        for inner in details.values() if isinstance(details, Mapping) else details:
            yield from _types_in(inner)


def _with_references(details: Any, refs: Refs) -> Any:
    """Return these schemas with references in the places of the types in them."""
    if isinstance(details, type):
        return refs[details]
    if isinstance(details, Mapping):
        return {name: _with_references(inner, refs) for name, inner in details.items()}
    return (
        [_with_references(one, refs) for one in details] if isinstance(details, list) else details
    )


def _describe(operation: Operation, refs: Refs) -> dict[str, Any]:
    words = "_".join(
        openapi_path(operation.path).replace("{id}", "id").replace(".", "_").split("/")[1:]
    )
    described: dict[str, Any] = {
        "operationId": f"{operation.method.lower()}_{words}".rstrip("_"),
        "summary": operation.summary,
        "tags": [operation.tag],
        "responses": _describe_responses(operation, refs),
    }
    if parameters := [*_parameters(operation)]:
        described["parameters"] = parameters
    if operation.request is not None:
        content: dict[str, Any] = {"schema": refs[operation.request]}
        if operation.example:
            chosen = {"model": "MODEL"} if hasattr(operation.request, "model") else {}
            content["example"] = {**chosen, **operation.example}
        described["requestBody"] = {
            "required": True,
            "content": {operation.request_media_type: content},
        }
    return described


def _parameters(operation: Operation) -> Iterable[dict[str, Any]]:
    if ANY_ID in operation.path:
        schema = {"type": "string", "minLength": 1}
        yield {"name": "id", "in": "path", "required": True, "schema": schema}
    if operation.request is not None:
        for name, text in _HEADERS:
            string = {"type": "string"}
            yield {"name": name, "in": "header", "description": text, "schema": string}


def _describe_responses(operation: Operation, refs: Refs) -> dict[str, Any]:
    content: dict[str, Any] = {}
    responses: dict[str, Any] = {"200": {"description": operation.summary, "content": content}}
    if operation.answer is None:
        responses = {}
    elif isinstance(operation.answer, str):
        content[operation.answer] = {"schema": {"type": "string"}}
    else:
        content[_JSON] = {"schema": refs[operation.answer]}
    if operation.streams_lines:
        content[streaming.LINES_TYPE] = content[_JSON]
    if operation.events is not None:
        responses["200"]["description"] += "; a stream of events if `stream` is true"
        content[sse.CONTENT_TYPE] = {"schema": _describe_event(operation, refs)}
    if operation.request is not None:
        responses["200"]["headers"] = {"x-request-id": {"schema": _REQUEST_ID}}
    for status, kind in operation.other_answers.items():
        responses[str(status)] = _describe_answer(operation.summary, refs[kind])
    for status in sorted(operation.errors):
        responses[str(status)] = _describe_answer(
            _REASONS[status], refs[operation.dialect.BODY_TYPE]
        )
    return responses


def _describe_event(operation: Operation, refs: Refs) -> dict[str, Any]:
    """Return the schema of one server-sent event, which before OpenAPI 3.2 stands for that of the stream."""
    assert operation.events is not None
    data = {"anyOf": [refs[operation.events], refs[operation.dialect.BODY_TYPE]]}
    texts: list[dict[str, Any]] = [{"contentMediaType": _JSON, "contentSchema": data}]
    if operation.ends_with_done:
        texts.append({"const": _DONE})
    fields = {"event": {"type": "string"}, "data": {"type": "string", "anyOf": texts}}
    return {"type": "object", "description": EVENT, "properties": fields}


def _describe_answer(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": {_JSON: {"schema": schema}}}


Schema = dict[str, Any]
NULL: Schema = {"type": "null"}
TEXT: Schema = {"type": "string"}
SOME_TEXT: Schema = {"type": "string", "minLength": 1}


def or_null(schema: Schema) -> Schema:
    """Return the schema of a field that may be left out."""
    return {"anyOf": [schema, NULL], "default": None}


def list_of(schema: Schema) -> Schema:
    """Return the schema of a list with at least one element."""
    return {"type": "array", "minItems": 1, "items": schema}


def make_object(required: tuple[str, ...], **properties: Schema | type) -> Schema:
    """Return the schema of an object with these properties, and any others."""
    return {"type": "object", "required": list(required), "properties": properties}


def text_or_parts(*parts: Schema | type, min_parts: int = 0) -> Schema:
    """Return the schema of a content: a text, or a list of these parts."""
    items = {"type": "array", "minItems": min_parts, "items": {"anyOf": list(parts)}}
    return {"anyOf": [TEXT, items]}


def with_fields(kind: type, **properties: Schema) -> Schema:
    """Return the schema of a type, of whose fields the schemas of some say more than the type does."""
    return {"allOf": [kind, make_object((), **properties)]}


_IDS = list_of({"type": "integer", "minimum": 0, "maximum": 2**32 - 1})
PROMPT_TEXTS: Schema = {"anyOf": [SOME_TEXT, list_of(SOME_TEXT)]}
PROMPTS: Schema = {"anyOf": [*PROMPT_TEXTS["anyOf"], _IDS, list_of(_IDS)]}

LOGIT_BIAS = or_null(
    {
        "type": "object",
        "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    }
)

_ASSISTANT = "assistant"
_OTHER_ROLES = [role for role in conversation.ROLES if role != _ASSISTANT]
IMAGE_URL: Schema = {"type": "string", "pattern": r"^data:image/[a-z0-9.+-]+;base64,"}
_PARTS: Schema = {
    "type": "array",
    "items": {
        "anyOf": [
            make_object(("type", "text"), type={"const": "text"}, text=TEXT),
            make_object(("type", "refusal"), type={"const": "refusal"}, refusal=TEXT),
            make_object(
                ("type", images.PART),
                type={"const": images.PART},
                **{images.PART: {"anyOf": [IMAGE_URL, make_object(("url",), url=IMAGE_URL)]}},
            ),
        ]
    },
}
_CALL = make_object(
    ("function",),
    function=make_object(("name",), name=TEXT, arguments={"type": ["string", "object"]}),
)
OTHER_KEYS: dict[str, Schema] = {
    "tool_calls": {"anyOf": [{"type": "array", "items": _CALL}, NULL]},
    "audio": NULL,
    "function_call": NULL,
}
CONTENT: Schema = {"anyOf": [TEXT, _PARTS]}
MESSAGES = list_of(
    {
        "anyOf": [
            make_object(
                ("role", "content"),
                role={"enum": _OTHER_ROLES},
                content=CONTENT,
                **OTHER_KEYS,
            ),
            make_object(
                ("role",),
                role={"const": _ASSISTANT},
                content={"anyOf": [TEXT, _PARTS, NULL]},
                **OTHER_KEYS,
            ),
        ]
    }
)
_TOOL_NAME = {"type": "string", "minLength": 1, "maxLength": conversation.MAX_TOOL_NAME}
TOOLS = {
    "type": "array",
    "maxItems": inputs.MAX_TOOLS,
    "items": {
        "anyOf": [
            make_object(
                ("type", kind),
                type={"const": kind},
                **{kind: make_object(("name",), name=_TOOL_NAME)},
            )
            for kind in ("function", "custom")
        ]
    },
}
LOGPROBS_RULE: Schema = {
    "anyOf": [
        make_object((), top_logprobs=NULL),
        make_object(("logprobs",), logprobs={"const": True}),
    ]
}
_JSON_SCHEMA = "json_schema"
FORMAT_RULE = make_object(
    (),
    response_format={
        "anyOf": [
            NULL,
            make_object(("type",), type={"enum": ["text", "json_object"]}, json_schema=NULL),
            make_object(
                ("type", _JSON_SCHEMA), type={"const": _JSON_SCHEMA}, json_schema={"type": "object"}
            ),
        ]
    },
)
