"""The answer to a chat request: its types for the description, and its formatter, for chunks of a stream or one body.

A chunk that carries only content is a template, `head + JSON of the text + tail`, made once per choice; everything
rarer (reasoning, tool calls, log probabilities) is encoded as it comes. So answers are not made from the types; a test
of the description keeps both in step. Fields may be added, so clients have to accept more.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from dynamo.frontend.apis.chat import request as chat_request
from dynamo.frontend.delivery import choices, identity, sse
from dynamo.preprocess.parsers import parser

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class ChatAlternative(msgspec.Struct, kw_only=True):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatToken(ChatAlternative, kw_only=True):
    """A token of the answer."""

    top_logprobs: list[ChatAlternative]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Log probabilities of a choice."""

    content: list[ChatToken] | None
    refusal: None


class CalledFunction(msgspec.Struct, kw_only=True):
    """The function of a tool call."""

    name: str
    arguments: str  # JSON


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call of the model."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The message of the model."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = []


class ChatChoice(msgspec.Struct, kw_only=True):
    """One of the `n` answers."""

    index: int
    message: ChatMessage
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The whole answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: sse.Usage
    system_fingerprint: str | None


class ToolCallDelta(ToolCall, kw_only=True):
    """A tool call, which comes in one piece."""

    index: int


class ChatDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A piece of the message."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCallDelta] = []


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """A piece of one of the `n` answers."""

    index: int
    delta: ChatDelta
    finish_reason: FinishReason | None
    logprobs: ChatLogprobs | None


class ChatChunk(msgspec.Struct, kw_only=True):
    """The data of an event of a streamed answer."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str | None
    usage: sse.Usage | None = None


class ChatFormatter:
    """Formats the answer to one request."""

    def __init__(
        self, request: chat_request.ChatRequest, answer_identity: identity.Identity
    ) -> None:
        self._identity = answer_identity
        # the tier that served the request, for clients that chose one
        self._tier = {} if request.service_tier is None else {"service_tier": "default"}
        self._token_names = answer_identity.token_names(by_id=request.return_tokens_as_token_ids)

    def chunk(
        self,
        index: int,
        piece: choices.Piece | None,
        *,
        reports: Sequence[choices.TokenReport] | None = None,
        finish_reason: str | None = None,
        is_first: bool = False,
    ) -> dict[str, Any]:
        """Return the chunk for a piece of one choice; None for a chunk without any."""
        delta = {"role": "assistant"} if is_first else {}
        choice = {
            "index": index,
            "delta": delta | _delta(piece),
            "logprobs": self._logprobs(reports),
            "finish_reason": finish_reason,
        }
        return self._object("chat.completion.chunk", [choice])

    def usage_chunk(self, usage: sse.Usage) -> dict[str, Any]:
        """Return the last chunk of a stream that reports usage."""
        return {**self._object("chat.completion.chunk", []), "usage": usage}

    def whole(self, answers: Sequence[sse.WholeChoice], usage: sse.Usage) -> dict[str, Any]:
        """Return the complete answer."""
        rows = [
            {
                "index": answer.index,
                "message": _message(answer.pieces),
                "logprobs": self._logprobs(answer.reports),
                "finish_reason": answer.finish_reason,
            }
            for answer in answers
        ]
        return {**self._object("chat.completion", rows), "usage": usage}

    def _object(self, kind: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._identity.head("chatcmpl-", kind), **self._tier, "choices": rows}

    def _logprobs(self, reports: Sequence[choices.TokenReport] | None) -> dict[str, Any] | None:
        if reports is None:
            return None
        content = [
            {
                **self._token(report.token_id, report.logprobs.logprob),
                "top_logprobs": [
                    self._token(top.token_id, top.logprob) for top in report.logprobs.top
                ],
            }
            for report in reports
            if report.logprobs is not None
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._token_names.token_bytes(token_id)
        return {
            "token": data.decode(errors="replace"),
            "logprob": sse.finite(logprob),
            "bytes": list(data),
        }


def _delta(piece: choices.Piece | None) -> dict[str, Any]:
    match piece:
        case None:
            return {}
        case str():
            return {"content": piece}
        case parser.Reasoning(text):
            return {"reasoning_content": text}
        case choices.Call():
            return {"tool_calls": [{"index": piece.number, **_call(piece)}]}


def _message(pieces: Sequence[choices.Piece]) -> dict[str, Any]:
    """Return the message; reasoning and tool calls are keys only where there are any."""
    content = reasoning = ""
    calls = []
    for piece in pieces:
        match piece:
            case str():
                content += piece
            case parser.Reasoning(text):
                reasoning += text
            case choices.Call():
                calls.append(_call(piece))
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content or (None if calls else ""),
        "refusal": None,
    }
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _call(call: choices.Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
