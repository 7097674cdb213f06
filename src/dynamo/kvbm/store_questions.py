"""The questions to an object store: which objects of a prompt have other workers stored there?

A prompt's hashes name its objects. If those before it are known, or it is the first one, the next object is asked for;
after each round of answers that are all yes, twice as many are asked for at once. An object that is there can be read
like a shared block, from a slot beyond our own, and is never removed from here.

Questions at once are bounded, and so is the number of objects that are known in this way: the one that was found
longest ago makes room. An object is asked for once in some seconds. Whether a question is worth its time is decided by
`tier_policy.LoadCost`, and for how long a prompt waits by `tiered_cache`.
"""  # decider

from collections import OrderedDict, deque
from collections.abc import Sequence

from dynamo.kvbm.tier_jobs import TierCopy
from dynamo.kvbm.tiers import CachedBlock, Segment, Tier

MAX_QUESTIONS = 8  # at once
ASK_AGAIN_S = 10.0
MAX_REMEMBERED = 4096  # objects that were asked for


class StoreQuestions:
    """Mutable; the thread that owns the tiers owns it."""

    def __init__(self, below: Tier) -> None:
        self._below = below
        # Beyond our own: those that are free, then those of what was found longest ago.
        self._slots = deque(range(below.num_slots, 2 * below.num_slots))
        self._running: dict[int, TierCopy] = {}  # by the hash of the last block
        self._late: set[TierCopy] = set()  # that still run
        self._asked_at: OrderedDict[int, float] = OrderedDict()

    def find_running(self, objects: Sequence[Segment]) -> set[TierCopy]:
        """Return the questions for these objects that have no answer yet."""
        names = [segment[-1].sequence_hash for segment in objects]
        return {self._running[name] for name in names if name in self._running}

    def select(self, chain: Sequence[CachedBlock], position: int, max_num: int) -> list[Segment]:
        """Return the objects to ask for, or asked for just now, from that of the block at `position` on.

        None while an answer is late.
        """
        size, selected = self._below.segment_blocks, list[Segment]()
        if self._late:
            return []
        num_left = min(MAX_QUESTIONS - len(self._running), len(self._slots))
        for first in range(position // size * size, len(chain) - size + 1, size):
            name = chain[first + size - 1].sequence_hash
            asked_at = self._asked_at.get(name)
            is_again = asked_at is not None and self._below.now < asked_at + ASK_AGAIN_S
            is_new = name not in self._running
            if len(selected) == max_num or (is_new and (is_again or not num_left)):
                break
            num_left -= is_new
            selected.append(tuple(chain[first : first + size]))
        return selected

    def begin(self, objects: Sequence[Segment], limit_s: float) -> list[TierCopy]:
        """Return a question for each of these objects, but for those that have one."""
        new = [segment for segment in objects if segment[-1].sequence_hash not in self._running]
        for segment in new:
            slot = self._slots.popleft()
            self._below.remove_foreign(slot)
            name = segment[-1].sequence_hash
            self._running[name] = TierCopy(
                path=(self._below.name, self._below.name),
                blocks=segment,
                from_slots=(slot,) * len(segment),
                to_slots=(slot,) * len(segment),
                num_bytes=0,
                limit_s=limit_s,
            )
            self._asked_at.pop(name, None)
            self._asked_at[name] = self._below.now
            if len(self._asked_at) > MAX_REMEMBERED:
                self._asked_at.popitem(last=False)
        return [self._running[segment[-1].sequence_hash] for segment in new]

    def end(self, question: TierCopy, *, is_there: bool) -> bool:
        """Record an answer; return whether the object can be read now."""
        self._late.discard(question)
        slot = question.to_slots[0]
        name = question.blocks[-1].sequence_hash
        if self._running.get(name) is question:
            del self._running[name]
        else:  # all was cleared meanwhile
            is_there = False
        if is_there:
            self._below.add_foreign(slot, question.blocks)
            self._slots.append(slot)
        else:
            self._slots.appendleft(slot)
        return is_there

    def record_late(self, question: TierCopy) -> None:
        """Ask for nothing until this question is answered."""
        self._late.add(question)

    def clear(self) -> None:
        """Forget what was asked; answers to come count as no."""
        self._running.clear()
        self._asked_at.clear()
