"""The requests in flight: how much each worker has to do, and which blocks it holds because of them.

    add ──▶ prefill_completed (its first output) ──▶ free

Blocks are counted once per worker, however many of its requests share them (`chain_holders`). A request that arrives,
runs or ends costs its own blocks, never those of others.

A prompt that another worker has computed (`is_prefilled`) counts by its blocks alone. Workers that only compute prompts
are not counted by blocks (`counts_blocks`): what they hold, they hold for others, and not for long.

With a `stride` only every so many-th block is kept by name: counting a prompt in is that much cheaper, and what it
shares with others is known that much more coarsely.

Unknown requests and workers are no error: messages of replicas, and of workers that have died, may come late. Nor are
names that are no chain (a replica's mistake): some may be counted wrongly, and nothing else happens.

Who holds which blocks, for sets of blocks that are closed: who holds a block holds all before it in its chain.

    block → bit mask of the workers that hold it

Along any chain the set of holders only shrinks; so where it does is found by bisection, ten look-ups for 512 blocks
instead of 512. What requests in flight hold is closed (each holds a whole chain); so is a cache that
evicts from the tail.
"""

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from dynamo.protocols import load as load_events
from dynamo.router.api import Worker
from dynamo.router.worker_load import CachePressure, Capacity, Load, Pace


@dataclass(slots=True, kw_only=True)
class _Request:
    worker: Worker
    hashes: Sequence[int]
    isl: int
    overlap: float
    num_grown: int = 0
    is_prefill_completed: bool = False


@dataclass(slots=True, kw_only=True)
class _Slot:
    """A worker, and how many *further* of its requests hold a block that one holds already."""

    load: Load
    shared: dict[int, int]
    request_ids: set[str]


class ActiveSequences:
    """Mutable; one event loop owns it."""

    def __init__(self, block_size: int, *, stride: int = 1, counts_blocks: bool = True) -> None:
        self.loads: dict[Worker, Load] = {}
        self.pace = Pace()
        self._block_size = block_size
        self._stride = stride
        self._counts_blocks = counts_blocks
        self._pressure = CachePressure(self.loads.values())
        self._requests: dict[str, _Request] = {}
        self._slots: dict[Worker, _Slot] = {}
        self._holders = ActiveBlocks()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def set_workers(self, workers: Mapping[Worker, Capacity]) -> list[Worker]:
        """Who is there now. Requests of those who are not any more are forgotten; returns these workers."""
        gone = [worker for worker in self._slots if worker not in workers]
        for worker in gone:
            self._remove(worker)
        for worker, capacity in workers.items():
            if worker in self._slots:
                self.loads[worker].capacity = capacity
            else:
                self._insert(worker, capacity)
        self._pressure.resize(block_size=self._block_size)
        return gone

    def add(
        self,
        request_id: str,
        worker: Worker,
        sequence_hashes: Sequence[int],
        *,
        isl: int,
        overlap: float,
        now: float,
        is_prefilled: bool = False,
    ) -> None:
        """A prompt of `isl` tokens, of which `overlap` blocks need not be computed, goes to a worker."""
        slot = self._slots.get(worker)
        if slot is None or request_id in self._requests:
            return
        request = _Request(worker=worker, hashes=sequence_hashes, isl=isl, overlap=overlap)
        self._requests[request_id] = request
        slot.request_ids.add(request_id)
        num_new = max(0, isl - int(overlap * self._block_size))
        slot.load.num_requests += 1
        num_held = self._hold(worker, sequence_hashes)
        if self._counts_blocks:
            slot.load.active_blocks += num_held
        if is_prefilled:
            request.is_prefill_completed = True
        else:
            slot.load.enter(request_id, num_new, now)
        self._pressure.insert(slot.load, num_new)

    def prefill_completed(self, request_id: str, now: float) -> None:
        """Its first output came; what else does not matter."""
        request = self._requests.get(request_id)
        if request is None or request.is_prefill_completed:
            return
        request.is_prefill_completed = True
        load = self._slots[request.worker].load
        self.pace.observe(load.waiting[request_id], now - load.head_since)
        load.leave(request_id, now)

    def grow(self, request_id: str, num_blocks: int) -> None:
        """Its answer fills so many more blocks."""
        request = self._requests.get(request_id)
        if request is not None:
            request.num_grown += num_blocks
            self._slots[request.worker].load.active_blocks += num_blocks

    def free(self, request_id: str, now: float) -> None:
        """It ended, however it ended."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        slot = self._slots[request.worker]
        slot.request_ids.discard(request_id)
        slot.load.leave(request_id, now)
        slot.load.num_requests -= 1
        num_gone = self._let_go(request.worker, request.hashes) + request.num_grown
        slot.load.active_blocks = (
            max(0, slot.load.active_blocks - num_gone) if slot.request_ids else 0
        )

    def runs(self, sequence_hashes: Sequence[int]) -> dict[Worker, int]:
        """How many leading blocks of this chain each worker holds for requests in flight; those with none left out."""
        if self._stride == 1:
            return self._holders.runs(sequence_hashes)
        runs = self._holders.runs(self._kept(sequence_hashes))
        return {worker: run * self._stride for worker, run in runs.items()}

    def snapshot(self, router_id: str) -> Iterator[load_events.ActiveSequenceEvent]:
        """All that is in flight, for a replica that joins late."""
        for request_id, request in self._requests.items():
            yield load_events.ActiveSequenceEvent(
                request_id=request_id,
                worker_id=request.worker.instance_id,
                dp_rank=request.worker.dp_rank,
                router_id=router_id,
                data=load_events.AddRequest(
                    token_sequence=tuple(request.hashes),
                    isl=request.isl,
                    overlap=request.overlap,
                    is_prefill_completed=request.is_prefill_completed,
                ),
            )

    def apply(self, event: load_events.ActiveSequenceEvent, now: float) -> None:
        """What another router did."""
        match event.data:
            case load_events.AddRequest() as added:
                self.add(
                    event.request_id,
                    Worker(event.worker_id, event.dp_rank),
                    tuple(dict.fromkeys(added.token_sequence)),
                    isl=added.isl,
                    overlap=added.overlap,
                    now=now,
                    is_prefilled=added.is_prefill_completed,
                )
                if added.is_prefill_completed and event.request_id in self._requests:
                    self._skip_prefill(event.request_id, now)
            case load_events.MarkPrefillCompleted():
                self.prefill_completed(event.request_id, now)
            case load_events.Free():
                self.free(event.request_id, now)

    def _skip_prefill(self, request_id: str, now: float) -> None:
        """Its prompt was computed before we heard of that: nothing to learn of the pace."""
        request = self._requests[request_id]
        request.is_prefill_completed = True
        load = self.loads[request.worker]
        if request_id in load.waiting:
            load.leave(request_id, now)

    def _insert(self, worker: Worker, capacity: Capacity) -> None:
        self._holders.insert(worker)
        load = self.loads[worker] = Load(capacity, self.pace)
        self._slots[worker] = _Slot(load=load, shared={}, request_ids=set())

    def _remove(self, worker: Worker) -> None:
        for request_id in self._slots[worker].request_ids:
            self._let_go(worker, self._requests.pop(request_id).hashes)
        self._holders.remove(worker)
        del self._slots[worker], self.loads[worker]

    def _hold(self, worker: Worker, hashes: Sequence[int]) -> int:
        """Count a chain for a worker; returns how many of its blocks are new there."""
        names = self._kept(hashes)
        shared, run = self._slots[worker].shared, self._holders.run(worker, names)
        for name in names[:run]:
            shared[name] = shared.get(name, 0) + 1
        self._holders.hold(worker, names, run)
        return len(hashes) - run * self._stride

    def _let_go(self, worker: Worker, hashes: Sequence[int]) -> int:
        """The opposite; returns how many of its blocks the worker holds no more."""
        names, shared = self._kept(hashes), self._slots[worker].shared
        run = bisect.bisect_left(names, True, key=lambda name: name not in shared)
        for name in names[:run]:
            if shared.get(name, 0) > 1:
                shared[name] -= 1
            else:
                shared.pop(name, None)
        self._holders.let_go(worker, names[run:])
        return len(hashes) - run * self._stride

    def _kept(self, hashes: Sequence[int]) -> Sequence[int]:
        return hashes[self._stride - 1 :: self._stride]


_BIT_OF_DIGIT = bytes.maketrans(b"01", b"\x00\x01")


class ActiveBlocks:
    """Mutable. A worker must be inserted before it is given blocks."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        self._bits: dict[Worker, int] = {}
        self._workers: list[Worker | None] = []  # by position of the bit

    def insert(self, worker: Worker) -> None:
        """It holds nothing yet. Its bit may be one that was free again."""
        if None in self._workers:
            position = self._workers.index(None)
            self._workers[position] = worker
        else:
            position = len(self._workers)
            self._workers.append(worker)
        self._bits[worker] = 1 << position

    def remove(self, worker: Worker) -> None:
        """It is gone; it must hold nothing any more."""
        self._workers[self._bits.pop(worker).bit_length() - 1] = None

    def run(self, worker: Worker, chain: Sequence[int]) -> int:
        """How many leading blocks of the chain this worker holds."""
        bit = self._bits[worker]
        if not chain or not self._masks.get(chain[0], 0) & bit:
            return 0
        return self._end(chain, bit)

    def runs(self, chain: Sequence[int]) -> dict[Worker, int]:
        """How many leading blocks of the chain each worker holds; who holds none is left out."""
        runs: dict[Worker, int] = {}
        masks, end = self._masks, 0
        mask = masks.get(chain[0], 0) if chain else 0
        while mask:
            end = self._end(chain, mask, end)
            rest = masks.get(chain[end], 0) & mask if end < len(chain) else 0
            runs.update(dict.fromkeys(self._named(mask ^ rest), end))
            mask = rest
        return runs

    def _named(self, mask: int) -> Iterator[Worker]:
        """The workers of a mask; whoever was removed holds nothing, and so has no bit in it."""
        return cast(Iterator[Worker], itertools.compress(self._workers, _flags(mask)))

    def hold(self, worker: Worker, chain: Sequence[int], start: int) -> None:
        """The worker holds the blocks from `start` on as well. What nobody holds yet costs next to nothing."""
        masks, bit = self._masks, self._bits[worker]
        fresh = start
        if start < len(chain) and chain[start] in masks:
            fresh = bisect.bisect_left(chain, True, start, key=lambda name: name not in masks)
        for name in chain[start:fresh]:
            masks[name] |= bit
        masks.update(zip(chain[fresh:], itertools.repeat(bit), strict=False))

    def let_go(self, worker: Worker, names: Sequence[int]) -> None:
        """The worker holds these blocks no more."""
        masks, others = self._masks, ~self._bits[worker]
        for name in names:
            if rest := masks.get(name, 0) & others:
                masks[name] = rest
            else:
                masks.pop(name, None)

    def _end(self, chain: Sequence[int], mask: int, start: int = 0) -> int:
        """Where the blocks end that all workers of the mask hold."""
        get = self._masks.get
        return bisect.bisect_left(chain, True, start, key=lambda name: get(name, 0) & mask != mask)


def _flags(mask: int) -> bytes:
    """A byte for each bit, lowest first: 1 where it is set. By text, as arithmetic copies a thousand bits each step."""
    return bin(mask)[:1:-1].encode().translate(_BIT_OF_DIGIT)
