"""The whole decision: which worker gets a request, by cached blocks and load, and whether the request waits first.

    selector.set_workers({Worker(7): Capacity(total_blocks=16384)})    whenever the set of workers changes
    decision = selector.select("id", prompt, now)                     None: the request waits in the queue
    selector.mark_prefill_completed("id", now)                        at its first output
    selector.free("id", now)                                          at its end, or when its wait is cancelled
    for id, decision in selector.admit(now): ...                      after each of these: requests to send now

Requests wait here while workers are busy, because only here can they still go to the worker that is free first, and
overtake one another. Each `admit` plans anew: the queued requests, in order, select as if those before them had been
sent; a request is sent if its worker has room. So a request that waits for the worker with its prefix keeps no other
request from a free worker.

The order of the queue:

    fcfs       first come, first served
    wspt       weighted shortest processing time, aged: as if a request had come later by `AGING` × its work
    deadline   the request with the earliest time for its first token
    lcfs       last come, first served: for callers that give up soon

`priority` counts as seconds of earlier arrival; under wspt it divides the work as well.

No request starves: one that has waited longer than `patience_s` goes before all others, in order of arrival. Under
wspt hardly any waits that long, since a request that arrives later than `AGING` × another's work cannot overtake it.

A prompt that a prefill worker has computed is another matter (`policies.select_decode_worker`): nothing of it is left
to compute, so it goes where most room to decode is, and never waits, because its blocks are held for a limited time.

No clock, no loop, no I/O: frontend, standalone router and simulator run the same decisions.
"""  # decider

import bisect
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from dynamo.base import errors
from dynamo.router import api, explanation, policies
from dynamo.router.active_sequences import ActiveSequences
from dynamo.router.api import Candidates, Decision, Prompt, RoutingPolicy
from dynamo.router.worker_load import Capacity, WorkerLoad

Order = Literal["fcfs", "wspt", "deadline", "lcfs"]
AGING = 2.0
_DEFAULT_DEADLINE_S = 10.0
_LOOKAHEAD = 32  # queued requests that one `admit` plans for: keeps it short under overload
_NO_BLOCKS: Mapping[api.Worker, int] = {}
_RANK_POLICY = policies.EstimatedTtft()  # among the ranks of one instance, whatever the policy is


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRequest:
    """One request of the queue. `work_s`: seconds to compute its prompt where most of it is cached."""

    request_id: str
    prompt: Prompt
    arrival: float
    work_s: float


_SORT_KEYS: dict[str, Callable[[QueuedRequest], float]] = {
    "fcfs": lambda r: r.arrival - r.prompt.priority,
    "wspt": lambda r: (
        r.arrival - r.prompt.priority + AGING * r.work_s / (1 + max(0.0, r.prompt.priority))
    ),
    "deadline": lambda r: (
        (r.arrival + _DEFAULT_DEADLINE_S if r.prompt.deadline is None else r.prompt.deadline)
        - r.prompt.priority
    ),
    "lcfs": lambda r: -r.arrival - r.prompt.priority,
}


class RequestQueue:
    """Queued requests in order of arrival and of the queue policy. Mutable; holds at most `max_size`."""

    def __init__(self, order: Order, *, max_size: int = 4096, patience_s: float = 120.0) -> None:
        self._key = _SORT_KEYS[order]
        self._max_size = max_size
        self._patience_s = patience_s
        self._by_id: dict[str, tuple[float, int, QueuedRequest]] = {}  # in order of arrival
        self._sorted: list[tuple[float, int, QueuedRequest]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._sorted)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def push(self, request: QueuedRequest) -> None:
        """Add a request with an id that is not in the queue. Raises Overloaded if the queue is full."""
        if len(self._sorted) >= self._max_size:
            raise errors.Overloaded(
                f"{self._max_size} requests wait for a worker already (--router-queue-size): try again later"
            )
        self._count += 1
        entry = (self._key(request), self._count, request)
        self._by_id[request.request_id] = entry
        bisect.insort(self._sorted, entry)

    def remove(self, request_id: str) -> bool:
        """Remove a request that is sent or cancelled. Returns False if it was not in the queue."""
        entry = self._by_id.pop(request_id, None)
        if entry is None:
            return False
        del self._sorted[bisect.bisect_left(self._sorted, entry[:2], key=lambda e: e[:2])]
        return True

    def in_order(self, now: float) -> Iterator[QueuedRequest]:
        """Yield all requests, the next to be sent first. The queue must not change meanwhile."""
        overdue = set()
        for _, count, request in self._by_id.values():
            if now - request.arrival < self._patience_s:
                break
            overdue.add(count)
            yield request
        for _, count, request in self._sorted:
            if count not in overdue:
                yield request


class Selector:
    """The decisions of one router for one model. Mutable; one event loop owns it. Without a queue no request waits."""

    def __init__(
        self,
        policy: RoutingPolicy,
        index: api.Index,
        active: ActiveSequences,
        *,
        queue: RequestQueue | None = None,
        max_backlog: float = 1.0,
        tier_weights: policies.TierWeights = policies.DEFAULT_TIER_WEIGHTS,
        select_worker: api.SelectWorker | None = None,
    ) -> None:
        """`max_backlog`: a worker has room below so many full steps (max_num_batched_tokens) of prompt tokens.

        `select_worker` is called in place of that of the policy.
        """
        self.active = active
        self._policy = policy
        self._select_worker = select_worker or policy.select_worker
        self._index = index
        self._queue = queue
        self._planned: dict[str, Decision] = {}  # queued request -> the worker that it waits for
        self._reserved: list[WorkerLoad] = []  # loads with `reserved_tokens`, during one plan
        self._max_backlog = max_backlog
        self._tier_weights = tier_weights

    @property
    def can_wait(self) -> bool:
        """Return True if requests may wait in the router."""
        return self._queue is not None

    @property
    def num_waiting(self) -> int:
        """Return the number of queued requests."""
        return len(self._queue) if self._queue is not None else 0

    def set_workers(self, workers: Mapping[api.Worker, Capacity]) -> None:
        """Replace the set of workers; forget the blocks and the load of removed ones."""
        for worker in self.active.set_workers(workers):
            self._index.remove_worker(worker)
        self._planned.clear()  # a queued request may go to a worker that is new

    def select(self, request_id: str, prompt: Prompt, now: float) -> Decision | None:
        """Select the worker of a new request, and count it there; return None if the request waits in the queue.

        Raises NoWorkers, Overloaded if the queue is full, InvalidRequest if the pinned worker is unknown.
        """
        self._check(prompt)
        candidates = self._candidates(prompt)
        if self._queue is None or prompt.pinned is not None or prompt.is_prefilled:
            decision = self._choose(prompt, candidates, now)
            return self._add_active(request_id, prompt, decision, now)
        if not len(self._queue) and self._has_any_room(now):
            decision = self._choose(prompt, candidates, now)
            if self._can_send(prompt, candidates, decision, now):
                return self._add_active(request_id, prompt, decision, now)
        self._push(self._queue, request_id, prompt, candidates, now)
        return None

    def count_cached(self, prompt: Prompt) -> dict[api.Worker, int]:
        """Return how many leading blocks of a prompt each worker has, in all its tiers."""
        num_blocks: dict[api.Worker, int] = {}
        for by_worker in self._index.find_matches(prompt.sequence_hashes).by_tier.values():
            for worker, count in by_worker.items():
                num_blocks[worker] = num_blocks.get(worker, 0) + count
        return num_blocks

    def find_overlaps(self, prompt: Prompt) -> api.OverlapScores:
        """Return the blocks of a prompt that each worker has, by tier."""
        return self._index.find_matches(prompt.sequence_hashes)

    def potential_loads(self, prompt: Prompt) -> dict[api.Worker, api.PotentialLoad]:
        """Return the load that each worker which may serve a prompt would have with it."""
        candidates, loads = self._candidates(prompt), dict[api.Worker, api.PotentialLoad]()
        for worker, load in candidates.loads.items():
            num_prefill, num_decode = policies.prefill_and_decode(prompt, candidates, worker)
            loads[worker] = api.PotentialLoad(
                round(num_prefill * prompt.block_size), num_decode, load.num_requests
            )
        return loads

    def preview(self, prompt: Prompt, now: float) -> Decision:
        """Return the decision without a queue and without counting the request. Raises as `select`."""
        self._check(prompt)
        return self._choose(prompt, self._candidates(prompt), now)

    def choose_rank(self, prompt: Prompt, instance_id: int, now: float) -> api.Worker:
        """Return the rank for a prompt that is for an instance with several, and for none of them by name."""
        allowed = dataclasses.replace(prompt, allowed_instances=frozenset((instance_id,)))
        return _RANK_POLICY.select_worker(allowed, self._candidates(allowed), now).worker

    def explain(self, prompt: Prompt, now: float) -> explanation.RoutingExplanation:
        """Explain the decision that `select` would make now, without making it."""
        return explanation.explain(self._policy, prompt, self._candidates(prompt), now)

    def enqueue(self, request_id: str, prompt: Prompt, now: float) -> None:
        """Queue a request in any case; the next `admit` decides.

        For requests that arrive in one turn of the event loop: so they are ordered before the first of them is sent.
        Needs a queue, and a prompt that is not pinned. Raises NoWorkers, Overloaded.
        """
        assert self._queue is not None, "a selector without a queue cannot enqueue"
        self._check(prompt)
        self._push(self._queue, request_id, prompt, self._candidates(prompt), now)

    def mark_prefill_completed(self, request_id: str, now: float) -> None:
        """Record that a worker has computed the prompt of a request."""
        self.active.mark_prefill_completed(request_id, now)

    def free(self, request_id: str, now: float) -> None:
        """Forget a request after its end, or after its wait in the queue was cancelled."""
        self.active.free(request_id, now)
        if self._queue is not None:
            self._queue.remove(request_id)
            self._planned.pop(request_id, None)

    def admit(self, now: float) -> list[tuple[str, Decision]]:
        """Take the requests that can be sent now from the queue. Call it whenever a worker may have got room."""
        if self._queue is None or not len(self._queue) or not self.active.loads:
            return []
        admitted = self._plan(self._queue, now)
        for load in self._reserved:
            load.reserved_tokens = 0.0
        self._reserved.clear()
        for request_id, _ in admitted:
            self._queue.remove(request_id)
            self._planned.pop(request_id, None)
        return admitted

    def _push(
        self,
        queue: RequestQueue,
        request_id: str,
        prompt: Prompt,
        candidates: Candidates,
        now: float,
    ) -> None:
        num_cached = max((0.0, *candidates.cached.values(), *candidates.in_flight.values()))
        num_new_tokens = prompt.num_tokens - num_cached * prompt.block_size
        work_s = num_new_tokens / self.active.prefill_speed.tokens_per_s
        queue.push(QueuedRequest(request_id=request_id, prompt=prompt, arrival=now, work_s=work_s))

    def _plan(self, queue: RequestQueue, now: float) -> list[tuple[str, Decision]]:
        admitted: list[tuple[str, Decision]] = []
        loads, num_left = self.active.loads, _LOOKAHEAD
        for queued in queue.in_order(now):
            if not num_left or not self._has_any_room(now):
                break
            request_id, prompt = queued.request_id, queued.prompt
            earlier = self._planned.get(request_id)
            if earlier is not None:
                load = loads.get(earlier.worker)
                if load is not None and not load.has_room(0, self._max_backlog, now):
                    self._reserve(prompt, earlier)  # still no room there: nothing to decide anew
                    continue
            num_left -= 1
            candidates = self._candidates(prompt)
            decision = self._choose(prompt, candidates, now)
            if self._can_send(prompt, candidates, decision, now):
                admitted.append((request_id, self._add_active(request_id, prompt, decision, now)))
            else:
                self._planned[request_id] = decision
                self._reserve(prompt, decision)
        return admitted

    def _can_send(
        self, prompt: Prompt, candidates: Candidates, decision: Decision, now: float
    ) -> bool:
        if not self._policy.waits_for_worker:
            return True
        num_new = len(prompt.sequence_hashes) - candidates.in_flight.get(decision.worker, 0)
        return candidates.loads[decision.worker].has_room(num_new, self._max_backlog, now)

    def _reserve(self, prompt: Prompt, decision: Decision) -> None:
        """Count a queued request at the worker that it waits for, for the requests planned after it."""
        load = self.active.loads[decision.worker]
        load.reserved_tokens += prompt.num_tokens - decision.overlap_blocks * prompt.block_size
        self._reserved.append(load)

    def _has_any_room(self, now: float) -> bool:
        return any(load.has_room(0, self._max_backlog, now) for load in self.active.loads.values())

    def _choose(self, prompt: Prompt, candidates: Candidates, now: float) -> Decision:
        if prompt.pinned is not None:
            return Decision(prompt.pinned, candidates.overlap(prompt.pinned))
        if prompt.is_prefilled:
            return policies.select_decode_worker(prompt, candidates, now)
        select_worker = prompt.override.select_worker if prompt.override else self._select_worker
        return select_worker(prompt, candidates, now)

    def _add_active(
        self, request_id: str, prompt: Prompt, decision: Decision, now: float
    ) -> Decision:
        self.active.add(
            request_id,
            decision.worker,
            prompt.sequence_hashes,
            isl=prompt.num_tokens,
            overlap=decision.overlap_blocks,
            now=now,
            is_prefilled=prompt.is_prefilled,
        )
        return decision

    def _candidates(self, prompt: Prompt) -> Candidates:
        loads: Mapping[api.Worker, WorkerLoad] = self.active.loads
        if not prompt.is_unrestricted:
            allowed = {worker: load for worker, load in loads.items() if prompt.allows(worker)}
            loads = allowed or loads  # the allowed workers may have been lost while it waited
        if prompt.is_prefilled or not (prompt.override or self._policy.uses_cache):
            return Candidates(loads, _NO_BLOCKS, _NO_BLOCKS)
        overlaps = self._index.find_matches(prompt.sequence_hashes)
        return Candidates(
            loads,
            policies.cached_blocks(
                overlaps, prompt.override.tier_weights if prompt.override else self._tier_weights
            ),
            self.active.prefix_lengths(prompt.sequence_hashes),
        )

    def _check(self, prompt: Prompt) -> None:
        loads = self.active.loads
        if prompt.dp_rank is not None:
            instance_id = None if prompt.pinned is None else prompt.pinned.instance_id
            ranks = {w.dp_rank for w in loads if instance_id in (None, w.instance_id)}
            if ranks and prompt.dp_rank not in ranks:
                raise errors.InvalidRequest.of_param(
                    "data_parallel_rank", f"expected at most {max(ranks)}, got {prompt.dp_rank}"
                )
        if not any(map(prompt.allows, loads)):
            raise errors.NoWorkers("no worker serves this model: start one, or wait until it is up")
        if prompt.pinned is not None and prompt.pinned not in loads:
            raise errors.InvalidRequest(
                f"expected the id of a worker that serves this model, got {prompt.pinned.instance_id:x}",
                param="nvext.backend_instance_id",
            )
