"""Anthropic's `POST /v1/messages` and `/v1/messages/count_tokens`."""

from collections.abc import Sequence

import msgspec

from dynamo.frontend import pipeline
from dynamo.frontend.apis.messages import answer, conversation, errors, request
from dynamo.frontend.apis.operation import (
    GENERATION_ERRORS,
    HELLO,
    READ_ERRORS,
    ApiContext,
    Operation,
)
from dynamo.frontend.delivery import streaming
from dynamo.preprocess import preprocessor
from dynamo.protocols import blocks

PATH = "/v1/messages"
_TURNS = {"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/Turn"}}


class MessageTokens(msgspec.Struct, frozen=True):
    """The length of a prompt."""

    input_tokens: int


async def prepare(
    preparer: preprocessor.Preprocessor, chat: conversation.MessageConversation, request_id: str
) -> Sequence[preprocessor.Prepared]:
    """Prepare the one prompt of a conversation. Raises RequestError."""
    return (await preparer.prepare_conversation(chat, request_id),)


API = pipeline.GenerationApi(
    endpoint="messages",
    decode=conversation.decode,
    prepare=prepare,
    make_formatter=answer.MessageFormatter,
    stream=streaming.EventDelivery,
    dialect=errors,
    id_headers=(*pipeline.REQUEST_ID_HEADERS, "request-id"),
)


def operations(context: ApiContext) -> Sequence[Operation]:
    """Return the operations of this API."""

    async def count_tokens(body: bytes) -> MessageTokens:
        chat = conversation.convert(request.decode_count(body))
        preparer = context.models.find(chat.model).preparer
        token_ids, _ = await preparer.tokenize_conversation(chat)
        return MessageTokens(blocks.count(token_ids))

    return (
        Operation(
            method="POST",
            path=PATH,
            handler=context.generate(API),
            summary="Answer a conversation, as Anthropic's messages do",
            tag="Anthropic",
            request=request.MessageRequest,
            request_details={"messages": _TURNS},
            answer=answer.MessageAnswer,
            events=answer.MessageEvent,
            errors=(*GENERATION_ERRORS, 529),
            dialect=errors,
            example={"messages": HELLO, "max_tokens": 60},
        ),
        Operation(
            method="POST",
            path=f"{PATH}/count_tokens",
            handler=context.compute(count_tokens, errors),
            summary="Count the tokens of such a request",
            tag="Anthropic",
            request=request.MessageCountRequest,
            request_details={"messages": _TURNS},
            answer=MessageTokens,
            errors=READ_ERRORS,
            dialect=errors,
            example={"messages": HELLO},
        ),
    )
