"""The answers of Ollama's API: one object, or a line of JSON for each part, of which the last tells the counts.

Tool calls come complete, as Ollama sends them: their pieces are collected until another kind of piece follows.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from dynamo.base import errors
from dynamo.frontend.apis import error_dialects
from dynamo.frontend.apis.ollama import request as ollama_request
from dynamo.frontend.delivery import choices, identity, sse
from dynamo.preprocess.parsers import parser

NS_PER_S = 10**9
_REASONS = {"length": "length"}  # all others are "stop"


class OllamaMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The message of the model, or a part of it."""

    role: Literal["assistant"]
    content: str
    thinking: str = ""
    tool_calls: list[dict[str, Any]] = []


class OllamaAnswer(msgspec.Struct, kw_only=True):
    """An answer or a line of one; durations are in nanoseconds, and the last line alone has them."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] | msgspec.UnsetType = msgspec.UNSET
    total_duration: int | msgspec.UnsetType = msgspec.UNSET
    load_duration: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_count: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_duration: int | msgspec.UnsetType = msgspec.UNSET
    eval_count: int | msgspec.UnsetType = msgspec.UNSET
    eval_duration: int | msgspec.UnsetType = msgspec.UNSET


class OllamaChatAnswer(OllamaAnswer, kw_only=True):
    """The answer of `/api/chat`."""

    message: OllamaMessage


class OllamaGenerateAnswer(OllamaAnswer, kw_only=True):
    """The answer of `/api/generate`."""

    response: str
    thinking: str | msgspec.UnsetType = msgspec.UNSET


class OllamaFormatter:
    """Formats the answer to one request."""

    def __init__(
        self, turn: ollama_request.OllamaConversation, answer_identity: identity.Identity
    ) -> None:
        self._turn = turn
        self._clock = answer_identity.clock
        self._began_at = self._clock.now()
        self._first_at = self._began_at  # of the first token, where it is known
        self._head = make_head(answer_identity.model, answer_identity.created)
        self._calls: dict[int, choices.Call] = {}

    def whole(self, answers: Sequence[sse.WholeChoice], usage: sse.Usage) -> dict[str, Any]:
        """Return the complete answer."""
        (answer,) = answers
        text = "".join(piece for piece in answer.pieces if isinstance(piece, str))
        thoughts = [piece.text for piece in answer.pieces if isinstance(piece, parser.Reasoning)]
        calls = [piece for piece in answer.pieces if isinstance(piece, choices.Call)]
        return self._object(
            text, "".join(thoughts), calls, self._ending(answer.finish_reason, usage)
        )

    def begin(self, usage: sse.Usage) -> bytes:
        """Note the time of the first token; the stream has nothing before it."""
        del usage
        self._first_at = self._clock.now()
        return b""

    def piece(self, piece: choices.Piece) -> bytes:
        """Return the line of a piece, after the calls that came before it."""
        if isinstance(piece, choices.Call):
            earlier = self._calls.get(piece.number)
            text = earlier.arguments if earlier is not None else ""
            self._calls[piece.number] = choices.Call(
                piece.number, piece.id, piece.name, text + piece.arguments
            )
            return b""
        if isinstance(piece, str):
            return self._take_calls() + self._line(self._object(piece))
        return self._take_calls() + self._line(self._object(thoughts=piece.text))

    def end(self, finish_reason: str, stop_string: str | None, usage: sse.Usage) -> bytes:
        """Return the last line, which has no text."""
        del stop_string
        last = self._object(ending=self._ending(finish_reason, usage))
        return self._take_calls() + self._line(last)

    def error(self, error: errors.DynamoError) -> bytes:
        """Return the last line of a failed stream."""
        return error_dialects.OLLAMA.body_of(error) + b"\n"

    def _take_calls(self) -> bytes:
        """Return the line of the calls that were collected, if there are any."""
        calls, self._calls = list(self._calls.values()), {}
        return self._line(self._object(calls=calls)) if calls else b""

    def _object(
        self,
        text: str = "",
        thoughts: str = "",
        calls: Sequence[choices.Call] = (),
        ending: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        if thoughts and not self._turn.hides_thinking:
            shown["thinking"] = thoughts
        if calls:
            shown["tool_calls"] = [
                {"function": {"name": call.name, "arguments": msgspec.Raw(call.arguments.encode())}}
                for call in calls
            ]
        content: dict[str, Any] = {"response": text, **shown}
        if self._turn.is_chat:
            content = {"message": {"role": "assistant", "content": text, **shown}}
        return {**self._head, **content, **(ending or {"done": False})}

    def _line(self, data: dict[str, Any]) -> bytes:
        return sse.encode(data) + b"\n"

    def _ending(self, finish_reason: str, usage: sse.Usage) -> dict[str, Any]:
        now = self._clock.now()
        return {
            "done": True,
            "done_reason": _REASONS.get(finish_reason, "stop"),
            "total_duration": round((now - self._began_at) * NS_PER_S),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": round((self._first_at - self._began_at) * NS_PER_S),
            "eval_count": usage.completion_tokens,
            "eval_duration": round((now - self._first_at) * NS_PER_S),
        }


def make_head(model: str, created: float) -> dict[str, Any]:
    """Return the fields that every answer begins with; `created` in seconds since 1970."""
    return {"model": model, "created_at": format_time(created)}


def make_load_answer(turn: ollama_request.OllamaConversation, created: float) -> dict[str, Any]:
    """Return the answer to a request that only asks for the model to be loaded."""
    content: dict[str, Any] = {"response": ""}
    if turn.is_chat:
        content = {"message": {"role": "assistant", "content": ""}}
    head = make_head(turn.model, created)
    return {**head, **content, "done": True, "done_reason": "load"}


def format_time(seconds: float) -> str:
    """Return a time since 1970 as Ollama writes it (RFC 3339)."""
    return datetime.fromtimestamp(seconds, tz=UTC).isoformat().replace("+00:00", "Z")
