"""Where rows of JSON go: standard error, a file, or a series of compressed files, readable by their owner only."""

import gzip
import os
import sys
from pathlib import Path
from typing import Protocol

_OWNER_ONLY = 0o600
_SUFFIXES = (".jsonl.gz", ".jsonl")


class Sink(Protocol):
    """Takes whole lines. Everything here may block, and raises OSError."""

    def write(self, lines: bytes, num_lines: int) -> None:
        """Write them, so that a reader sees them."""
        ...

    def close(self) -> None:
        """No more comes."""
        ...


class StderrSink:
    """Among the logs."""

    def write(self, lines: bytes, num_lines: int) -> None:
        del num_lines
        sys.stderr.write(lines.decode())
        sys.stderr.flush()

    def close(self) -> None:
        """Standard error is not ours to close."""


class JsonlSink:
    """One file, which grows; several processes may share it, because each write is whole lines at its end."""

    def __init__(self, path: Path) -> None:
        self._file = _open(path)

    def write(self, lines: bytes, num_lines: int) -> None:
        del num_lines
        view = memoryview(lines)
        while view:
            view = view[os.write(self._file, view) :]

    def close(self) -> None:
        os.close(self._file)


class GzipSink:
    """Files `STEM-PID-000000.jsonl.gz` and so on: a new one when one has enough bytes (uncompressed) or lines."""

    def __init__(self, stem: Path, *, roll_bytes: int, roll_lines: int) -> None:
        """No limit where it is 0."""
        self._stem = stem
        self._roll_bytes = roll_bytes
        self._roll_lines = roll_lines
        self._number = 0
        self._open()

    def write(self, lines: bytes, num_lines: int) -> None:
        if self._is_full:
            self.close()
            self._number += 1
            self._open()
        self._file.write(lines)
        self._file.flush()  # what ends here can be read, even if we die
        self._raw.flush()
        self._num_bytes += len(lines)
        self._num_lines += num_lines

    def close(self) -> None:
        self._file.close()
        self._raw.close()

    @property
    def _is_full(self) -> bool:
        return (0 < self._roll_bytes <= self._num_bytes) or (
            0 < self._roll_lines <= self._num_lines
        )

    def _open(self) -> None:
        name = f"{self._stem.name}-{os.getpid()}-{self._number:06}.jsonl.gz"
        path = self._stem.with_name(name)
        self._raw = os.fdopen(_open(path), "wb")
        self._file = gzip.GzipFile(filename="", fileobj=self._raw, mode="wb")
        self._num_bytes = self._num_lines = 0


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, _OWNER_ONLY)


def stem_of(path: Path) -> Path:
    """The path without the suffix of a file of rows."""
    suffix = next((suffix for suffix in _SUFFIXES if path.name.endswith(suffix)), "")
    return path.with_name(path.name.removesuffix(suffix))
