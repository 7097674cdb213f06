"""Which worker holds which blocks, exactly, from what the workers themselves tell.

    index.apply(worker, event)          one KV event, in the order in which the worker told it (see `event_order`)
    index.find(sequence_hashes)         how many leading blocks of a prompt each worker holds, by tier
    index.remove_worker(worker)         at once, whatever it held

Blocks are kept by sequence hash; `foreign_names` translates for engines that have other names. A foreign block with an
unknown parent has no place and is left out (`num_orphans`). `chains` says what is bounded and why nothing stalls.

Which bit stands for whom: a holder is one tier of one worker.

A bit of somebody who left is not given to another before every trace of it is swept from the blocks, because until
then it still stands on them. Whoever searches does so among the living, so the traces harm nobody.

Our names for the blocks of engines that have names of their own.

Where an engine of ours speaks, block names are sequence hashes, and nothing is kept here. For a foreign engine each
stored block is hashed, and remembered under the engine's name for as long as its tier holds it.
Which of the two it is, the last block of each event tells: its name either is the hash of its predecessor's name and
its own tokens, or not; 64 bits do not agree by chance.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress

from dynamo.base import errors
from dynamo.protocols import blocks, kv_events
from dynamo.router import api, prefix_tree

MAX_BLOCKS = 1 << 22  # about 450 MB
_DEVICE, _HOST, _DISK = kv_events.DEVICE, kv_events.HOST, kv_events.DISK
_SWEEP = 4  # segments for each event
_SWEEP_NAMES = 256  # of foreign engines


class PrefixIndex:
    """An `api.Index`. Mutable; one thread or loop owns it."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self.num_orphans = 0  # blocks that were told of but could not be placed
        self._chains = prefix_tree.PrefixTree(max_blocks)
        self._holders = WorkerBits()
        self._sweeping = 0  # bits of who is being swept
        self._foreign = EngineHashMap()

    @property
    def num_blocks(self) -> int:
        """Different blocks, those that wait to be swept among them."""
        return len(self._chains)

    def find(self, sequence_hashes: Sequence[int]) -> api.OverlapScores:
        living = self._holders.living
        device = self._depths(sequence_hashes, living[_DEVICE])
        if not (living[_HOST] or living[_DISK]):
            return api.OverlapScores(device, {}, {})
        host = self._depths_behind(sequence_hashes, _HOST, device)
        disk = self._depths_behind(sequence_hashes, _DISK, device, host)
        return api.OverlapScores(device, host, disk)

    def apply(self, worker: api.Worker, event: kv_events.KvEvent) -> None:
        """What `worker` told. Raises RemoteProtocolError for a hash that is not of 64 bits."""
        try:
            if isinstance(event, kv_events.Stored):
                self._stored(worker, event)
            elif isinstance(event, kv_events.Removed):
                self.drop(worker, event.tier, self._foreign.remove(worker, event))
            else:
                self.clear(worker)
        except (OverflowError, struct.error) as error:
            raise errors.RemoteProtocolError(
                f"expected hashes of 64 bits, without sign, from {worker}: {error}"
            ) from error
        self.sweep(_SWEEP)

    def clear(self, worker: api.Worker) -> None:
        """It holds nothing, in no tier."""
        self._holders.leave(worker)
        self._foreign.leave(worker)

    def remove_worker(self, worker: api.Worker) -> None:
        self.clear(worker)

    def sweep(self, num_segments: int) -> bool:
        """Free a bounded part of what those who left have left; says whether nothing remains.

        Each event sweeps a little. Where no events come, memory waits for whoever calls this.
        """
        if not self._sweeping and self._holders.left:
            self._sweeping, self._holders.left = self._holders.left, 0
            self._chains.forget(self._sweeping)
        if self._sweeping and self._chains.sweep(num_segments):
            self._holders.release(self._sweeping)
            self._sweeping = 0
        is_free = self._foreign.free(_SWEEP_NAMES)
        return is_free and not (self._sweeping or self._holders.left)

    def holdings(self) -> Iterator[tuple[api.Worker, kv_events.Tier, Sequence[int]]]:
        """All that is known: who, where, and a stretch of consecutive blocks."""
        for (worker, tier), bit in self._holders:
            for names in self._chains.held_by(bit):
                yield worker, tier, names

    def is_foreign(self, worker: api.Worker) -> bool:
        """Whether it has block names of its own, which `holdings` do not tell."""
        return self._foreign.knows(worker)

    def hold(self, worker: api.Worker, tier: kv_events.Tier, names: Sequence[int]) -> None:
        """`worker` has these consecutive blocks: the inverse of `holdings`."""
        self._chains.hold(self._holders.join(worker, tier), names)

    def drop(self, worker: api.Worker, tier: kv_events.Tier, names: Iterable[int]) -> None:
        """`worker` has these blocks no more."""
        if holder := self._holders.bit(worker, tier):
            self._chains.drop(holder, names)

    def _depths(self, names: Sequence[int], among: int) -> dict[api.Worker, int]:
        depths: dict[api.Worker, int] = {}
        for bits, depth in self._chains.runs(names, among):
            found = dict.fromkeys(self._holders.workers(bits), depth)
            if depths:
                depths |= found
            else:
                depths = found
        return depths

    def _depths_behind(
        self, names: Sequence[int], tier: kv_events.Tier, *faster: dict[api.Worker, int]
    ) -> dict[api.Worker, int]:
        """How far this tier goes on for each worker, where its faster tiers end."""
        depths: dict[api.Worker, int] = {}
        among_by_start: dict[int, int] = {}
        for worker in self._holders.workers(self._holders.living[tier]):
            start = sum(tier_depths.get(worker, 0) for tier_depths in faster)
            bit = self._holders.bit(worker, tier)
            among_by_start[start] = among_by_start.get(start, 0) | bit
        for start, among in among_by_start.items():
            depths.update(self._depths(names[start:], among))
        return depths

    def _stored(self, worker: api.Worker, event: kv_events.Stored) -> None:
        if not event.blocks:
            return
        if is_foreign(event):
            learnt = self._foreign.learn(worker, event)
        else:
            learnt = event.parent_hash, [block.block_hash for block in event.blocks]
        if learnt is None:
            self.num_orphans += len(event.blocks)
            return
        parent, names = learnt
        self._chains.hold(self._holders.join(worker, event.tier), names, parent)


_DIGITS = bytes.maketrans(b"01", b"\0\1")


class WorkerBits:
    """Workers by bit. All bits of the living are in `living`, by tier."""

    def __init__(self) -> None:
        self.living = dict.fromkeys(kv_events.TIERS, 0)
        self.left = 0  # who left and was not begun to be swept
        self._bits: dict[tuple[api.Worker, kv_events.Tier], int] = {}
        self._workers: list[api.Worker | None] = []  # by position of the bit
        self._free: list[int] = []

    def bit(self, worker: api.Worker, tier: kv_events.Tier) -> int:
        """Its bit; 0 if it has none."""
        return self._bits.get((worker, tier), 0)

    def join(self, worker: api.Worker, tier: kv_events.Tier) -> int:
        """Its bit; a new one if it has none."""
        bit = self._bits.get((worker, tier))
        if bit is None:
            bit = self._bits[worker, tier] = self._new_bit(worker)
            self.living[tier] = self.living.get(tier, 0) | bit
        return bit

    def leave(self, worker: api.Worker) -> None:
        """It has nothing any more, in no tier."""
        for tier in self.living:
            bit = self._bits.pop((worker, tier), 0)
            self.living[tier] &= ~bit
            self.left |= bit

    def release(self, bits: int) -> None:
        """These bits stand on no block any more: others may have them."""
        positions = [i for i in range(len(self._workers)) if bits >> i & 1]
        for position in positions:
            self._workers[position] = None
        self._free += positions

    def workers(self, bits: int) -> Iterable[api.Worker]:
        """Who these (living) are; all of one tier."""
        if not bits & (bits - 1):
            return self._workers[bits.bit_length() - 1 : bits.bit_length()]  # type: ignore[return-value]
        digits = bin(bits)[:1:-1].encode().translate(_DIGITS)
        return compress(self._workers, digits)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[tuple[tuple[api.Worker, kv_events.Tier], int]]:
        return iter(self._bits.items())

    def _new_bit(self, worker: api.Worker) -> int:
        if not self._free:
            self._free.append(len(self._workers))
            self._workers.append(None)
        position = self._free.pop()
        self._workers[position] = worker
        return 1 << position


class EngineHashMap:
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
