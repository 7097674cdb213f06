"""Rows that are written beside the work: put on the event loop, encoded and written by a thread.

What waits is bounded in number and in bytes. A row that finds no room is dropped and counted: an operator's disk must
not hold up the answers.
"""

import collections
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from dynamo.base import errors
from dynamo.observability import metrics, row_sinks

MAX_WAITING_BYTES = 256 * 2**20
NAMES = ("stderr", "jsonl", "jsonl_gz")
R = TypeVar("R")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What an operator says of one kind of rows."""

    variable: str  # that named the sinks, for sentences about them
    sinks: Sequence[str]
    path: Path | None
    capacity: int  # rows that may wait
    buffer_bytes: int  # that wait at most before they are written
    flush_s: float  # for how long they wait at most
    roll_bytes: int
    roll_lines: int = 0


class RowWriter(Generic[R]):
    """`encode` makes one line of JSON (without its end) of what was put; it is called in the thread."""

    def __init__(
        self, options: Options, encode: Callable[[R], bytes], dropped: metrics.Counter
    ) -> None:
        self._sinks = [_open(name, options) for name in options.sinks]
        self._options = options
        self._encode = encode
        self._dropped = dropped
        self._rows: collections.deque[tuple[R, int]] = collections.deque()
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=options.variable, daemon=True)
        self._thread.start()

    def put(self, row: R, num_bytes: int = 0) -> None:
        """Have it written soon. `num_bytes` is about what it weighs."""
        with self._lock:
            is_full = (
                self._is_closed
                or len(self._rows) >= self._options.capacity
                or self._num_bytes + num_bytes > MAX_WAITING_BYTES
            )
            if not is_full:
                self._rows.append((row, num_bytes))
                self._num_bytes += num_bytes
            is_enough = self._num_bytes >= self._options.buffer_bytes
        if is_full:
            self._dropped.inc()
        if is_enough or len(self._rows) * 2 >= self._options.capacity:
            self._wake.set()

    def close(self) -> None:
        """Write what waits, and end. Blocks."""
        self._is_closed = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closed:
            self._wake.wait(self._options.flush_s)
            self._wake.clear()
            self._flush()
        self._flush()
        for sink in self._sinks:
            sink.close()

    def _flush(self) -> None:
        with self._lock:
            rows, self._rows = self._rows, collections.deque()
            self._num_bytes = 0
        if not rows:
            return
        try:
            lines = b"".join(self._encode(row) + b"\n" for row, _ in rows)
            for sink in self._sinks:
                sink.write(lines, len(rows))
        except (
            Exception
        ):  # a full disk, or a bug of ours: the frontend goes on, and says what it lost
            self._dropped.inc(len(rows))
            _logger.exception("%s: %d rows could not be written", self._options.variable, len(rows))


def check(options: Options) -> None:
    """Raises ConfigError for sinks that we have not."""
    for name in options.sinks:
        if name not in NAMES:
            raise errors.ConfigError(
                f"{options.variable}: expected sinks out of {', '.join(NAMES)}, got {name!r}"
                + (" (not supported yet)" if name in ("nats", "otel") else "")
            )
        if name != "stderr" and options.path is None:
            raise errors.ConfigError(
                f"{options.variable}: the sink {name!r} needs a file: set "
                + options.variable.replace("SINKS", "OUTPUT_PATH")
            )


def _open(name: str, options: Options) -> row_sinks.Sink:
    if name == "stderr" or options.path is None:
        return row_sinks.StderrSink()
    stem = row_sinks.stem_of(options.path)
    try:
        if name == "jsonl":
            return row_sinks.JsonlSink(stem.with_name(stem.name + ".jsonl"))
        return row_sinks.GzipSink(
            stem, roll_bytes=options.roll_bytes, roll_lines=options.roll_lines
        )
    except OSError as error:
        raise errors.ConfigError(
            f"{options.variable}: cannot write to {options.path}: {error}"
        ) from error
