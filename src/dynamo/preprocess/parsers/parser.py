"""What comes out of a parser, and what every parser can do.

A parser is fed the text of one choice, in pieces cut anywhere, and tells what it is made of. However the text is cut,
the events, neighbours of one kind joined, are the same. What cannot be read as what it seemed to be is told as content.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call, complete."""

    name: str
    arguments: str  # an object, as JSON


Event = Content | Reasoning | ToolCall
ToolSchemas = Mapping[str, Mapping[str, Any]]  # a tool's name → the JSON schema of its parameters


class Parser(Protocol):
    """Reads the text of one choice."""

    @property
    def is_reasoning(self) -> bool:
        """Would text that comes now be reasoning?"""
        ...

    @property
    def is_plain(self) -> bool:
        """Is all that may still come content, so that it need not pass through here?"""
        ...

    def push(self, text: str) -> Sequence[Event]:
        """The text goes on; gives what is certain now."""
        ...

    def finish(self) -> Sequence[Event]:
        """The text is over; gives what was held back."""
        ...


def _never(text: str) -> bool:
    del text
    return False


class ParserFactory(NamedTuple):
    """For the answers to one prompt: most of them need none, which is known as soon as they begin."""

    new: Callable[[], Parser]
    can_pass: Callable[[str], bool] = (
        _never  # an answer that begins with this text, as it is: all of it is content
    )


MAX_HELD_BLANKS = (
    256  # characters; more are told, so that a model that writes blanks for ever is heard
)


def count_leading_blanks(text: str) -> int:
    """How much white space the text begins with."""
    return len(text) - len(text.lstrip())


class TrailingBlanks:
    """Holds the white space at the end of a text that grows."""

    def __init__(self) -> None:
        self._waiting = ""

    def push(self, text: str) -> str:
        """The text goes on; gives what need not wait."""
        text = self._waiting + text
        num_told = max(len(text.rstrip()), len(text) - MAX_HELD_BLANKS)
        self._waiting = text[num_told:]
        return text[:num_told]

    def take(self) -> str:
        """What waited."""
        taken, self._waiting = self._waiting, ""
        return taken


class StateMachineParser(abc.ABC):
    """A parser made of steps."""

    def __init__(self, first: Callable[[Any], bool]) -> None:
        """`first` and all later steps are methods of the class, and take the parser."""
        self._step = first
        self._text = ""
        self._events: list[Event] = []

    def push(self, text: str) -> Sequence[Event]:
        """The text goes on; gives what is certain now."""
        self._text += text
        while self._text and self._step(self):
            pass
        return self._take()

    def finish(self) -> Sequence[Event]:
        """The text is over; gives what was held back."""
        self._end()
        self._text = ""
        return self._take()

    @abc.abstractmethod
    def _end(self) -> None:
        """Tell what is left."""

    def _tell(self, kind: type[Reasoning | Content], text: str) -> None:
        if text:
            self._events.append(kind(text))

    def _take(self) -> Sequence[Event]:
        taken, self._events = self._events, []
        return taken


class ChainedParser:
    """Two parsers in a row: the content of the first is the text of the second."""

    def __init__(self, first: Parser, second: Parser) -> None:
        self._first = first
        self._second = second

    @property
    def is_reasoning(self) -> bool:
        return self._first.is_reasoning

    @property
    def is_plain(self) -> bool:
        return self._first.is_plain and self._second.is_plain

    def push(self, text: str) -> Sequence[Event]:
        return self._pass_on(self._first.push(text))

    def finish(self) -> Sequence[Event]:
        return [*self._pass_on(self._first.finish()), *self._second.finish()]

    def _pass_on(self, found: Sequence[Event]) -> list[Event]:
        told: list[Event] = []
        for event in found:
            if isinstance(event, Content):
                told += self._second.push(event.text)
            else:
                told.append(event)
        return told
