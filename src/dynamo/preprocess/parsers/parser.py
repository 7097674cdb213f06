"""Parsers of answers: their events, what every parser can do, and the state machine that they are built on.

A parser reads the text of one choice, in pieces cut anywhere, and returns events. However the text is cut, the events
are the same once neighbours of one kind are joined. Text that turns out to be none of the others is content.

A state machine's state is one of its methods, `_step`. It looks at `_text`, which is not returned yet, and says whether
it moved: consumed some text, or changed the state. If not, it waits for more. So no decision depends on how the text
was cut. The method is stored unbound: a parser that held a method of itself would be a reference cycle, which only the
garbage collector can free.
"""  # decider

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

MAX_HELD_BLANKS = 256  # characters; more go on, so that a model that writes blanks forever is heard


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
    """A complete call; `arguments` is a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The beginning of a call with arguments that come in parts."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A part of the arguments of the call that has begun."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of the call that has begun: its arguments are a JSON object now."""


Event = Content | Reasoning | ToolCall | CallBegin | CallArguments | CallEnd
ToolSchemas = Mapping[str, Mapping[str, Any]]  # a tool's name → the JSON schema of its parameters


class Parser(Protocol):
    """Reads the text of one choice."""

    @property
    def is_reasoning(self) -> bool:
        """Return whether text that came now would be reasoning."""
        ...

    @property
    def is_plain(self) -> bool:
        """Return whether all text to come is content, so that it need not pass through this parser."""
        ...

    def push(self, text: str) -> Sequence[Event]:
        """Add text; return the events that are certain now."""
        ...

    def finish(self) -> Sequence[Event]:
        """End the text; return events for what was held back."""
        ...


def _never(text: str) -> bool:
    del text
    return False


class ParserFactory(msgspec.Struct, frozen=True):
    """Makes parsers for the answers to one prompt.

    Most answers need none, which is known as soon as they begin: `can_pass` says whether an answer that begins with
    this text is content as a whole.
    """

    new: Callable[[], Parser]
    can_pass: Callable[[str], bool] = _never


def count_leading_blanks(text: str) -> int:
    """Return the number of white-space characters at the beginning of the text."""
    return len(text) - len(text.lstrip())


class TrailingBlanks:
    """Holds back the white space at the end of a growing text.

    White space around calls and reasoning belongs to neither of their neighbours; what follows it decides.
    """

    def __init__(self) -> None:
        self._held_blanks = ""

    def push(self, text: str) -> str:
        """Add text; return all that need not wait."""
        text = self._held_blanks + text
        num_certain = max(len(text.rstrip()), len(text) - MAX_HELD_BLANKS)
        self._held_blanks = text[num_certain:]
        return text[:num_certain]

    def take(self) -> str:
        """Return the white space that was held back, and hold none."""
        blanks, self._held_blanks = self._held_blanks, ""
        return blanks


class StateMachineParser(abc.ABC):
    """A parser made of steps: `first` and all later ones are methods of the class, which take the parser."""

    def __init__(self, first: Callable[[Any], bool]) -> None:
        self._step = first
        self._text = ""
        self._events: list[Event] = []

    def push(self, text: str) -> Sequence[Event]:
        self._text += text
        while self._text and self._step(self):
            pass
        return self._take_events()

    def finish(self) -> Sequence[Event]:
        self._end()
        self._text = ""
        return self._take_events()

    @abc.abstractmethod
    def _end(self) -> None:
        """Emit events for the rest of the text."""

    def _emit(self, kind: type[Reasoning | Content], text: str) -> None:
        if text:
            self._events.append(kind(text))

    def _take_events(self) -> Sequence[Event]:
        events, self._events = self._events, []
        return events


class ChainedParser:
    """Two parsers in a row, reasoning before calls: the content of the first is the text of the second."""

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
        if self._first.is_plain:
            return self._second.push(text)
        return self._push_content(self._first.push(text))

    def finish(self) -> Sequence[Event]:
        return [*self._push_content(self._first.finish()), *self._second.finish()]

    def _push_content(self, first_events: Sequence[Event]) -> list[Event]:
        events: list[Event] = []
        for event in first_events:
            if isinstance(event, Content):
                events += self._second.push(event.text)
            else:
                events.append(event)
        return events
