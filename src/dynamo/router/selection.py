"""The whole decision: what each worker holds, how busy it is, who gets the request, and whether it waits first.

    selector.set_workers({Worker(7): Capacity(total_blocks=16384)})    who is there, whenever that changes
    decision = selector.select("id", prompt, now)                     None: it waits in the router's queue
    selector.first_output("id", now)                                  its prompt is computed
    selector.free("id", now)                                          it ended, however it ended, or gave up waiting
    for id, decision in selector.admit(now): ...                      after each of these: who need not wait any more

Requests wait here while workers are busy, because only here can they still go to whoever is free first, and pass one
another. Each `admit` plans anew: the waiting, in order, choose as if those before them had gone already; who chose a
worker with room goes. So one that holds out for the worker that knows its prompt keeps nobody else from a free one.

A prompt that another worker has computed is another matter (`least_blocks`): nothing of it is left to compute, so it
goes where most room is to decode, and never waits here, because its blocks are held for a limited time.

No clock, no loop, no I/O: the frontend, the standalone router and the simulator run the same decisions.
"""

from collections.abc import Mapping

from dynamo.base import errors
from dynamo.router import api, baselines, cost_function
from dynamo.router.active_sequences import ActiveSequences
from dynamo.router.api import Decision, Policy, Prompt, View
from dynamo.router.queue import Waiting, WaitingQueue
from dynamo.router.worker_load import Capacity, Load

_LOOKAHEAD = (
    32  # requests of the queue that one `admit` plans for, so that it stays short under overload
)
_NOTHING: Mapping[api.Worker, int] = {}


class Selector:
    """Mutable; one event loop owns it. Without a queue nobody waits."""

    def __init__(
        self,
        policy: Policy,
        index: api.Index,
        active: ActiveSequences,
        *,
        queue: WaitingQueue | None = None,
        max_backlog: float = 1.0,
        credits_: cost_function.Credits | None = None,
    ) -> None:
        """`max_backlog`: a worker has room up to so many full steps (max_num_batched_tokens) of prompt tokens."""
        self.active = active
        self._policy = policy
        self._index = index
        self._queue = queue
        self._held_out: dict[str, Decision] = {}  # the worker that each of the waiting waits for
        self._reserved: list[Load] = []  # whose `reserved_tokens` this turn's planning has raised
        self._max_backlog = max_backlog
        self._credits = credits_ or cost_function.Credits()

    @property
    def can_wait(self) -> bool:
        """Whether it has a queue."""
        return self._queue is not None

    @property
    def num_waiting(self) -> int:
        """Requests in the router's queue."""
        return len(self._queue) if self._queue is not None else 0

    def set_workers(self, workers: Mapping[api.Worker, Capacity]) -> None:
        """Who is there now. What those who are gone held, and had to do, is forgotten."""
        for worker in self.active.set_workers(workers):
            self._index.remove_worker(worker)

    def select(self, request_id: str, prompt: Prompt, now: float) -> Decision | None:
        """A worker for a new request; None if it waits.

        Raises NoWorkers if there are none, Overloaded if too many wait, InvalidRequest if the pinned worker is unknown.
        """
        self._check(prompt)
        view = self._view(prompt)
        if self._queue is None or prompt.pinned is not None or prompt.is_prefilled:
            return self._send(request_id, prompt, self._choose(prompt, view, now), now)
        if not len(self._queue) and self._is_room_anywhere(now):
            decision = self._choose(prompt, view, now)
            if self._can_go(prompt, view, decision, now):
                return self._send(request_id, prompt, decision, now)
        self._push(self._queue, request_id, prompt, view, now)
        return None

    def preview(self, prompt: Prompt, now: float) -> Decision:
        """Who would get it, if nobody had to wait; nothing is remembered. Raises as `select`."""
        self._check(prompt)
        return self._choose(prompt, self._view(prompt), now)

    def enqueue(self, request_id: str, prompt: Prompt, now: float) -> None:
        """As `select`, but leave the decision to the next `admit`.

        For requests that come in the same turn of the loop: so they are ordered before the first of them is sent. Needs
        a queue, and a prompt that is not pinned. Raises NoWorkers, Overloaded.
        """
        assert self._queue is not None, "a selector without a queue cannot enqueue"
        self._check(prompt)
        self._push(self._queue, request_id, prompt, self._view(prompt), now)

    def first_output(self, request_id: str, now: float) -> None:
        """A worker has computed its prompt."""
        self.active.prefill_completed(request_id, now)

    def free(self, request_id: str, now: float) -> None:
        """It ended, or gave up waiting."""
        self.active.free(request_id, now)
        if self._queue is not None:
            self._queue.remove(request_id)
            self._held_out.pop(request_id, None)

    def admit(self, now: float) -> list[tuple[str, Decision]]:
        """Who of the waiting goes now, and where. To be called whenever room may have come."""
        if self._queue is None or not len(self._queue) or not self.active.loads:
            return []
        admitted = self._plan(self._queue, now)
        for load in self._reserved:
            load.reserved_tokens = 0.0
        self._reserved.clear()
        for request_id, _ in admitted:
            self._queue.remove(request_id)
            self._held_out.pop(request_id, None)
        return admitted

    def _push(
        self, queue: WaitingQueue, request_id: str, prompt: Prompt, view: View, now: float
    ) -> None:
        work_s = self._work_s(prompt, view)
        queue.push(Waiting(request_id=request_id, prompt=prompt, arrival=now, work_s=work_s))

    def _plan(self, queue: WaitingQueue, now: float) -> list[tuple[str, Decision]]:
        admitted: list[tuple[str, Decision]] = []
        loads, num_left = self.active.loads, _LOOKAHEAD
        for waiting in queue.in_order(now):
            if not num_left or not self._is_room_anywhere(now):
                break
            request_id, prompt = waiting.request_id, waiting.prompt
            held = self._held_out.get(request_id)
            if held is not None and held.worker in loads and not self._has_room(held.worker, now):
                self._reserve(prompt, held)  # its worker has no room still: nothing to think about
                continue
            num_left -= 1
            view = self._view(prompt)
            decision = self._choose(prompt, view, now)
            if self._can_go(prompt, view, decision, now):
                admitted.append((request_id, self._send(request_id, prompt, decision, now)))
            else:
                self._held_out[request_id] = decision
                self._reserve(prompt, decision)
        return admitted

    def _can_go(self, prompt: Prompt, view: View, decision: Decision, now: float) -> bool:
        if not self._policy.waits:
            return True
        num_new = len(prompt.sequence_hashes) - view.in_flight.get(decision.worker, 0)
        return view.loads[decision.worker].has_room(num_new, self._max_backlog, now)

    def _reserve(self, prompt: Prompt, decision: Decision) -> None:
        """Those behind it shall see that it will go there."""
        num_new = prompt.num_tokens - decision.overlap_blocks * prompt.block_size
        load = self.active.loads[decision.worker]
        load.reserved_tokens += num_new
        self._reserved.append(load)

    def _is_room_anywhere(self, now: float) -> bool:
        return any(load.has_room(0, self._max_backlog, now) for load in self.active.loads.values())

    def _has_room(self, worker: api.Worker, now: float) -> bool:
        return self.active.loads[worker].has_room(0, self._max_backlog, now)

    def _choose(self, prompt: Prompt, view: View, now: float) -> Decision:
        if prompt.pinned is not None:
            return Decision(prompt.pinned, view.overlap(prompt.pinned))
        if prompt.is_prefilled:
            return baselines.choose(prompt, view, now)
        return self._policy.choose(prompt, view, now)

    def _send(self, request_id: str, prompt: Prompt, decision: Decision, now: float) -> Decision:
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

    def _view(self, prompt: Prompt) -> View:
        loads: Mapping[api.Worker, Load] = self.active.loads
        if not prompt.is_free:
            allowed = {worker: load for worker, load in loads.items() if prompt.allows(worker)}
            loads = allowed or loads  # while it waited, those that it may go to have died
        if prompt.is_prefilled or not self._policy.looks:
            return View(loads, _NOTHING, _NOTHING)
        overlaps = self._index.find(prompt.sequence_hashes)
        return View(
            loads,
            cost_function.cached_blocks(overlaps, self._credits),
            self.active.runs(prompt.sequence_hashes),
        )

    def _work_s(self, prompt: Prompt, view: View) -> float:
        known = max((0.0, *view.cached.values(), *view.in_flight.values()))
        return (prompt.num_tokens - known * prompt.block_size) / self.active.pace.tokens_per_s

    def _check(self, prompt: Prompt) -> None:
        loads = self.active.loads
        if prompt.dp_rank is not None and prompt.pinned is None:
            self._check_rank(prompt.dp_rank)
        if not any(map(prompt.allows, loads)):
            raise errors.NoWorkers("no worker serves this model: start one, or wait until it is up")
        if prompt.pinned is not None and prompt.pinned not in loads:
            raise errors.InvalidRequest(
                f"expected the id of a worker that serves this model, got {prompt.pinned.instance_id}",
                param="nvext.backend_instance_id",
            )

    def _check_rank(self, dp_rank: int) -> None:
        ranks = {worker.dp_rank for worker in self.active.loads}
        if ranks and dp_rank not in ranks:
            raise errors.InvalidRequest(
                f"data_parallel_rank: expected at most {max(ranks)}, got {dp_rank}",
                param="data_parallel_rank",
            )
