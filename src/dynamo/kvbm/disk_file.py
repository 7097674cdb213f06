"""The disk tier's file: a header, an index and the slots, allocated once and found again after a restart.

    header    4 KiB: what the blocks are (fingerprint: model, dtype, layout, ...), their size and number
    index     64 bytes a slot: the block's hashes, the checksum of its bytes, and a checksum of this record
    slots     the blocks, each beginning at a multiple of 4 KiB

A block is written before its record, and nothing is flushed: after a kill or a crash a record may be missing, or name
bytes that are not there, and then the checksum says so when the block is read. Wrong bytes are never returned.

The file is readable by its owner only, and locked by the process that uses it. A file with another fingerprint is
refused. Blocks are moved past the page cache (O_DIRECT) where the file system can: host memory has them already.
"""

import ctypes
import errno
import fcntl
import logging
import os
import stat
import struct
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import xxhash

from dynamo.base import errors
from dynamo.kvbm.tiers import CachedBlock
from dynamo.protocols import kv_events

FILE_NAME = "blocks.kv"
PAGE_BYTES = 4096
FORMAT = "dynamo KV blocks 1"
_RECORD = struct.Struct("<QQQQQQ8x")  # hashes: sequence, local, parent; has a parent; order; bytes
_RECORD_BYTES = 64
_FREE_RECORD = bytes(_RECORD_BYTES)
_KEPT_BYTES = 64 * 2**20  # free space that the file leaves on its disk
_Move = Callable[[int, list[memoryview], int], int]  # os.preadv, os.pwritev
_logger = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first page of the file, as JSON."""

    format: str = FORMAT
    block_bytes: int
    num_slots: int
    fingerprint: dict[str, str]


class DiskFile:
    """A `storage.Storage`: the open file. Its methods may be called by any thread, one at a time for each slot."""

    tier = kv_events.DISK
    num_threads = 2

    def __init__(
        self, directory: Path, fingerprint: Mapping[str, str], *, block_bytes: int, num_slots: int
    ) -> None:
        """Create the file, or open the one of an earlier run. Raises ConfigError that names it and what is wrong."""
        self.path = directory / FILE_NAME
        self.name = str(self.path)
        self.num_slots, self._block_bytes = num_slots, block_bytes
        self._stride = -(-block_bytes // PAGE_BYTES) * PAGE_BYTES
        self._slots_at = PAGE_BYTES + -(-num_slots * _RECORD_BYTES // PAGE_BYTES) * PAGE_BYTES
        self.header = Header(
            block_bytes=block_bytes, num_slots=num_slots, fingerprint=dict(fingerprint)
        )
        self._lock = threading.Lock()
        self._order = 0
        self._checksums: dict[int, int] = {}  # by slot
        self.blocks: dict[int, CachedBlock] = {}  # from an earlier run, by slot, oldest first
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(
                self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            raise errors.ConfigError(
                f"--kvbm-nvme-path: cannot open {self.path}: {error}"
            ) from error
        self._data_fd, self._direct_fd = self._fd, -1
        try:
            self._open()
        except (OSError, errors.ConfigError) as error:
            self.close()
            if isinstance(error, errors.ConfigError):
                raise
            raise errors.ConfigError(
                f"--kvbm-nvme-path: cannot use {self.path}: {error}"
            ) from error

    def write(self, slot: int, block: CachedBlock, content: memoryview) -> None:
        """Write a block to a slot. Raises OSError; the slot then holds nothing."""
        checksum = xxhash.xxh3_64_intdigest(content)
        self._move(os.pwritev, slot, content)
        with self._lock:
            self._order += 1
            order = self._order
            self._checksums[slot] = checksum
        parent = block.parent_hash
        body = _RECORD.pack(
            block.sequence_hash, block.local_hash, parent or 0, parent is not None, order, checksum
        )
        record = body + xxhash.xxh3_64_digest(body)
        os.pwrite(self._fd, record, PAGE_BYTES + slot * _RECORD_BYTES)

    def read(self, slot: int, content: memoryview) -> bool:
        """Read the block of a slot; return False if it is not what was written. Raises OSError."""
        self._move(os.preadv, slot, content)
        return xxhash.xxh3_64_intdigest(content) == self._checksums.get(slot)

    def forget(self) -> None:
        """Erase the index, so that no block is found after a restart. Raises OSError."""
        with self._lock:
            self._checksums.clear()
        os.pwrite(self._fd, bytes(self._slots_at - PAGE_BYTES), PAGE_BYTES)

    def close(self) -> None:
        """Close the file and release its lock. Idempotent."""
        for fd in {self._fd, self._direct_fd} - {-1}:
            os.close(fd)
        self._fd = self._data_fd = self._direct_fd = -1

    def _open(self) -> None:
        self._claim()
        stored_header = os.pread(self._fd, PAGE_BYTES, 0).rstrip(b"\0")
        if stored_header and self._fits(stored_header):
            self._read_index()
        else:
            self._create()
        if self._block_bytes % PAGE_BYTES:
            self._go_buffered(f"blocks of {self._block_bytes} bytes are not whole pages")
            return
        try:
            self._direct_fd = os.open(self.path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            self._data_fd = self._direct_fd
        except OSError as error:
            self._go_buffered(str(error))

    def _claim(self) -> None:
        """Raises ConfigError for a file of another user, or one that another process uses."""
        facts = os.fstat(self._fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            raise errors.ConfigError(
                f"{self.path} is not a file of our user {os.geteuid()}; choose another --kvbm-nvme-path"
            )
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise errors.ConfigError(
                f"{self.path} is in use by another process: give each worker a --kvbm-nvme-path of its own"
            ) from error
        os.fchmod(self._fd, 0o600)

    def _fits(self, stored_header: bytes) -> bool:
        """Return whether the file can be used as it is. Raises ConfigError if its blocks are not ours."""
        try:
            header = msgspec.json.decode(stored_header, type=Header)
        except msgspec.DecodeError as error:
            raise errors.ConfigError(
                f"{self.path} holds something else than KV blocks; choose another --kvbm-nvme-path"
            ) from error
        own, stored = self.header.fingerprint, header.fingerprint
        differences = [
            f"{name} is {stored.get(name, 'unknown')}, ours is {own.get(name, 'unknown')}"
            for name in dict.fromkeys((*own, *stored))
            if own.get(name) != stored.get(name)
        ]
        if header.format != FORMAT:
            differences.append(f"format is {header.format}, ours is {FORMAT}")
        if differences:
            raise errors.ConfigError(
                f"{self.path} holds the KV blocks of another engine: {'; '.join(differences)};"
                " choose another --kvbm-nvme-path, or delete the file"
            )
        if header != self.header:
            _logger.warning("%s has another size: it begins empty", self.path)
        return header == self.header

    def _create(self) -> None:
        num_bytes = self._slots_at + self.num_slots * self._stride
        facts, disk = os.fstat(self._fd), os.fstatvfs(self._fd)
        free = disk.f_bavail * disk.f_frsize + facts.st_blocks * 512
        if num_bytes + _KEPT_BYTES > free:
            fitting = max(0, free - _KEPT_BYTES - PAGE_BYTES) // (self._stride + _RECORD_BYTES)
            raise errors.ConfigError(
                f"--kvbm-disk-cache-gb: {num_bytes / 1e9:.3g} GB ({self.num_slots} blocks) do not fit into the"
                f" {free / 1e9:.3g} GB that are free at {self.path.parent}; the largest that fits is"
                f" {fitting * self._stride / 1e9:.3g} GB ({fitting} blocks)"
            )
        os.ftruncate(self._fd, 0)
        os.ftruncate(self._fd, num_bytes)
        if _libc.fallocate(self._fd, 0, 0, num_bytes):
            code = ctypes.get_errno()
            if code != errno.EOPNOTSUPP:
                raise OSError(code, os.strerror(code))
            _logger.warning(
                "the file system at %s cannot reserve space: the disk tier takes it as it grows",
                self.path.parent,
            )
        os.pwrite(self._fd, bytes(self._slots_at - PAGE_BYTES), PAGE_BYTES)
        header = msgspec.json.encode(self.header)
        if len(header) > PAGE_BYTES:
            raise OSError(errno.ENAMETOOLONG, "the fingerprint is longer than a page")
        os.pwrite(self._fd, header.ljust(PAGE_BYTES, b"\0"), 0)

    def _read_index(self) -> None:
        index = os.pread(self._fd, self.num_slots * _RECORD_BYTES, PAGE_BYTES)
        records: list[tuple[int, int, CachedBlock]] = []
        for slot in range(len(index) // _RECORD_BYTES):
            record = index[slot * _RECORD_BYTES : (slot + 1) * _RECORD_BYTES]
            body, digest = record[: _RECORD.size], record[_RECORD.size :]
            if record == _FREE_RECORD or xxhash.xxh3_64_digest(body) != digest:
                continue
            name, local, parent, has_parent, order, checksum = _RECORD.unpack(body)
            records.append((order, slot, CachedBlock(name, local, parent if has_parent else None)))
            self._checksums[slot] = checksum
        names: set[int] = set()
        for order, slot, block in sorted(records, reverse=True):
            self._order = max(self._order, order)
            if block.sequence_hash not in names:  # an older copy of the same block
                names.add(block.sequence_hash)
                self.blocks[slot] = block
        self.blocks = dict(reversed(self.blocks.items()))

    def _move(self, call: _Move, slot: int, content: memoryview) -> None:
        """Read or write all bytes of a slot, buffered from now on if the file system cannot do it otherwise."""
        at, num_done = self._slots_at + slot * self._stride, 0
        while num_done < len(content):
            try:
                num_moved = call(self._data_fd, [content[num_done:]], at + num_done)
            except OSError as error:
                if error.errno != errno.EINVAL or self._data_fd == self._fd:
                    raise
                self._go_buffered(str(error))
                continue
            if not num_moved:
                raise OSError(errno.EIO, "the file ends too early")
            num_done += num_moved

    def _go_buffered(self, reason: str) -> None:
        _logger.warning("the disk tier uses the page cache for %s: %s", self.path, reason)
        self._data_fd = self._fd  # the other one may be in use: `close` closes it


def read_header(directory: Path) -> Header | None:
    """Return the header of the file in a directory; None if there is none that can be read."""
    try:
        with (directory / FILE_NAME).open("rb") as file:
            return msgspec.json.decode(file.read(PAGE_BYTES).rstrip(b"\0"), type=Header)
    except (OSError, msgspec.DecodeError):
        return None


def open_stored(directory: Path) -> DiskFile:
    """Open the file in a directory as it is. Raises ConfigError if there is none, or if a process uses it."""
    header = read_header(directory)
    if header is None:
        raise errors.ConfigError(f"{directory} has no {FILE_NAME} with KV blocks")
    return DiskFile(
        directory, header.fingerprint, block_bytes=header.block_bytes, num_slots=header.num_slots
    )
