"""Scaling policies: from an observation to a proposal, without limits of budget and time; the seam and two policies.

Limits, cool-down and workers that do not come are the matter of `scaling_pipeline`, and the same for every policy.

The *load policy* needs no profile: it asks for one worker more or fewer by the use of the KV cache and the queue of
prompts. Decode workers: more above a share of their KV cache in use, fewer below another. Prefill workers: more if the
queue per worker is long now and, continued by its trend over some intervals, stays so; fewer if it is short. After a
worker has become ready its pool waits for some intervals before it grows again. Aggregated workers do both: either
reason adds one, and both must allow to take one away.

The *SLA policy* is that of Dynamo 0.4.1, to the letter: for comparison, and for figures that are based on it. It
multiplies the predicted traffic by what the profile says of one worker. Measured times over those of the profile
correct it; while workers start these corrections keep their values, because they measure the lack of workers.

A queue in front of a pool of equal workers says how many of them hold a waiting time. The wait in an M/G/c queue is
longer than t with a probability of about ErlangC(c, a) * exp(-2 (c - a) t / (b s)), with a = arrivals * s busy workers
and burstiness b: 1 for Poisson arrivals of equal prompts, more for prompts of different lengths and for bursts. Times
are seconds.
"""  # decider

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from dynamo.planner.observation import Observation, PoolState, Replicas, Traffic
from dynamo.planner.predictors import Predictor
from dynamo.planner.profile import WorkerProfile

Mode = Literal["agg", "disagg", "auto", "prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What the planner holds, and the size of a worker."""

    mode: Mode = "agg"
    ttft_s: float = 0.5
    itl_s: float = 0.05
    prefill_gpus: int = 1  # of one prefill worker
    decode_gpus: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The traffic that a proposal is made for."""

    requests_per_s: float
    isl: float
    osl: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What the profile says of the workers under the load that was observed."""

    ttft_s: float  # of a request that comes now: the queue before it and its own prompt
    itl_s: float
    prompts_per_s: float  # that one worker can compute


def estimate(
    profile: WorkerProfile,
    targets: Targets,
    observation: Observation,
    *,
    isl: float,
    context: float,
) -> Estimate:
    """Return the estimate for prompts of `isl` new tokens, and `context` tokens of a sequence in the KV cache."""
    if observation.prefill.num_ready:
        pool, load, gpus = observation.prefill, observation.prefill_load, targets.prefill_gpus
    else:
        pool, load, gpus = observation.decode, observation.decode_load, targets.decode_gpus
    tokens_per_s = profile.prefill.tokens_per_s(isl) * gpus
    wait_s = load.waiting_tokens / max(1, pool.num_ready) / tokens_per_s
    return Estimate(
        ttft_s=wait_s + profile.prefill.prompt_s(isl),
        itl_s=profile.decode.itl_s(observation.decode_load.kv_usage, context),
        prompts_per_s=tokens_per_s / max(1.0, isl),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The workers that a policy asks for, and why; `unreachable` says which target no number of workers can meet."""

    replicas: Replicas
    reason: str
    prediction: Prediction | None = None
    estimate: Estimate | None = None  # by policies with a profile
    unreachable: str = ""
    is_firm: bool = False  # earlier proposals bind no more
    is_step: bool = False  # from the workers that there are: their numbers tell no proportion


class Policy(Protocol):
    """Proposes a number of workers. It keeps the series that it needs."""

    def propose(self, observation: Observation, traffic: Traffic) -> Proposal:
        """Return a proposal; `traffic` is the fresh reading of the observation."""
        ...

    def survivors_hold(self, observation: Observation, traffic: Traffic, fewer: Replicas) -> bool:
        """Return True if this smaller number of workers would hold the target with the whole load."""
        ...


def in_mode(mode: Mode, proposal: Replicas, present: Replicas) -> Replicas:
    """Return the proposal, with a pool that this mode does not scale left as it is."""
    match mode:
        case "prefill":
            return Replicas(proposal.prefill, present.decode)
        case "agg" | "decode":
            return Replicas(present.prefill, proposal.decode)
        case _:
            return proposal


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadThresholds:
    """The thresholds of Dynamo's load-based planner. Queues are requests per worker."""

    decode_kv_scale_up: float = 0.9
    decode_kv_scale_down: float = 0.5
    prefill_queue_scale_up: float = 0.5
    prefill_queue_scale_down: float = 0.2
    decode_grace_intervals: int = 3
    queue_trend_intervals: int = 3


class _Growth:
    """The grace period of a pool after a worker became ready."""

    def __init__(self, num_intervals: int) -> None:
        self._num_intervals = num_intervals
        self._num_left = self._num_ready = 0

    def may_grow(self, pool: PoolState) -> bool:
        """Return True if no worker starts and the last one has served for the grace period."""
        self._num_left = (
            self._num_intervals if pool.num_ready > self._num_ready else max(0, self._num_left - 1)
        )
        if not self._num_ready:
            self._num_left = 0  # the first workers are no growth
        self._num_ready = pool.num_ready
        return not self._num_left and not pool.num_starting


class LoadPolicy:
    """One step up or down per interval. With `is_literal` survivors are not examined, as in the original."""

    def __init__(
        self,
        targets: Targets,
        thresholds: LoadThresholds = LoadThresholds(),
        *,
        is_literal: bool = False,
    ) -> None:
        self._targets = targets
        self._limits = thresholds
        self._is_literal = is_literal
        self._last_queue = 0.0
        self._was_served = True  # False: what waits came while no worker was ready
        self._decode_growth = _Growth(thresholds.decode_grace_intervals)

    def propose(self, observation: Observation, traffic: Traffic) -> Proposal:
        """Return the workers that there are, one more or one fewer in each pool."""
        present = observation.num_ordered
        is_aggregated = self._targets.mode == "agg"
        usage = observation.decode_load.kv_usage
        prefill = observation.decode if is_aggregated else observation.prefill
        num_waiting = num_prompts = observation.prefill_load.num_waiting
        num_waiting += observation.decode_load.num_waiting
        if is_aggregated or not prefill.num_ready:  # decode workers compute prompts, or will
            num_prompts = num_waiting
        queue = num_prompts / max(1, prefill.num_ready)
        queue_step = self._queue_step(queue, num_prompts, prefill)
        usage_step = self._usage_step(usage, num_waiting, observation.decode)
        silent = [
            name
            for name, pool, load in (
                ("prefill", observation.prefill, observation.prefill_load),
                ("decode", observation.decode, observation.decode_load),
            )
            if pool.num_ready and not load.is_reported
        ]
        if "prefill" in silent and not is_aggregated:
            queue_step = max(0, queue_step)
        if "decode" in silent:
            usage_step = max(0, usage_step)
        if is_aggregated:
            up, down = max(queue_step, usage_step), min(queue_step, usage_step)
            replicas = Replicas(0, present.decode + (up if up >= 0 else down))
        else:
            replicas = Replicas(present.prefill + queue_step, present.decode + usage_step)
        if not has_load(observation, traffic):
            replicas = Replicas(0, 0)
        return Proposal(
            replicas=in_mode(self._targets.mode, replicas, present),
            reason=f"KV cache {usage:.0%} in use, {round(queue, 1):g} prompts waiting per worker"
            + "".join(f"; no {name} worker reports its load" for name in silent),
            is_step=not self._is_literal,
        )

    def survivors_hold(self, observation: Observation, traffic: Traffic, fewer: Replicas) -> bool:
        """Return True if the KV use, spread over the workers that remain, stays below the threshold to grow."""
        if self._is_literal or not has_load(observation, traffic):
            return True
        usage, num_ready = observation.decode_load.kv_usage, observation.decode.num_ready
        return self._is_spread_over(usage, num_ready, fewer.decode)

    def _usage_step(self, usage: float, num_waiting: int, pool: PoolState) -> int:
        may_grow = self._decode_growth.may_grow(pool)
        if not pool.num_ready:  # there is no cache of which a share could be in use
            return int(num_waiting > 0 and not pool.num_starting)
        if usage > self._limits.decode_kv_scale_up:
            return int(may_grow)
        is_low = usage < self._limits.decode_kv_scale_down and not pool.num_starting
        return -int(is_low and self._is_spread_over(usage, pool.num_ready, pool.num_ready - 1))

    def _is_spread_over(self, usage: float, num_ready: int, num_fewer: int) -> bool:
        if self._is_literal:
            return True
        limit = 0.9 * self._limits.decode_kv_scale_up
        return num_fewer > 0 and usage * num_ready / num_fewer < limit

    def _queue_step(self, queue: float, num_waiting: int, pool: PoolState) -> int:
        trend, self._last_queue = queue - self._last_queue, queue
        was_served, self._was_served = self._was_served, pool.num_ready > 0
        if not pool.num_ready:
            return int(num_waiting > 0 and not pool.num_starting)
        foretold = queue + trend * self._limits.queue_trend_intervals
        threshold = self._limits.prefill_queue_scale_up
        if queue > threshold and foretold > threshold:
            return int(was_served and not pool.num_starting)
        is_short = queue < self._limits.prefill_queue_scale_down and not pool.num_starting
        return -int(is_short and (pool.num_ready > 1 or self._is_literal))


def has_load(observation: Observation, traffic: Traffic) -> bool:
    """Return whether requests arrived, or are on their way."""
    loads = (observation.prefill_load, observation.decode_load)
    if traffic.num_requests > 0 or observation.num_open:
        return True
    return any(load.num_running or load.num_waiting for load in loads)


class SlaPolicy:
    """Workers from predicted traffic, profile and corrections."""

    def __init__(
        self,
        profile: WorkerProfile,
        targets: Targets,
        make_predictor: Callable[[], Predictor],
        *,
        corrects: bool = True,
    ) -> None:
        self._profile = profile
        self._targets = targets
        self._num_requests, self._isl, self._osl = (make_predictor() for _ in range(3))
        self._corrects = corrects
        self._prefill_correction = self._decode_correction = 1.0

    def propose(self, observation: Observation, traffic: Traffic) -> Proposal:
        """Return the workers for the predicted traffic; those there are if a mean could not be measured."""
        present = observation.num_ordered
        means = (traffic.isl, traffic.osl, traffic.ttft_s, traffic.itl_s, traffic.duration_s)
        if any(mean is None or not math.isfinite(mean) for mean in means):
            least = int(has_load(observation, traffic))  # without a worker no request ever ends
            first = in_mode(
                self._targets.mode, Replicas(*(max(n, least) for n in present)), present
            )
            return Proposal(replicas=first, reason="no request ended in the interval: skipped")
        isl, osl = traffic.isl or 0.0, traffic.osl or 0.0
        for predictor, value in (
            (self._num_requests, traffic.num_requests),
            (self._isl, isl),
            (self._osl, osl),
        ):
            predictor.add(value)
        if not (observation.prefill.num_starting or observation.decode.num_starting):
            self._correct(observation, traffic, isl, osl)
        next_requests, next_isl, next_osl = (
            series.forecast(1)[0] for series in (self._num_requests, self._isl, self._osl)
        )
        rate = next_requests / observation.interval_s
        num_prefill_gpus = (
            rate
            * next_isl
            * min(1.0, self._prefill_correction)
            / self._profile.prefill.tokens_per_s(next_isl)
        )
        itl_s = self._targets.itl_s
        if self._decode_correction > 0:
            itl_s /= self._decode_correction
        best = self._profile.decode.best_rate(itl_s, next_isl + next_osl / 2)
        replicas = Replicas(
            math.ceil(num_prefill_gpus / self._targets.prefill_gpus),
            math.ceil(rate * next_osl / best.throughput / self._targets.decode_gpus),
        )
        return Proposal(
            replicas=in_mode(self._targets.mode, replicas, present),
            reason=(
                f"{round(rate, 2):g} requests/s of {next_isl:.0f}+{next_osl:.0f} tokens predicted, corrections"
                f" {self._prefill_correction:.2f} and {self._decode_correction:.2f}"
            ),
            prediction=Prediction(requests_per_s=rate, isl=next_isl, osl=next_osl),
            estimate=estimate(
                self._profile, self._targets, observation, isl=isl, context=isl + osl / 2
            ),
        )

    def survivors_hold(self, observation: Observation, traffic: Traffic, fewer: Replicas) -> bool:
        """Return True: the original takes workers away as soon as the formula does."""
        return True

    def _correct(self, observation: Observation, traffic: Traffic, isl: float, osl: float) -> None:
        if not self._corrects:
            return
        expected_s = self._profile.prefill.prompt_s(isl)
        self._prefill_correction = (traffic.ttft_s or 0.0) / expected_s if expected_s else 1.0
        busy = traffic.num_requests * (traffic.duration_s or 0.0) / observation.interval_s
        concurrency = busy / max(1, observation.decode.num_ready)
        context = isl + osl / 2
        usage = concurrency * context / self._profile.decode.max_kv_tokens
        self._decode_correction = (traffic.itl_s or 0.0) / self._profile.decode.itl_s(
            usage, context
        )


_MOST_WORKERS = 100_000


def erlang_c(num_workers: int, busy: float) -> float:
    """Return the probability that a request waits, with `busy` workers busy on average."""
    if busy >= num_workers:
        return 1.0
    blocking = _blocking_by_workers(busy)
    for k in range(len(blocking), num_workers + 1):
        blocking[k] = busy * blocking[k - 1] / (k + busy * blocking[k - 1])
    return blocking[num_workers] / (1 - busy / num_workers * (1 - blocking[num_workers]))


@functools.lru_cache(maxsize=8)  # a search asks for many numbers of workers under one load
def _blocking_by_workers(busy: float) -> dict[int, float]:
    """Return Erlang's formula B by the number of workers, as far as its recursion has come for this load.

    Several threads may go on with it at once: what they write for a number is the same.
    """
    return {0: 1.0}


def late_share(
    num_workers: int,
    *,
    requests_per_s: float,
    service_s: float,
    waits_s: Mapping[float, float],
    burstiness: float,
) -> float:
    """Return the share of requests that wait longer than they may; `waits_s` has the shares by that time."""
    busy = requests_per_s * service_s
    if busy >= num_workers:
        return 1.0
    decay = 2 * (num_workers - busy) / (burstiness * service_s)
    late = sum(
        share * math.exp(-min(700.0, decay * wait_s)) if wait_s >= 0 else share
        for wait_s, share in waits_s.items()
    )
    return erlang_c(num_workers, busy) * late / sum(waits_s.values())


def least_workers(
    *,
    requests_per_s: float,
    service_s: float,
    waits_s: Mapping[float, float],
    burstiness: float = 1.0,
    most_late: float = 0.05,
) -> int:
    """Return the least workers with which at most `most_late` of the requests wait too long; 0 for no requests."""
    if requests_per_s * service_s <= 0:
        return 0
    low = high = math.floor(requests_per_s * service_s) + 1
    if low > _MOST_WORKERS:  # the formula takes time and memory for each of them
        return low
    case = {"requests_per_s": requests_per_s, "service_s": service_s, "burstiness": burstiness}

    def is_late(number: int) -> bool:
        return late_share(number, **case, waits_s=waits_s) > most_late

    while is_late(high):
        if high > _MOST_WORKERS:
            return high
        low, high = high + 1, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if is_late(middle) else (low, middle)
    return low
