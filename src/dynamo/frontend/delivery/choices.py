"""A choice, one of the n answers to one prompt: its text, the pieces of it, the log probabilities of its tokens.

`Choice` is all content. `ParsedChoice` takes its text apart into reasoning, tool calls and content. It does so token by
token, because tokens are counted by what they are; once only content can follow, which is most often so from the first
token on and then takes no parser at all, it is as quick as any other. `EchoedChoice` begins with its prompt, as
completions do with `echo`; with `max_tokens: 0` there is nothing else, so that evaluation tools let a model score a
text. No engine can generate zero tokens; it generates one, which is dropped.
"""

import dataclasses
import itertools
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dynamo.preprocess import detokenize, preprocessor
from dynamo.preprocess.parsers import parser
from dynamo.protocols import blocks, generate


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call as the client sees it, or in a stream a part of one."""

    number: int  # among the calls of its choice
    id: str
    name: str
    arguments: str
    is_start: bool = True


_NO_CALL = Call(0, "", "", "")
Piece = str | parser.Reasoning | Call  # a string is content


class TokenReport(NamedTuple):
    """One visible token with its log probabilities."""

    token_id: int
    logprobs: generate.TokenLogprobs | None  # None for the first token of a prompt
    start: int  # of the token's text in the text of the choice, in characters


ReadResult = tuple[str, list[TokenReport] | None]


class LogprobReporter:
    """Reports the log probability of each token together with its text, so that a stop string's tokens stay hidden.

    With `reports_end` the token that ended the choice is reported too, though it has no text.
    """

    def __init__(self, text: detokenize.ChoiceText, *, reports_end: bool) -> None:
        self._text = text
        self._reports_end = reports_end
        self._pending: list[tuple[TokenReport, int]] = []  # with the end of the token's text
        self._num_read = 0  # characters of all tokens so far
        self._num_sent = 0  # characters that were returned
        self._sum = 0.0  # of all log probabilities
        self._num_tokens = 0

    @property
    def mean_logprob(self) -> float:
        """The mean log probability per token, by which answers of different lengths compare."""
        return self._sum / max(1, self._num_tokens)

    def push(self, output: generate.Output) -> tuple[str, list[TokenReport]]:
        """Return the text that this output makes certain, and its tokens."""
        text = ""
        for step in split_tokens(output):
            text += self._push_one(step)
            if self._text.stop_reason is not None:
                break
        return text, self._take_reports(is_last=output.finish_reason is not None)

    def _push_one(self, step: generate.Output) -> str:
        text = self._text.push(step)
        self._num_sent += len(text)
        start, self._num_read = self._num_read, self._num_sent + self._text.num_held
        if step.logprobs and (self._reports_end or step.finish_reason is None):
            self._sum += step.logprobs[0].logprob
            self._num_tokens += 1
            report = TokenReport(step.token_ids[0], step.logprobs[0], start)
            # without text of its own it is part of a character, which has to be sent
            self._pending.append((report, max(self._num_read, start + 1)))
        return text

    def _take_reports(self, *, is_last: bool) -> list[TokenReport]:
        num_sent = self._num_sent
        if self._text.stop_reason is not None:
            return [report for report, _ in self._pending if report.start < num_sent]
        # the ends grow: none is complete behind the first that waits
        taken = itertools.takewhile(lambda each: is_last or each[1] <= num_sent, self._pending)
        complete = [report for report, _ in taken]
        del self._pending[: len(complete)]
        return complete


def split_tokens(output: generate.Output) -> Iterator[generate.Output]:
    """Yield the output one visible token at a time, and its end last."""
    visible = detokenize.visible_ids(output)
    for place, token_id in enumerate(visible):
        logprobs = output.logprobs[place : place + 1] if output.logprobs else None
        yield generate.Output((token_id,), logprobs=logprobs)
    if output.finish_reason is not None:
        yield generate.Output(
            output.token_ids[len(visible) :],
            output.finish_reason,
            stop_reason=output.stop_reason,
            logprobs=(output.logprobs or ())[len(visible) :],
        )


class Choice:
    """A choice with nothing but content in its text. `push` is bound once, because it is called per token."""

    __slots__ = (
        "finish_reason",
        "index",
        "is_settled",
        "last_at",
        "num_calls",
        "num_reasoning_tokens",
        "push",
        "reporter",
        "stop_token",
        "text",
        "token_ids",
    )

    def __init__(
        self,
        index: int,
        text: detokenize.ChoiceText,
        *,
        has_logprobs: bool,
        reports_end: bool = False,
    ) -> None:
        self.index = index
        self.token_ids: list[int] | None = None  # not sent yet; None: the client wants none
        self.text = text
        self.push = text.push
        self.reporter = LogprobReporter(text, reports_end=reports_end) if has_logprobs else None
        self.finish_reason: generate.FinishReason | None = None
        self.is_settled = False  # it is over, and its delivery has taken account of that
        self.stop_token: int | str | None = None  # of the request, by which the engine ended it
        self.last_at: float | None = None  # time of its latest token, of the frontend's clock
        self.num_calls = 0
        self.num_reasoning_tokens = 0

    @property
    def is_over(self) -> bool:
        """True if the choice is complete."""
        return self.finish_reason is not None

    @property
    def is_cut(self) -> bool:
        """True if the frontend ended it, of which the engine does not know."""
        return self.text.stop_reason is not None

    @property
    def has_only_pieces(self) -> bool:
        """True if chunks carry nothing but its pieces."""
        return self.reporter is None and self.token_ids is None

    @property
    def is_plain(self) -> bool:
        """True if chunks carry nothing but its text."""
        return self.has_only_pieces

    def take_token_ids(self) -> Sequence[int] | None:
        """Return the ids of the tokens since the last call; None if the client wants none."""
        token_ids = self.token_ids
        if token_ids is not None:
            self.token_ids = []
        return token_ids

    def take_pieces(self, text: str) -> Sequence[Piece]:
        """Return the pieces of the text that `read` returned."""
        return (text,) if text else ()

    def read(self, output: generate.Output) -> ReadResult:
        """Return the text that can be sent now, and its tokens if log probabilities were requested.

        Sets `finish_reason` at the end.
        """
        reports = None
        if self.reporter is None:
            text = self.push(output)
        else:
            text, reports = self.reporter.push(output)
        if self.text.stop_reason is not None:
            self.finish_reason = generate.FinishReason.STOP
        else:
            self.finish_reason, self.stop_token = output.finish_reason, output.stop_reason
        return text, reports


class ParsedChoice(Choice):
    """A choice that may need a parser. With `is_single_call` it ends with its first tool call.

    Without `stops_in_thoughts` only stop strings behind its thoughts end it.
    """

    __slots__ = (
        "_call",
        "_has_ended_call",
        "_is_plain_now",
        "_is_single_call",
        "_parser",
        "_parsers",
        "_pieces",
        "_stops_in_thoughts",
    )

    def __init__(
        self,
        index: int,
        text: detokenize.ChoiceText,
        parsers: parser.ParserFactory,
        *,
        has_logprobs: bool,
        is_single_call: bool,
        reports_end: bool = False,
        stops_in_thoughts: bool = True,
    ) -> None:
        super().__init__(index, text, has_logprobs=has_logprobs, reports_end=reports_end)
        self._parsers = parsers
        self._parser: parser.Parser | None = None  # created when text needs one
        self._stops_in_thoughts = stops_in_thoughts
        if not stops_in_thoughts:
            self._parser = parsers.new()
            text.passes_stops = self._parser.is_reasoning
        self._pieces: list[Piece] = []
        self._is_plain_now = False  # the rest needs no parser
        self._is_single_call = is_single_call
        self._has_ended_call = False
        self._call = _NO_CALL  # that comes in parts

    @property
    def is_cut(self) -> bool:
        return self._has_ended_call or self.text.stop_reason is not None

    @property
    def is_plain(self) -> bool:
        return self._is_plain_now and self.has_only_pieces

    def take_pieces(self, text: str) -> Sequence[Piece]:
        """Return all pieces since the last call, neighbours of one kind joined."""
        del text
        pieces, self._pieces = self._pieces, []
        if len(pieces) < 2:
            return pieces
        return [joined for _, same in itertools.groupby(pieces, type) for joined in _join(same)]

    def read(self, output: generate.Output) -> ReadResult:
        if self._is_plain_now:
            text, reports = super().read(output)
            if text:
                self._pieces.append(text)
            return text, reports
        if len(output.token_ids) == 1 and self.reporter is None:  # nearly always so
            text, _ = super().read(output)
            if self._parser is None and self._parsers.can_pass(text):
                self._is_plain_now = True
                self._pieces.append(text)
            else:
                self._parse(text, 1)
            return text, None
        return self._read_tokens(output)

    def _read_tokens(self, output: generate.Output) -> ReadResult:
        all_text, all_reports = "", []
        for step in split_tokens(output):
            text, reports = super().read(step)
            all_text += text
            all_reports += reports or []
            self._parse(text, len(step.token_ids))
            if self.is_over:
                break
        return all_text, all_reports if self.reporter is not None else None

    def _parse(self, text: str, num_tokens: int) -> None:
        parser = self._parser
        if parser is None:
            parser = self._parser = self._parsers.new()
        was_reasoning = parser.is_reasoning
        parsed = parser.push(text)
        if self.is_over:
            parsed = [*parsed, *parser.finish()]
        self._is_plain_now = parser.is_plain
        if not self._stops_in_thoughts:
            self.text.passes_stops = parser.is_reasoning
        if was_reasoning or (not self._is_plain_now and parser.is_reasoning):
            self.num_reasoning_tokens += num_tokens
        for event in parsed:
            self._append(event)
            if self._has_ended_call:
                break

    def _append(self, event: parser.Event) -> None:
        match event:
            case parser.Content(text):
                self._pieces.append(text)
            case parser.Reasoning():
                self._pieces.append(event)
            case parser.ToolCall(name, arguments):
                self._begin_call(name, arguments)
                self._end_call()
            case parser.CallBegin(name):
                self._begin_call(name, "")
            case parser.CallArguments(text):
                call = self._call
                self._pieces.append(Call(call.number, call.id, call.name, text, is_start=False))
            case parser.CallEnd():
                self._end_call()

    def _begin_call(self, name: str, arguments: str) -> None:
        self._call = Call(self.num_calls, new_tool_call_id(), name, arguments)
        self._pieces.append(self._call)
        self.num_calls += 1

    def _end_call(self) -> None:
        if self._is_single_call:
            self._has_ended_call = True
            self.finish_reason = generate.FinishReason.STOP


def new_tool_call_id() -> str:
    """Return nine random letters and digits: the chat templates of Mistral's models refuse any other length."""
    return secrets.token_hex(5)[:9]


def _join(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Yield pieces of one kind as one, and the parts of one tool call."""
    same = list(pieces)
    texts = [piece for piece in same if isinstance(piece, str)]
    thoughts = [piece.text for piece in same if isinstance(piece, parser.Reasoning)]
    if texts:
        yield "".join(texts)
    elif thoughts:
        yield parser.Reasoning("".join(thoughts))
    else:
        calls = [piece for piece in same if isinstance(piece, Call)]
        for _, parts in itertools.groupby(calls, lambda call: call.number):
            first, *others = parts
            arguments = "".join([first.arguments, *(part.arguments for part in others)])
            yield dataclasses.replace(first, arguments=arguments)


class EchoedPrompt:
    """A prompt that its answers repeat. The log probabilities of its tokens come with the engine's first output."""

    def __init__(self, prompt: preprocessor.Prepared, preparer: preprocessor.Preprocessor) -> None:
        self._token_ids = prompt.request.token_ids
        self._is_text = prompt.prompt is not None
        self._decoder = preparer.text
        self.reports: list[TokenReport] = []
        self.text = (
            preparer.text.decode(self._token_ids) if prompt.prompt is None else prompt.prompt
        )

    def read_logprobs(self, output: generate.Output) -> None:
        """Take the prompt's log probabilities, if this output has them; the first token has none."""
        if output.prompt_logprobs is None:
            return
        detokenizer = self._decoder.new(skip_special_tokens=self._is_text)
        logprobs, start = (None, *output.prompt_logprobs), 0
        for token_id, logprob in zip(blocks.unpack(self._token_ids), logprobs, strict=True):
            self.reports.append(TokenReport(token_id, logprob, start))
            start += len(detokenizer.push((token_id,)))


class EchoedChoice(Choice):
    """A choice that begins with its prompt; with `is_scored` it has nothing else."""

    __slots__ = ("_has_begun", "_is_scored", "_prompt")

    def __init__(
        self,
        index: int,
        text: detokenize.ChoiceText,
        prompt: EchoedPrompt,
        *,
        has_logprobs: bool,
        is_scored: bool,
    ) -> None:
        super().__init__(index, text, has_logprobs=has_logprobs, reports_end=True)
        self._prompt = prompt
        self._is_scored = is_scored
        self._has_begun = False

    def read(self, output: generate.Output) -> ReadResult:
        self._prompt.read_logprobs(output)
        reports: list[TokenReport] | None = None
        if self._is_scored:
            text, reports = "", None if self.reporter is None else []
            self.token_ids = None if self.token_ids is None else []
            if output.finish_reason is not None:
                self.finish_reason = generate.FinishReason.LENGTH
        else:
            text, reports = super().read(output)
        if reports is not None:
            shift = len(self._prompt.text)
            reports = [report._replace(start=report.start + shift) for report in reports]
        if self._has_begun:
            return text, reports
        self._has_begun = True
        text = self._prompt.text + text
        return text, None if reports is None else self._prompt.reports + reports
