"""How the answer to a completion request looks: chunks of a stream, or one body.

Choices are numbered over all prompts: prompt number × n + number of the choice.
"""

from collections.abc import Sequence
from typing import Any

from dynamo.frontend import identity
from dynamo.frontend.answer import choices, sse
from dynamo.protocols import generate, openai_completions, openai_usage


class CompletionShape:
    """The answer to one request."""

    def __init__(self, asked: openai_completions.CompletionRequest, who: identity.Identity) -> None:
        self._head = who.head("cmpl-", "text_completion")
        self._name = who.names(by_number=asked.return_tokens_as_token_ids).token_text

    def chunk(
        self,
        index: int,
        piece: choices.Piece | None,
        *,
        reports: Sequence[choices.TokenReport] | None = None,
        finish_reason: str | None = None,
        is_first: bool = False,
    ) -> dict[str, Any]:
        """A piece of one choice; a first one is like the others."""
        del is_first
        return self._object([self._choice(index, _text(piece), reports, finish_reason)])

    def usage_chunk(self, usage: openai_usage.Usage) -> dict[str, Any]:
        """What a stream ends with, if asked for."""
        return {**self._object([]), "usage": usage}

    def whole(
        self, answers: Sequence[sse.WholeChoice], usage: openai_usage.Usage
    ) -> dict[str, Any]:
        """The complete answer."""
        found = [
            self._choice(
                answer.index,
                "".join(map(_text, answer.pieces)),
                answer.reports,
                answer.finish_reason,
            )
            for answer in answers
        ]
        return {**self._object(found), "usage": usage}

    def _object(self, found: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "choices": found}

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
        found = [report.logprobs for report in reports]
        return {
            "tokens": [self._name(report.token_id) for report in reports],
            "token_logprobs": [one and sse.finite(one.logprob) for one in found],
            "top_logprobs": [one and self._top(one) for one in found],
            "text_offset": [report.start for report in reports],
        }

    def _top(self, found: generate.TokenLogprobs) -> dict[str, float]:
        return {self._name(top.token_id): sse.finite(top.logprob) for top in found.top}


def _text(piece: choices.Piece | None) -> str:
    """Completions are content, and nothing else."""
    return piece if isinstance(piece, str) else ""
