"""Anthropic's `POST /v1/messages` and `/v1/messages/count_tokens`."""

from collections.abc import Sequence

import msgspec

from dynamo.frontend import pipeline
from dynamo.frontend.apis import chat, error_dialects, request_schemas
from dynamo.frontend.apis.messages import answer, request
from dynamo.frontend.apis.operation import (
    GENERATION_ERRORS,
    HELLO,
    READ_ERRORS,
    ApiContext,
    Operation,
)
from dynamo.frontend.delivery import streaming

PATH = "/v1/messages"
_TURNS = {"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/Turn"}}
_FORCED_TOOL = request_schemas.make_object(
    (),
    tool_choice={
        "anyOf": [
            request_schemas.NULL,
            request_schemas.make_object(
                ("type", "name"), type={"const": "tool"}, name=request_schemas.TEXT
            ),
            request_schemas.make_object(
                ("type",), type={"enum": ["auto", "any", "none"]}, name=request_schemas.NULL
            ),
        ]
    },
)


class MessageTokens(msgspec.Struct, frozen=True):
    """The length of a prompt."""

    input_tokens: int


API = pipeline.GenerationApi(
    endpoint="messages",
    decode=request.decode,
    prepare=chat.prepare,
    make_formatter=answer.MessageFormatter,
    stream=streaming.EventDelivery,
    dialect=error_dialects.ANTHROPIC,
    id_headers=(*pipeline.REQUEST_ID_HEADERS, "request-id"),
)


def operations(context: ApiContext) -> Sequence[Operation]:
    """Return the operations of this API."""

    async def count_tokens(counted: request.MessageCountRequest) -> MessageTokens:
        return MessageTokens(await context.count_tokens(request.convert(counted)))

    return (
        Operation(
            method="POST",
            path=PATH,
            handler=context.generate(API),
            summary="Answer a conversation, as Anthropic's messages do",
            tag="Anthropic",
            request=request.MessageRequest,
            request_details={"messages": _TURNS, "thread": request_schemas.NULL},
            request_rules=(_FORCED_TOOL,),
            answer=answer.MessageAnswer,
            events=answer.MessageEvent,
            errors=(*GENERATION_ERRORS, 529),
            dialect=error_dialects.ANTHROPIC,
            example={"messages": HELLO, "max_tokens": 60},
        ),
        Operation(
            method="POST",
            path=f"{PATH}/count_tokens",
            handler=context.compute(request.decode_count, count_tokens, error_dialects.ANTHROPIC),
            summary="Count the tokens of such a request",
            tag="Anthropic",
            request=request.MessageCountRequest,
            request_details={"messages": _TURNS},
            request_rules=(_FORCED_TOOL,),
            answer=MessageTokens,
            errors=READ_ERRORS,
            dialect=error_dialects.ANTHROPIC,
            example={"messages": HELLO},
        ),
    )
