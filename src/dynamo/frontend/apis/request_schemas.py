"""JSON schemas of parts of requests that say more than the types by which they are decoded.

Messages, tools and texts are decoded as plain values and checked afterwards (`preprocess.conversation`, and the `check`
of each request), so their schemas for `/openapi.json` are written here. A rule holds between the fields of one request.
"""

from typing import Any

from dynamo.preprocess import conversation, images, inputs

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


def make_object(required: tuple[str, ...], **properties: Schema) -> Schema:
    """Return the schema of an object with these properties, and any others."""
    return {"type": "object", "required": list(required), "properties": properties}


def _prompts_of(text: Schema) -> Schema:
    ids = list_of({"type": "integer", "minimum": 0, "maximum": 2**32 - 1})
    return {"anyOf": [text, ids, list_of(text), list_of(ids)]}


PROMPTS = _prompts_of(TEXT)
EMBEDDED_PROMPTS = _prompts_of(SOME_TEXT)
EMBEDDED_TEXTS: Schema = {"anyOf": [SOME_TEXT, list_of(SOME_TEXT)]}

_ASSISTANT = "assistant"
_OTHER_ROLES = [role for role in conversation.ROLES if role != _ASSISTANT]
_IMAGE_URL: Schema = {"type": "string", "pattern": r"^data:image/[a-z0-9.+-]+;base64,"}
_PARTS: Schema = {
    "type": "array",
    "items": {
        "anyOf": [
            make_object(("type", "text"), type={"const": "text"}, text=TEXT),
            make_object(("type", "refusal"), type={"const": "refusal"}, refusal=TEXT),
            make_object(
                ("type", images.PART),
                type={"const": images.PART},
                **{images.PART: {"anyOf": [_IMAGE_URL, make_object(("url",), url=_IMAGE_URL)]}},
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
