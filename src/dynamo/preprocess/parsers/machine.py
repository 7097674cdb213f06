"""A state machine over a text that comes in pieces: what all parsers have in common.

The state is a method, `_step`. It looks at `_text`, what is not yet told, and says whether it moved: took some of it,
or changed the state. If not, it waits for more. So no decision depends on how the text was cut.

It is kept unbound: a parser that held a method of itself would be a cycle, which only the garbage collector can free.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any

from dynamo.preprocess.parsers import events


class Machine(abc.ABC):
    """A parser made of steps."""

    def __init__(self, first: Callable[[Any], bool]) -> None:
        """`first` and all later steps are methods of the class, and take the parser."""
        self._step = first
        self._text = ""
        self._events: list[events.Event] = []

    def push(self, text: str) -> Sequence[events.Event]:
        """The text goes on; gives what is certain now."""
        self._text += text
        while self._text and self._step(self):
            pass
        return self._take()

    def finish(self) -> Sequence[events.Event]:
        """The text is over; gives what was held back."""
        self._end()
        self._text = ""
        return self._take()

    @abc.abstractmethod
    def _end(self) -> None:
        """Tell what is left."""

    def _tell(self, kind: type[events.Reasoning | events.Content], text: str) -> None:
        if text:
            self._events.append(kind(text))

    def _take(self) -> Sequence[events.Event]:
        taken, self._events = self._events, []
        return taken
