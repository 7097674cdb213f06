"""`POST /v1/chat/completions`."""

from collections.abc import Sequence
from typing import Any

from dynamo.frontend import pipeline
from dynamo.frontend.apis import openai_errors
from dynamo.frontend.apis.chat import answer, request
from dynamo.frontend.apis.operation import GENERATION_ERRORS, HELLO, ApiContext, Operation
from dynamo.frontend.delivery import streaming
from dynamo.preprocess import conversation, inputs, preprocessor

Schema = dict[str, Any]


async def prepare(
    preparer: preprocessor.Preprocessor, chat: inputs.Conversation, request_id: str
) -> Sequence[preprocessor.Prepared]:
    """Prepare the one prompt of a conversation. Raises RequestError."""
    return (await preparer.prepare_conversation(chat, request_id),)


API = pipeline.GenerationApi(
    endpoint="chat_completions",
    decode=request.decode,
    prepare=prepare,
    make_formatter=answer.ChatFormatter,
    stream=streaming.StreamDelivery,
    dialect=openai_errors,
)


def _object(required: tuple[str, ...], **properties: Schema) -> Schema:
    return {"type": "object", "required": list(required), "properties": properties}


# Messages and tools are decoded to dictionaries and checked afterwards (`preprocess.conversation`); here as schemas.
_ASSISTANT = "assistant"
_OTHER_ROLES = [role for role in conversation.ROLES if role != _ASSISTANT]
_TEXT: Schema = {"type": "string"}
_PARTS: Schema = {
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
_OTHER_KEYS: dict[str, Schema] = {
    "tool_calls": {"anyOf": [{"type": "array", "items": _CALL}, {"type": "null"}]},
    "audio": {"type": "null"},
    "function_call": {"type": "null"},
}
_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            _object(
                ("role", "content"),
                role={"enum": _OTHER_ROLES},
                content={"anyOf": [_TEXT, _PARTS]},
                **_OTHER_KEYS,
            ),
            _object(
                ("role",),
                role={"const": _ASSISTANT},
                content={"anyOf": [_TEXT, _PARTS, {"type": "null"}]},
                **_OTHER_KEYS,
            ),
        ]
    },
}
_TOOL_NAME = {"type": "string", "minLength": 1, "maxLength": conversation.MAX_TOOL_NAME}
_TOOLS = {
    "type": "array",
    "maxItems": inputs.MAX_TOOLS,
    "items": _object(
        ("type", "function"),
        type={"const": "function"},
        function=_object(("name",), name=_TOOL_NAME),
    ),
}


def operations(context: ApiContext) -> Sequence[Operation]:
    """Return the operations of this API."""
    return (
        Operation(
            method="POST",
            path="/v1/chat/completions",
            handler=context.generate(API),
            summary="Answer a conversation, as OpenAI's chat does",
            tag="OpenAI",
            request=request.ChatRequest,
            request_details={
                "messages": _MESSAGES,
                "tools": {"anyOf": [_TOOLS, {"type": "null"}], "default": None},
            },
            answer=answer.ChatCompletion,
            events=answer.ChatChunk,
            ends_with_done=True,
            errors=GENERATION_ERRORS,
            example={"messages": HELLO, "max_tokens": 60},
        ),
    )
