"""The storage below host memory: slots for blocks, which outlive the process. One suite of tests holds all of it.

DiskFile                       a file on a local disk, with one block in each slot
object_storage.ObjectStorage   objects in S3, Azure, Google's storage or a directory, with a segment in each slot

The disk tier's file is a `slot_file.SlotFile`, allocated once and found again after a restart. A
block is written before its record, and nothing is flushed: after a kill or a crash a record may be missing, or name
bytes that are not there, and then the checksum says so when the block is read. Wrong bytes are never returned.

Blocks begin at multiples of 4 KiB, and are moved past the page cache (O_DIRECT) where the file system can: host memory
has them already.
"""

import ctypes
import errno
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import xxhash

from dynamo.base import errors
from dynamo.kvbm import slot_file
from dynamo.kvbm.tiers import CachedBlock, Segment, SharedChanges, TierSlots
from dynamo.protocols import kv_events


class Storage(Protocol):
    """Used by any thread, one at a time for each slot."""

    @property
    def tier(self) -> kv_events.Tier:
        """The tier that it keeps: disk or remote."""

    @property
    def name(self) -> str:
        """The directory or URL, for messages to people."""

    @property
    def num_threads(self) -> int:
        """How many reads, and how many writes, it is worth to have under way."""

    @property
    def slots(self) -> TierSlots:
        """The slots that this process writes."""

    def renumber(self, stored: Mapping[int, Segment]) -> None:
        """Give other slots to what an earlier run has left, and forget the rest, before anything is read or written.

        Only for storage whose `slots` can do so.
        """

    def find_segment(self, slot: int, segment: Segment, generation: int) -> bool:
        """Return whether another worker has stored these blocks, which are then read from this slot, not one of ours.

        False if all was forgotten since that `generation`. Raises OSError.
        """

    def look(self) -> SharedChanges | None:
        """Return what other processes have changed since the last look; None if nothing. Raises OSError."""

    @property
    def generation(self) -> int:
        """How often all blocks were forgotten."""

    def write(
        self, slot: int, segment: Segment, contents: Sequence[memoryview], generation: int
    ) -> None:
        """Write the blocks of a slot. Raises OSError; the slot then holds nothing.

        `generation` is that of the time when the write was asked for: if all blocks were forgotten since, these are
        not found after a restart either.
        """

    def read(
        self, slot: int, blocks: Sequence[CachedBlock], contents: Sequence[memoryview]
    ) -> frozenset[int]:
        """Read some blocks of a slot; return the positions of those that are not what was written. Raises OSError."""

    def forget(self) -> None:
        """Forget all blocks at once, so that none is found in what `purge` leaves. Raises OSError."""

    def purge(self) -> None:
        """Remove what was forgotten, as long as that may take. Raises OSError; a restart may find the rest then."""

    def close(self) -> None:
        """Release what the storage holds. Idempotent."""


FILE_NAME = "blocks.kv"
PAGE_BYTES = slot_file.PAGE_BYTES
_KEPT_BYTES = 64 * 2**20  # free space that the file leaves on its disk
_Move = Callable[[int, list[memoryview], int], int]  # os.preadv, os.pwritev
_logger = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)


class DiskFile(slot_file.SlotFile):
    """A `storage.Storage`: the open file. Its methods may be called by any thread, one at a time for each slot."""

    tier = kv_events.DISK
    num_threads = 2

    def __init__(
        self,
        directory: Path,
        fingerprint: Mapping[str, str],
        *,
        block_bytes: int,
        num_slots: int,
        num_parts: int = 1,
        is_whole: bool = False,
    ) -> None:
        """Create the file, or open the one of an earlier run. Raises ConfigError that names it and what is wrong."""
        self.name = str(directory / FILE_NAME)
        self._data_fd = self._direct_fd = -1
        super().__init__(
            directory / FILE_NAME,
            fingerprint,
            block_bytes=block_bytes,
            num_slots=num_slots,
            num_parts=num_parts,
            stride=-(-block_bytes // PAGE_BYTES) * PAGE_BYTES,
            option="--kvbm-nvme-path",
            is_whole=is_whole,
        )

    def write(
        self, slot: int, segment: Segment, contents: Sequence[memoryview], generation: int
    ) -> None:
        """Write the one block of a slot. Raises OSError; the slot then holds nothing.

        A block of an earlier generation is not found again: its record has that generation too.
        """
        (block,), (content,) = segment, contents
        checksum = xxhash.xxh3_64_intdigest(content)
        self._move(os.pwritev, slot, content)
        self.write_record(slot, block, checksum, generation)

    def read(
        self, slot: int, blocks: Sequence[CachedBlock], contents: Sequence[memoryview]
    ) -> frozenset[int]:
        """Read the one block of a slot. Raises OSError.

        A slot of another process has changed if its record is not that of this block.
        """
        (expected,), (content,) = blocks, contents
        own = self.slots
        checksum = self._checksums.get(slot)
        if not own.first <= slot < own.first + own.num:
            record = self.read_record(slot)
            is_expected = record is not None and record.block == expected
            checksum = record.checksum if record is not None and is_expected else None
        self._move(os.preadv, slot, content)
        is_right = xxhash.xxh3_64_intdigest(content) == checksum
        return frozenset() if is_right else frozenset((0,))

    def renumber(self, stored: Mapping[int, Segment]) -> None:
        """Do nothing: a slot is a place in the file."""

    def find_segment(self, slot: int, segment: Segment, generation: int) -> bool:
        """Return False: what others have stored is in the index (`look`)."""
        return False

    def purge(self) -> None:
        """Do nothing: a record of an earlier generation is not found."""

    def close(self, *, removes_unused: bool = False) -> None:
        if self._direct_fd >= 0:
            os.close(self._direct_fd)
        self._data_fd = self._direct_fd = -1
        super().close(removes_unused=removes_unused)

    def _open(self) -> None:
        super()._open()
        self._data_fd = self._fd
        block_bytes = self.header.block_bytes
        if block_bytes % PAGE_BYTES:
            self._go_buffered(f"blocks of {block_bytes} bytes are not whole pages")
            return
        try:
            self._direct_fd = os.open(self.path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            self._data_fd = self._direct_fd
        except OSError as error:
            self._go_buffered(str(error))

    def _reserve_space(self, num_bytes: int) -> None:
        facts, disk = os.fstat(self._fd), os.fstatvfs(self._fd)
        free = disk.f_bavail * disk.f_frsize + facts.st_blocks * 512
        if num_bytes + _KEPT_BYTES > free:
            per_block = num_bytes / self.num_slots
            fitting = int(max(0, free - _KEPT_BYTES) / per_block)
            raise errors.ConfigError(
                f"--kvbm-disk-cache-gb: {num_bytes / 1e9:.5g} GB ({self.num_slots} blocks) do not fit into the"
                f" {free / 1e9:.5g} GB that are free at {self.path.parent}; the largest that fits is"
                f" {fitting * self._stride / 1e9:.5g} GB ({fitting} blocks)"
            )

    def _allocate(self, num_bytes: int) -> None:
        if not _libc.fallocate(self._fd, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes)):
            return
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(code, os.strerror(code))
        _logger.warning(
            "the file system at %s cannot reserve space: the disk tier takes it as it grows",
            self.path.parent,
        )

    def _move(self, call: _Move, slot: int, content: memoryview) -> None:
        """Read or write all bytes of a slot, buffered from now on if the file system cannot do it otherwise."""
        at, num_done = self._slots_at + slot * self._stride, 0
        while num_done < len(content):
            fd = self._data_fd
            try:
                num_moved = call(fd, [content[num_done:]], at + num_done)
            except OSError as error:
                if error.errno != errno.EINVAL or fd == self._fd:
                    raise
                if fd == self._data_fd:  # no other thread was quicker
                    self._go_buffered(str(error))
                continue
            if not num_moved:
                raise OSError(errno.EIO, "the file ends too early")
            num_done += num_moved

    def _go_buffered(self, reason: str) -> None:
        _logger.warning("the disk tier uses the page cache for %s: %s", self.path, reason)
        self._data_fd = self._fd  # the other one may be in use: `close` closes it


def read_header(directory: Path) -> slot_file.Header | None:
    """Return the header of the file in a directory; None if there is none that can be read."""
    return slot_file.read_header(directory / FILE_NAME)


def open_stored(directory: Path) -> DiskFile:
    """Open the file in a directory as it is. Raises ConfigError if there is none, or if a process uses it."""
    header = read_header(directory)
    if header is None:
        raise errors.ConfigError(f"{directory} has no {FILE_NAME} with KV blocks")
    return DiskFile(
        directory,
        header.fingerprint,
        block_bytes=header.block_bytes,
        num_slots=header.num_slots,
        num_parts=header.num_parts,
        is_whole=True,
    )
