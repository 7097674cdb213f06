"""The storage below host memory: slots for blocks, which outlive the process. One suite of tests holds all of it.

disk_file.DiskFile             a file on a local disk
object_storage.ObjectStorage   objects in S3, Azure, Google's storage or a directory
"""

from collections.abc import Mapping
from typing import Protocol

from dynamo.kvbm.tiers import CachedBlock
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
    def blocks(self) -> Mapping[int, CachedBlock]:
        """Blocks of an earlier run by slot, used longest ago first."""

    def write(self, slot: int, block: CachedBlock, content: memoryview) -> None:
        """Write a block to a slot. Raises OSError; the slot then holds nothing."""

    def read(self, slot: int, content: memoryview) -> bool:
        """Read the block of a slot; return False if it is not what was written. Raises OSError."""

    def forget(self) -> None:
        """Forget all blocks, so that none is found after a restart. Raises OSError."""

    def close(self) -> None:
        """Release what the storage holds. Idempotent."""
