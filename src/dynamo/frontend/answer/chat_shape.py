"""How the answer to a chat request looks: chunks of a stream, or one body.

A chunk that carries content is a template, `head + JSON of the text + tail`, made once per choice; everything rarer
(reasoning, tool calls, log probabilities) is encoded as it comes.
"""

from collections.abc import Sequence
from typing import Any

from dynamo.frontend import identity
from dynamo.frontend.answer import choices, sse
from dynamo.preprocess.parsers import parser
from dynamo.protocols import openai_chat, openai_usage


class ChatShape:
    """The answer to one request."""

    def __init__(self, asked: openai_chat.ChatRequest, who: identity.Identity) -> None:
        self._who = who
        # the tier that served it, told to those who chose one
        self._tier = {} if asked.service_tier is None else {"service_tier": "default"}
        self._names = who.names(by_number=asked.return_tokens_as_token_ids)

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
        delta = {"role": "assistant"} if is_first else {}
        delta |= _delta(piece)
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(reports),
            "finish_reason": finish_reason,
        }
        return self._object("chat.completion.chunk", [choice])

    def usage_chunk(self, usage: openai_usage.Usage) -> dict[str, Any]:
        """What a stream ends with, if asked for."""
        return {**self._object("chat.completion.chunk", []), "usage": usage}

    def whole(
        self, answers: Sequence[sse.WholeChoice], usage: openai_usage.Usage
    ) -> dict[str, Any]:
        """The complete answer."""
        found = [
            {
                "index": answer.index,
                "message": _message(answer.pieces),
                "logprobs": self._logprobs(answer.reports),
                "finish_reason": answer.finish_reason,
            }
            for answer in answers
        ]
        return {**self._object("chat.completion", found), "usage": usage}

    def _object(self, kind: str, found: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._who.head("chatcmpl-", kind), **self._tier, "choices": found}

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
        data = self._names.token_bytes(token_id)
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
    """What only some answers have is there only if they have it."""
    content = thoughts = ""
    calls = []
    for piece in pieces:
        match piece:
            case str():
                content += piece
            case parser.Reasoning(text):
                thoughts += text
            case choices.Call():
                calls.append(_call(piece))
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content or (None if calls else ""),
        "refusal": None,
    }
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = calls
    return message


def _call(call: choices.Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
