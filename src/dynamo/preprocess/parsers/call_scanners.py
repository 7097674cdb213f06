"""How far a tool call reaches in a growing text.

A call that is JSON ends with its last bracket, wherever a mark may stand in its strings; so brackets are counted, and a
character that cannot stand there ends the call at once instead of consuming the answer. Other calls end at a mark.
"""  # decider

import enum
from typing import NamedTuple, Protocol

from dynamo.preprocess.parsers import parser

MAX_CALL_CHARS = 2**18
MAX_HEAD_CHARS = 256
_MAX_DEPTH = 200
_CLOSER = {"{": "}", "[": "]", "(": ")"}
_JSON_CHARS = frozenset("{}[]:,+-.0123456789eE" + "true" + "false" + "null" + ' \t\r\n"')


class CallState(enum.Enum):
    """Whether a call goes on, is complete, or turned out to be none."""

    OPEN = enum.auto()
    COMPLETE = enum.auto()
    BROKEN = enum.auto()


class CallExtent(NamedTuple):
    """The number of characters that belong to the call, and its state after them."""

    num_chars: int
    state: CallState


class CallScanner(Protocol):
    """Finds the end of one call."""

    def push(self, text: str) -> CallExtent:
        """Add text; return how much of it belongs to the call. Not to be called after the call has ended."""
        ...


class BracketScanner:
    """Finds the end of a value in brackets.

    `has_head`: text such as the tool's name may stand before the opening `{`. `allowed`: the characters outside of
    strings; None: all.
    """

    def __init__(
        self,
        *,
        quotes: str = '"',
        allowed: frozenset[str] | None = _JSON_CHARS,
        has_head: bool = False,
    ) -> None:
        self._quotes = quotes
        self._allowed = allowed
        self._has_head = has_head
        self._num_head = 0  # characters before the value, white space at the beginning not counted
        self._num_chars = 0
        self._closers: list[str] = []
        self._quote = ""
        self._is_escaped = False

    def push(self, text: str) -> CallExtent:
        for at, char in enumerate(text):
            state = self._take(char)
            if state is not CallState.OPEN:
                return CallExtent(at + (state is CallState.COMPLETE), state)
        return CallExtent(len(text), CallState.OPEN)

    def _take(self, char: str) -> CallState:
        self._num_chars += 1
        if self._num_chars > MAX_CALL_CHARS:
            return CallState.BROKEN
        if not self._closers:
            return self._take_before(char)
        if self._quote:
            return self._take_quoted(char)
        return self._take_bare(char)

    def _take_before(self, char: str) -> CallState:
        if char == "{" or (char == "[" and not self._num_head):
            self._closers.append(_CLOSER[char])
            return CallState.OPEN
        if char.isspace() and not self._num_head:
            return CallState.OPEN
        self._num_head += 1
        is_head = self._has_head and self._num_head <= MAX_HEAD_CHARS
        return CallState.OPEN if is_head else CallState.BROKEN

    def _take_quoted(self, char: str) -> CallState:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == self._quote:
            self._quote = ""
        return CallState.OPEN

    def _take_bare(self, char: str) -> CallState:
        if char in self._quotes:
            self._quote = char
        elif char in _CLOSER:
            self._closers.append(_CLOSER[char])
        elif char in ")]}":
            if self._closers.pop() != char:
                return CallState.BROKEN
            return CallState.OPEN if self._closers else CallState.COMPLETE
        if self._allowed is not None and char not in self._allowed:
            return CallState.BROKEN
        return CallState.OPEN if len(self._closers) <= _MAX_DEPTH else CallState.BROKEN


class MarkerScanner:
    """Finds the end of a call that reaches up to a mark, the mark included.

    A value reaches from the mark `opening` to the mark `closing`; the mark of the end may stand within one.
    """

    def __init__(self, mark: str, opening: str = "", closing: str = "") -> None:
        self._mark = mark
        self._opening = opening
        self._closing = closing
        self._has_values = False
        self._tail = ""
        self._num_chars = 0
        self._num_tail = len(mark) - 1
        if closing:
            self._num_tail += len(closing) + parser.MAX_HELD_BLANKS

    def push(self, text: str) -> CallExtent:
        window = self._tail + text
        at = window.find(self._mark)
        while at >= 0 and self._is_open(window, at):
            at = window.find(self._mark, at + 1)
        num_used = at + len(self._mark) - len(self._tail) if at >= 0 else len(text)
        max_used = MAX_CALL_CHARS - self._num_chars
        if num_used > max_used:
            return CallExtent(max_used, CallState.BROKEN)
        self._num_chars += num_used
        self._is_open(window, len(window))
        self._tail = window[-self._num_tail :]
        return CallExtent(num_used, CallState.COMPLETE if at >= 0 else CallState.OPEN)

    def _is_open(self, window: str, at: int) -> bool:
        """Return whether this place is within a value."""
        if not self._has_values:
            self._has_values = bool(self._opening) and window.find(self._opening, 0, at) >= 0
        before = window[max(at - self._num_tail, 0) : at].rstrip()
        return self._has_values and not before.endswith(self._closing)
