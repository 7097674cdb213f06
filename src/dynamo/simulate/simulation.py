"""The event loop of a simulation, and its results: arrivals and steps of workers in order of time, with the router's
own decisions in between.
"""  # decider

import heapq
import itertools
import math
import operator
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dynamo.router import api, prefix_index, selection
from dynamo.simulate.workers import SimulatedWorker
from dynamo.simulate.workload import SimulatedRequest, Workload

_ARRIVAL = operator.attrgetter("at")
_REPORT_EVERY = 100


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The course of one request."""

    arrival: SimulatedRequest
    worker: api.Worker | None = None
    sent_at: float = 0.0
    first_output_at: float = 0.0
    ended_at: float = 0.0
    num_cached: int = 0

    @property
    def ttft(self) -> float:
        """Return the seconds from arrival to the first token."""
        return self.first_output_at - self.arrival.at

    @property
    def itl(self) -> float:
        """Return the mean seconds between two tokens; 0 for an answer of one."""
        return (self.ended_at - self.first_output_at) / max(1, self.arrival.num_output - 1)


@dataclass(slots=True)
class RunRecord:
    """The outcomes of all requests of a run."""

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
        self._record = RunRecord()
        self._open: dict[str, Outcome] = {}
        self._ids = map(str, itertools.count())
        self._due: list[tuple[float, api.Worker]] = []  # a heap; may hold times that have moved

    def run(self) -> RunRecord:
        """Run until the last request has ended."""
        turns = [
            list(turn) for _, turn in itertools.groupby(self._workload.initial_arrivals(), _ARRIVAL)
        ]
        turns.reverse()
        while turns or self._due:
            if turns and (not self._due or turns[-1][0].at < self._due[0][0]):
                self._arrive(turns.pop())
            else:
                self._step(*heapq.heappop(self._due))
        self._on_progress(len(self._record.outcomes))
        return self._record

    def _arrive(self, turn: Sequence[SimulatedRequest]) -> None:
        """Route requests that arrive at one time: all are queued before the first is sent, as in one turn of a loop."""
        now = turn[0].at
        for arrival in turn:
            request_id, outcomes = next(self._ids), self._record.outcomes
            self._open[request_id] = outcome = Outcome(arrival=arrival)
            outcomes.append(outcome)
            if len(outcomes) % _REPORT_EVERY == 0:
                self._on_progress(len(outcomes))
            prompt = api.Prompt(
                num_tokens=arrival.num_tokens,
                block_size=self._workload.block_size,
                sequence_hashes=arrival.names,
            )
            if len(turn) > 1 and self._selector.can_wait:
                self._selector.enqueue(request_id, prompt, now)
            elif (decision := self._selector.select(request_id, prompt, now)) is not None:
                self._send(request_id, decision.worker, now)
        self._admit(now)
        self._record.max_waiting = max(self._record.max_waiting, self._selector.num_waiting)

    def _admit(self, now: float) -> None:
        for request_id, decision in self._selector.admit(now):
            self._send(request_id, decision.worker, now)

    def _send(self, request_id: str, worker: api.Worker, now: float) -> None:
        outcome = self._open[request_id]
        outcome.worker, outcome.sent_at = worker, now
        simulated = self._workers[worker]
        was_due = simulated.next_time
        simulated.submit(request_id, outcome.arrival, now)
        self._schedule_step(worker, was_due)

    def _schedule_step(self, worker: api.Worker, was_due: float) -> None:
        due = self._workers[worker].next_time
        if due != was_due and due < math.inf:
            heapq.heappush(self._due, (due, worker))

    def _step(self, now: float, worker: api.Worker) -> None:
        if self._workers[worker].next_time != now:
            return
        result = self._workers[worker].advance(now)
        for is_stored, names, tier in result.changes:  # the router's index follows without delay
            if is_stored:
                self._index.add_blocks(worker, tier, names)
            else:
                self._index.remove_blocks(worker, tier, names)
        for request_id, num_cached in result.first_outputs:
            outcome = self._open[request_id]
            outcome.first_output_at, outcome.num_cached = now, num_cached
            self._selector.mark_prefill_completed(request_id, now)
        self._schedule_step(worker, math.inf)
        for request_id in result.ended:
            self._selector.free(request_id, now)
            self._open.pop(request_id).ended_at = now
        self._admit(now)
        turn = [
            arrival
            for _ in result.ended
            if (arrival := self._workload.next_arrival(now)) is not None
        ]
        if turn:
            self._arrive(turn)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """The curves of the plots."""

    ttfts: Sequence[float]  # seconds, rising
    itls: Sequence[float]  # seconds, rising; of answers with two tokens or more
    # (seconds since the beginning, share of cached prompt tokens)
    hit_rates: Sequence[tuple[float, float]]
    shares: Sequence[float]  # computed prompt tokens of each worker over their mean, falling


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySummary:
    """The figures of one policy. Times are seconds, shares are from 0 to 1."""

    policy: str
    num_requests: int
    mean_ttft: float
    p50_ttft: float
    p99_ttft: float
    max_ttft: float
    mean_itl: float  # of answers with two tokens or more; 0 without any
    requests_per_s: float  # from the first arrival to the last end
    hit_rate: float  # cached prompt tokens over prompt tokens
    imbalance: float  # computed prompt tokens: those of the busiest worker over the mean
    max_waiting: int  # in the router's queue
    simulated_s: float
    elapsed_s: float  # real time of the simulation
    curves: Curves


def summarise(
    policy: str, record: RunRecord, workers: Sequence[api.Worker], elapsed_s: float
) -> PolicySummary:
    """Compute the figures of a run with at least one request."""
    ttfts = sorted(outcome.ttft for outcome in record.outcomes)
    itls = sorted(o.itl for o in record.outcomes if o.arrival.num_output > 1)
    computed: Counter[api.Worker | None] = Counter()
    for outcome in record.outcomes:
        computed[outcome.worker] += outcome.arrival.num_tokens - outcome.num_cached
    mean = computed.total() / len(workers)
    shares = sorted((computed[worker] / mean if mean else 1.0 for worker in workers), reverse=True)
    return PolicySummary(
        policy=policy,
        num_requests=len(ttfts),
        mean_ttft=statistics.fmean(ttfts),
        p50_ttft=quantile(ttfts, 0.5),
        p99_ttft=quantile(ttfts, 0.99),
        max_ttft=ttfts[-1],
        mean_itl=statistics.fmean(itls or (0.0,)),
        requests_per_s=len(ttfts)
        / (max(o.ended_at for o in record.outcomes) - record.outcomes[0].arrival.at),
        hit_rate=sum(o.num_cached for o in record.outcomes)
        / sum(o.arrival.num_tokens for o in record.outcomes),
        imbalance=shares[0],
        max_waiting=record.max_waiting,
        simulated_s=max(o.first_output_at for o in record.outcomes),
        elapsed_s=elapsed_s,
        curves=Curves(ttfts=ttfts, itls=itls, hit_rates=_hit_rates(record), shares=shares),
    )


def quantile(rising: Sequence[float], share: float) -> float:
    """Return the value below which this share of rising values lies; there is at least one."""
    return rising[min(len(rising) - 1, int(share * len(rising)))]


def _hit_rates(record: RunRecord, num_parts: int = 60) -> list[tuple[float, float]]:
    """Return the hit rate of each of `num_parts` equal parts of the requests, in order of arrival."""
    size = -(-len(record.outcomes) // num_parts)
    rates = []
    for i in range(0, len(record.outcomes), size):
        part = record.outcomes[i : i + size]
        num_tokens = sum(outcome.arrival.num_tokens for outcome in part)
        rates.append((part[-1].arrival.at, sum(o.num_cached for o in part) / num_tokens))
    return rates
