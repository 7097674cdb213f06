"""What comes out of a parser, and what every parser can do.

A parser is fed the text of one choice, in pieces cut anywhere, and tells what it is made of. However the text is cut,
the events, neighbours of one kind joined, are the same. What cannot be read as what it seemed to be is told as content.
"""

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
Tools = Mapping[str, Mapping[str, Any]]  # a tool's name → the JSON schema of its parameters


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


class Parsers(NamedTuple):
    """For the answers to one prompt: most of them need none, which is known as soon as they begin."""

    new: Callable[[], Parser]
    can_pass: Callable[[str], bool] = (
        _never  # an answer that begins with this text, as it is: all of it is content
    )
