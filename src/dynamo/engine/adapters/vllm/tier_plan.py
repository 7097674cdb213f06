"""What the two halves of the tier connector say to each other with each step of vLLM.

    scheduler (EngineCore) ──TierPlan──▶ workers (one for each rank) ──TierResults──▶ scheduler

The halves live in different processes, and vLLM carries the messages. All ranks get the same plan, and each copies its
own part of every block; a copy has ended when all ranks have made it.
"""  # decider

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dynamo.kvbm import tier_jobs, tiers
from dynamo.protocols import kv_events

# Of vLLM's extra arguments of a request:
CACHE_HINT = "dynamo_cache_hint"  # `generate.CacheHint`
# its reads from tiers are to be reported, because its spans are exported
IS_TRACED = "dynamo_is_traced"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlan:
    """The copies to begin with a step. `waiting` of a copy is its number."""

    copies: tuple[tier_jobs.TierCopy, ...] = ()
    # loads beside the steps; other loads end before the step
    request_by_load: dict[int, str] = field(default_factory=dict)
    num_tokens: int = 0  # that the step computes
    slots: Mapping[int, tiers.Segment] | None = None  # of what all ranks have in an object store
    is_disk_cleared: bool = False  # all that the disk holds is to be forgotten first


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedStorage:
    """The tiers as a worker has opened them."""

    block_bytes: int
    host: tiers.TierSlots
    disk: tiers.TierSlots | None
    is_shared: bool = False  # with other workers of the host; by one rank only

    def intersect(self, other: "OpenedStorage") -> "OpenedStorage":
        """Return what both ranks have."""
        return OpenedStorage(
            block_bytes=self.block_bytes,
            host=tiers.TierSlots(num=min(self.host.num, other.host.num)),
            disk=None if self.disk is None or other.disk is None else _both(self.disk, other.disk),
        )


def _both(ours: tiers.TierSlots, theirs: tiers.TierSlots) -> tiers.TierSlots:
    """Return the slots, and the blocks in them, that both ranks have.

    A disk's blocks lie in the same slots at all ranks. Each rank numbers objects by their age, so ours are taken, and
    `TierPlan.slots` tells all ranks.
    """
    segments = set(theirs.stored.values()) if ours.can_renumber else ()
    stored = {
        slot: segment
        for slot, segment in ours.stored.items()
        if (segment in segments if ours.can_renumber else theirs.stored.get(slot) == segment)
    }
    return replace(ours, num=min(ours.num, theirs.num), stored=stored)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedCopy:
    """How a copy ended at some ranks."""

    num_ranks: int = 1
    failed: frozenset[int] = frozenset()  # positions of blocks
    seconds: float | None = None  # None: it says nothing of the speed
    began_at: float = 0.0  # at the first of the ranks, on the steady clock of their host
    ended_at: float = 0.0  # at the last of them

    def join(self, other: "EndedCopy") -> "EndedCopy":
        """Return how the copy ended at the ranks of both."""
        is_measured = self.seconds is not None and other.seconds is not None
        return EndedCopy(
            num_ranks=self.num_ranks + other.num_ranks,
            failed=self.failed | other.failed,
            seconds=max(self.seconds or 0.0, other.seconds or 0.0) if is_measured else None,
            began_at=min(self.began_at, other.began_at),
            ended_at=max(self.ended_at, other.ended_at),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TierResults:
    """What happened at some ranks since their last report."""

    opened: OpenedStorage | None = None  # in the first report only
    num_usable: int = 0  # slots of the host tier
    ended: dict[int, EndedCopy] = field(default_factory=dict)  # by number
    step_s: float | None = None
    changes: dict[kv_events.Tier, tiers.SharedChanges] = field(default_factory=dict)

    def join(self, other: "TierResults") -> "TierResults":
        """Return the results of the ranks of both."""
        ended = dict(self.ended)
        for number, copy in other.ended.items():
            ended[number] = ended[number].join(copy) if number in ended else copy
        has_both = self.opened is not None and other.opened is not None
        return TierResults(
            opened=self.opened.intersect(other.opened)  # type: ignore[union-attr,arg-type]
            if has_both
            else self.opened or other.opened,
            num_usable=min(self.num_usable, other.num_usable),
            ended=ended,
            step_s=max(self.step_s or 0.0, other.step_s or 0.0) or None,
        )
