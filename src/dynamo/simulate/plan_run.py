"""One run of the planner's simulation: arrivals, a cluster, and the orders of workers, in virtual time."""  # decider

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dynamo.planner import observation
from dynamo.simulate.plan_cluster import PlanCluster, PlanEvent, WorkerDeath, WorkerOrder
from dynamo.simulate.plan_worker import Request, StepTimes

INITIAL = observation.Replicas(1, 1)
Decide = Callable[[observation.Observation], WorkerOrder]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanScenario:
    """What all policies of a table have in common. Times are seconds."""

    requests: Sequence[Request]
    times: StepTimes
    profile_factor: float = 1.0  # of the times of the policies' profile, over these
    corrects: bool = True  # the policies may correct that profile
    ttft_s: float = 0.5
    itl_s: float = 0.05
    interval_s: float = 10.0
    startup_s: float = 60.0
    role_change_s: float | None = None  # None: workers keep their roles
    max_gpus: int = 8
    initial: observation.Replicas = INITIAL
    is_aggregated: bool = False
    deaths: Sequence[WorkerDeath] = ()  # that are injected
    num_hanging_starts: int = 0  # the first that are ordered
    num_failing_starts: int = 0  # those after them

    def cluster(self) -> PlanCluster:
        """Return a cluster without workers."""
        return PlanCluster(
            self.times,
            startup_s=self.startup_s,
            role_change_s=None if self.is_aggregated else self.role_change_s,
            is_aggregated=self.is_aggregated,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSample:
    """One interval of a run: its arrivals, and the workers at its end."""

    at: float  # its end
    num_requests: int
    num_prefill: int  # ready workers
    num_decode: int
    num_billed: int  # those that start or drain included
    attainment: float | None  # of the servable requests that arrived in it; None without such


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """The figures of one run. Times are seconds, shares are from 0 to 1."""

    policy: str
    num_requests: int
    num_lost: int
    mean_latency: float
    p90_latency: float
    p99_latency: float
    mean_ttft: float
    p90_ttft: float
    p99_ttft: float
    attainment: float  # share of the servable requests that met both targets
    servable: float
    gpu_seconds: float
    num_scalings: int
    num_migrated: int  # requests whose worker died
    events: Sequence[PlanEvent] = ()
    samples: Sequence[PlanSample] = ()


def run(
    scenario: PlanScenario, name: str, decide: Decide, initial: observation.Replicas | None = None
) -> PlanResult:
    """Simulate one policy until the last request has ended."""
    cluster = scenario.cluster()
    cluster.add_ready(scenario.initial if initial is None else initial)
    cluster.num_hanging_starts = scenario.num_hanging_starts
    cluster.num_failing_starts = scenario.num_failing_starts
    for death in scenario.deaths:
        cluster.schedule_death(death)
    requests = [copy.copy(request) for request in scenario.requests]
    tick_at, position = scenario.interval_s, 0
    last_tick = requests[-1].at + 36_000
    pools: list[_Pools] = []  # of an observation no more is kept: a trace may be weeks long
    while cluster.num_ended < len(requests) and tick_at < last_tick:
        position = feed(cluster, requests, position, tick_at)
        cluster.run_until(tick_at)
        if cluster.num_ended < len(requests):
            observed = cluster.observe(scenario.interval_s)
            pools.append(_Pools(observed.at, observed.prefill, observed.decode))
            order = decide(observed)
            has_failed = observed.prefill.num_failed or observed.decode.num_failed
            if order.reason and (has_failed or order.replicas != observed.num_ordered):
                cluster.events.append(PlanEvent(tick_at, "decision", order.reason))
            cluster.scale(order.replicas, order.role_changes, order.withdrawals)
        tick_at += scenario.interval_s
    if cluster.num_ended == len(requests):  # else workers were held for the others until now
        cluster.now = max(request.ended_at for request in requests)
    cluster.stop()
    samples = _samples(scenario, requests, pools)
    return replace(summarise(scenario, name, requests, cluster), samples=samples)


class _Pools(NamedTuple):
    """The workers at the end of an interval."""

    at: float
    prefill: observation.PoolState
    decode: observation.PoolState


def _samples(
    scenario: PlanScenario, requests: Sequence[Request], pools: Sequence[_Pools]
) -> list[PlanSample]:
    arrivals: list[list[Request]] = [[] for _ in pools]
    for request in requests:
        number = int(request.at / scenario.interval_s)
        if number < len(arrivals):
            arrivals[number].append(request)
    samples = []
    for observed, arrived in zip(pools, arrivals, strict=True):
        met = [meets_targets(scenario, request) for request in arrived if request.is_servable]
        samples.append(
            PlanSample(
                at=observed.at,
                num_requests=len(arrived),
                num_prefill=observed.prefill.num_ready,
                num_decode=observed.decode.num_ready,
                num_billed=observed.prefill.num_billed + observed.decode.num_billed,
                attainment=sum(met) / len(met) if met else None,
            )
        )
    return samples


def run_fixed(scenario: PlanScenario, replicas: observation.Replicas) -> PlanResult:
    """Simulate a number of workers that never changes."""
    return run(scenario, "fixed", lambda _: WorkerOrder(replicas), replicas)


def feed(cluster: PlanCluster, requests: Sequence[Request], position: int, until: float) -> int:
    """Let the requests before `until` arrive, from this position on; return the next position."""
    while position < len(requests) and requests[position].at < until:
        cluster.run_until(requests[position].at)
        cluster.submit(requests[position])
        position += 1
    return position


def meets_targets(scenario: PlanScenario, request: Request) -> bool:
    """Return True if the request has ended, with TTFT and mean ITL within the targets."""
    if request.ended_at == math.inf:
        return False
    return request.ttft_s <= scenario.ttft_s and request.itl_s <= scenario.itl_s


def summarise(
    scenario: PlanScenario, name: str, requests: Sequence[Request], cluster: PlanCluster
) -> PlanResult:
    """Compute the figures of a run."""
    ended = [request for request in requests if request.ended_at < math.inf]
    latencies = sorted(request.ended_at - request.at for request in ended)
    ttfts = sorted(request.ttft_s for request in ended)
    servable = [request for request in requests if request.is_servable]
    num_met = sum(meets_targets(scenario, request) for request in servable)
    return PlanResult(
        policy=name,
        num_requests=len(requests),
        num_lost=len(requests) - len(ended),
        mean_latency=sum(latencies) / max(1, len(latencies)),
        p90_latency=_quantile(latencies, 0.9),
        p99_latency=_quantile(latencies, 0.99),
        mean_ttft=sum(ttfts) / max(1, len(ttfts)),
        p90_ttft=_quantile(ttfts, 0.9),
        p99_ttft=_quantile(ttfts, 0.99),
        attainment=num_met / max(1, len(servable)),
        servable=len(servable) / max(1, len(requests)),
        gpu_seconds=cluster.gpu_seconds,
        num_scalings=cluster.num_scalings,
        num_migrated=cluster.num_migrated,
        events=cluster.events,
    )


def median_result(results: Sequence[PlanResult]) -> PlanResult:
    """Return the median of each figure over several seeds, with events and samples of the first."""
    names = PlanResult.__dataclass_fields__.keys() - {"policy", "events", "samples"}
    medians = {
        name: sorted(getattr(result, name) for result in results)[len(results) // 2]
        for name in names
    }
    return replace(results[0], **medians)


def _quantile(rising: Sequence[float], share: float) -> float:
    return rising[min(len(rising) - 1, int(share * len(rising)))] if rising else math.nan
