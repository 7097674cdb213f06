"""Our names for the blocks of engines that have names of their own.

Where an engine of ours speaks, block names are sequence hashes, and nothing is kept here. For a foreign engine each
stored block is hashed, and remembered under the engine's name for as long as its tier holds it.
Which of the two it is, the last block of each event tells: its name either is the hash of its predecessor's name and
its own tokens, or not; 64 bits do not agree by chance.
"""

from collections.abc import Sequence

from dynamo.protocols import blocks, kv_events
from dynamo.router import api


class ForeignNames:
    """Per worker and tier: from the engine's names to sequence hashes."""

    def __init__(self) -> None:
        self._names: dict[tuple[api.Worker, kv_events.Tier], dict[int, int]] = {}
        self._left: list[dict[int, int]] = []  # of those who left; freed a little at a time

    def learn(
        self, worker: api.Worker, event: kv_events.Stored
    ) -> tuple[int | None, list[int]] | None:
        """Our names of the parent and the blocks of a foreign event; None if its parent is not known."""
        parent = None
        if event.parent_hash is not None:
            parent = self._find(worker, event.parent_hash)
            if parent is None:
                return None
        names = blocks.sequence_hashes([block.tokens_hash for block in event.blocks], parent)
        known = self._names.setdefault((worker, event.tier), {})
        known.update(zip((block.block_hash for block in event.blocks), names, strict=True))
        return parent, names

    def remove(self, worker: api.Worker, event: kv_events.Removed) -> Sequence[int]:
        """Our names of removed blocks, which are forgotten."""
        known = self._names.get((worker, event.tier))
        if not known:
            return event.block_hashes
        return [known.pop(name, name) for name in event.block_hashes]

    def knows(self, worker: api.Worker) -> bool:
        """Whether it ever named a block in its own way."""
        return any((worker, tier) in self._names for tier in kv_events.TIERS)

    def leave(self, worker: api.Worker) -> None:
        """Nothing of this worker is known any more."""
        for tier in kv_events.TIERS:
            if names := self._names.pop((worker, tier), None):
                self._left.append(names)

    def free(self, num_names: int) -> bool:
        """Free some of what was left; says whether nothing remains. A dictionary freed at once would stall us."""
        if self._left:
            names = self._left[-1]
            for _ in range(min(num_names, len(names))):
                names.popitem()
            if not names:
                self._left.pop()
        return not self._left

    def _find(self, worker: api.Worker, name: int) -> int | None:
        for tier in kv_events.TIERS:
            known = self._names.get((worker, tier))
            if known and name in known:
                return known[name]
        return None


def is_foreign(event: kv_events.Stored) -> bool:
    """Whether the engine has names of its own for these blocks (at least one)."""
    last = event.blocks[-1]
    parent = event.blocks[-2].block_hash if len(event.blocks) > 1 else event.parent_hash
    return last.block_hash != blocks.next_sequence_hash(parent, last.tokens_hash)
