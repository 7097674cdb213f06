"""A choice whose text is taken apart: reasoning, tool calls, content.

It goes token by token, because tokens are counted by what they are. Once only content can follow, which is most often
so from the first token on and then takes no parser at all, the choice is as quick as any other.
"""

import itertools
import secrets
from collections.abc import Iterator, Sequence

from dynamo.frontend.answer import choices
from dynamo.preprocess import choice_text
from dynamo.preprocess.parsers import parser
from dynamo.protocols import generate


class ParsedChoice(choices.Choice):
    """A choice that may need a parser. `is_single_call`: it ends with its first call."""

    __slots__ = ("_is_enough", "_is_plain_now", "_is_single_call", "_parser", "_parsers", "_pieces")

    def __init__(
        self,
        index: int,
        text: choice_text.ChoiceText,
        parsers: parser.ParserFactory,
        *,
        has_logprobs: bool,
        is_single_call: bool,
    ) -> None:
        super().__init__(index, text, has_logprobs=has_logprobs)
        self._parsers = parsers
        self._parser: parser.Parser | None = None  # since it is known that one is needed
        self._pieces: list[choices.Piece] = []
        self._is_plain_now = False  # nothing needs to pass through the parser any more
        self._is_single_call = is_single_call
        self._is_enough = False

    @property
    def is_cut(self) -> bool:
        return self._is_enough or super().is_cut

    @property
    def is_plain(self) -> bool:
        return self._is_plain_now and self.reporter is None

    def pieces(self, text: str) -> Sequence[choices.Piece]:
        """All that was not asked for before, neighbours of one kind joined."""
        del text
        taken, self._pieces = self._pieces, []
        return _joined(taken)

    def read(self, output: generate.Output) -> tuple[str, list[choices.TokenReport] | None]:
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
        return self._read_one_by_one(output)

    def _read_one_by_one(
        self, output: generate.Output
    ) -> tuple[str, list[choices.TokenReport] | None]:
        told, found = "", []
        for step in choices.one_by_one(output):
            text, reports = super().read(step)
            told += text
            found += reports or []
            self._parse(text, len(step.token_ids))
            if self.is_over:
                break
        return told, found if self.reporter is not None else None

    def _parse(self, text: str, num_tokens: int) -> None:
        parser = self._parser
        if parser is None:
            parser = self._parser = self._parsers.new()
        was_reasoning = parser.is_reasoning
        found = parser.push(text)
        if self.is_over:
            found = [*found, *parser.finish()]
        self._is_plain_now = parser.is_plain
        if was_reasoning or (not self._is_plain_now and parser.is_reasoning):
            self.num_reasoning_tokens += num_tokens
        for event in found:
            self._take(event)
            if self._is_enough:
                break

    def _take(self, event: parser.Event) -> None:
        match event:
            case parser.Content(text):
                self._pieces.append(text)
            case parser.Reasoning():
                self._pieces.append(event)
            case parser.ToolCall(name, arguments):
                call = choices.Call(self.num_calls, new_tool_call_id(), name, arguments)
                self._pieces.append(call)
                self.num_calls += 1
                if self._is_single_call:
                    self._is_enough = True
                    self.finish_reason = generate.FinishReason.STOP


def _joined(pieces: list[choices.Piece]) -> list[choices.Piece]:
    if len(pieces) < 2:
        return pieces
    return [piece for _, same in itertools.groupby(pieces, type) for piece in _join(same)]


def _join(pieces: Iterator[choices.Piece]) -> Iterator[choices.Piece]:
    """Pieces of one kind as one; calls stay apart."""
    found = list(pieces)
    texts = [piece for piece in found if isinstance(piece, str)]
    thoughts = [piece.text for piece in found if isinstance(piece, parser.Reasoning)]
    if texts:
        yield "".join(texts)
    elif thoughts:
        yield parser.Reasoning("".join(thoughts))
    else:
        yield from found


def new_tool_call_id() -> str:
    """Return nine random letters and digits: the chat templates of Mistral's models refuse any other length."""
    return secrets.token_hex(5)[:9]
