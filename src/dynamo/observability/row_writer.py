"""A writer of JSON rows (audit log, request trace): rows are queued by the event loop and written by a thread.

The queue is bounded in rows and in bytes. A row that does not fit is dropped and counted, so a slow disk never delays
an answer. Rows go to standard error, to one file, or to a series of compressed files; only their owner may read these.
"""

import collections
import contextlib
import errno
import logging
import os
import stat
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from dynamo.base import errors
from dynamo.observability import metrics

MAX_QUEUED_BYTES = 256 * 2**20
CLOSE_S = 10.0  # a disk that hangs must not keep the process
SINK_NAMES = ("stderr", "jsonl", "jsonl_gz")
_OWNER_ONLY = 0o600
_SUFFIXES = (".jsonl.gz", ".jsonl")
R = TypeVar("R")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptions:
    """An operator's settings for one kind of rows."""

    variable: str  # the environment variable that names the sinks, for error messages
    sinks: Sequence[str]
    path: Path | None
    capacity: int  # rows in the queue
    buffer_bytes: int  # queued bytes that start a write
    flush_s: float  # longest time that a row stays in the queue
    roll_bytes: int
    roll_lines: int = 0


def check_options(options: RowOptions) -> None:
    """Raise ConfigError for an unknown sink, or for a file sink without a path."""
    for name in options.sinks:
        if name not in SINK_NAMES:
            raise errors.ConfigError(
                f"{options.variable}: expected sinks out of {', '.join(SINK_NAMES)}, got {name!r}"
                + (" (not supported yet)" if name in ("nats", "otel") else "")
            )
        if name != "stderr" and options.path is None:
            raise errors.ConfigError(
                f"{options.variable}: the sink {name!r} needs a file: set "
                + options.variable.replace("SINKS", "OUTPUT_PATH")
            )


class RowWriter(Generic[R]):
    """A queue of rows with its thread. `encode` runs in the thread and returns one line of JSON without its newline."""

    def __init__(
        self, options: RowOptions, encode: Callable[[R], bytes], dropped: metrics.Counter
    ) -> None:
        self._sinks = [_make_sink(name, options) for name in options.sinks]
        self._options = options
        self._encode = encode
        self._dropped = dropped
        self._rows: collections.deque[tuple[R, int]] = collections.deque()
        self._num_bytes = 0
        self._num_lost = 0  # since the last write that succeeded
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=options.variable, daemon=True)
        self._thread.start()

    def put(self, row: R, num_bytes: int = 0) -> None:
        """Queue a row of about `num_bytes` bytes, or drop and count it if the queue is full."""
        with self._lock:
            is_full = (
                self._is_closed
                or len(self._rows) >= self._options.capacity
                or self._num_bytes + num_bytes > MAX_QUEUED_BYTES
            )
            if not is_full:
                self._rows.append((row, num_bytes))
                self._num_bytes += num_bytes
            has_enough = self._num_bytes >= self._options.buffer_bytes
        if is_full:
            self._dropped.inc()
        if has_enough or len(self._rows) * 2 >= self._options.capacity:
            self._wake.set()

    def close(self) -> None:
        """Write the queued rows, close the sinks and end the thread; give up after `CLOSE_S` seconds. Blocks."""
        self._is_closed = True
        self._wake.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            _logger.warning(
                "%s: the last rows could not be written within %g s",
                self._options.variable,
                CLOSE_S,
            )

    def _run(self) -> None:
        while not self._is_closed:
            self._wake.wait(self._options.flush_s)
            self._wake.clear()
            self._flush()
        self._flush()
        for sink in self._sinks:
            with contextlib.suppress(OSError):  # the end of a compressed file, on a full disk
                sink.close()

    def _flush(self) -> None:
        with self._lock:
            rows, self._rows = self._rows, collections.deque()
            self._num_bytes = 0
        if not rows:
            return
        try:
            lines = b"".join(self._encode(row) + b"\n" for row, _ in rows)
            self._write(lines, len(rows))
        except (
            Exception
        ) as error:  # a full disk, or a bug here: the process goes on and counts the loss
            self._dropped.inc(len(rows))
            if not self._num_lost:
                _logger.log(
                    logging.ERROR,
                    "%s: %d rows could not be written: %s; the next line on this says how many were lost",
                    self._options.variable, len(rows), error,
                    exc_info=not isinstance(error, OSError),
                )  # fmt: skip
            self._num_lost += len(rows)
        else:
            if self._num_lost:
                _logger.warning(
                    "%s: rows are written again; %d were lost",
                    self._options.variable, self._num_lost,
                )  # fmt: skip
            self._num_lost = 0

    def _write(self, lines: bytes, num_lines: int) -> None:
        """Write to each sink. Raises the first error, when the other sinks have the rows."""
        failures = []
        for sink in self._sinks:
            try:
                sink.write(lines, num_lines)
            except OSError as error:
                failures.append(error)
        if failures:
            raise failures[0]


class RowSink(Protocol):
    """A destination of rows. Each method may block, and raises OSError."""

    def write(self, lines: bytes, num_lines: int) -> None:
        """Write whole lines, and make them visible to a reader of the file."""
        ...

    def close(self) -> None:
        """Release the file after the last write."""
        ...


class StderrSink:
    """Rows on standard error, among the logs."""

    def write(self, lines: bytes, num_lines: int) -> None:
        del num_lines
        sys.stderr.write(lines.decode())
        sys.stderr.flush()

    def close(self) -> None:
        """Leave standard error open."""


class JsonlSink:
    """Rows in one growing file, which may be moved away. Processes may share it: each write appends whole lines."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, _open_file(path)

    def write(self, lines: bytes, num_lines: int) -> None:
        del num_lines
        at_path = self._path.stat() if self._path.exists() else None
        if at_path is None or not os.path.samestat(at_path, os.fstat(self._file)):
            former, self._file = self._file, _open_file(self._path)
            os.close(former)
        _append(self._file, lines)

    def close(self) -> None:
        os.close(self._file)


class GzipSink:
    """Rows in files `STEM-PID-000000.jsonl.gz`, `…-000001.jsonl.gz` and so on.

    A file is followed by the next one at `roll_bytes` uncompressed bytes or `roll_lines` lines; 0 is no limit.
    """

    def __init__(self, stem: Path, *, roll_bytes: int, roll_lines: int) -> None:
        self._stem = stem
        self._roll_bytes = roll_bytes
        self._roll_lines = roll_lines
        self._number = 0
        self._file: int | None = None
        self._open_next()

    def write(self, lines: bytes, num_lines: int) -> None:
        if (0 < self._roll_bytes <= self._num_bytes) or (0 < self._roll_lines <= self._num_lines):
            self.close()
        file = self._open_next() if self._file is None else self._file
        packed = self._compressor.compress(lines)
        packed += self._compressor.flush(
            zlib.Z_SYNC_FLUSH
        )  # readable even if this process is killed
        try:
            _append(file, packed)
        except OSError:  # what follows would not be readable behind a gap
            if not os.fstat(file).st_size:
                self._number -= 1
            os.close(file)
            self._file = None
            raise
        self._num_bytes += len(lines)
        self._num_lines += num_lines

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            try:
                _append(file, self._compressor.flush())
            finally:
                os.close(file)

    def _open_next(self) -> int:
        while True:
            name = f"{self._stem.name}-{os.getpid()}-{self._number:06}.jsonl.gz"
            file = _open_file(self._stem.with_name(name))
            self._number += 1
            if not os.fstat(file).st_size:
                break
            os.close(file)  # of an earlier process of this number, perhaps killed in the middle
        self._compressor = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)  # gzip
        self._file, self._num_bytes, self._num_lines = file, 0, 0
        return file


def _append(file: int, data: bytes) -> None:
    """Append all of it, or nothing. Raises OSError."""
    unwritten = memoryview(data)
    try:
        while unwritten:
            unwritten = unwritten[os.write(file, unwritten) :]
    except OSError:
        end = os.lseek(file, 0, os.SEEK_CUR)
        if os.fstat(file).st_size == end:  # no other process has appended since
            os.ftruncate(file, end - len(data) + len(unwritten))
        raise


def _open_file(path: Path) -> int:
    """Open a file to append to it; where all users may make files, no link and no file of another user."""
    is_shared = bool(path.parent.stat().st_mode & stat.S_IWOTH)
    safely = os.O_NOFOLLOW | os.O_NONBLOCK if is_shared else 0  # nor a pipe that blocks
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | safely, _OWNER_ONLY)
    if is_shared and os.fstat(file).st_uid != os.getuid():
        os.close(file)
        raise PermissionError(errno.EPERM, "another user made it", str(path))
    return file


def _make_sink(name: str, options: RowOptions) -> RowSink:
    if name == "stderr" or options.path is None:
        return StderrSink()
    suffix = next((suffix for suffix in _SUFFIXES if options.path.name.endswith(suffix)), "")
    stem = options.path.with_name(options.path.name.removesuffix(suffix))
    try:
        if name == "jsonl":
            return JsonlSink(stem.with_name(stem.name + ".jsonl"))
        return GzipSink(stem, roll_bytes=options.roll_bytes, roll_lines=options.roll_lines)
    except OSError as error:
        raise errors.ConfigError(
            f"{options.variable}: cannot write to {options.path}: {error}"
        ) from error
