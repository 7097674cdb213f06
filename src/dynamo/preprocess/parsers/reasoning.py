"""Reasoning in an answer: the text between two marks at its beginning.

Some models write the opening mark, for some the prompt ends with it, and some just begin to think (`is_forced`). An
opening mark later in the text is content: an answer may speak of marks. White space around reasoning is dropped.

Some models call a tool before they have closed their thought. The call ends it then, and a closing mark directly behind
calls is dropped.
"""  # decider

import functools
import itertools
from dataclasses import dataclass

from dynamo.preprocess import stop_strings
from dynamo.preprocess.parsers import parser

_PROMPT_END = 256  # characters at the end of a prompt in which a mark would stand


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How a family of models writes reasoning."""

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    is_forced: bool = False  # answers begin with reasoning, opening mark or not
    # the marks before and after the answer, and those behind it; the first may close the reasoning
    answer: tuple[str, ...] = ()
    # tokens of which marks consist, if these are not tokens themselves
    tokens: tuple[str, ...] = ()
    is_harmony: bool = False  # has a parser of its own, for calls and reasoning

    @property
    def marks(self) -> tuple[str, ...]:
        """Return all marks that must be visible in the text, special tokens or not."""
        return self.opens + self.closes + self.answer + self.tokens

    def begins_in(self, prompt: str) -> bool:
        """Return whether the answer to this prompt begins with reasoning."""
        end = prompt[-_PROMPT_END:].rstrip()
        return end.endswith(self.opens) or (self.is_forced and not end.endswith(self.closes))

    def breaks_off_in(self, message: str) -> bool:
        """Return whether a message that an answer continues ends within reasoning."""
        return max(map(message.rfind, self.opens)) > max(map(message.rfind, self.closes))

    def parsers(
        self, prompt: str, *, call_opens: tuple[str, ...] = (), call_closes: tuple[str, ...] = ()
    ) -> parser.ParserFactory:
        """Return the parsers for answers to this prompt.

        A thought ends before one of `call_opens`, too; `call_closes` may stand behind a call.
        """
        new = functools.partial(
            ReasoningParser, self, call_opens=call_opens, call_closes=call_closes
        )
        if self.begins_in(prompt):
            return parser.ParserFactory(functools.partial(new, begins_in=True))
        if self.answer and prompt[-_PROMPT_END:].rstrip().endswith(self.answer[0]):
            return parser.ParserFactory(functools.partial(new, begins_answer=True))
        return parser.ParserFactory(functools.partial(new, begins_in=False), self.cannot_open)

    def cannot_open(self, text: str) -> bool:
        """Return whether an answer that begins with this text certainly begins with no mark, nor blanks and a mark."""
        first = text.lstrip()[:1]
        if not first:
            return False
        marks = self.opens + self.answer[:1]
        for mark in marks:  # noqa: SIM110 (once per answer: a generator costs more than the rest)
            if mark.startswith(first):
                return False
        return True

    def is_over_in(self, prompt: str) -> bool:
        """Return whether the prompt ends with complete reasoning, so that the answer has none."""
        return prompt[-_PROMPT_END:].rstrip().endswith(self.closes)


class ReasoningParser(parser.StateMachineParser):
    """Separates the reasoning of one answer from the rest, which is content."""

    def __init__(
        self,
        form: ReasoningFormat,
        *,
        begins_in: bool = False,
        begins_answer: bool = False,
        call_opens: tuple[str, ...] = (),
        call_closes: tuple[str, ...] = (),
    ) -> None:
        super().__init__(ReasoningParser._open_answer if begins_answer else ReasoningParser._begin)
        self._form = form
        self._call_opens = call_opens
        self._call_closes = call_closes
        starts = form.opens if begins_in else form.opens + form.answer[:1]
        self._starts = stop_strings.cached_markers(*starts)
        self._closes = stop_strings.cached_markers(*form.closes, *call_opens)
        self._begins_in = begins_in
        self._blanks = parser.TrailingBlanks()  # reasoning if more of it follows

    @property
    def is_reasoning(self) -> bool:
        return self._step in (ReasoningParser._skip_blanks, ReasoningParser._think) or (
            self._step is ReasoningParser._begin and self._begins_in
        )

    @property
    def is_plain(self) -> bool:
        return self._step is ReasoningParser._read_content

    def _end(self) -> None:
        if self._step is ReasoningParser._begin:
            kind = parser.Reasoning if self._begins_in else parser.Content
            self._emit(kind, self._text)
        elif self._step is ReasoningParser._think:
            self._emit(parser.Reasoning, self._blanks.take() + self._text)
        elif self._step in (ReasoningParser._read_calls, ReasoningParser._begin_answer):
            self._emit(parser.Content, self._text)
        elif self._step is ReasoningParser._read_answer:
            self._emit(parser.Content, self._blanks.take() + self._text)

    def _begin(self) -> bool:
        num_blanks = parser.count_leading_blanks(self._text)
        can_wait = num_blanks <= parser.MAX_HELD_BLANKS
        text = self._text[num_blanks:]
        mark = self._starts.leading(text) if can_wait else ""
        if mark:
            self._text = text[len(mark) :]
            is_answer = mark in self._form.answer
            self._step = ReasoningParser._open_answer if is_answer else ReasoningParser._skip_blanks
        elif can_wait and self._starts.begins(text):
            return False
        else:
            self._step = (
                ReasoningParser._skip_blanks if self._begins_in else ReasoningParser._read_content
            )
        return True

    def _skip_blanks(self) -> bool:
        self._text = self._text.lstrip()
        if self._text:
            self._step = ReasoningParser._think
        return bool(self._text)

    def _think(self) -> bool:
        text, mark, self._text = self._closes.partition(self._text)
        self._emit(parser.Reasoning, self._blanks.push(text))
        if mark:
            self._blanks.take()
            is_answer = mark in self._form.answer[:1]
            self._step = (
                ReasoningParser._open_answer if is_answer else ReasoningParser._skip_more_blanks
            )
        if mark in self._call_opens:
            self._text = mark + self._text
            self._step = ReasoningParser._read_calls
        return bool(mark)

    def _read_calls(self) -> bool:
        """Read calls that ended a thought, and what follows them, up to a closing mark directly behind them."""
        marks = map("".join, itertools.product(self._call_closes, ("", "\n"), self._form.closes))
        text, mark, self._text = stop_strings.cached_markers(*marks).partition(self._text)
        self._emit(parser.Content, text + next(filter(mark.startswith, self._call_closes), ""))
        if mark:
            self._step = ReasoningParser._skip_more_blanks
        return bool(mark)

    def _skip_more_blanks(self) -> bool:
        self._text = self._text.lstrip()
        if self._text:
            self._step = ReasoningParser._begin_answer
        return bool(self._text)

    def _begin_answer(self) -> bool:
        """Read a mark before the answer or behind it, if the format has them."""
        marks = self._form.answer[:1] + self._form.answer[2:]
        mark = stop_strings.cached_markers(*marks).leading(self._text)
        if not mark and stop_strings.cached_markers(*marks).begins(self._text):
            return False
        self._text = self._text[len(mark) :]
        if mark in marks[1:]:
            self._step = ReasoningParser._skip_more_blanks
        else:
            self._step = ReasoningParser._open_answer if mark else ReasoningParser._read_content
        return True

    def _open_answer(self) -> bool:
        self._text = self._text.lstrip()
        if self._text:
            self._step = ReasoningParser._read_answer
        return bool(self._text)

    def _read_answer(self) -> bool:
        closes = stop_strings.cached_markers(*self._form.answer[1:])
        text, mark, self._text = closes.partition(self._text)
        self._emit(parser.Content, self._blanks.push(text))
        if mark:
            self._blanks.take()
            self._step = ReasoningParser._skip_more_blanks
        return bool(mark)

    def _read_content(self) -> bool:
        self._emit(parser.Content, self._text)
        self._text = ""
        return False
