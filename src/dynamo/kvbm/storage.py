"""The storage below host memory: slots for blocks, which outlive the process. One suite of tests holds all of it.

disk_file.DiskFile             a file on a local disk
object_storage.ObjectStorage   objects in S3, Azure, Google's storage or a directory
"""

from collections.abc import Mapping
from typing import Protocol

from dynamo.kvbm.tiers import CachedBlock, SharedChanges, TierSlots
from dynamo.protocols import kv_events


class Storage(Protocol):
    """Used by any thread, one at a time for each slot."""

    @property
    def tier(self) -> kv_events.Tier:
        """The tier that this is."""

    @property
    def name(self) -> str:
        """Its place, for messages."""

    @property
    def num_slots(self) -> int:
        """How many blocks it holds."""

    @property
    def num_threads(self) -> int:
        """How many reads, and how many writes, it is worth to have under way."""

    @property
    def slots(self) -> TierSlots:
        """The slots that this process writes."""

    def look(self) -> SharedChanges | None:
        """Return what other processes have changed since the last look; None if nothing. Raises OSError."""

    @property
    def blocks(self) -> Mapping[int, CachedBlock]:
        """Blocks of an earlier run by slot, used longest ago first."""

    @property
    def generation(self) -> int:
        """How often all blocks were forgotten."""

    def write(self, slot: int, block: CachedBlock, content: memoryview, generation: int) -> None:
        """Write a block to a slot. Raises OSError; the slot then holds nothing.

        `generation` is that of the time when the write was asked for: if all blocks were forgotten since, this one is
        not found after a restart either.
        """

    def read(self, slot: int, content: memoryview, expected: CachedBlock | None = None) -> bool:
        """Read the block of a slot; return False if it is not what was written. Raises OSError.

        A slot of another process has changed if its block is not `expected`.
        """

    def forget(self) -> None:
        """Forget all blocks, so that none is found after a restart. Raises OSError."""

    def close(self) -> None:
        """Release what the storage holds. Idempotent."""
