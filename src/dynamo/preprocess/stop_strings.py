"""Marks and stop strings in a text that grows, for any way in which it is cut into pieces.

Of several marks, the one that is *complete first* counts; of those complete at the same character, the longest. So
the result does not depend on how tokens cut the text, and no look-ahead is needed. An end of the text that may still
become a mark is reported, so that it can be held back.

A text ends before the stop string that is complete first.
"""  # decider

import functools
from collections.abc import Sequence
from typing import NamedTuple


class MarkerSet:
    """Marks to look for. Immutable."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = tuple(marks)
        self._inner = frozenset(char for mark in marks for char in mark[:-1])
        self._longest = max(map(len, marks), default=0) - 1  # an incomplete mark is shorter

    def partition(self, text: str) -> tuple[str, str, str]:
        """Return the text before the mark that is complete first, that mark, and the rest, as `str.partition` does.

        Without a mark, the rest is the end of the text that may be the beginning of one.
        """
        matches = [
            (at + len(mark), at, mark) for mark in self._marks if (at := text.find(mark)) >= 0
        ]
        if matches:
            end, start, mark = min(matches)
            return text[:start], mark, text[end:]
        cut = len(text) - self._num_open(text)
        return text[:cut], "", text[cut:]

    def _num_open(self, text: str) -> int:
        """Return the length of the longest end of `text` that is the beginning of a mark."""
        if not text or text[-1] not in self._inner:
            return 0
        lengths = range(min(self._longest, len(text)), 0, -1)
        return next((n for n in lengths if self.begins(text[-n:])), 0)

    def begins(self, text: str) -> bool:
        """Return whether the whole text is a mark or the beginning of one."""
        for mark in self._marks:  # noqa: SIM110 (once per answer: a generator costs more than the rest)
            if mark.startswith(text):
                return True
        return False

    def leading(self, text: str) -> str:
        """Return the mark with which the text begins; empty for none."""
        if not text.startswith(self._marks):  # nearly always so
            return ""
        return next(mark for mark in self._marks if text.startswith(mark))


@functools.lru_cache(maxsize=256)
def cached_markers(*marks: str) -> MarkerSet:
    """Return the same set for the same marks: for the marks of formats, which are few."""
    return MarkerSet(marks)


class StopResult(NamedTuple):
    """Text that may go out, and the stop string that ended it; None: the text goes on."""

    text: str
    matched: str | None


class StopStrings:
    """Finds the end of one text. Nothing may be pushed after a match."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = MarkerSet(stops)
        self._pending = ""  # may be the beginning of a stop string

    def push(self, text: str) -> StopResult:
        """Add text; return all that is certain to stand before a stop string."""
        text, mark, following = self._stops.partition(self._pending + text)
        self._pending = "" if mark else following
        return StopResult(text, mark or None)

    def flush(self) -> str:
        """End the text; return what was held back."""
        pending, self._pending = self._pending, ""
        return pending

    @property
    def num_held(self) -> int:
        """Return the number of characters that are held back."""
        return len(self._pending)
