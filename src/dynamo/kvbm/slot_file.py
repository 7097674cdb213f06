"""A file of slots for blocks with an index, which workers of one user and host may share.

    header    4 KiB: what the blocks are (fingerprint: model, dtype, layout, ...), their size and number; then a version
              of each chunk of the index; and at its end the generation, which grows when all blocks are forgotten
    index     64 bytes a slot: the block's hashes, the checksum of its bytes, its generation, and a checksum of all this
    slots     the blocks

The slots are cut into equal parts, one for each worker: it alone writes there, and all read everything. A part belongs
to the process that holds its lock, which the kernel releases when the process ends, however that happens; the next one
finds the blocks in it again. No worker waits for another: one that has written a record raises the version of the
record's chunk, and the others read the chunks of a changed version (`look`).

The file is readable by its owner only. One with another fingerprint is refused.
"""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import stat
import struct
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import xxhash

from dynamo.base import errors
from dynamo.kvbm.tiers import CachedBlock, Segment, SharedChanges, TierSlots

PAGE_BYTES = 4096
FORMAT = "dynamo KV blocks 1"
MAX_PARTS = 16
MAX_CHUNKS_PER_LOOK = 16  # of large tiers; of small ones as many as hold _SLOTS_PER_LOOK
_SLOTS_PER_LOOK = 1_024
# hashes: sequence, local, parent; has a parent; order; checksum of the bytes; generation
_RECORD = struct.Struct("<QQQQQQQ")
_RECORD_BYTES = 64
_VERSIONS = struct.Struct("<240QxxxxxxxxQ")  # and the generation
_NUM_VERSIONS = 240
_HEADER_BYTES = PAGE_BYTES - _VERSIONS.size
_GENERATION_AT = PAGE_BYTES - 8
_NUMBER = struct.Struct("<Q")
_LOCK = struct.Struct("hhqqi4x")  # struct flock
_SETUP_LOCK, _PART_LOCKS = 2**40, 2**40 + 1  # offsets beyond the end of any file
_SETUP_S = 10.0
_logger = logging.getLogger(__name__)


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The header of the file, as JSON. The blocks of a file with another header are not used."""

    format: str = FORMAT
    block_bytes: int
    num_slots: int
    num_parts: int = 1
    fingerprint: dict[str, str]


class SlotRecord(msgspec.Struct, frozen=True):
    """The row of the index that says which block a slot has, and the checksum of its bytes."""

    block: CachedBlock
    order: int
    checksum: int
    generation: int


class SlotFile:
    """The open file, and one part of it. Its methods may be called by any thread, one at a time for each slot."""

    def __init__(
        self,
        path: Path,
        fingerprint: Mapping[str, str],
        *,
        block_bytes: int,
        num_slots: int,
        num_parts: int,
        stride: int,
        option: str,
        is_whole: bool = False,
    ) -> None:
        """Create the file, or open the one that is there. `stride` is the distance of two slots in bytes.

        `is_whole` takes all parts, which no other process may use then.
        Raises ConfigError that names the file, what is wrong, and the option.
        """
        if not hasattr(fcntl, "F_OFD_SETLK"):
            raise errors.ConfigError(f"{option}: expected Linux, which alone locks open files so")
        self.path, self._stride, self._option = path, stride, option
        self._is_whole = is_whole or num_parts == 1
        self.header = Header(
            block_bytes=block_bytes,
            num_slots=num_slots,
            num_parts=num_parts,
            fingerprint=dict(fingerprint),
        )
        self.generation = self._order = self._part = 0
        self.blocks: dict[int, Segment] = {}  # of our part, from an earlier run, oldest first
        self.num_lost = 0  # blocks that were lost because the file was cut short
        self._checksums: dict[int, int] = {}  # of our part, by slot
        self._lock = threading.Lock()
        self._versions = [0] * _NUM_VERSIONS
        self._chunks: dict[int, bytes] = {}  # of other parts, as they were read last
        self._others: dict[int, CachedBlock] = {}  # blocks of other parts, by slot
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = self._open_locked()
        except OSError as error:
            raise errors.ConfigError(f"{option}: cannot open {path}: {error}") from error
        try:
            self._open()
        except (OSError, errors.ConfigError) as error:
            self.close()
            if isinstance(error, errors.ConfigError):
                raise
            raise errors.ConfigError(f"{option}: cannot use {path}: {error}") from error
        finally:
            if self._fd >= 0:
                self._try_lock(fcntl.F_UNLCK, _SETUP_LOCK)

    @property
    def num_slots(self) -> int:
        """The slots of all parts."""
        return self.header.num_slots

    @property
    def slots(self) -> TierSlots:
        """The slots of our part, with the blocks of an earlier run."""
        num_own = self.num_slots // (1 if self._is_whole else self.header.num_parts)
        return TierSlots(first=self._part * num_own, num=num_own, stored=self.blocks)

    def write_record(self, slot: int, block: CachedBlock, checksum: int, generation: int) -> None:
        """Enter a block of our part into the index, when its bytes are there. Raises OSError."""
        with self._lock:
            self._order += 1
            order = self._order
            self._checksums[slot] = checksum
        parent = block.parent_hash
        body = _RECORD.pack(
            block.sequence_hash, block.local_hash, parent or 0, parent is not None, order, checksum, generation
        )  # fmt: skip
        self._write_raw_record(slot, body + xxhash.xxh3_64_digest(body))

    def clear_record(self, slot: int) -> None:
        """Remove a slot of our part from the index, before its bytes change. Raises OSError."""
        self._write_raw_record(slot, bytes(_RECORD_BYTES))

    def read_record(self, slot: int) -> SlotRecord | None:
        """Return what the index says of a slot now; None if it has no block. Raises OSError."""
        return self._parse(os.pread(self._fd, _RECORD_BYTES, PAGE_BYTES + slot * _RECORD_BYTES))

    def look(self) -> SharedChanges | None:
        """Return what other processes have changed since the last look; None if nothing. Raises OSError.

        A long list of changes is returned piece by piece.
        """
        if self._is_whole:
            return None
        *versions, generation = self._read_numbers(_VERSIONS)
        is_cleared = generation != self.generation
        if is_cleared:
            self._begin_generation(generation)
        changes = SharedChanges(stored={}, removed=[], is_cleared=is_cleared)
        changed = [
            chunk
            for chunk, version in enumerate(versions)
            if version != self._versions[chunk] and chunk // self._chunks_per_part != self._part
        ]
        chunk_slots = -(-self.slots.num // self._chunks_per_part)
        for chunk in changed[: max(MAX_CHUNKS_PER_LOOK, _SLOTS_PER_LOOK // chunk_slots)]:
            self._versions[chunk] = versions[chunk]
            self._read_chunk(chunk, changes)
        return changes if is_cleared or changed else None

    def forget(self) -> None:
        """Begin a new generation, so that no process finds a block, now or after a restart. Raises OSError."""
        self._begin_generation(max(self._read_generation(), self.generation) + 1)
        os.pwrite(self._fd, _NUMBER.pack(self.generation), _GENERATION_AT)

    def has_other_users(self) -> bool:
        """Return whether another process uses a part. Raises OSError."""
        query = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _PART_LOCKS, MAX_PARTS, 0)
        answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, query)
        return bool(_LOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def map_slots(self, num_bytes: int) -> mmap.mmap:
        """Return the memory of all slots. Raises OSError or ValueError."""
        fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
        try:  # the map keeps a copy of its descriptor, which must not keep our locks
            return mmap.mmap(fd, num_bytes, offset=self._slots_at)
        finally:
            os.close(fd)

    @property
    def is_provided(self) -> bool:
        """Return whether the file system has provided all slots."""
        return os.fstat(self._fd).st_blocks * 512 >= self.num_slots * self._stride

    def reserve(self, offset: int, length: int) -> bool:
        """Let the file system provide these bytes of the slots now; return whether it has."""
        try:
            os.posix_fallocate(self._fd, self._slots_at + offset, length)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return False
        return True

    def close(self, *, removes_unused: bool = False) -> None:
        """Close the file and release its locks; with `removes_unused`, delete it if no process uses it. Idempotent."""
        if self._fd < 0:
            return
        if removes_unused and self._try_lock(fcntl.F_WRLCK, _SETUP_LOCK):
            with contextlib.suppress(OSError):
                if not self.has_other_users():
                    self.path.unlink()
        os.close(self._fd)
        self._fd = -1

    # --- opening ---

    def _open_locked(self) -> int:
        """Return the open file, locked for its setup; not one that its last user removes meanwhile."""
        until = time.monotonic() + _SETUP_S
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            self._fd = os.open(self.path, flags, 0o600)
            facts = os.fstat(self._fd)
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
                self.close()
                raise errors.ConfigError(
                    f"{self.path} is not a file of our user {os.geteuid()}; choose another {self._option}"
                )
            is_locked = self._try_lock(fcntl.F_WRLCK, _SETUP_LOCK)
            if is_locked and self.path.exists() and self.path.stat().st_ino == facts.st_ino:
                return self._fd
            self.close()
            if time.monotonic() > until:
                raise errors.ConfigError(
                    f"{self.path} is being opened by another process for {_SETUP_S:g} s; end that process"
                )
            time.sleep(0.01)

    def _open(self) -> None:
        self._claim()
        os.fchmod(self._fd, 0o600)
        stored_header = os.pread(self._fd, _HEADER_BYTES, 0).rstrip(b"\0")
        if stored_header and self._fits(stored_header):
            self._make_whole()
            self._read_index()
        else:
            self._create()

    def _claim(self) -> None:
        """Lock a part, or all if nothing is shared. Raises ConfigError if there is none left."""
        num_parts = self.header.num_parts
        if self._is_whole:
            if not self._try_lock(fcntl.F_WRLCK, _PART_LOCKS, MAX_PARTS):
                raise errors.ConfigError(
                    f"{self.path} is in use by another process: end it, or give each worker a {self._option} of its"
                    " own, or --kvbm-sharing-workers"
                )
            return
        for part in range(num_parts):
            if self._try_lock(fcntl.F_WRLCK, _PART_LOCKS + part):
                self._part = part
                return
        raise errors.ConfigError(
            f"{self.path} is in use by {num_parts} other processes, or by one that does not share it: expected fewer"
            f" than --kvbm-sharing-workers {num_parts}"
        )

    def _try_lock(self, kind: int, offset: int, length: int = 1) -> bool:
        try:
            fcntl.fcntl(
                self._fd, fcntl.F_OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, offset, length, 0)
            )
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _fits(self, stored_header: bytes) -> bool:
        """Return whether the file can be used as it is. Raises ConfigError if its blocks are not ours."""
        header = parse_header(stored_header)
        if header is None:
            raise errors.ConfigError(
                f"{self.path} holds something else than KV blocks; choose another {self._option}"
            )
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
                f" choose another {self._option}, or delete the file"
            )
        if header == self.header:
            return True
        if not self.has_other_users():
            _logger.warning("%s has another size: it begins empty", self.path)
            return False
        if header.num_parts != self.header.num_parts:
            raise errors.ConfigError(
                f"{self.path} is shared by {header.num_parts} workers: expected the same --kvbm-sharing-workers, got"
                f" {self.header.num_parts}"
            )
        _logger.warning("%s keeps its size of %d blocks: it is in use", self.path, header.num_slots)
        self.header = header
        return True

    def _create(self) -> None:
        header = msgspec.json.encode(self.header)
        if len(header) > _HEADER_BYTES:
            raise OSError(f"the fingerprint is longer than {_HEADER_BYTES} bytes")
        self._extend(0)
        os.pwrite(self._fd, header.ljust(PAGE_BYTES, b"\0"), 0)

    def _make_whole(self) -> None:
        """Give a file that was cut short its size again, and forget the blocks whose bytes it has lost."""
        size = os.fstat(self._fd).st_size
        if size >= self._slots_at + self.num_slots * self._stride:
            return
        self._extend(size)
        first = max(0, size - self._slots_at) // self._stride
        self.generation = self._read_generation()
        self.num_lost = sum(
            self.read_record(slot) is not None for slot in range(first, self.num_slots)
        )
        if self.has_other_users():  # they alone write their records
            self.forget()
        else:
            lost = bytes((self.num_slots - first) * _RECORD_BYTES)
            os.pwrite(self._fd, lost, PAGE_BYTES + first * _RECORD_BYTES)
        _logger.warning(
            "%s was cut short to %d bytes: it has its size again, and %d blocks are lost",
            self.path, size, self.num_lost,
        )  # fmt: skip

    def _extend(self, kept_bytes: int) -> None:
        """Give the file its size; only its first bytes are kept."""
        num_bytes = self._slots_at + self.num_slots * self._stride
        self._reserve_space(num_bytes)
        os.ftruncate(self._fd, kept_bytes)
        os.ftruncate(self._fd, num_bytes)
        self._allocate(num_bytes)

    def _reserve_space(self, num_bytes: int) -> None:
        """Check that there is room for so many bytes. Raises ConfigError."""

    def _allocate(self, num_bytes: int) -> None:
        """Let the file system reserve so many bytes. Raises OSError."""

    def _read_index(self) -> None:
        """Find the blocks of our part."""
        self.generation = self._read_generation()
        first, num_own = self.slots.first, self.slots.num
        index = os.pread(self._fd, num_own * _RECORD_BYTES, PAGE_BYTES + first * _RECORD_BYTES)
        found = [
            (record.order, first + number, record)
            for number in range(num_own)
            if (record := self._parse(index[number * _RECORD_BYTES :][:_RECORD_BYTES])) is not None
        ]
        names: set[int] = set()
        for order, slot, record in sorted(found, key=lambda entry: entry[:2], reverse=True):
            self._checksums[slot] = record.checksum
            self._order = max(self._order, order)
            if record.block.sequence_hash not in names:  # an older copy of the same block
                names.add(record.block.sequence_hash)
                self.blocks[slot] = (record.block,)
        self.blocks = dict(reversed(self.blocks.items()))
        *self._versions, _ = self._read_numbers(_VERSIONS)
        size = -(-num_own // self._chunks_per_part)
        for chunk in range(_NUM_VERSIONS):
            part, number = divmod(chunk, self._chunks_per_part)
            if part != self._part and number * size < num_own:
                self._versions[chunk] = -1  # not read yet

    # --- the index ---

    @property
    def _slots_at(self) -> int:
        """The offset of the first slot."""
        return PAGE_BYTES + -(-self.num_slots * _RECORD_BYTES // PAGE_BYTES) * PAGE_BYTES

    @property
    def _chunks_per_part(self) -> int:
        return _NUM_VERSIONS // self.header.num_parts

    def _read_generation(self) -> int:
        return self._read_numbers(_NUMBER)[0]

    def _read_numbers(self, layout: struct.Struct) -> tuple[int, ...]:
        """Return the numbers at the end of the header. Raises OSError, also if the file was cut short."""
        raw = os.pread(self._fd, layout.size, PAGE_BYTES - layout.size)
        if len(raw) < layout.size:
            raise OSError(f"{self.path} was cut short")
        return layout.unpack(raw)

    def _begin_generation(self, generation: int) -> None:
        with self._lock:
            self.generation = generation
            self._checksums.clear()
        self._others.clear()
        self._chunks.clear()

    def _write_raw_record(self, slot: int, record: bytes) -> None:
        os.pwrite(self._fd, record, PAGE_BYTES + slot * _RECORD_BYTES)
        if not self._is_whole:
            own = self.slots
            size = -(-own.num // self._chunks_per_part)
            chunk = self._part * self._chunks_per_part + (slot - own.first) // size
            with self._lock:
                self._versions[chunk] += 1
                version = _NUMBER.pack(self._versions[chunk])
                os.pwrite(self._fd, version, PAGE_BYTES - _VERSIONS.size + chunk * _NUMBER.size)

    def _read_chunk(self, chunk: int, changes: SharedChanges) -> None:
        num_own = self.slots.num
        size = -(-num_own // self._chunks_per_part)
        part, number = divmod(chunk, self._chunks_per_part)
        first, end = number * size, min((number + 1) * size, num_own)
        first_slot, num_slots = part * num_own + first, max(0, end - first)
        before = self._chunks.get(chunk, b"")
        raw = os.pread(self._fd, num_slots * _RECORD_BYTES, PAGE_BYTES + first_slot * _RECORD_BYTES)
        self._chunks[chunk] = raw
        for start in range(0, len(raw), _RECORD_BYTES):
            record = raw[start : start + _RECORD_BYTES]
            if record == before[start : start + _RECORD_BYTES]:
                continue
            slot = first_slot + start // _RECORD_BYTES
            if self._others.pop(slot, None) is not None:
                changes.removed.append(slot)
            parsed = self._parse(record)
            if parsed is not None:
                self._others[slot] = changes.stored[slot] = parsed.block

    def _parse(self, record: bytes) -> SlotRecord | None:
        body, digest = record[: _RECORD.size], record[_RECORD.size :]
        if not any(record) or xxhash.xxh3_64_digest(body) != digest:
            return None
        name, local, parent, has_parent, order, checksum, generation = _RECORD.unpack(body)
        if generation != self.generation:
            return None
        block = CachedBlock(name, local, parent if has_parent else None)
        return SlotRecord(block, order, checksum, generation)


def remove_unused(path: Path) -> bool:
    """Remove a file of ours that no process uses; return whether there was one."""
    header = read_header(path)
    if header is None:
        return False
    try:
        file = SlotFile(
            path,
            header.fingerprint,
            block_bytes=header.block_bytes,
            num_slots=header.num_slots,
            num_parts=header.num_parts,
            stride=header.block_bytes,
            option="",
            is_whole=True,
        )
    except errors.ConfigError:
        return False
    file.close(removes_unused=True)
    return True


def parse_header(content: bytes) -> Header | None:
    """Return the header in the first page of a file; None if there is none."""
    try:
        return msgspec.json.decode(content[:_HEADER_BYTES].rstrip(b"\0"), type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # it was damaged
        return None


def read_header(path: Path) -> Header | None:
    """Return the header of a file; None if there is none that can be read."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would block
        with os.fdopen(fd, "rb"):
            return parse_header(os.pread(fd, PAGE_BYTES, 0))
    return None
