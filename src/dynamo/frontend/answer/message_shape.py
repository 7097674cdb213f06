"""How the answer of Anthropic's messages API looks: the events of a stream, or one body.

Content is a row of blocks: text, thinking, tool_use. In a stream one block is open at a time, and a piece of another
kind closes it. Thoughts that nobody asked for are counted, but not told.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo.base import errors
from dynamo.frontend.answer import choices, sse
from dynamo.protocols import anthropic_errors, openai_usage

_MARK = "\u0000"
_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
_STOP = sse.typed_event({"type": "message_stop"})


class MessageShape:
    """The answer to one request."""

    def __init__(self, request_id: str, model: str, *, shows_thoughts: bool) -> None:
        self._id = "msg_" + request_id.replace("-", "")
        self._model = model
        self._shows_thoughts = shows_thoughts
        self._num_blocks = 0
        self._open = ""  # the kind of the block that is open
        self._template = sse.Template(b"", b"")  # of its deltas

    def whole(
        self, answers: Sequence[sse.WholeChoice], usage: openai_usage.Usage
    ) -> dict[str, Any]:
        """The complete answer."""
        (answer,) = answers
        content = [_block(piece) for piece in answer.pieces if self._is_told(piece)]
        ending = _ending(answer.finish_reason, answer.stop_string)
        return self._message(content, ending, _usage(usage))

    def begin(self, usage: openai_usage.Usage) -> bytes:
        """The message without its content."""
        message = self._message([], _ending(None, None), _usage(usage))
        return sse.typed_event({"type": "message_start", "message": message})

    def piece(self, piece: choices.Piece) -> bytes:
        """A delta of the open block; before it the start of a new one, if need be."""
        if isinstance(piece, str):
            kind, text = "text", piece
        elif not self._is_told(piece):
            return b""
        elif isinstance(piece, choices.Call):
            kind, text = f"tool_use {piece.number}", piece.arguments
        else:
            kind, text = "thinking", piece.text
        opening = b"" if kind == self._open else self._close() + self._start(kind, piece)
        head, tail = self._template
        return opening + head + sse.encode(text) + tail

    def end(self, finish_reason: str, stop_string: str | None, usage: openai_usage.Usage) -> bytes:
        """Close the block, and say why it ended and what it cost."""
        delta = {
            "type": "message_delta",
            "delta": _ending(finish_reason, stop_string),
            "usage": _usage(usage),
        }
        return self._close() + sse.typed_event(delta) + _STOP

    def error(self, error: errors.DynamoError) -> bytes:
        """The stream just ends after it."""
        return b"event: error\ndata: " + anthropic_errors.body_of(error) + b"\n\n"

    def _is_told(self, piece: choices.Piece) -> bool:
        return self._shows_thoughts or isinstance(piece, str | choices.Call)

    def _start(self, kind: str, piece: choices.Piece) -> bytes:
        self._open = kind
        self._template = self._delta_template(_delta(piece))
        start = {
            "type": "content_block_start",
            "index": self._num_blocks,
            "content_block": _empty_block(piece),
        }
        return sse.typed_event(start)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        events = b""
        if self._open == "thinking":
            events = self._delta_event({"type": "signature_delta", "signature": ""})
        events += sse.typed_event({"type": "content_block_stop", "index": self._num_blocks})
        self._num_blocks += 1
        self._open = ""
        return events

    def _delta_template(self, delta: dict[str, str]) -> sse.Template:
        head, _, tail = self._delta_event(delta).rpartition(sse.encode(_MARK))
        return sse.Template(head, tail)

    def _delta_event(self, delta: dict[str, str]) -> bytes:
        event = {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}
        return sse.typed_event(event)

    def _message(
        self, content: list[dict[str, Any]], ending: dict[str, Any], usage: dict[str, int]
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **ending,
            "usage": {**usage, "service_tier": "standard"},
        }


def _block(piece: choices.Piece) -> dict[str, Any]:
    """Complete."""
    if isinstance(piece, str):
        return {"type": "text", "text": piece}
    if isinstance(piece, choices.Call):
        return {**_empty_block(piece), "input": msgspec.Raw(piece.arguments.encode())}
    return {**_empty_block(piece), "thinking": piece.text}


def _empty_block(piece: choices.Piece) -> dict[str, Any]:
    """As it begins in a stream."""
    if isinstance(piece, str):
        return {"type": "text", "text": ""}
    if isinstance(piece, choices.Call):
        return {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
    return {"type": "thinking", "thinking": "", "signature": ""}


def _delta(piece: choices.Piece) -> dict[str, str]:
    """A piece of its block, with a mark for the text."""
    if isinstance(piece, str):
        return {"type": "text_delta", "text": _MARK}
    if isinstance(piece, choices.Call):
        return {"type": "input_json_delta", "partial_json": _MARK}
    return {"type": "thinking_delta", "thinking": _MARK}


def _ending(finish_reason: str | None, stop_string: str | None) -> dict[str, Any]:
    reason = _REASONS.get(finish_reason or "")
    return {
        "stop_reason": reason if stop_string is None else "stop_sequence",
        "stop_sequence": stop_string,
    }


def _usage(usage: openai_usage.Usage) -> dict[str, int]:
    """Anthropic counts the prompt in parts: what a cache had is not among `input_tokens`."""
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }
