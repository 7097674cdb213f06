"""The event loop of a simulation: arrivals and workers' steps in order of time, the router's decisions in between."""

import heapq
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dynamo.protocols import kv_events
from dynamo.router import api, prefix_index, selection
from dynamo.simulate.worker import Change, SimulatedWorker
from dynamo.simulate.workload import Arrival, Workload

_ARRIVAL = operator.attrgetter("at")
_REPORT_EVERY = 100


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of one request."""

    arrival: Arrival
    worker: api.Worker | None = None
    sent_at: float = 0.0
    first_output_at: float = 0.0
    num_cached: int = 0

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token."""
        return self.first_output_at - self.arrival.at


@dataclass(slots=True)
class Record:
    """All of a run."""

    outcomes: list[Outcome] = field(default_factory=list)
    max_waiting: int = 0  # in the router's queue


class Simulation:
    """One run of one workload over one set of workers."""

    def __init__(
        self,
        workload: Workload,
        workers: Mapping[api.Worker, SimulatedWorker],
        selector: selection.Selector,
        index: prefix_index.PrefixIndex,
        on_progress: Callable[[int], None] = lambda num_done: None,
    ) -> None:
        self._workload = workload
        self._workers = workers
        self._selector = selector
        self._index = index
        self._on_progress = on_progress
        self._record = Record()
        self._open: dict[str, Outcome] = {}
        self._ids = map(str, itertools.count())
        self._due: list[tuple[float, api.Worker]] = []  # a heap; may hold times that have moved

    def run(self) -> Record:
        """To the end of the last request."""
        turns = [list(turn) for _, turn in itertools.groupby(self._workload.first(), _ARRIVAL)]
        turns.reverse()
        while turns or self._due:
            if turns and (not self._due or turns[-1][0].at < self._due[0][0]):
                self._arrive(turns.pop())
            else:
                self._step(*heapq.heappop(self._due))
        self._on_progress(len(self._record.outcomes))
        return self._record

    def _arrive(self, turn: Sequence[Arrival]) -> None:
        """Requests of one moment. A queue sees them all before the first is sent, as in one turn of an event loop."""
        now = turn[0].at
        for arrival in turn:
            request_id, prompt = self._open_request(arrival), self._prompt(arrival)
            if len(turn) > 1 and self._selector.can_wait:
                self._selector.enqueue(request_id, prompt, now)
            elif (decision := self._selector.select(request_id, prompt, now)) is not None:
                self._send(request_id, decision.worker, now)
        self._admit(now)
        self._record.max_waiting = max(self._record.max_waiting, self._selector.num_waiting)

    def _open_request(self, arrival: Arrival) -> str:
        request_id, outcomes = next(self._ids), self._record.outcomes
        self._open[request_id] = outcome = Outcome(arrival=arrival)
        outcomes.append(outcome)
        if len(outcomes) % _REPORT_EVERY == 0:
            self._on_progress(len(outcomes))
        return request_id

    def _admit(self, now: float) -> None:
        for request_id, decision in self._selector.admit(now):
            self._send(request_id, decision.worker, now)

    def _prompt(self, arrival: Arrival) -> api.Prompt:
        return api.Prompt(
            num_tokens=arrival.num_tokens,
            block_size=self._workload.block_size,
            sequence_hashes=arrival.names,
        )

    def _send(self, request_id: str, worker: api.Worker, now: float) -> None:
        outcome = self._open[request_id]
        outcome.worker, outcome.sent_at = worker, now
        simulated = self._workers[worker]
        was_due = simulated.next_time
        simulated.submit(request_id, outcome.arrival, now)
        self._expect(worker, was_due)

    def _expect(self, worker: api.Worker, was_due: float) -> None:
        due = self._workers[worker].next_time
        if due != was_due and due < math.inf:
            heapq.heappush(self._due, (due, worker))

    def _step(self, now: float, worker: api.Worker) -> None:
        progress = self._workers[worker].advance(now)
        self._tell(worker, progress.changes)
        for request_id, num_cached in progress.first_outputs:
            outcome = self._open[request_id]
            outcome.first_output_at, outcome.num_cached = now, num_cached
            self._selector.mark_prefill_completed(request_id, now)
        self._expect(worker, math.inf)
        self._end(progress.ended, now)

    def _tell(self, worker: api.Worker, changes: Sequence[Change]) -> None:
        """The index hears at once what a cache took in, and what it forgot."""
        for is_stored, names in changes:
            if is_stored:
                self._index.add_blocks(worker, kv_events.DEVICE, names)
            else:
                self._index.remove_blocks(worker, kv_events.DEVICE, names)

    def _end(self, request_ids: Sequence[str], now: float) -> None:
        for request_id in request_ids:
            self._selector.free(request_id, now)
            del self._open[request_id]
        self._admit(now)
        turn = [arrival for _ in request_ids if (arrival := self._workload.next(now)) is not None]
        if turn:
            self._arrive(turn)
