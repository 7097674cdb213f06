"""Anthropic's `POST /v1/messages` and `/v1/messages/count_tokens`, and the answers: for events or one body.

Content is a list of blocks: text, thinking, tool_use. In a stream one block is open at a time, and a piece of another
kind closes it. Thoughts are counted, but only shown on request.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from dynamo.base import errors
from dynamo.frontend import pipeline
from dynamo.frontend.apis import chat, error_dialects, openapi, tokenize
from dynamo.frontend.apis.messages import content_blocks, request
from dynamo.frontend.apis.messages import request as message_request
from dynamo.frontend.apis.operation import (
    GENERATION_ERRORS,
    HELLO,
    READ_ERRORS,
    Operation,
    RequestHandlers,
)
from dynamo.frontend.delivery import choices, sse, streaming
from dynamo.frontend.model_registry.registered_model import RegisteredModel
from dynamo.preprocess import inputs

_TEXT_MARK = "\u0000"
_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
_CONTEXT_FULL = "model_context_window_exceeded"
_MESSAGE_STOP = sse.typed_event({"type": "message_stop"})
_PING = sse.typed_event({"type": "ping"})
PING_S = 10.0  # between two events: clients and proxies give a silent stream up


class MessageUsage(msgspec.Struct, kw_only=True):
    """Tokens of the prompt, by how they were computed, and of the answer."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: None
    output_tokens: int
    output_tokens_details: dict[str, int]
    server_tool_use: None
    service_tier: Literal["standard"]
    inference_geo: None


class ContentBlock(msgspec.Struct, kw_only=True):
    """Text, a thought or a tool call; its other fields depend on the type."""

    type: Literal["text", "thinking", "tool_use"]


class MessageAnswer(msgspec.Struct, kw_only=True):
    """The whole answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: (
        Literal[
            "end_turn",
            "max_tokens",
            "stop_sequence",
            "tool_use",
            "refusal",
            "model_context_window_exceeded",
        ]
        | None
    )
    stop_sequence: str | None
    stop_details: None
    container: None
    diagnostics: None
    usage: MessageUsage


class MessageEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The data of an event of a streamed answer; its other fields depend on the type."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
        "ping",
    ]
    delta: dict[str, Any] = {}


class MessageFormatter:
    """Formats the answer to one request."""

    def __init__(
        self, request: message_request.MessageConversation, answer_identity: sse.Identity
    ) -> None:
        self._id = "msg_" + answer_identity.request_id.replace("-", "")
        self._model = answer_identity.model
        self._shows_thinking = request.shows_thinking
        self._context_length = answer_identity.context_length
        self._clock = answer_identity.clock
        self._ping_at = 0.0  # if what comes until then is not shown
        self._num_blocks = 0
        self._open_kind = ""  # of the open block
        self._template = sse.Template(b"", b"")  # of its deltas

    def whole(self, answers: Sequence[sse.WholeChoice], usage: sse.Usage) -> dict[str, Any]:
        (answer,) = answers
        content = [_block(piece) for piece in answer.pieces if self._is_shown(piece)]
        ending = self._ending(answer.finish_reason, answer.stop_string, usage)
        return self._message(content, ending, _usage(usage))

    def begin(self, usage: sse.Usage) -> bytes:
        """Return the event with the message before it has any content."""
        self._ping_at = self._clock.now() + PING_S
        message = self._message([], self._ending(None, None, usage), _usage(usage))
        return sse.typed_event({"type": "message_start", "message": message})

    def piece(self, piece: choices.Piece) -> bytes:
        """Return a delta of the open block, after the start of a new block where the kind changes."""
        if isinstance(piece, str):
            kind, text = "text", piece
        elif not self._is_shown(piece):
            return self._ping()
        elif isinstance(piece, choices.Call):
            kind, text = f"tool_use {piece.number}", piece.arguments
        else:
            kind, text = "thinking", piece.text
        opening = (
            b"" if kind == self._open_kind else self._close_block() + self._open_block(kind, piece)
        )
        head, tail = self._template
        return opening + head + sse.encode_inline(text) + tail

    def end(self, finish_reason: str, stop_string: str | None, usage: sse.Usage) -> bytes:
        """Return the events that close the open block and report why the answer ended, and its usage."""
        delta = {
            "type": "message_delta",
            "delta": self._ending(finish_reason, stop_string, usage),
            "usage": _usage(usage),
        }
        return self._close_block() + sse.typed_event(delta) + _MESSAGE_STOP

    def error(self, error: errors.DynamoError) -> bytes:
        return b"event: error\ndata: " + error_dialects.ANTHROPIC.body_of(error) + b"\n\n"

    def _ending(
        self, finish_reason: str | None, stop_string: str | None, usage: sse.Usage
    ) -> dict[str, Any]:
        reason = _STOP_REASONS.get(finish_reason or "")
        if reason == "max_tokens" and usage.total_tokens >= self._context_length:
            reason = _CONTEXT_FULL
        return {
            "stop_reason": reason if stop_string is None else "stop_sequence",
            "stop_sequence": stop_string,
            "stop_details": None,
            "container": None,
        }

    def _is_shown(self, piece: choices.Piece) -> bool:
        return self._shows_thinking or isinstance(piece, str | choices.Call)

    def _ping(self) -> bytes:
        if self._clock.now() < self._ping_at:
            return b""
        self._ping_at = self._clock.now() + PING_S
        return _PING

    def _open_block(self, kind: str, piece: choices.Piece) -> bytes:
        self._open_kind = kind
        head, _, tail = self._delta_event(_delta(piece)).rpartition(sse.encode(_TEXT_MARK))
        self._template = sse.Template(head, tail)
        start = {
            "type": "content_block_start",
            "index": self._num_blocks,
            "content_block": _empty_block(piece),
        }
        return sse.typed_event(start)

    def _close_block(self) -> bytes:
        if not self._open_kind:
            return b""
        events = b""
        if self._open_kind == "thinking":
            events = self._delta_event({"type": "signature_delta", "signature": ""})
        events += sse.typed_event({"type": "content_block_stop", "index": self._num_blocks})
        self._num_blocks += 1
        self._open_kind = ""
        return events

    def _delta_event(self, delta: dict[str, str]) -> bytes:
        event = {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}
        return sse.typed_event(event)

    def _message(
        self, content: list[dict[str, Any]], ending: dict[str, Any], usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **ending,
            "diagnostics": None,
            "usage": usage
            | {"cache_creation": None, "service_tier": "standard", "inference_geo": None},
        }


def _block(piece: choices.Piece) -> dict[str, Any]:
    if isinstance(piece, str):
        return {**_empty_block(piece), "text": piece}
    if isinstance(piece, choices.Call):
        return {**_empty_block(piece), "input": msgspec.Raw(piece.arguments.encode())}
    return {**_empty_block(piece), "thinking": piece.text}


def _empty_block(piece: choices.Piece) -> dict[str, Any]:
    """Return the block of this piece as it starts in a stream."""
    if isinstance(piece, str):
        return {"type": "text", "text": "", "citations": []}
    if isinstance(piece, choices.Call):
        return {
            "type": "tool_use",
            "id": piece.id,
            "name": piece.name,
            "input": {},
            "caller": {"type": "direct"},
        }
    return {"type": "thinking", "thinking": "", "signature": ""}


def _delta(piece: choices.Piece) -> dict[str, str]:
    """Return a delta of the piece's block with a mark in the place of the text."""
    if isinstance(piece, str):
        return {"type": "text_delta", "text": _TEXT_MARK}
    if isinstance(piece, choices.Call):
        return {"type": "input_json_delta", "partial_json": _TEXT_MARK}
    return {"type": "thinking_delta", "thinking": _TEXT_MARK}


def _usage(usage: sse.Usage) -> dict[str, Any]:
    """Return the usage in Anthropic's form, where cached prompt tokens are not part of `input_tokens`."""
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "thinking_tokens": usage.completion_tokens_details.reasoning_tokens
        },
        "server_tool_use": None,
    }


PATH = "/v1/messages"
_RESULT = openapi.with_fields(
    content_blocks.ToolResultBlock,
    content=openapi.or_null(
        openapi.text_or_parts(
            content_blocks.TextBlock, content_blocks.ImageBlock, content_blocks.ToolReferenceBlock
        )
    ),
)
_BLOCKS = content_blocks.BLOCK_TYPES | {"tool_result": _RESULT}
_TURNS = openapi.list_of(
    {
        "anyOf": [
            openapi.make_object(
                ("role", "content"),
                role={"const": role},
                content=openapi.text_or_parts(
                    *map(_BLOCKS.__getitem__, names), min_parts=int(role != "assistant")
                ),
            )
            for role, names in request.BLOCKS_BY_ROLE.items()
        ]
    }
)
_TOOLS = {"type": "array", "maxItems": inputs.MAX_TOOLS, "items": request.Tool}
_PROMPT = {
    "messages": _TURNS,
    "system": openapi.or_null(openapi.text_or_parts(content_blocks.TextBlock)),
    "tools": openapi.or_null(_TOOLS),
}
_FORCED_TOOL = openapi.make_object(
    (),
    tool_choice={
        "anyOf": [
            openapi.NULL,
            openapi.make_object(("type", "name"), type={"const": "tool"}, name=openapi.TEXT),
            openapi.make_object(
                ("type",), type={"enum": ["auto", "any", "none"]}, name=openapi.NULL
            ),
        ]
    },
)


_BUDGET = openapi.make_object(
    (),
    thinking={
        "anyOf": [
            openapi.NULL,
            openapi.make_object(("type",), type={"enum": ["adaptive", "disabled"]}),
            openapi.make_object(
                ("type", "budget_tokens"),
                type={"const": "enabled"},
                budget_tokens={"type": "integer"},
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
    make_formatter=MessageFormatter,
    stream=streaming.EventDelivery,
    dialect=error_dialects.ANTHROPIC,
    id_headers=(*pipeline.REQUEST_ID_HEADERS, "request-id"),
)


def operations(handlers: RequestHandlers) -> Sequence[Operation]:
    async def count_tokens(
        conversation: inputs.Conversation, model: RegisteredModel
    ) -> MessageTokens:
        return MessageTokens(await tokenize.count_tokens(conversation, model))

    return (
        Operation(
            method="POST",
            path=PATH,
            handler=handlers.generate(API),
            summary="Answer a conversation, as Anthropic's messages do",
            tag="Anthropic",
            request=request.MessageRequest,
            request_details=_PROMPT | {"thread": openapi.NULL},
            request_rules=(_FORCED_TOOL, _BUDGET),
            answer=MessageAnswer,
            events=MessageEvent,
            errors=(*GENERATION_ERRORS, 529),
            dialect=error_dialects.ANTHROPIC,
            example={"messages": HELLO, "max_tokens": 60},
        ),
        Operation(
            method="POST",
            path=f"{PATH}/count_tokens",
            handler=handlers.compute_by_model(
                request.decode_count, count_tokens, error_dialects.ANTHROPIC
            ),
            summary="Count the tokens of such a request",
            tag="Anthropic",
            request=request.MessageCountRequest,
            request_details=_PROMPT,
            request_rules=(_FORCED_TOOL,),
            answer=MessageTokens,
            errors=READ_ERRORS,
            dialect=error_dialects.ANTHROPIC,
            example={"messages": HELLO},
        ),
    )
