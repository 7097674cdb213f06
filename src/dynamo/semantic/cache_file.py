"""The file of a semantic cache: its answers outlive a restart of the process.

Each answer that is stored or removed is appended as a record with its length and checksum; a file that has grown to
twice the bound of the cache is written anew. The directory and the file are of this user alone; each process holds a
file of its own, the first that is free (`--http-workers`). Answers of another configuration, or read by other rules
for wordings, are refused by name. A disk that fails ends the file, never the cache. What a crash of the machine cuts
off is dropped when the file is read.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.semantic import cache, config, question_meaning

_HEAD = struct.Struct("<II")  # bytes and checksum of the record that follows
_MOST_FILES = 64
_SLACK = 2**20  # bytes of a file beyond twice its answers
_MAX_RECORD = cache.MAX_BODY + 2**18
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW
_logger = logging.getLogger(__name__)


class FileOrigin(msgspec.Struct, frozen=True, array_like=True):
    """What the answers of a file depend on: the first record."""

    format: str
    configuration: str
    wordings: str


class AnswerRecord(msgspec.Struct, frozen=True, array_like=True):
    """An answer that was stored, or one that was removed (without a body)."""

    digest: bytes
    tenant: str = ""
    meaning: question_meaning.QuestionMeaning | None = None
    body: bytes = b""
    expires_at: float = 0.0  # by the wall clock
    decision: str = ""


def make_origin(settings: config.SemanticConfig) -> FileOrigin:
    """Return what answers under this configuration depend on."""
    synonyms, capitonyms = question_meaning.SYNONYMS.items(), question_meaning.CAPITONYMS
    rules = repr((question_meaning.RULE_TABLE, sorted(synonyms), sorted(capitonyms))).encode()
    digests = [
        hashlib.blake2b(data, digest_size=8).hexdigest()
        for data in (msgspec.json.encode(settings), rules)
    ]
    return FileOrigin("semantic cache 4", *digests)


class CacheFile:
    """Holds the directory of one cache, fills the cache from it, and follows its changes until it is closed."""

    def __init__(self, directory: Path, clock: clocks.Clock) -> None:
        """Take the first free file of the directory. Raises ConfigError if the directory is not of this user alone."""
        self._clock = clock
        self._mutex = threading.Lock()  # large bodies are routed in a thread
        self._fd: int | None = None
        self._num_bytes = 0
        self._cache: cache.SemanticCache | None = None
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = directory.lstat()
            if status.st_uid != os.getuid() or status.st_mode & 0o077 or directory.is_symlink():
                raise errors.ConfigError(
                    f"semantic_cache.directory: {directory}: expected a directory that only user {os.getuid()} may "
                    "enter: chmod 700, or choose another"
                )
            self._path, self._lock = _lock_free_file(directory)
        except OSError as error:
            raise errors.ConfigError(f"semantic_cache.directory: {directory}: {error}") from error

    def follow(self, stored: cache.SemanticCache, origin: FileOrigin) -> None:
        """Put the answers of the file into a cache, and write what changes from now on."""
        self._cache, self._origin = stored, origin
        for record in self._read():
            if record.body and record.meaning is not None:
                key = cache.CacheKey(record.digest, record.tenant, record.meaning, record.decision)
                stored.store(key, record.body, record.expires_at - self._clock.wall())
            else:
                stored.remove(record.digest)
        with self._mutex:
            self._write_anew()
        stored.on_change = self._append
        _logger.info("%s: %d answers are cached again", self._path, len(stored))

    def close(self) -> None:
        """Stop to follow, and let another process have the directory."""
        if self._cache is not None:
            self._cache.on_change = None
        with self._mutex:
            self._close_file()
        with contextlib.suppress(OSError):
            os.close(self._lock)

    def _read(self) -> Iterator[AnswerRecord]:
        """Yield the records up to the first that is damaged; none of a file that is of another origin."""
        try:
            with open(os.open(self._path, os.O_RDONLY | _FLAGS), "rb") as file:
                records = _read_records(file.read(self._most_bytes + _MAX_RECORD))
                first = next(records, b"")
                try:
                    origin = msgspec.msgpack.decode(first, type=FileOrigin)
                except msgspec.DecodeError:
                    _logger.warning(
                        "%s: expected a file of a semantic cache; it is replaced", self._path
                    )
                    return
                for name in origin.__struct_fields__:
                    if getattr(origin, name) != getattr(self._origin, name):
                        _logger.warning(
                            "%s: its answers are of another %s; they are removed", self._path, name
                        )
                        return
                for data in records:
                    yield msgspec.msgpack.decode(data, type=AnswerRecord)
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            _logger.warning("%s: read until an error: %s", self._path, error)

    @property
    def _most_bytes(self) -> int:
        assert self._cache is not None
        return 2 * self._cache.settings.max_megabytes * 2**20 + _SLACK

    def _append(self, digest: bytes, answer: cache.StoredAnswer | None) -> None:
        with self._mutex:
            if self._fd is None:
                return
            try:
                self._write(self._encode(digest, answer))
                if self._num_bytes > self._most_bytes:
                    self._write_anew()
            except OSError as error:
                self._give_up(error)

    def _encode(self, digest: bytes, answer: cache.StoredAnswer | None) -> AnswerRecord:
        if answer is None:
            return AnswerRecord(digest)
        expires_at = self._clock.wall() + answer.expires_at - self._clock.now()
        key = answer.key
        return AnswerRecord(digest, key.tenant, key.meaning, answer.body, expires_at, key.decision)

    def _write_anew(self) -> None:
        """Replace the file by one of the answers that the cache has now."""
        assert self._cache is not None
        temporary = self._path.with_suffix(".new")
        try:
            self._close_file()
            temporary.unlink(missing_ok=True)
            self._fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
            self._num_bytes = 0
            self._write(self._origin)
            for digest, answer in self._cache.answers():
                self._write(self._encode(digest, answer))
            os.replace(temporary, self._path)
        except OSError as error:
            self._give_up(error)

    def _write(self, record: FileOrigin | AnswerRecord) -> None:
        assert self._fd is not None
        data = msgspec.msgpack.encode(record)
        view = memoryview(_HEAD.pack(len(data), zlib.crc32(data)) + data)
        self._num_bytes += len(view)
        while view:
            view = view[os.write(self._fd, view) :]

    def _give_up(self, error: OSError) -> None:
        _logger.error("%s: %s; answers are cached in memory only from now on", self._path, error)
        self._close_file()
        with contextlib.suppress(OSError):
            # it would bring back answers that were removed since
            self._path.unlink(missing_ok=True)

    def _close_file(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _lock_free_file(directory: Path) -> tuple[Path, int]:
    """Return the first file of a directory that no process holds, and the descriptor of its lock. Raises OSError."""
    for number in range(_MOST_FILES):
        path = directory / f"answers-{number}"
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        except OSError:
            os.close(lock)
            raise
        return path, lock
    raise OSError(f"{_MOST_FILES} processes use it already")


def _read_records(data: bytes) -> Iterator[bytes]:
    """Yield the records whose lengths and checksums are right, up to the first whose are not."""
    position = 0
    while position + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, position)
        position += _HEAD.size
        record = data[position : position + length]
        if length > _MAX_RECORD or len(record) < length or zlib.crc32(record) != checksum:
            return
        yield record
        position += length
