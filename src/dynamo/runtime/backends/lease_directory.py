"""A directory of keys that die with their owners: the disk under file discovery, without any waiting.

    leases/1f3a          locked by its owner for as long as it lives
    keys/v1%2Finstances%2Fdynamo%2Fbackend%2Fgenerate%2F1f3a
                         a line of JSON that names the lease and the value's size, then the value

**Alive or dead.** The owner holds an exclusive `flock` on its lease. The kernel drops it when the process dies, however
it dies, so a *shared* lock is proof of its death, without a clock and without a timeout. Sweepers share that lock, so
several may remove a dead owner's keys and lease side by side, and none takes another for the owner, while a
new owner of the same name has to wait. Since the name may then mean another file, each process checks after locking
that the name still leads to the locked file.

**Order.** An owner has its lease before its first key. A scan reads keys before leases. So a key without its lease
has no owner: it is hidden and removed. Should that have been wrong (files were deleted by hand), the owner puts back
the missing ones at its next `restore`.

Keys are written under another name and renamed: a reader sees the old value or the new one. An unreadable file is
ignored with a line in the log. All methods may be called from any thread. A child made by `fork` without
`exec` keeps its parent's lease alive.
"""

import contextlib
import fcntl
import logging
import os
import re
import threading
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dynamo.base import errors, local_users, membership
from dynamo.protocols import wire

VALUE_LIMIT = 1 << 20
_FILE_LIMIT = VALUE_LIMIT + 1024  # a value and its header
NAME_LIMIT = 255  # bytes; what file systems allow
_TEMPORARY = ".new-"  # and the lease: one for each owner
_NO_LETTER = re.compile(rb"[^A-Za-z0-9]")
_LOCK_ATTEMPTS = 100
_LOCK_RETRY_S = 0.01
_OPEN_SAFELY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # no link, no pipe that blocks

Stamp = tuple[int, int, int]  # inode, time of change, size

log = logging.getLogger(__name__)


class _Header(msgspec.Struct, frozen=True):
    lease: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """A key file as it was read; `stamp` tells whether it is still the same."""

    stamp: Stamp
    key: str
    lease: str | None  # None: the file is unreadable
    value: bytes


def file_name(key: str) -> str:
    """Return a key as a file name; all but letters and digits is percent-encoded. Raises LocalProtocolError."""
    name = _NO_LETTER.sub(lambda byte: b"%%%02X" % ord(byte[0]), key.encode()).decode()
    if not 0 < len(name) <= NAME_LIMIT:
        raise errors.LocalProtocolError(
            f"key {key!r} takes {len(name)} bytes as a file name, expected 1 to {NAME_LIMIT}:"
            " use shorter names of namespace, component and endpoint"
        )
    return name


def key_of(name: str) -> str:
    """Return the key of a file name; the inverse of `file_name`."""
    return urllib.parse.unquote(name)


def prepare(root: Path) -> None:
    """Create the directory, for its owner only. Raises ConfigError if another user could change it."""
    with _translate_disk_errors(root):
        local_users.make_private_directory(root)
        for part in ("leases", "keys"):
            local_users.make_private_directory(root / part)


class LeaseDirectory:
    """One owner's view of the directory: its lease, its keys, and the living keys of all owners."""

    def __init__(self, root: Path, lease: str, local_token: bytes | None = None) -> None:
        self.keys = root / "keys"
        self._root = root
        self._leases = root / "leases"
        self._lease = lease
        self._local_token = local_token
        self._lease_fd: int | None = None
        self._keys_fd: int | None = None  # while it is open, no other directory has its inode
        self._own: dict[str, bytes] = {}  # this owner's values by file name; to put back
        self._records: dict[str, _Record] = {}  # by file name
        self._ignored: set[str] = set()  # leases already reported in the log
        self._mutex = threading.Lock()

    def acquire(self) -> None:
        """Create the directory and take the lease, without keys of an earlier owner. Raises ConfigError."""
        with self._mutex, _translate_disk_errors(self._root):
            self._lease_fd = self._lock_lease()
            self._keys_fd = self._open_keys()
            self._read_keys()
            self._sweep()

    def release(self) -> None:
        """Remove this owner's keys and lease; files that the disk keeps are dead all the same."""
        with self._mutex:
            if self._lease_fd is None:
                return
            try:
                for name in self._own:
                    self._remove_own(name)
                (self._leases / self._lease).unlink(missing_ok=True)
            except OSError as error:
                log.warning("leaving keys for others to sweep: %s", error)
            os.close(self._lease_fd)
            self._lease_fd = None
            if self._keys_fd is not None:
                os.close(self._keys_fd)
            self._own.clear()

    def write(self, key: str, value: bytes) -> None:
        """Put a key under our lease.

        Raises LocalProtocolError for what cannot be a key or a value, ConfigError if the disk refuses it.
        """
        if len(value) > VALUE_LIMIT:
            raise errors.LocalProtocolError(
                f"value of {key!r} has {len(value)} bytes, expected at most {VALUE_LIMIT}"
            )
        name = file_name(key)
        with self._mutex, _translate_disk_errors(self._root):
            if self._lease_fd is None:
                raise errors.LocalProtocolError(f"put {key!r}: this discovery is closed")
            self._write(name, value)
            self._own[name] = value

    def remove(self, key: str) -> None:
        """Remove a key of this owner, if it is there. Raises ConfigError if the disk refuses it."""
        name = file_name(key)
        with self._mutex, _translate_disk_errors(self._root):
            if self._own.pop(name, None) is not None:
                self._remove_own(name)

    def restore(self) -> bool:
        """Put back this owner's deleted files; return True if `keys` is another directory than before.

        Raises ConfigError.
        """
        with self._mutex, _translate_disk_errors(self._root):
            if self._lease_fd is None:
                return False
            if not _is_file(self._lease_fd, self._leases / self._lease):
                log.warning("somebody removed our lease from %s; putting our keys back", self._root)
                lost_fd, self._lease_fd = self._lease_fd, self._lock_lease()
                os.close(lost_fd)
            prepare(self._root)
            if self._local_token is not None:
                membership.share_local_token(self._root, self._local_token)
            for name, value in self._own.items():
                if not (self.keys / name).exists():
                    self._write(name, value)
            if self._keys_fd is None or _is_file(self._keys_fd, self.keys):
                return False
            former, self._keys_fd = self._keys_fd, self._open_keys()
            os.close(former)
            return True

    def scan(self, *, with_keys: bool) -> dict[str, bytes]:
        """Return the living keys and their values, and remove those of dead owners from the disk. Raises ConfigError.

        Without `with_keys` only the leases are looked at, and the keys are those of the last scan.
        """
        with self._mutex, _translate_disk_errors(self._root):
            if with_keys:
                self._read_keys()
            self._sweep()
            return {r.key: r.value for r in self._records.values() if r.lease is not None}

    def _lock_lease(self) -> int:
        prepare(self._root)
        path = self._leases / self._lease
        for _ in range(_LOCK_ATTEMPTS):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _OPEN_SAFELY, 0o600)
            is_ours = False
            try:
                is_ours = _try_lock(descriptor, fcntl.LOCK_EX) and _is_file(descriptor, path)
            finally:
                if not is_ours:  # a sweeper has it for a moment, or has just removed it
                    os.close(descriptor)
            if is_ours:
                return descriptor
            time.sleep(_LOCK_RETRY_S)
        raise errors.ConfigError(
            f"lease {path} is held by a living process: give each process an instance id of its own"
        )

    def _open_keys(self) -> int:
        return os.open(self.keys, os.O_RDONLY | os.O_DIRECTORY | _OPEN_SAFELY)

    def _write(self, name: str, value: bytes) -> None:
        temporary = self.keys / f"{_TEMPORARY}{self._lease}"
        header = msgspec.json.encode(_Header(self._lease, len(value)))
        try:
            temporary.write_bytes(header + b"\n" + value)
            # the kernel's stamps are so coarse that two writes could look like one
            now = time.time_ns()
            os.utime(temporary, ns=(now, now))
            temporary.rename(self.keys / name)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def _remove_own(self, name: str) -> None:
        path = self.keys / name
        with contextlib.suppress(FileNotFoundError):  # removed by another process
            if _read(path).lease == self._lease:  # else another owner wrote it since
                path.unlink()

    def _read_keys(self) -> None:
        """Bring the records up to date; only files that changed are read."""
        records = {}
        with os.scandir(self.keys) as entries:
            for entry in entries:
                if entry.name.startswith(_TEMPORARY):
                    continue
                try:
                    record = self._records.get(entry.name)
                    if record is None or record.stamp != _stamp(entry.stat(follow_symlinks=False)):
                        record = _read(self.keys / entry.name)
                except FileNotFoundError:
                    continue  # removed since we listed it
                records[entry.name] = record
        self._records = records

    def _sweep(self) -> None:
        """Remove the records and files of dead owners."""
        names_by_lease: dict[str, list[str]] = {lease: [] for lease in os.listdir(self._leases)}
        for name, record in self._records.items():
            if record.lease is not None:
                names_by_lease.setdefault(record.lease, []).append(name)
        own_names = names_by_lease.pop(self._lease, ())
        # of an earlier life
        self._remove_dead([name for name in own_names if name not in self._own])
        for lease, names in names_by_lease.items():
            try:
                self._sweep_if_dead(lease, names)
            except OSError as error:
                if lease not in self._ignored:
                    self._ignored.add(lease)
                    log.warning("cannot look after lease %s: %s", lease, error)

    def _sweep_if_dead(self, lease: str, names: list[str]) -> None:
        path = f"{self._leases}/{lease}"
        try:
            descriptor = os.open(path, os.O_RDONLY | _OPEN_SAFELY)
        except FileNotFoundError:
            self._remove_dead(names)
            return
        try:
            if not _try_lock(descriptor, fcntl.LOCK_SH):
                return  # its owner lives
            # None of them belongs to a new owner: they were read before the lease was opened.
            self._remove_dead(names)
            (self.keys / f"{_TEMPORARY}{lease}").unlink(missing_ok=True)
            if _is_file(descriptor, path):
                Path(path).unlink(missing_ok=True)  # another sweeper may be quicker
        finally:
            os.close(descriptor)

    def _remove_dead(self, names: list[str]) -> None:
        stamp_by_path = {self.keys / name: self._records.pop(name).stamp for name in names}
        for path, stamp in stamp_by_path.items():
            with contextlib.suppress(FileNotFoundError):  # another sweeper was quicker
                if _stamp(os.lstat(path)) == stamp:  # else another owner wrote it since
                    os.unlink(path)


@contextlib.contextmanager
def _translate_disk_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise errors.ConfigError(
            f"discovery directory {root}: {error}; expected a directory that we can write and that has space:"
            " see to it, or set DYN_FILE_KV to another"
        ) from error


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_file(descriptor: int, path: str | Path) -> bool:
    """Return True if the name still leads to the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError:
        return False


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_ino, status.st_mtime_ns, status.st_size


def _read(path: Path) -> _Record:
    """Read a file as a record; one that is no key file is logged and recorded without an owner."""
    lease, value, stamp = None, b"", _stamp(os.lstat(path))
    try:
        descriptor = os.open(path, os.O_RDONLY | _OPEN_SAFELY)
        try:
            stamp = _stamp(os.fstat(descriptor))
            line, _, value = os.read(descriptor, _FILE_LIMIT).partition(b"\n")
        finally:
            os.close(descriptor)
        header = msgspec.json.decode(line, type=_Header)
        if header.size == len(value):
            lease = header.lease
        else:
            log.warning("ignoring %s: %d bytes of %d", path, len(value), header.size)
    except FileNotFoundError:
        raise
    except (OSError, *wire.DECODE_ERRORS) as error:
        log.warning("ignoring %s: no key file: %s", path, error)
    return _Record(stamp=stamp, key=key_of(path.name), lease=lease, value=value)
