"""One of the n answers to one prompt: its text, what that is made of, the log probabilities of its tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dynamo.preprocess import choice_text
from dynamo.preprocess.parsers import parser
from dynamo.protocols import generate


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call as the client sees it."""

    number: int  # among those of its choice
    id: str
    name: str
    arguments: str


Piece = str | parser.Reasoning | Call  # a text is content


class TokenReport(NamedTuple):
    """One visible token with its log probabilities."""

    token_id: int
    logprobs: generate.TokenLogprobs | None  # None: it is the first of a prompt
    start: int  # where its text begins in the text of the choice, in characters


class Reporter:
    """Tells the log probabilities of tokens, each no sooner than its text: what a stop string hides is not told."""

    def __init__(self, text: choice_text.ChoiceText) -> None:
        self._text = text
        self._waiting: list[tuple[TokenReport, int]] = []  # with the end of the token's text
        self._num_read = 0  # characters that the tokens so far stand for
        self._num_told = 0  # characters that went out
        self._sum = 0.0  # of all log probabilities
        self._num_tokens = 0

    @property
    def mean_logprob(self) -> float:
        """How likely the answer is, whatever its length."""
        return self._sum / max(1, self._num_tokens)

    def push(self, output: generate.Output) -> tuple[str, list[TokenReport]]:
        """The text that this output makes certain, and the tokens behind it."""
        text = ""
        for step in one_by_one(output):
            text += self._push_one(step)
            if self._text.stop_reason is not None:
                break
        return text, self._take()

    def _push_one(self, step: generate.Output) -> str:
        text = self._text.push(step)
        self._num_told += len(text)
        start, self._num_read = self._num_read, self._num_told + self._text.num_held
        if step.logprobs:
            self._sum += step.logprobs[0].logprob
            self._num_tokens += 1
            report = TokenReport(step.token_ids[0], step.logprobs[0], start)
            self._waiting.append((report, self._num_read))
        return text

    def _take(self) -> list[TokenReport]:
        told = self._num_told
        if self._text.stop_reason is not None:
            return [report for report, _ in self._waiting if report.start < told]
        taken = [report for report, end in self._waiting if end <= told]
        del self._waiting[: len(taken)]
        return taken


def one_by_one(output: generate.Output) -> Iterator[generate.Output]:
    """The same, a visible token at a time, and last the end."""
    visible = choice_text.visible_ids(output)
    for at, token_id in enumerate(visible):
        logprobs = output.logprobs[at : at + 1] if output.logprobs else None
        yield generate.Output((token_id,), logprobs=logprobs)
    if output.finish_reason is not None:
        yield generate.Output(output.token_ids[len(visible) :], output.finish_reason)


class Choice:
    """A choice that is being answered; `push` is bound once, because it is called per token."""

    __slots__ = (
        "finish_reason",
        "index",
        "last_at",
        "num_calls",
        "num_reasoning_tokens",
        "push",
        "reporter",
        "text",
    )

    def __init__(self, index: int, text: choice_text.ChoiceText, *, has_logprobs: bool) -> None:
        self.index = index
        self.text = text
        self.push = text.push
        self.reporter = Reporter(text) if has_logprobs else None
        self.finish_reason: generate.FinishReason | None = None
        self.last_at: float | None = None  # when its latest token came
        self.num_calls = 0
        self.num_reasoning_tokens = 0

    @property
    def is_over(self) -> bool:
        """Nothing more is to be told of it."""
        return self.finish_reason is not None

    @property
    def is_cut(self) -> bool:
        """Did we end it, and not its engine?"""
        return self.text.stop_reason is not None

    @property
    def is_plain(self) -> bool:
        """Is its text all that there is to tell?"""
        return self.reporter is None

    def pieces(self, text: str) -> Sequence[Piece]:
        """What the text that was read is made of."""
        return (text,) if text else ()

    def read(self, output: generate.Output) -> tuple[str, list[TokenReport] | None]:
        """The text that goes out now and the tokens behind it, if asked for. Sets `finish_reason` at the end."""
        reports = None
        if self.reporter is None:
            text = self.push(output)
        else:
            text, reports = self.reporter.push(output)
        if self.text.stop_reason is not None:
            self.finish_reason = generate.FinishReason.STOP
        else:
            self.finish_reason = output.finish_reason
        return text, reports
