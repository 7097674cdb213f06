"""Server-sent events, and what the shapes of an answer have in common.

The bytes of a chunk that carries text are `head + JSON of the text + tail`: `template` finds head and tail by encoding
a chunk with a mark in the place of the text.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from dynamo.frontend.answer import choices
from dynamo.protocols import generate, openai_usage

CONTENT_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode
_MARK = "\u0000"
_LEAST_LOGPROB = -9999.0  # JSON has no minus infinity
_REASONS = {
    generate.FinishReason.EOS: "stop",
    generate.FinishReason.STOP: "stop",
    generate.FinishReason.LENGTH: "length",
    generate.FinishReason.CONTENT_FILTER: "content_filter",
}


class Template(NamedTuple):
    """What stands around the text in each event of one choice."""

    head: bytes
    tail: bytes


class WholeChoice(msgspec.Struct, frozen=True):
    """A complete choice of an answer that was not streamed."""

    index: int
    pieces: Sequence[choices.Piece]
    finish_reason: str
    reports: Sequence[choices.TokenReport] | None
    stop_string: str | None  # that ended it


class Shape(Protocol):
    """How the answers of one API look."""

    def whole(self, answers: Sequence[WholeChoice], usage: openai_usage.Usage) -> dict[str, Any]:
        """The complete answer."""
        ...


class ChunkShape(Shape, Protocol):
    """One whose stream is chunks of choices."""

    def chunk(
        self,
        index: int,
        piece: choices.Piece | None,
        *,
        reports: Sequence[choices.TokenReport] | None = None,
        finish_reason: str | None = None,
        is_first: bool = False,
    ) -> dict[str, Any]:
        """A piece of one choice, or none at all."""
        ...

    def usage_chunk(self, usage: openai_usage.Usage) -> dict[str, Any]:
        """What a stream ends with, if asked for."""
        ...


def event(data: Any) -> bytes:
    """One event."""
    return b"data: " + encode(data) + b"\n\n"


def typed_event(data: dict[str, Any]) -> bytes:
    """One event whose name is the `type` in its data."""
    return f"event: {data['type']}\ndata: ".encode() + encode(data) + b"\n\n"


def annotation(name: str, value: str) -> bytes:
    """An event that tells about the request, beside the answer."""
    return b"event: " + name.encode() + b"\n: " + encode(value) + b"\n\n"


def template(shape: ChunkShape, index: int, extra: dict[str, Any]) -> Template:
    """Head and tail of the events of one choice."""
    marked = event({**shape.chunk(index, _MARK), **extra})
    head, _, tail = marked.rpartition(encode(_MARK))
    return Template(head, tail)


def finish_reason(choice: choices.Choice) -> str:
    """Why a choice ended, as OpenAI's API names it."""
    assert choice.finish_reason is not None
    reason = _REASONS.get(choice.finish_reason, "stop")
    return "tool_calls" if choice.num_calls and reason == "stop" else reason


def finite(logprob: float) -> float:
    """A log probability that JSON can hold."""
    return max(logprob, _LEAST_LOGPROB)
