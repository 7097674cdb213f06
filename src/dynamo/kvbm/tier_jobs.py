"""The copies that a tiered cache has under way."""  # decider

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo.kvbm import tier_policy
from dynamo.kvbm.tiers import CachedBlock, TierBlock
from dynamo.protocols import kv_events

BATCH_BLOCKS = 16  # of one copy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TierCopy:
    """A copy to make: each slot of `from_slots` to the one at the same position in `to_slots`."""

    path: tier_policy.Path
    blocks: tuple[CachedBlock, ...]
    from_slots: tuple[int, ...]  # those of an object store hold several blocks
    to_slots: tuple[int, ...]
    num_bytes: int
    # for how long a request waits for it; None: none does, or to its end
    limit_s: float | None = None
    sources: tuple[TierBlock, ...] = ()  # none in the engine's own memory
    targets: tuple[TierBlock, ...] = ()
    waiting: Hashable = None  # the sequence that waits
    origins: tuple[kv_events.Tier, ...] = ()  # of a load: the tier in which each block was found
    is_quick: bool = False  # a load that the engine's thread should make itself

    @property
    def is_question(self) -> bool:
        """Whether it copies nothing: it fails if an object store has not the object with these blocks."""
        return self.path[0] == self.path[1]


class RunningCopies:
    """The copies that were begun and have not ended. Mutable; the thread that owns the tiers owns it."""

    def __init__(self, cost: tier_policy.LoadCost, block_bytes: int) -> None:
        self.new: list[TierCopy] = []  # that no thread has yet
        self.num_running: Counter[tier_policy.Path] = Counter()
        self._queued_bytes: Counter[tier_policy.Path] = Counter()
        self._cost, self._block_bytes = cost, block_bytes

    def begin(
        self,
        path: tier_policy.Path,
        in_host: Sequence[TierBlock],
        slots: Sequence[int],
        others: Iterable[TierBlock] = (),
        **fields: Any,
    ) -> TierCopy:
        """Begin a copy between blocks of host memory and these slots of another tier, or blocks of the engine.

        `others` are what the slots hold; `fields` are further ones of the copy.
        """
        host_slots = [each.slot for each in in_host]
        is_to_host = path[1] is kv_events.HOST
        copy = TierCopy(
            path=path,
            blocks=tuple([each.block for each in in_host]),
            from_slots=tuple(slots if is_to_host else host_slots),
            to_slots=tuple(host_slots if is_to_host else slots),
            num_bytes=len(in_host) * self._block_bytes,
            sources=tuple(others if is_to_host else in_host),
            targets=tuple(in_host if is_to_host else others),
            **fields,
        )
        self.num_running[path] += 1
        self._queued_bytes[path] += copy.num_bytes
        self.new.append(copy)
        return copy

    def take_new(self) -> list[TierCopy]:
        """Return the copies that no thread has yet, to begin them."""
        copies, self.new = self.new, []
        return copies

    def end(self, copy: TierCopy) -> None:
        self.num_running[copy.path] -= 1
        self._queued_bytes[copy.path] -= copy.num_bytes

    def load_s(self, path: tier_policy.Path, num_blocks: int) -> float:
        """Return the estimated seconds of copying so many blocks, after those that wait."""
        num_bytes = self._queued_bytes[path] + num_blocks * self._block_bytes
        return self._cost.copy_s(path, num_bytes)
