"""The last lines of this process's log, kept in memory for the console."""

import collections
import itertools
import logging
from collections.abc import Sequence

import msgspec

from dynamo.observability import logs

MAX_LINES = 1000
_MAX_CHARS = 2000


class LogLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line. `number` counts all lines of the process, from 1."""

    number: int
    at: float  # seconds since 1970
    level: str
    target: str
    message: str
    request_id: str = ""


class LogRing(logging.Handler):
    """A handler of the root logger that keeps the last `MAX_LINES` lines. May be called from any thread."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)
        self._lines: collections.deque[LogLine] = collections.deque(maxlen=MAX_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line of a record, and drop the oldest."""
        context = logs.log_context.get()
        try:
            message = record.getMessage()
        except (TypeError, ValueError, LookupError):  # the other handlers report it
            message = str(record.msg)
        if record.exc_info and record.exc_info[1] is not None:  # its trace is in the log itself
            message = f"{message}: {record.exc_info[1]!r}"
        line = LogLine(
            number=next(self._numbers),
            at=record.created,
            level=record.levelname,
            target=record.name,
            # a name of a file may have bytes that are no text, which no JSON holds
            message=message[:_MAX_CHARS].encode(errors="backslashreplace").decode(),
            request_id=(context.request_id or "") if context is not None else "",
        )
        self._lines.append(line)

    def after(
        self, number: int = 0, *, least_level: int = 0, limit: int = 200
    ) -> Sequence[LogLine]:
        """Return the last `limit` lines after this number that have at least this level."""
        levels = logging.getLevelNamesMapping()
        selected = [
            line
            for line in list(self._lines)
            if line.number > number and levels.get(line.level, 0) >= least_level
        ]
        return selected[-max(1, min(limit, MAX_LINES)) :]
