"""The indexes of cached blocks: an exact one from the workers' KV events, and a guessed one for workers without them.

`PrefixIndex`, the exact index by worker and tier:

    index.apply(worker, event)                one KV event, in the worker's order (see `kv_event_order`)
    index.find_matches(sequence_hashes)       how many leading blocks of a prompt each worker has, by tier
    index.remove_worker(worker)               at once, however many blocks it has

Tiers are an open set: any tier that an event names is indexed. `kv_events.TIERS` come first, in their order; others
follow in the order of their names, which all routers share, as slower than those before.

Blocks are kept by sequence hash in a `prefix_tree`; `EngineHashMap` translates for engines with hashes of their own. A
block of such an engine with an unknown parent cannot be placed and is left out.

`ApproxIndex`, guessed from where prompts were sent:

    index.record(worker, sequence_hashes, now)      a request was sent there: the worker will cache these blocks
    index.expire(now)                               before `find_matches`
    index.find_matches(sequence_hashes)

A guess ends `ttl_s` seconds after it was last recorded (cache policy `ttl`), or only when room ends (`lru`). Beyond
`max_guesses` those recorded longest ago are dropped until `prune_ratio` of the room is used, a bounded number at a
time, so that no request waits for a large cleaning. Defaults are those of Dynamo (`--router-ttl-secs`,
`--router-max-tree-size`, `--router-prune-target-ratio`).

Each worker's guesses stand in one dictionary in the order of their last use: a guess that is used again moves to the
end, and dropping begins at the front. To find the front costs more the more was dropped there, so time counts in whole
seconds, rounded up: the front is looked for once a second at most.
"""  # decider

import heapq
import math
import operator
import struct
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import compress, islice, repeat
from typing import Literal

from dynamo.base import errors
from dynamo.protocols import blocks, kv_events
from dynamo.router import api, prefix_tree

MAX_BLOCKS = 1 << 22  # about 450 MB
_SWEPT_EDGES = 4  # per event
_SWEPT_HASHES = 256  # of engines with their own hashes, per event
_BIT_OF_DIGIT = bytes.maketrans(b"01", b"\0\1")


class PrefixIndex:
    """An `api.Index`. Mutable; one thread or event loop owns it."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._tree = prefix_tree.PrefixTree(max_blocks)
        self._worker_bits = WorkerBits()
        self._sweeping = 0  # bits of the removed workers that are being swept
        self._engine_hashes = EngineHashMap()

    @property
    def num_blocks(self) -> int:
        """Return the number of different blocks, those that wait to be swept included."""
        return len(self._tree)

    def find_matches(self, sequence_hashes: Sequence[int]) -> api.OverlapScores:
        by_tier: dict[kv_events.Tier, dict[api.Worker, int]] = {}
        for tier, workers in self._worker_bits.live.items():
            if not workers:
                continue
            if by_tier:
                depths = self._continue_matches(sequence_hashes, tier, by_tier.values())
            else:
                depths = self._match(sequence_hashes, workers)
            if depths:
                by_tier[tier] = depths
        return api.OverlapScores(by_tier)

    def apply(self, worker: api.Worker, event: kv_events.KvEvent) -> None:
        """Apply a KV event of `worker`. Raises RemoteProtocolError for a hash that does not fit into 64 bits."""
        try:
            if isinstance(event, kv_events.Stored):
                self._apply_stored(worker, event)
            elif isinstance(event, kv_events.Removed):
                names = self._engine_hashes.remove(worker, event)
                self.remove_blocks(worker, event.tier, names)
            else:
                self.remove_worker(worker)
        except (OverflowError, struct.error) as error:
            raise errors.RemoteProtocolError(
                f"expected hashes of 64 bits, without sign, from {worker}: {error}"
            ) from error
        self.sweep(_SWEPT_EDGES)

    def remove_worker(self, worker: api.Worker) -> None:
        self._worker_bits.remove_worker(worker)
        self._engine_hashes.remove_worker(worker)

    def sweep(self, num_edges: int) -> bool:
        """Free a bounded part of what removed workers occupy; return True if nothing remains to be freed.

        Each event sweeps a little; where no events come, call this to free memory.
        """
        if not self._sweeping and self._worker_bits.removed:
            self._sweeping, self._worker_bits.removed = self._worker_bits.removed, 0
            self._tree.begin_sweep(self._sweeping)
        if self._sweeping and self._tree.sweep(num_edges):
            self._worker_bits.release(self._sweeping)
            self._sweeping = 0
        is_free = self._engine_hashes.free_removed(_SWEPT_HASHES)
        return is_free and not (self._sweeping or self._worker_bits.removed)

    def cached_runs(self) -> Iterator[tuple[api.Worker, kv_events.Tier, Sequence[int]]]:
        """Yield all content: worker, tier, and a run of consecutive blocks."""
        for (worker, tier), bit in self._worker_bits:
            for names in self._tree.runs_of(bit):
                yield worker, tier, names

    def tiers_by_worker(self) -> dict[int, list[kv_events.Tier]]:
        """Return the tiers in which each worker has had blocks, by instance id."""
        tiers: dict[int, list[kv_events.Tier]] = {}
        for (worker, tier), _ in self._worker_bits:
            if tier not in tiers.setdefault(worker.instance_id, []):
                tiers[worker.instance_id].append(tier)
        return tiers

    def add_blocks(self, worker: api.Worker, tier: kv_events.Tier, names: Sequence[int]) -> None:
        """Add consecutive blocks to a worker's tier: the inverse of `cached_runs`."""
        self._tree.add_blocks(self._worker_bits.assign(worker, tier), names)

    def remove_blocks(self, worker: api.Worker, tier: kv_events.Tier, names: Iterable[int]) -> None:
        if bit := self._worker_bits.find(worker, tier):
            self._tree.remove_blocks(bit, names)

    def _match(self, names: Sequence[int], workers: int) -> dict[api.Worker, int]:
        depths: dict[api.Worker, int] = {}
        for matching, depth in self._tree.match(names, workers):
            matches = dict.fromkeys(self._worker_bits.workers(matching), depth)
            if depths:
                depths |= matches
            else:
                depths = matches
        return depths

    def _continue_matches(
        self,
        names: Sequence[int],
        tier: kv_events.Tier,
        faster: Collection[dict[api.Worker, int]],
    ) -> dict[api.Worker, int]:
        """Return how many blocks of this tier continue each worker's match in its faster tiers."""
        depths: dict[api.Worker, int] = {}
        workers_by_start: dict[int, int] = {}
        for worker in self._worker_bits.workers(self._worker_bits.live[tier]):
            start = sum(tier_depths.get(worker, 0) for tier_depths in faster)
            bit = self._worker_bits.find(worker, tier)
            workers_by_start[start] = workers_by_start.get(start, 0) | bit
        for start, workers in workers_by_start.items():
            depths.update(self._match(names[start:], workers))
        return depths

    def _apply_stored(self, worker: api.Worker, event: kv_events.Stored) -> None:
        if not event.blocks:
            return
        if has_own_hashes(event):
            translated = self._engine_hashes.translate(worker, event)
            if translated is None:
                return
            parent, names = translated
        else:
            parent, names = event.parent_hash, [block.block_hash for block in event.blocks]
        self._tree.add_blocks(self._worker_bits.assign(worker, event.tier), names, parent)


class WorkerBits:
    """The bit of each tier of each worker in the worker sets of the prefix tree.

    The bit of a removed worker is not assigned again before all its traces are swept from the tree, because until then
    it still marks blocks. Searches look among `live` bits only, so these traces do no harm.
    """

    def __init__(self) -> None:
        self.live = dict.fromkeys(kv_events.TIERS, 0)  # worker set by tier, fastest first
        self.removed = 0  # removed bits for which no sweep has begun
        self._bits: dict[tuple[api.Worker, kv_events.Tier], int] = {}
        self._workers: list[api.Worker | None] = []  # by position of the bit
        self._free: list[int] = []

    def find(self, worker: api.Worker, tier: kv_events.Tier) -> int:
        """Return the bit of a worker's tier; 0 if it has none."""
        return self._bits.get((worker, tier), 0)

    def assign(self, worker: api.Worker, tier: kv_events.Tier) -> int:
        """Return the bit of a worker's tier, a new one if it has none."""
        bit = self._bits.get((worker, tier))
        if bit is None:
            if not self._free:
                self._free.append(len(self._workers))
                self._workers.append(None)
            position = self._free.pop()
            self._workers[position] = worker
            bit = self._bits[worker, tier] = 1 << position
            if tier not in self.live:
                others = sorted({*self.live, tier} - {*kv_events.TIERS})
                self.live = {t: self.live.get(t, 0) for t in (*kv_events.TIERS, *others)}
            self.live[tier] |= bit
        return bit

    def remove_worker(self, worker: api.Worker) -> None:
        """Remove the bits of all tiers of a worker."""
        for tier in self.live:
            bit = self._bits.pop((worker, tier), 0)
            self.live[tier] &= ~bit
            self.removed |= bit

    def release(self, bits: int) -> None:
        """Allow to assign these bits again: they mark no block any more."""
        positions = [i for i in range(len(self._workers)) if bits >> i & 1]
        for position in positions:
            self._workers[position] = None
        self._free += positions

    def workers(self, bits: int) -> Iterable[api.Worker]:
        """Return the workers of these live bits, which must be of one tier."""
        if not bits & (bits - 1):
            return self._workers[bits.bit_length() - 1 : bits.bit_length()]  # type: ignore[return-value]
        digits = bin(bits)[:1:-1].encode().translate(_BIT_OF_DIGIT)
        return compress(self._workers, digits)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[tuple[tuple[api.Worker, kv_events.Tier], int]]:
        return iter(self._bits.items())


class EngineHashMap:
    """The sequence hashes of blocks for which an engine has hashes of its own, by worker and tier.

    Our engines name blocks by their sequence hashes, and nothing is kept here. For other engines each stored block is
    hashed, and its sequence hash kept under the engine's hash for as long as its tier has the block. The last block of
    an event tells the two apart: its hash either is the hash of its predecessor's and its own tokens, or not; 64 bits
    do not agree by chance.
    """

    def __init__(self) -> None:
        self._hashes: dict[api.Worker, dict[kv_events.Tier, dict[int, int]]] = {}
        self._removed: list[dict[int, int]] = []  # of removed workers; freed a little at a time

    def translate(
        self, worker: api.Worker, event: kv_events.Stored
    ) -> tuple[int | None, list[int]] | None:
        """Return the sequence hashes of the event's parent and blocks; None if the parent is unknown."""
        by_tier = self._hashes.setdefault(worker, {})
        parent = None
        if event.parent_hash is not None:
            parents = (hashes.get(event.parent_hash) for hashes in by_tier.values())
            parent = next((name for name in parents if name is not None), None)
            if parent is None:
                return None
        names = blocks.sequence_hashes([block.tokens_hash for block in event.blocks], parent)
        hashes = by_tier.setdefault(event.tier, {})
        hashes.update(zip((block.block_hash for block in event.blocks), names, strict=True))
        return parent, names

    def remove(self, worker: api.Worker, event: kv_events.Removed) -> Sequence[int]:
        """Forget removed blocks, and return their sequence hashes."""
        hashes = self._hashes.get(worker, {}).get(event.tier)
        if not hashes:
            return event.block_hashes
        return [hashes.pop(block_hash, block_hash) for block_hash in event.block_hashes]

    def remove_worker(self, worker: api.Worker) -> None:
        """Forget all hashes of this worker; `free_removed` frees their memory."""
        self._removed += self._hashes.pop(worker, {}).values()

    def free_removed(self, num_hashes: int) -> bool:
        """Free some hashes of removed workers; return True if none remain.

        To free a large dictionary at once would stall the event loop.
        """
        if self._removed:
            hashes = self._removed[-1]
            for _ in range(min(num_hashes, len(hashes))):
                hashes.popitem()
            if not hashes:
                self._removed.pop()
        return not self._removed


def has_own_hashes(event: kv_events.Stored) -> bool:
    """Return True if the event's block hashes are not sequence hashes. It must have at least one block."""
    last = event.blocks[-1]
    parent = event.blocks[-2].block_hash if len(event.blocks) > 1 else event.parent_hash
    return last.block_hash != blocks.next_sequence_hash(parent, last.tokens_hash)


_MIN_PRUNED = 1024  # guesses at a time: walking over what was dropped before has a cost, too


class ApproxIndex:
    """An `api.Index`. Mutable; one event loop owns it. Time is passed in, in seconds, and never goes back."""

    def __init__(
        self,
        *,
        policy: Literal["ttl", "lru"] = "ttl",
        ttl_s: float = 120.0,
        max_guesses: int = 1 << 20,
        prune_ratio: float = 0.8,
    ) -> None:
        """A block at a worker is one guess."""
        self._ttl_s = ttl_s if policy == "ttl" else math.inf
        self._max_guesses = max_guesses
        self._target = int(max_guesses * prune_ratio)
        self._index = PrefixIndex(2 * max_guesses)
        self._used_at: dict[api.Worker, dict[int, int]] = {}  # used longest ago first
        self._expires_at: dict[api.Worker, float] = {}  # none of its guesses expires before
        self._is_pruning = False
        self.num_guesses = 0

    def find_matches(self, sequence_hashes: Sequence[int]) -> api.OverlapScores:
        return self._index.find_matches(sequence_hashes)

    def record(self, worker: api.Worker, sequence_hashes: Sequence[int], now: float) -> None:
        """Record that a request with these blocks was sent to `worker`."""
        if not sequence_hashes:
            return
        second = math.ceil(now)
        used_at = self._used_at.setdefault(worker, {})
        num_before = len(used_at)
        if num_before:  # removed from their places, so that they come to the end
            deque(map(used_at.pop, sequence_hashes, repeat(second)), maxlen=0)
        used_at.update(dict.fromkeys(sequence_hashes[::-1], second))  # tails are dropped first
        self.num_guesses += len(used_at) - num_before
        self._expires_at.setdefault(worker, second + self._ttl_s)
        self._index.add_blocks(worker, kv_events.DEVICE, sequence_hashes)
        self._index.sweep(_SWEPT_EDGES * (1 + len(sequence_hashes) // prefix_tree.MAX_EDGE_BLOCKS))
        self._prune(2 * len(sequence_hashes))

    def expire(self, now: float) -> None:
        """Drop the guesses that are too old at `now`."""
        newest_expired = now - self._ttl_s
        for worker in [worker for worker, due in self._expires_at.items() if due <= now]:
            expired = []
            for name, second in self._used_at[worker].items():
                if second > newest_expired:
                    self._expires_at[worker] = second + self._ttl_s
                    break
                expired.append(name)
            self._drop(worker, expired)

    def remove_worker(self, worker: api.Worker) -> None:
        self.num_guesses -= len(self._used_at.pop(worker, ()))
        self._expires_at.pop(worker, None)
        self._index.remove_worker(worker)

    def _prune(self, min_dropped: int) -> None:
        if self.num_guesses > self._max_guesses:
            self._is_pruning = True
        if not self._is_pruning:
            return
        num_dropped = min(self.num_guesses - self._target, max(min_dropped, _MIN_PRUNED))
        by_age = heapq.merge(*map(self._by_age, self._used_at), key=operator.itemgetter(0))
        names_by_worker: dict[api.Worker, list[int]] = {}
        for _, worker, name in islice(by_age, num_dropped):
            names_by_worker.setdefault(worker, []).append(name)
        for worker, names in names_by_worker.items():
            self._drop(worker, names)
        self._is_pruning = self.num_guesses > self._target

    def _by_age(self, worker: api.Worker) -> Iterator[tuple[int, api.Worker, int]]:
        return ((second, worker, name) for name, second in self._used_at[worker].items())

    def _drop(self, worker: api.Worker, names: list[int]) -> None:
        used_at = self._used_at[worker]
        if len(names) == len(used_at):
            self.remove_worker(worker)
            return
        for name in names:
            del used_at[name]
        self.num_guesses -= len(names)
        self._index.remove_blocks(worker, kv_events.DEVICE, names)
