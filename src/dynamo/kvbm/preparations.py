"""What sequences wait for in the queue: copies of their blocks to host memory, and answers of an object store.

    begin ──▶ reads of what the tier below has ──▶ a question for what follows ──yes──▶ reads, and twice the questions

A sequence waits until all of that has ended, or is late; then it is admitted, and loads what host memory has. Its
blocks stay there until then. Sequences with the same beginning wait for the same reads and questions. While a read is
late, the tier below is taken to hang, and nothing is begun.

A sequence waits at most as long as loading from the tier below may take in any case (`tier_policy.LoadCost`), for
questions and reads together.
"""  # decider

import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from dynamo.kvbm import pool as pools
from dynamo.kvbm import segments, tier_jobs, tier_policy
from dynamo.kvbm.tier_jobs import RunningCopies, TierCopy
from dynamo.kvbm.tiers import CachedBlock, Segment, Tier, TierBlock
from dynamo.protocols import kv_events

DEVICE, HOST = kv_events.DEVICE, kv_events.HOST
MAX_QUESTIONS = 8  # at once
ASK_AGAIN_S = 10.0
MAX_REMEMBERED = 4096  # objects that were asked for


class StoreQuestions:
    """Questions to an object store: which objects of a prompt have other workers stored there?

    A prompt's hashes name its objects. If those before it are known, or it is the first one, the next object is asked
    for; after each round of answers that are all yes, twice as many are asked for at once. An object that is there can
    be read like a shared block, from a slot beyond our own, and is never removed from here.

    Questions at once are bounded, and so is the number of objects that are known in this way: the one that was found
    longest ago makes room. An object is asked for once in some seconds. `tier_policy.LoadCost` decides whether a
    question is worth its time. Mutable; the thread that owns the tiers owns it.
    """

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


@dataclass(slots=True, kw_only=True)
class Preparation:
    """The blocks that one sequence waits for, on their way to host memory. Names are sequence hashes."""

    names: Sequence[int]  # of its blocks
    chain: Sequence[CachedBlock]  # to ask for; none if the store is not asked
    first: int  # position of the first name in it
    wait_until: float  # though the next answer may bring more
    num_objects: int = 1  # to ask for in the next round
    num_held: int = 0  # leading names whose blocks in host memory are held
    copies: set[TierCopy] = field(default_factory=set)  # and questions
    # In host memory until it is admitted.
    kept_blocks: list[TierBlock] = field(default_factory=list)
    # Those that host memory had before: the blocks from disk must not take their place.
    held_blocks: list[TierBlock] = field(default_factory=list)


class Preparations:
    """Mutable; the thread that owns the pool owns it."""

    def __init__(
        self,
        pool: pools.DevicePool,
        host: Tier,
        below: Tier,
        copies: RunningCopies,
        cost: tier_policy.LoadCost,
        counts: Counter[str],
        *,
        block_size: int,
    ) -> None:
        self._pool, self._host, self._below = pool, host, below
        self._path = below.name, HOST
        self._copies, self._cost, self._counts = copies, cost, counts
        self._block_size = block_size
        # To a store that other workers may fill.
        self.questions = StoreQuestions(below) if below.name is kv_events.REMOTE else None
        self._by_sequence: dict[Hashable, Preparation] = {}
        self._reads: dict[int, TierCopy] = {}  # that run, by block
        self._late_loads: set[TierCopy] = set()  # that still run
        self._asked_at: dict[TierCopy, float] = {}

    def begin(
        self,
        waiting: Hashable,
        sequence_hashes: Sequence[int],
        chain: Sequence[CachedBlock],
        first: int,
    ) -> None:
        """Begin to prepare a sequence; see `tiered_cache.TieredCache.prepare`."""
        missing = self._missing(sequence_hashes)
        self._counts["disk_lookups"] += len(missing)
        num_known = len(sequence_hashes) - len(missing)
        preparation = Preparation(
            names=sequence_hashes[: num_known + self._host.num_slots // 2],
            chain=chain,
            first=first,
            wait_until=self._host.now + self._cost.max_wait_s(len(missing) * self._block_size),
        )
        self._by_sequence[waiting] = preparation
        self._advance(preparation)
        if not preparation.copies:
            self.release(waiting)

    def is_running(self, waiting: Hashable) -> bool:
        """Return whether a sequence has something to wait for."""
        preparation = self._by_sequence.get(waiting)
        return preparation is not None and bool(preparation.copies)

    def waiting_for(self, copy: TierCopy) -> list[Hashable]:
        """Return the sequences that wait for a read or a question."""
        return [key for key, each in self._by_sequence.items() if copy in each.copies]

    def stop_waiting(self, copy: TierCopy) -> None:
        """Let the sequences that wait for a late read, or for a late answer, go on without it."""
        waiting = [each for each in self._by_sequence.values() if copy in each.copies]
        self._counts["late_loads"] += len(waiting)
        if self.questions is not None and copy.is_question:
            self.questions.record_late(copy)
            for preparation in waiting:
                preparation.copies.discard(copy)
            return
        if copy.path == self._path:  # no other may begin to wait, though its own is gone
            self._late_loads.add(copy)
        for preparation in waiting:
            self._late_loads |= preparation.copies
            preparation.copies.clear()

    def keep(self, copy: TierCopy, target: TierBlock) -> None:
        """Keep a block that has come to host memory for the sequences that wait for the copy."""
        for preparation in self._by_sequence.values():
            if copy in preparation.copies:
                preparation.kept_blocks.append(target)
                target.num_users += 1  # until the sequence is admitted

    def end_read(self, copy: TierCopy) -> None:
        """Record that a read has ended."""
        self._late_loads.discard(copy)
        for preparation in self._by_sequence.values():
            preparation.copies.discard(copy)
        for block in copy.blocks:
            if self._reads.get(block.sequence_hash) is copy:
                del self._reads[block.sequence_hash]

    def end_question(self, question: TierCopy, *, is_there: bool, seconds: float | None) -> None:
        """Record an answer, and go on with the sequences that wait for it. It took the store so many seconds."""
        assert self.questions is not None
        self._late_loads.discard(question)
        # A sequence waits for the end of the step that runs meanwhile, too, but not longer than its limit.
        limit_s = question.limit_s or 0.0
        waited_s = min(self._host.now - self._asked_at.pop(question), limit_s)
        self._cost.record_answer(max(waited_s, seconds or 0.0), is_there=is_there)
        is_found = self.questions.end(question, is_there=is_there)
        self._counts["store_finds"] += is_found
        for preparation in self._by_sequence.values():
            if question in preparation.copies:
                preparation.copies.discard(question)
                if is_found:
                    self._advance(preparation)

    def release(self, waiting: Hashable) -> list[TierBlock]:
        """Let the blocks go that were kept for a sequence, and return those that came from below host memory."""
        preparation = self._by_sequence.pop(waiting, None)
        if preparation is None:
            return []
        for block in preparation.kept_blocks + preparation.held_blocks:
            self._host.release(block)
        return preparation.kept_blocks

    def clear(self) -> None:
        """Let all sequences go on, and forget what was asked."""
        if self.questions is not None:
            self.questions.clear()
        for waiting in list(self._by_sequence):
            self.release(waiting)

    def _advance(self, preparation: Preparation) -> None:
        """Begin to read what the tier below has of a prompt, and to ask a store for what follows."""
        missing = self._missing(preparation.names)
        found = missing[: len(leading(self._below.find(n) or self._host.find(n) for n in missing))]
        num_known = len(preparation.names) - len(missing) + len(found)
        if self._begin_reads(preparation, found, num_known) and preparation.chain:
            self._ask(preparation, num_known)

    def _begin_reads(self, preparation: Preparation, found: Sequence[int], num_known: int) -> bool:
        """Begin to read these blocks, the last of the prompt's first `num_known`. Return whether more are of use."""
        names = [name for name in found if name not in self._host]
        reads = {self._reads[name] for name in found if name in self._reads}
        if not names and not reads:
            return True
        num_tokens = len(found) * self._block_size
        load_s = self._copies.load_s(self._path, len(names))
        load_s += self._copies.load_s((HOST, DEVICE), len(found))
        if not self._cost.pays(load_s, num_tokens):
            self._counts["not_worth_loading"] += 1
            self._cost.record_declined(self._path)
            return False
        limit_s = min(self._cost.max_wait_s(num_tokens), preparation.wait_until - self._host.now)
        if self._late_loads or limit_s <= 0:  # the disk hangs, or questions took the time
            return False
        for name in preparation.names[preparation.num_held : num_known]:
            if (held := self._host.find(name)) is not None:
                preparation.held_blocks.append(self._host.acquire(held, is_read=False))
        preparation.num_held = num_known
        preparation.copies |= reads | self._read(names, limit_s)
        return True

    def _read(self, names: Sequence[int], limit_s: float) -> set[TierCopy]:
        """Begin to copy these blocks from disk to host memory, as far as that has room."""
        copies: set[TierCopy] = set()
        for batch in segments.batch_reads(self._below, names, tier_jobs.BATCH_BLOCKS):
            targets = leading(self._host.reserve((b,), e.priority, e.hint) for e, b in batch)
            if not targets:
                break
            read = [source for source, _ in batch[: len(targets)]]
            copy = self._copies.begin(
                self._path,
                targets,
                [source.slot for source in read],
                [self._below.acquire(source) for source in dict.fromkeys(read)],
                limit_s=limit_s,
            )
            copies.add(copy)
            self._reads.update((block.sequence_hash, copy) for block in copy.blocks)
            if len(targets) < len(batch):  # what follows would not be found without these
                break
        return copies

    def _ask(self, preparation: Preparation, num_known: int) -> None:
        """Ask the store for the objects that follow the first blocks of a prompt, if that is worth the time."""
        assert self.questions is not None, "the caller gives no chain without a store"
        if self._late_loads or any(copy.is_question for copy in preparation.copies):
            return
        position = preparation.first + num_known
        objects = self.questions.select(preparation.chain, position, preparation.num_objects)
        num_tokens = (len(preparation.names) - num_known) * self._block_size
        if not objects or not num_tokens:
            return
        limit_s = min(self._cost.max_ask_s(num_tokens), preparation.wait_until - self._host.now)
        if limit_s <= 0 or not self._cost.can_ask(num_tokens):
            self._counts["not_worth_asking"] += 1
            return
        preparation.num_objects *= 2
        new_questions = self.questions.begin(objects, limit_s)
        self._counts["store_questions"] += len(new_questions)
        self._copies.new += new_questions
        self._asked_at.update(dict.fromkeys(new_questions, self._host.now))
        preparation.copies |= self.questions.find_running(objects)

    def _missing(self, sequence_hashes: Sequence[int]) -> Sequence[int]:
        """Return the hashes from the first one on that neither the engine nor host memory has."""
        for position, sequence_hash in enumerate(sequence_hashes):
            if sequence_hash not in self._pool and self._host.find(sequence_hash) is None:
                return sequence_hashes[position:]
        return ()


def leading(entries: Iterable[TierBlock | None]) -> list[TierBlock]:
    """Return the blocks before the first that was not found."""
    return [block for block in itertools.takewhile(bool, entries) if block is not None]
