"""The answer to a completion request: its types for the description, and its formatter, for chunks or one body.

Choices are numbered over all prompts: prompt number * n + number of the choice.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from dynamo.frontend.apis.completions import request as completion_request
from dynamo.frontend.delivery import choices, identity, sse


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Log probabilities of a choice; the lists have one length."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One of the `n` answers to one of the prompts."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "content_filter"] | None  # null: the stream goes on


class Completion(msgspec.Struct, kw_only=True):
    """The whole answer, and the data of an event of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | None
    usage: sse.Usage | None = None


class CompletionFormatter:
    """Formats the answer to one request."""

    def __init__(
        self, request: completion_request.CompletionRequest, answer_identity: identity.Identity
    ) -> None:
        self._head = answer_identity.head("cmpl-", "text_completion")
        names = answer_identity.token_names(by_id=request.return_tokens_as_token_ids)
        self._token_text = names.token_text

    def chunk(
        self,
        index: int,
        piece: choices.Piece | None,
        *,
        reports: Sequence[choices.TokenReport] | None = None,
        finish_reason: str | None = None,
        is_first: bool = False,
    ) -> dict[str, Any]:
        """Return the chunk for a piece of one choice; a first chunk is like the others."""
        del is_first
        return self._object([self._choice(index, content_of(piece), reports, finish_reason)])

    def usage_chunk(self, usage: sse.Usage) -> dict[str, Any]:
        """Return the last chunk of a stream that reports usage."""
        return {**self._object([]), "usage": usage}

    def whole(self, answers: Sequence[sse.WholeChoice], usage: sse.Usage) -> dict[str, Any]:
        """Return the complete answer."""
        rows = [
            self._choice(
                answer.index,
                "".join(map(content_of, answer.pieces)),
                answer.reports,
                answer.finish_reason,
            )
            for answer in answers
        ]
        return {**self._object(rows), "usage": usage}

    def _object(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "choices": rows}

    def _choice(
        self,
        index: int,
        text: str,
        reports: Sequence[choices.TokenReport] | None,
        finish_reason: str | None,
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": None if reports is None else self._logprobs(reports),
            "finish_reason": finish_reason,
        }

    def _logprobs(self, reports: Sequence[choices.TokenReport]) -> dict[str, Any]:
        logprobs = [report.logprobs for report in reports]
        return {
            "tokens": [self._token_text(report.token_id) for report in reports],
            "token_logprobs": [token and sse.finite(token.logprob) for token in logprobs],
            "top_logprobs": [
                token
                and {self._token_text(top.token_id): sse.finite(top.logprob) for top in token.top}
                for token in logprobs
            ],
            "text_offset": [report.start for report in reports],
        }


def content_of(piece: choices.Piece | None) -> str:
    """Return the text of a piece; a completion has no others than content."""
    return piece if isinstance(piece, str) else ""
