"""Which blocks the engine beside us could find again, so that nobody is asked to compute them.

A mirror of its KV events. It lags a step behind, which costs at most a wrong guess: what is really there is decided
when the sequence gets its blocks.
"""

from collections.abc import Sequence

from dynamo.protocols import blocks, kv_events


class KnownPrefix:
    """Of one data-parallel rank."""

    def __init__(self) -> None:
        self._names: set[int] = set()

    def apply(self, events: Sequence[kv_events.KvEvent]) -> None:
        """What one step stored and removed."""
        for event in events:
            match event:
                case kv_events.Stored(blocks=stored):
                    self._names.update(block.block_hash for block in stored)
                case kv_events.Removed(block_hashes=names):
                    self._names.difference_update(names)
                case kv_events.Cleared():
                    self._names.clear()

    def num_tokens(self, token_ids: bytes, block_size: int, seed: int = blocks.SEED) -> int:
        """How many of these packed tokens need not be computed; `seed` as `blocks.seed_of`."""
        names = blocks.sequence_hashes(blocks.local_hashes(token_ids, block_size, seed))
        num_blocks = next(
            (i for i, name in enumerate(names) if name not in self._names), len(names)
        )
        return num_blocks * block_size
