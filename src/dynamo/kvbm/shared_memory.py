"""The host tier that workers of one user and host share: a `slot_file.SlotFile` in memory, mapped by each of them.

A worker removes a slot from the index before it changes the slot's bytes, and enters it again when they are whole. So
a reader that finds the same record after its copy as before has copied the block; and what a killed worker has half
written is in no index.

The memory outlives its workers: one that is started again finds the blocks of the part that it takes. The last worker
that stops in order removes it, and one that starts removes what is not used.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import xxhash

from dynamo.base import errors
from dynamo.kvbm import host_memory, slot_file
from dynamo.kvbm.tiers import CachedBlock, SharedChanges, TierSlots
from dynamo.transfer import memory

OPTION = "--kvbm-shared-memory-dir"
_DIRECTORY = Path("/dev/shm")
_logger = logging.getLogger(__name__)


class SharedHostMemory(host_memory.HostMemory):
    """The memory of all parts, and the index; `slots` are those of our own part."""

    def __init__(
        self,
        path: Path,
        fingerprint: Mapping[str, str],
        *,
        num_blocks: int,
        block_bytes: int,
        num_parts: int,
    ) -> None:
        """Create the memory or join the workers that use it. Raises ConfigError that names the option."""
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

    def is_current(self, slot: int, block: CachedBlock) -> bool:
        own = self.slots
        if own.first <= slot < own.first + own.num:
            return True
        record = self._file.read_record(slot)
        return record is not None and record.block == block

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
        per_piece = max(1, host_memory.PIECE_BYTES // size)
        for first in range(own.first, own.first + own.num, per_piece):
            num_slots = min(per_piece, own.first + own.num - first)
            has_memory = host_memory.available_bytes() > num_slots * size + host_memory.KEPT_BYTES
            if not self._file.is_provided and not (
                has_memory and self._file.reserve(first * size, num_slots * size)
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
    missing = host_memory.available_bytes() - room.f_bavail * room.f_frsize
    existing = path.stat().st_blocks * 512 if path.exists() else 0
    return existing - max(0, missing)


def remove_unused(directory: Path, kept: Path) -> None:
    """Remove the memory of other models that no worker uses."""
    for path in directory.glob("*.kv"):
        if path != kept and slot_file.remove_unused(path):
            _logger.info("removed %s, which no worker used", path)
