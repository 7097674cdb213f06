"""The active sequences: the requests in flight at each worker, with their load and the blocks that they use.

    add ──▶ mark_prefill_completed (first output) ──▶ free

A block counts once per worker, however many of its requests share it. A request that arrives, runs or ends costs its
own blocks, never those of others: `ActiveBlocks` finds by bisection how many leading blocks are shared.

A prompt that a prefill worker has computed (`is_prefilled`) counts by its blocks alone. Prefill workers do not count
by blocks (`counts_blocks` False): they keep blocks for other workers, and not for long.

With a `stride` only every stride-th block is kept by hash: adding a prompt costs that much less, and the blocks that it
shares with others are known that much more coarsely.

Unknown requests and workers are no error: messages of router replicas, and of lost workers, may come late. Nor are
hashes that do not form a prefix chain (a replica's mistake): some may be counted wrongly, and nothing else happens.
"""  # decider

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from dynamo.protocols import load as load_events
from dynamo.router.api import Worker
from dynamo.router.worker_load import (
    CachePressure,
    Capacity,
    DecodeSlowdown,
    PrefillSpeed,
    WorkerLoad,
)

_BIT_OF_DIGIT = bytes.maketrans(b"01", b"\x00\x01")


class ActiveBlocks:
    """The workers that use each block: block hash → bit mask of workers.

    Prefix-closed: a worker that uses a block uses all blocks before it in the chain. So along a chain the set of
    workers only shrinks, and bisection finds where: ten look-ups for 512 blocks instead of 512. A worker must be
    inserted before it gets blocks.
    """

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        self._bits: dict[Worker, int] = {}
        self._workers: list[Worker | None] = []  # by position of the bit

    def insert_worker(self, worker: Worker) -> None:
        """Give a worker without blocks a bit, if possible one that a removed worker had."""
        if None in self._workers:
            position = self._workers.index(None)
            self._workers[position] = worker
        else:
            position = len(self._workers)
            self._workers.append(worker)
        self._bits[worker] = 1 << position

    def remove_worker(self, worker: Worker) -> None:
        """Take back the bit of a worker that uses no block any more."""
        self._workers[self._bits.pop(worker).bit_length() - 1] = None

    def prefix_length(self, worker: Worker, chain: Sequence[int]) -> int:
        """Return how many leading blocks of the chain this worker uses."""
        bit = self._bits[worker]
        if not chain or not self._masks.get(chain[0], 0) & bit:
            return 0
        return self._common_length(chain, bit)

    def prefix_lengths(self, chain: Sequence[int]) -> dict[Worker, int]:
        """Return how many leading blocks of the chain each worker uses; workers that use none are left out."""
        lengths: dict[Worker, int] = {}
        masks, end = self._masks, 0
        mask = masks.get(chain[0], 0) if chain else 0
        while mask:
            end = self._common_length(chain, mask, end)
            remaining = masks.get(chain[end], 0) & mask if end < len(chain) else 0
            # a byte per bit, lowest first: by text, as arithmetic copies a thousand bits each step
            flags = bin(mask ^ remaining)[:1:-1].encode().translate(_BIT_OF_DIGIT)
            workers = cast(Iterator[Worker], itertools.compress(self._workers, flags))
            lengths.update(dict.fromkeys(workers, end))
            mask = remaining
        return lengths

    def add_blocks(self, worker: Worker, chain: Sequence[int], start: int) -> None:
        """Add the blocks from `start` on to those of the worker. Blocks that no worker uses cost next to nothing."""
        masks, bit = self._masks, self._bits[worker]
        fresh = start
        if start < len(chain) and chain[start] in masks:
            fresh = bisect.bisect_left(chain, True, start, key=lambda name: name not in masks)
        for name in chain[start:fresh]:
            masks[name] |= bit
        masks.update(zip(chain[fresh:], itertools.repeat(bit), strict=False))

    def remove_blocks(self, worker: Worker, names: Sequence[int]) -> None:
        """Remove these blocks from those of the worker."""
        masks, keep = self._masks, ~self._bits[worker]
        for name in names:
            if remaining := masks.get(name, 0) & keep:
                masks[name] = remaining
            else:
                masks.pop(name, None)

    def _common_length(self, chain: Sequence[int], mask: int, start: int = 0) -> int:
        """Return the end of the blocks that all workers of the mask use."""
        get = self._masks.get
        return bisect.bisect_left(chain, True, start, key=lambda name: get(name, 0) & mask != mask)


@dataclass(slots=True, kw_only=True)
class _Request:
    worker: Worker
    hashes: Sequence[int]
    is_prefill_completed: bool = False
    first_output_at: float | None = None  # None: it came before this router knew the request
    active_tokens: int = 0  # in use at its worker at its first output


@dataclass(slots=True, kw_only=True)
class _WorkerState:
    """One worker: its load, its requests, and per shared block the number of *further* requests that use it."""

    load: WorkerLoad
    extra_uses: dict[int, int]
    request_ids: set[str]


class ActiveSequences:
    """The requests in flight at all workers of one model. Mutable; one event loop owns it."""

    def __init__(self, block_size: int, *, stride: int = 1, counts_blocks: bool = True) -> None:
        self.loads: dict[Worker, WorkerLoad] = {}
        self.prefill_speed = PrefillSpeed()
        self._decode_slowdown = DecodeSlowdown()
        self._block_size = block_size
        self._stride = stride
        self._counts_blocks = counts_blocks
        self._cache_pressure = CachePressure(self.loads.values())
        self._requests: dict[str, _Request] = {}
        self._states: dict[Worker, _WorkerState] = {}
        self._blocks = ActiveBlocks()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def set_workers(self, workers: Mapping[Worker, Capacity]) -> list[Worker]:
        """Replace the set of workers; forget the requests of removed ones, and return the removed workers."""
        removed = [worker for worker in self._states if worker not in workers]
        for worker in removed:
            for request_id in self._states[worker].request_ids:
                self._remove_blocks(worker, self._requests.pop(request_id).hashes)
            self._blocks.remove_worker(worker)
            del self._states[worker], self.loads[worker]
        for worker, capacity in workers.items():
            if worker in self._states:
                self.loads[worker].capacity = capacity
            else:
                self._blocks.insert_worker(worker)
                load = self.loads[worker] = WorkerLoad(
                    capacity, self.prefill_speed, decode_slowdown=self._decode_slowdown
                )
                self._states[worker] = _WorkerState(load=load, extra_uses={}, request_ids=set())
        self._cache_pressure.update_cache_size(block_size=self._block_size)
        return removed

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
        """Add a request with a prompt of `isl` tokens, of which `overlap` blocks need not be computed."""
        state = self._states.get(worker)
        if state is None or request_id in self._requests:
            return
        request = self._requests[request_id] = _Request(worker=worker, hashes=sequence_hashes)
        state.request_ids.add(request_id)
        num_new_tokens = max(0, isl - int(overlap * self._block_size))
        state.load.num_requests += 1
        num_new_blocks = self._add_blocks(worker, sequence_hashes)
        if self._counts_blocks:
            state.load.active_blocks += num_new_blocks
        if is_prefilled:
            self._begin_decode(request, state.load, now)
        else:
            state.load.add_prefill(request_id, num_new_tokens, now)
        self._cache_pressure.insert(state.load, num_new_tokens)

    def mark_prefill_completed(self, request_id: str, now: float) -> None:
        """Record that the first output of a request came; later outputs change nothing."""
        request = self._requests.get(request_id)
        if request is None or request.is_prefill_completed:
            return
        load = self._states[request.worker].load
        self._begin_decode(request, load, now)
        self.prefill_speed.observe(load.waiting[request_id], now - load.head_since)
        load.remove_prefill(request_id, now)
        load.head_since = now  # perhaps one step computed it together with those before it

    def free(self, request_id: str, now: float) -> None:
        """Forget a request that has ended, for whatever reason."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        state = self._states[request.worker]
        if request.first_output_at is not None:
            active_tokens = state.load.active_blocks * self._block_size
            self._decode_slowdown.observe(
                now - request.first_output_at, (request.active_tokens + active_tokens) / 2
            )
        state.request_ids.discard(request_id)
        state.load.remove_prefill(request_id, now)
        state.load.num_requests -= 1
        num_freed = self._remove_blocks(request.worker, request.hashes)
        state.load.active_blocks = (
            max(0, state.load.active_blocks - num_freed) if state.request_ids else 0
        )

    def prefix_lengths(self, sequence_hashes: Sequence[int]) -> dict[Worker, int]:
        """Return how many leading blocks of this prompt requests in flight use, by worker; zeros are left out."""
        if self._stride == 1:
            return self._blocks.prefix_lengths(sequence_hashes)
        lengths = self._blocks.prefix_lengths(self._sample(sequence_hashes))
        return {worker: length * self._stride for worker, length in lengths.items()}

    def apply(self, event: load_events.ActiveSequenceEvent, now: float) -> None:
        """Apply an event of another router replica, which came at `now` (seconds)."""
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
                request = self._requests.get(event.request_id)
                if request is not None and added.is_prefill_completed:
                    # computed before this event came: it says nothing of the prefill speed
                    request.is_prefill_completed = True
                    self.loads[request.worker].remove_prefill(event.request_id, now)
            case load_events.MarkPrefillCompleted():
                self.mark_prefill_completed(event.request_id, now)
            case load_events.Free():
                self.free(event.request_id, now)

    def _begin_decode(self, request: _Request, load: WorkerLoad, now: float) -> None:
        request.is_prefill_completed = True
        request.first_output_at = now
        request.active_tokens = load.active_blocks * self._block_size

    def _add_blocks(self, worker: Worker, hashes: Sequence[int]) -> int:
        """Count a prompt's blocks for a worker; return how many of them it did not use yet."""
        names = self._sample(hashes)
        extra_uses = self._states[worker].extra_uses
        num_shared = self._blocks.prefix_length(worker, names)
        for name in names[:num_shared]:
            extra_uses[name] = extra_uses.get(name, 0) + 1
        self._blocks.add_blocks(worker, names, num_shared)
        return len(hashes) - num_shared * self._stride

    def _remove_blocks(self, worker: Worker, hashes: Sequence[int]) -> int:
        """Undo `_add_blocks`; return how many of the blocks the worker uses no more."""
        names, extra_uses = self._sample(hashes), self._states[worker].extra_uses
        num_shared = bisect.bisect_left(names, True, key=lambda name: name not in extra_uses)
        for name in names[:num_shared]:
            if extra_uses.get(name, 0) > 1:
                extra_uses[name] -= 1
            else:
                extra_uses.pop(name, None)
        self._blocks.remove_blocks(worker, names[num_shared:])
        return len(hashes) - num_shared * self._stride

    def _sample(self, hashes: Sequence[int]) -> Sequence[int]:
        return hashes[self._stride - 1 :: self._stride]
