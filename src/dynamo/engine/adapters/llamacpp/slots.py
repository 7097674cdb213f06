"""The slots of llama.cpp: which request runs in which, which ones wait, and the prefixes that idle slots keep.

llama.cpp divides its KV cache into slots of one whole context each. A slot keeps the tokens of its last request, and
the next request in it computes only what differs. Which slot that is we choose: the idle one that shares the longest
prefix with the prompt. So we know what each slot holds, and publish it as blocks, like an engine with paged memory; a
block that several slots hold is stored with the first and removed with the last.

A request without a slot waits, higher priority first, then by arrival.
"""  # decider

import collections
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from dynamo.protocols import blocks, kv_events


@dataclass(slots=True, eq=False)
class Slot:
    """One slot. While a request runs in it, the slot keeps nothing for others."""

    number: int
    names: list[int] = field(default_factory=list)  # sequence hashes of the blocks that it keeps
    num_tokens: int = 0  # of the running request; 0: the slot is idle
    is_outdated: bool = False  # the prefix cache was cleared while the request ran


@dataclass(slots=True, eq=False)
class SlotClaim:
    """A request that has a slot, or waits for one (`slot` is None)."""

    prompt: bytes  # packed tokens
    seed: int  # of the hashes of its blocks
    slot: Slot | None = None
    num_cached: int = 0  # tokens of the prompt that its slot keeps, in whole blocks


class SlotTable:
    """The slots of one engine and the claims that wait for them."""

    def __init__(self, num_slots: int, block_size: int) -> None:
        self._block_size = block_size
        self._idle = [Slot(number) for number in range(num_slots)]
        self._running: set[Slot] = set()
        self._waiting: list[tuple[int, int, SlotClaim]] = []  # a heap: -priority, arrival, claim
        self._arrivals = itertools.count()
        self._holders: collections.Counter[int] = collections.Counter()  # slots by block

    @property
    def num_running(self) -> int:
        """Return the number of requests that have a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Return the number of requests without a slot."""
        return len(self._waiting)

    @property
    def num_active_blocks(self) -> int:
        """Return the number of blocks that running requests fill, the last one of each in part."""
        return sum(-(-slot.num_tokens // self._block_size) for slot in self._running)

    def enqueue(self, claim: SlotClaim, priority: int) -> None:
        """Add a claim to those that wait; `grant` gives it a slot."""
        heapq.heappush(self._waiting, (-priority, next(self._arrivals), claim))

    def withdraw(self, claim: SlotClaim) -> None:
        """Remove a claim that waits."""
        self._waiting = [entry for entry in self._waiting if entry[2] is not claim]
        heapq.heapify(self._waiting)

    def grant(self) -> tuple[SlotClaim | None, list[kv_events.KvEvent]]:
        """Give the next waiting claim the best idle slot; return it (None: nothing can be granted), and the events.

        The events remove what the slot kept beyond the prefix that it shares with the prompt.
        """
        if not self._waiting or not self._idle:
            return None, []
        claim = heapq.heappop(self._waiting)[2]
        names = self._names(claim.prompt, claim.seed)
        shared = [_common_prefix(slot.names, names) for slot in self._idle]
        # Of slots that share equally much, the one with the least to lose; it was idle for the longest, too.
        best = max(range(len(shared)), key=lambda i: (shared[i], -len(self._idle[i].names)))
        slot = claim.slot = self._idle.pop(best)
        self._running.add(slot)
        prompt_len = blocks.count(claim.prompt)
        # At least the last token is computed, so the block of which it is the last is not reused as a whole.
        usable = min(shared[best], (prompt_len - 1) // self._block_size)
        claim.num_cached = usable * self._block_size
        slot.num_tokens, slot.is_outdated = prompt_len, False
        return claim, self._forget(slot, num_kept=usable)

    def release(self, claim: SlotClaim, output: Sequence[int] | None) -> list[kv_events.KvEvent]:
        """Take the slot of a claim back; return the events that store what it keeps now.

        It keeps the prompt and all tokens of `output` but the last, which was not computed; nothing of which we could
        be sure if the output is None.
        """
        slot = claim.slot
        assert slot is not None
        self._running.remove(slot)
        self._idle.append(slot)
        slot.num_tokens = 0
        if output is None or slot.is_outdated:
            return self._forget(slot, num_kept=0)
        packed = claim.prompt + blocks.pack(output[:-1])
        local = blocks.local_hashes(packed, self._block_size, claim.seed)
        names = blocks.sequence_hashes(local)
        events = self._forget(slot, num_kept=_common_prefix(slot.names, names))
        first_new = next((i for i, name in enumerate(names) if name not in self._holders), None)
        self._holders.update(names[len(slot.names) :])
        slot.names = names
        if first_new is not None:
            stored = map(kv_events.StoredBlock, names[first_new:], local[first_new:])
            parent = names[first_new - 1] if first_new else None
            events.append(kv_events.Stored(parent_hash=parent, blocks=tuple(stored)))
        return events

    def clear(self) -> None:
        """Forget what all slots keep, also those of running requests once they end."""
        self._holders.clear()
        for slot in self._idle:
            slot.names = []
        for slot in self._running:
            slot.names, slot.is_outdated = [], True

    def _names(self, packed: bytes, seed: int) -> list[int]:
        return blocks.sequence_hashes(blocks.local_hashes(packed, self._block_size, seed))

    def _forget(self, slot: Slot, *, num_kept: int) -> list[kv_events.KvEvent]:
        """Drop the blocks of a slot after the first `num_kept`; return the event for those that no other slot holds."""
        dropped, slot.names = slot.names[num_kept:], slot.names[:num_kept]
        self._holders.subtract(dropped)
        removed = [name for name in dropped if self._holders[name] <= 0]
        for name in removed:
            del self._holders[name]
        # The last block first: a removed block never leaves a stored one without its parent.
        return [kv_events.Removed(block_hashes=tuple(reversed(removed)))] if removed else []


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
