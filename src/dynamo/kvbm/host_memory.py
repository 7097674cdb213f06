"""The host tier's memory: of one process, or shared by the workers of one user and host.

The system provides pages as they are first written, and kills a process that writes more than there is. So the size is
checked at start against what the machine and the control group have left, and the pages are written in pieces beside
the start, each only while enough memory is left: the tier begins empty, and stays smaller if others took the memory.

Shared memory is a `slot_file.SlotFile` in memory, mapped by each worker. A worker removes a slot from the index before
it changes the slot's bytes, and enters it again when they are whole. So a reader that finds the same record after its
copy as before has copied the block; and what a killed worker has half written is in no index.

The memory outlives its workers: one that is started again finds the blocks of the part that it takes. The last worker
that stops in order removes it, and one that starts removes what is not used.
"""

import ctypes
import errno
import logging
import mmap
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import xxhash

from dynamo.base import errors
from dynamo.kvbm import slot_file
from dynamo.kvbm.tiers import CachedBlock, SharedChanges, TierSlots
from dynamo.transfer import memory

PIECE_BYTES = 64 * 2**20
AUTO_SHARE = 0.25  # of the memory that is left
_KEPT_SHARE, KEPT_BYTES = 0.05, 256 * 2**20  # left for the rest of the machine
_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
_MADV_POPULATE_WRITE = 23
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_logger = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)


def parse_size(text: str, option: str) -> int:
    """Return the bytes of a size: a number of GB (10^9 bytes), or one with a unit such as MB, GiB or B.

    Raises ConfigError that names the option.
    """
    matched = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get((matched[2] or "GB").upper()) if matched else None
    if matched is None or unit is None:
        raise errors.ConfigError(
            f"{option}: expected a size in GB, or with a unit such as 500MB or 2GiB, got {text!r}"
        )
    return int(float(matched[1]) * unit)


def available_bytes() -> int:
    """Return the bytes that this process may take now: of the machine, and of each control group that limits it.

    Where the system does not tell (macOS), it is all memory of the machine.
    """
    if not _MEMINFO.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return min([available, *_cgroup_bytes()])


def count_host_blocks(size: str, num_blocks: int | None, block_bytes: int, reserved: int) -> int:
    """Return the blocks of the host tier: `num_blocks`, or as many as `size` ("auto": a share of the memory) holds.

    `reserved` bytes are promised to others. Raises ConfigError with both numbers if there is less memory.
    """
    left = available_bytes() - reserved
    fitting = max(0, left - max(KEPT_BYTES, int(_KEPT_SHARE * left))) // block_bytes
    option = "--kvbm-cpu-cache-gb"
    if num_blocks is None and size == "auto":
        return min(fitting, int(AUTO_SHARE * left) // block_bytes)
    if num_blocks is None:
        num_blocks = parse_size(size, option) // block_bytes
        if not num_blocks:
            raise errors.ConfigError(
                f"{option} {size}: expected room for a block of {block_bytes} bytes; give more"
            )
    else:
        option = "--kvbm-cpu-cache-override-num-blocks"
    if num_blocks > fitting:
        raise errors.ConfigError(
            f"{option}: {num_blocks * block_bytes / 1e9:.5g} GB ({num_blocks} blocks) do not fit into the"
            f" {max(0, left) / 1e9:.5g} GB that this process may still take; the largest that fits is"
            f" {fitting * block_bytes / 1e9:.5g} GB ({fitting} blocks)"
        )
    return num_blocks


class HostMemory:
    """The memory of a host tier: blocks that follow one another, each in one piece."""

    def __init__(self, num_blocks: int, block_bytes: int, *, reserved: int = 0) -> None:
        """`reserved` bytes stay for the engine's cache, whose pages the system may not have provided yet.

        Raises ConfigError if the system refuses the address range.
        """
        self.num_blocks, self.block_bytes, self._reserved = num_blocks, block_bytes, reserved
        self.num_bytes = num_blocks * block_bytes
        try:
            region = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise errors.ConfigError(
                f"cannot reserve {self.num_bytes / 1e9:.5g} GB for the host tier: {error}"
            ) from error
        self.window = memory.Window(region)

    @property
    def slots(self) -> TierSlots:
        """The slots that this process writes."""
        return TierSlots(num=self.num_blocks)

    @property
    def generation(self) -> int:
        """How often all blocks were forgotten."""
        return 0

    def retract(self, slots: Sequence[int]) -> None:
        """Let no other process find these slots, whose memory changes now."""

    def publish(self, slot: int, block: CachedBlock, generation: int) -> None:
        """Let other processes find a block; see `storage.Storage.write` for the generation."""

    def version(self, slot: int, block: CachedBlock) -> int | None:
        """Return a number that another process changes with the slot; None if it holds another block."""
        return 0

    def look(self) -> SharedChanges | None:
        """Return what other processes have changed; None if nothing."""
        return None

    def forget(self) -> None:
        """Let no process find a block any more."""

    def close(self) -> None:
        """Release what is held besides memory. Idempotent."""

    def block(self, slot: int) -> memoryview:
        size = self.block_bytes
        return self.window.view[slot * size : (slot + 1) * size]

    def get(self, slot: int, block: CachedBlock) -> memoryview:
        """Return the content of a block, which stays as it is while it is used here. Raises OSError if it is gone."""
        return self.block(slot)

    def provide(self) -> Iterator[int]:
        """Provide the memory piece by piece; yield after each piece how many slots more can be used."""
        num_provided, num_slots = 0, 0
        while num_provided < self.num_bytes:
            length = min(PIECE_BYTES, self.num_bytes - num_provided)
            if not (self._has_memory(length) and self._populate(num_provided, length)):
                _logger.warning(
                    "the host tier stays at %d blocks of %d: other processes have taken the memory",
                    num_slots,
                    self.num_blocks,
                )
                return
            num_provided += length
            usable = num_provided // self.block_bytes
            yield usable - num_slots
            num_slots = usable

    def _has_memory(self, num_bytes: int) -> bool:
        """Return whether so much is left that neither the engine nor the machine lacks it."""
        return available_bytes() >= num_bytes + self._reserved + KEPT_BYTES // 2

    def _populate(self, offset: int, length: int) -> bool:
        """Let the system provide pages, while other threads run; return whether it has. Writing them could kill us."""
        address = self.window.address + offset
        if not _libc.madvise(address, length, _MADV_POPULATE_WRITE):
            return True
        is_unknown = ctypes.get_errno() == errno.EINVAL  # to Linux before 5.14
        if is_unknown:
            _libc.memset(address, 0, length)
        return is_unknown


def _cgroup_bytes() -> Iterator[int]:
    """Yield what each control group of this process leaves, those above it included."""
    if not _OWN_CGROUP.exists():
        return
    for line in _OWN_CGROUP.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, limit, usage = _CGROUPS, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root = _CGROUPS / "memory"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        for each in (group, *group.parents):
            yield from _left_in(each, limit, usage)
            if each == root:
                break


def _left_in(group: Path, limit: str, usage: str) -> Iterator[int]:
    try:
        most, used = (group / limit).read_text().strip(), int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return
    if most.isdecimal():
        reclaimable = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
        yield int(most) - used + reclaimable


OPTION = "--kvbm-shared-memory-dir"
_DIRECTORY = Path("/dev/shm")


class SharedHostMemory(HostMemory):
    """The memory of all parts, and the index; `slots` are those of our own part."""

    def __init__(
        self,
        path: Path,
        fingerprint: Mapping[str, str],
        *,
        num_blocks: int,
        block_bytes: int,
        num_parts: int,
        reserved: int = 0,
    ) -> None:
        """Create the memory or join the workers that use it. Raises ConfigError that names the option."""
        self._reserved = reserved
        remove_unused(path.parent, path)
        self._file = slot_file.SlotFile(
            path,
            fingerprint,
            block_bytes=block_bytes,
            num_slots=num_blocks,
            num_parts=num_parts,
            stride=block_bytes,
            option=OPTION,
        )
        self.num_blocks, self.block_bytes = self._file.num_slots, block_bytes
        self.num_bytes = self.num_blocks * block_bytes
        try:
            self.window = memory.Window(self._file.map_slots(self.num_bytes))
        except (OSError, ValueError, OverflowError) as error:
            self._file.close()
            raise errors.ConfigError(f"{OPTION}: cannot map {path}: {error}") from error

    @property
    def slots(self) -> TierSlots:
        return self._file.slots

    @property
    def generation(self) -> int:
        return self._file.generation

    def retract(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._file.clear_record(slot)

    def publish(self, slot: int, block: CachedBlock, generation: int) -> None:
        self._file.write_record(slot, block, 0, generation)

    def version(self, slot: int, block: CachedBlock) -> int | None:
        own = self.slots
        if own.first <= slot < own.first + own.num:
            return 0
        record = self._file.read_record(slot)
        return record.order if record is not None and record.block == block else None

    def get(self, slot: int, block: CachedBlock) -> memoryview:
        """Return the content of a block: a copy if another process may write to the slot. Raises OSError if it has."""
        own = self.slots
        if own.first <= slot < own.first + own.num:
            return self.block(slot)
        version = self.version(slot, block)
        content = memoryview(bytes(self.block(slot)))
        if version is None or self.version(slot, block) != version:
            raise OSError("another worker has removed a block from shared host memory")
        return content

    def look(self) -> SharedChanges | None:
        return self._file.look()

    def forget(self) -> None:
        self._file.forget()

    def close(self) -> None:
        """Leave; the last worker removes the memory."""
        self._file.close(removes_unused=True)

    def provide(self) -> Iterator[int]:
        """Reserve our part piece by piece; yield after each piece how many slots more can be used."""
        own, size = self.slots, self.block_bytes
        per_piece = max(1, PIECE_BYTES // size)
        for first in range(own.first, own.first + own.num, per_piece):
            num_slots = min(per_piece, own.first + own.num - first)
            if not self._file.is_provided and not (
                self._has_memory(num_slots * size)
                and self._file.reserve(first * size, num_slots * size)
            ):
                _logger.warning(
                    "the host tier stays at %d blocks of %d: there is no memory left in %s",
                    first - own.first, own.num, self._file.path.parent,
                )  # fmt: skip
                return
            yield num_slots


def locate(directory: str | None, fingerprint: Mapping[str, str]) -> Path:
    """Return the place of the memory for blocks of one kind; `directory` is the option's."""
    text = "\n".join(f"{name}={value}" for name, value in sorted(fingerprint.items()))
    parent = _DIRECTORY / f"dynamo-kv-{os.geteuid()}" if directory is None else Path(directory)
    return parent / f"{xxhash.xxh3_64_hexdigest(text.encode())}.kv"


def count_spare_bytes(path: Path) -> int:
    """Return the bytes that the memory at this place has already; negative if its directory has less room than RAM."""
    directory = next(each for each in path.parents if each.exists())
    room = os.statvfs(directory)
    missing = available_bytes() - room.f_bavail * room.f_frsize
    existing = path.stat().st_blocks * 512 if path.exists() else 0
    return existing - max(0, missing)


def remove_unused(directory: Path, kept: Path) -> None:
    """Remove the memory of other models that no worker uses."""
    for path in directory.glob("*.kv"):
        if path != kept and slot_file.remove_unused(path):
            _logger.info("removed %s, which no worker used", path)
