"""Finding marks in a text as it grows, for any way in which it is cut into pieces.

Of several marks, the one that is *complete first* counts; of those complete at the same character, the longest. So
the answer does not depend on how tokens cut the text, and no look-ahead is needed. An end of the text that may yet
turn out to be the beginning of a mark is told, so that it can be held back.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple


class MarkerMatch(NamedTuple):
    """Where a mark begins, and which."""

    start: int
    mark: str


class MarkerSet:
    """Some marks to look for. Immutable."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = tuple(marks)
        self._inner = frozenset(char for mark in marks for char in mark[:-1])
        self._longest = max(map(len, marks), default=0) - 1  # a held text is shorter than its mark

    def find(self, text: str) -> MarkerMatch | None:
        """The mark that is complete first."""
        matches = [
            (at + len(mark), at, mark) for mark in self._marks if (at := text.find(mark)) >= 0
        ]
        return MarkerMatch(*min(matches)[1:]) if matches else None

    def num_open(self, text: str) -> int:
        """Length of the longest end of `text` that begins a mark."""
        if not text or text[-1] not in self._inner:
            return 0
        lengths = range(min(self._longest, len(text)), 0, -1)
        return next((n for n in lengths if self.begins(text[-n:])), 0)

    def begins(self, text: str) -> bool:
        """May the whole text become a mark, or is it one?"""
        for mark in self._marks:  # noqa: SIM110 (once per answer: a generator costs more than the rest)
            if mark.startswith(text):
                return True
        return False

    def leading(self, text: str) -> str:
        """The mark with which the text begins; empty for none."""
        if not text.startswith(self._marks):  # nearly always so
            return ""
        return next(mark for mark in self._marks if text.startswith(mark))


@functools.lru_cache(maxsize=256)
def cached_markers(*found: str) -> MarkerSet:
    """The same object for the same marks: for those of formats, which are few."""
    return MarkerSet(found)


class StopResult(NamedTuple):
    """Text that may go out, and the stop string that ended it, if one did."""

    text: str
    matched: str | None


class StopStrings:
    """Watches one text. After a match it must not be pushed any more."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = MarkerSet(stops)
        self._held = ""

    def push(self, text: str) -> StopResult:
        """The text goes on."""
        text = self._held + text
        found = self._stops.find(text)
        if found is not None:
            self._held = ""
            return StopResult(text[: found.start], found.mark)
        cut = len(text) - self._stops.num_open(text)
        self._held = text[cut:]
        return StopResult(text[:cut], None)

    def flush(self) -> str:
        """The text is over: what was held back."""
        held, self._held = self._held, ""
        return held

    @property
    def num_held(self) -> int:
        """Characters that wait."""
        return len(self._held)
