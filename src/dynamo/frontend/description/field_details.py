"""What fields have to be whose types are open: templates walk through messages and tools, so they are decoded to
dictionaries and looked at afterwards (`protocols.openai_messages`).

Here is the same as JSON Schema, for the description of our API.
"""

from typing import Any

from dynamo.protocols import anthropic, openai_chat, openai_completions, openai_messages

Schema = dict[str, Any]


def _object(required: tuple[str, ...], **properties: Schema) -> Schema:
    return {"type": "object", "required": list(required), "properties": properties}


_TEXT: Schema = {"type": "string"}
_PARTS = {
    "type": "array",
    "items": {
        "anyOf": [
            _object(("type", "text"), type={"const": "text"}, text=_TEXT),
            _object(("type", "refusal"), type={"const": "refusal"}, refusal=_TEXT),
        ]
    },
}
_CALL = _object(
    ("function",),
    function=_object(("name",), name=_TEXT, arguments={"type": ["string", "object"]}),
)
_ASSISTANT = "assistant"
_OTHERS = [role for role in openai_messages.ROLES if role != _ASSISTANT]
_UNSUPPORTED = {"audio": {"type": "null"}, "function_call": {"type": "null"}}
_CALLS = {"anyOf": [{"type": "array", "items": _CALL}, {"type": "null"}]}
MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            _object(
                ("role", "content"),
                role={"enum": _OTHERS},
                content={"anyOf": [_TEXT, _PARTS]},
                tool_calls=_CALLS,
                **_UNSUPPORTED,
            ),
            _object(
                ("role",),
                role={"const": _ASSISTANT},
                content={"anyOf": [_TEXT, _PARTS, {"type": "null"}]},
                tool_calls=_CALLS,
                **_UNSUPPORTED,
            ),
        ]
    },
}
_NAME = {"type": "string", "minLength": 1, "maxLength": openai_messages.MAX_TOOL_NAME}
TOOLS = {
    "type": "array",
    "maxItems": openai_chat.MAX_TOOLS,
    "items": _object(
        ("type", "function"),
        type={"const": "function"},
        function=_object(("name",), name=_NAME),
    ),
}
_TURNS = {"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/Message"}}
_ID = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
_IDS = {"type": "array", "minItems": 1, "items": _ID}
_TEXTS = {"type": "array", "minItems": 1, "items": _TEXT}
_PROMPTS = {"anyOf": [_TEXT, _IDS, _TEXTS, {"type": "array", "minItems": 1, "items": _IDS}]}
DETAILS: dict[tuple[type, str], Schema] = {
    (openai_chat.ChatRequest, "messages"): MESSAGES,
    (openai_chat.ChatRequest, "tools"): {"anyOf": [TOOLS, {"type": "null"}], "default": None},
    (openai_completions.CompletionRequest, "prompt"): _PROMPTS,
    (anthropic.MessageRequest, "messages"): _TURNS,
    (anthropic.Conversation, "messages"): _TURNS,
}
