"""The predictive policy, the default where there is a profile: enough workers for the time when a new one would serve.

A worker that is ordered now serves after its start-up time. The policy therefore predicts the traffic until then, and

- asks for more workers for the traffic at that time, plus those that work off, within `catch_up_s`, the prompts that
  will be waiting by then, with a margin for what forecasts of this length lacked so far;
- gives up a worker only if none of the predictions until then needs it: it could not be back in time. Where a period
  foretells the load, that alone decides; otherwise the limits wait whether the load stays low, and a rising load is
  taken to rise on. What was enough for giving up a worker is enough for not ordering it again, until the load rises.

The number of workers for a rate of requests follows from the waiting time (`policies`): prompts are computed without
what the prefix cache holds, and at most one in twenty may wait longer than the target leaves beside its own prefill.
Prompts that alone exceed the target are left out of that count, but not out of the work; if most of them do, no number
of workers meets the target, and the policy scales for throughput. Decode workers run at the fullest point of the
profile that holds the ITL, for the answers that are expected and for those that are there.
"""  # decider

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass

from dynamo.planner import policies, predictors
from dynamo.planner.forecast import Forecast, RequestShape
from dynamo.planner.observation import Observation, PoolLoad, Replicas, Traffic
from dynamo.planner.policies import Prediction, Proposal, Targets, in_mode
from dynamo.planner.predictors import Predictor
from dynamo.planner.profile import ProfileCorrection, WorkerProfile

_LEAST_SERVABLE = 0.5  # share of requests whose own prefill leaves time for the TTFT target
_TREND_INTERVALS = 3  # that a growing number of answers, or a rising load, is continued
_LEAD_STEPS = 7  # intervals of the series in the time until a new worker serves, at most
_STEADY = 1.05  # times the work of earlier intervals, up to which the load does not rise
_LEAST_GROWTH = 1.1  # of the load that the workers which remain must be able to carry


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """The margins of the predictive policy."""

    startup_s: float = 60.0  # until one is measured
    most_busy: float = 0.85  # utilisation of prefill without a waiting-time target, and of decode
    most_late: float = 0.05  # share of requests beyond the TTFT target
    catch_up_s: float = 30.0  # to work off a queue once the workers are there


def stabilization_s(predictor: str, startup_s: float, interval_s: float) -> float:
    """Return the seconds for which fewer workers must have sufficed.

    An idle worker is kept for about as long as a start takes. The forecasts of the seasonal predictor hold the recent
    peak, which keeps it for some intervals already.
    """
    lead_s = startup_s + interval_s
    num_held = predictors.RECENT if predictor == predictors.SEASONAL else 0
    return max(lead_s / 2, lead_s - num_held * series_interval_s(interval_s, lead_s))


def series_interval_s(interval_s: float, lead_s: float) -> float:
    """Return the seconds of one value of the series of traffic: those of shorter intervals are noise."""
    return max(interval_s, lead_s / _LEAD_STEPS)


class PredictivePolicy:
    """Workers for the predicted traffic at the time when a new worker would serve."""

    def __init__(
        self,
        profile: WorkerProfile,
        targets: Targets,
        make_predictor: Callable[[], Predictor],
        headroom: Headroom = Headroom(),
        *,
        corrects: bool = True,
    ) -> None:
        """With `corrects` the times of forward passes in service correct the profile."""
        self._correction = ProfileCorrection(profile)
        self._corrects = corrects
        self._targets = targets
        self._headroom = headroom
        self._forecast = Forecast(make_predictor())
        self._sizing: Sizing | None = None  # of the last proposal
        self._decode_tokens = 0.0  # in use at the last proposal
        self._present = self._proposed = Replicas(0, 0)  # at the last proposal
        self._gave_up_at = -math.inf

    def propose(self, observation: Observation, traffic: Traffic) -> Proposal:
        """Return the workers for the traffic one start-up time ahead."""
        lead_s = self._lead_s(observation)
        interval_s = series_interval_s(observation.interval_s, lead_s)
        self._forecast.add(traffic, observation.interval_s, interval_s)
        present = observation.num_ordered
        shape = self._forecast.shape
        num_waiting = observation.prefill_load.num_waiting + observation.decode_load.num_waiting
        if shape is None:
            return self._propose_without_requests(observation, traffic, num_waiting)
        profile = self._corrected_profile(observation, shape)
        self._sizing = sizing = Sizing(
            profile, self._targets, self._headroom, shape, self._forecast.burstiness
        )
        num_steps = max(1, math.ceil(lead_s / interval_s))
        rates = self._forecast.rates(num_steps + 1)
        backlog = self._backlog(observation, sizing, rates, interval_s, num_waiting)
        margin = self._margin(observation, lead_s)
        later_rate = max(rates[num_steps - 1 :])
        extra_per_s = backlog / self._headroom.catch_up_s
        needed = sizing.workers(later_rate, extra_per_s=extra_per_s)
        ordered = sizing.workers(later_rate * margin, extra_per_s=extra_per_s)
        if self._targets.mode == "disagg":  # decode has its own headroom, and slows down evenly
            ordered = Replicas(ordered.prefill, needed.decode)
        if self._targets.mode != "prefill":
            held, soon = self._decode_workers_in_use(observation, sizing)
            kept = max(held, min(soon, present.decode))
            needed = needed._replace(decode=max(needed.decode, kept))
            ordered = ordered._replace(decode=max(ordered.decode, held))
        rate = traffic.num_requests / observation.interval_s
        peak_rate = max(*rates, rate, self._forecast.recent_peak)
        retained = sizing.workers(peak_rate, extra_per_s=num_waiting / self._headroom.catch_up_s)
        replicas = Replicas(
            *(
                up if up > now else max(least, min(now, keep))
                for now, up, least, keep in zip(present, ordered, needed, retained, strict=True)
            )
        )
        if not policies.has_load(observation, traffic) and max(rates) * lead_s < 0.5:
            replicas = Replicas(0, 0)
        replicas = in_mode(self._targets.mode, replicas, present)
        self._present, self._proposed = present, replicas
        return Proposal(
            replicas=replicas,
            reason=(
                f"{round(later_rate, 2):g} requests/s of {shape.isl:.0f} new+{shape.osl:.0f} tokens predicted in"
                f" {lead_s:.0f} s, {backlog:.0f} waiting by then{self._correction.describe()}"
            ),
            prediction=Prediction(requests_per_s=later_rate, isl=shape.isl, osl=shape.osl),
            estimate=policies.estimate(
                profile, self._targets, observation, isl=shape.isl, context=shape.context
            ),
            unreachable=sizing.unreachable,
            is_firm=self._forecast.is_periodic,
        )

    def _propose_without_requests(
        self, observation: Observation, traffic: Traffic, num_waiting: int
    ) -> Proposal:
        """Return the workers that are there: some that an earlier planner has left may be busy."""
        present = observation.num_ordered
        replicas = Replicas(*(max(n, int(num_waiting > 0)) for n in present))
        if not policies.has_load(observation, traffic):
            replicas = Replicas(0, 0)
        reason = "requests wait" if num_waiting else "no request yet"
        return Proposal(replicas=in_mode(self._targets.mode, replicas, present), reason=reason)

    def _margin(self, observation: Observation, lead_s: float) -> float:
        """Return the factor on the predicted rate for which workers are ordered."""
        for now, before, proposed in zip(
            observation.num_ordered, self._present, self._proposed, strict=True
        ):
            if now < before and proposed < before:  # otherwise it has died
                self._gave_up_at = observation.at
        has_given_up = observation.at - self._gave_up_at < lead_s
        if has_given_up and self._forecast.growth < _STEADY:
            return 1.0
        return 1.0 if self.is_out_of_reach else self._forecast.margin

    def _corrected_profile(self, observation: Observation, shape: RequestShape) -> WorkerProfile:
        if self._corrects:
            loads = (observation.prefill_load, observation.decode_load)
            workers = [worker for load in loads for worker in load.workers]
            passes = [each for worker in workers for each in worker.passes]
            self._correction.learn(passes, isl=shape.isl, context=shape.context)
        return self._correction.profile

    def workers(self, requests_per_s: float) -> Replicas:
        """Return the least workers for requests as they come now at this rate."""
        sizing = self._sizing
        return Replicas(0, 0) if sizing is None else sizing.workers(requests_per_s)

    @property
    def is_out_of_reach(self) -> bool:
        """True if no number of workers can hold the targets for the present mean request."""
        return self._sizing is not None and bool(self._sizing.unreachable)

    def survivors_hold(self, observation: Observation, traffic: Traffic, fewer: Replicas) -> bool:
        """Return True if fewer workers would hold the targets at the present rate with a tenth more.

        A load that rises, for which no pool gets workers of the other one, must find them as if it rose on.
        """
        if self._sizing is None:
            return True
        adds_workers = any(map(operator.gt, self._proposed, self._present))
        rise = 0.0 if adds_workers else self._forecast.growth - 1
        growth = max(_LEAST_GROWTH, 1 + _TREND_INTERVALS * rise)
        needed = self.workers(growth * traffic.num_requests / observation.interval_s)
        match self._targets.mode:
            case "agg" | "decode":
                return needed.decode <= fewer.decode
            case "prefill":
                return needed.prefill <= fewer.prefill
            case _:
                return needed.prefill <= fewer.prefill and needed.decode <= fewer.decode

    def _decode_workers_in_use(self, observation: Observation, sizing: "Sizing") -> tuple[int, int]:
        """Return the decode workers for the answers that are there, and for those if they go on to grow in number.

        It is what the mean length of answers that have ended does not tell: long ones end late.
        """
        num_tokens = sizing.tokens_in_use(observation.decode_load, observation.decode.num_ready)
        growth, self._decode_tokens = max(0.0, num_tokens - self._decode_tokens), num_tokens
        later = num_tokens + _TREND_INTERVALS * growth
        return sizing.decode_workers_for(num_tokens), sizing.decode_workers_for(later)

    def _lead_s(self, observation: Observation) -> float:
        pools = (observation.prefill, observation.decode)
        measured = (pool.startup_s for pool in pools if pool.startup_s is not None)
        return max(measured, default=self._headroom.startup_s) + observation.interval_s

    def _backlog(
        self,
        observation: Observation,
        sizing: "Sizing",
        rates: list[float],
        interval_s: float,
        num_waiting: int,
    ) -> float:
        """Return the prompts that wait when a worker ordered now would serve.

        Decode workers that no predicted rate needs help from now on, if they can change their role.
        """
        is_aggregated = self._targets.mode == "agg"
        pool = observation.decode if is_aggregated else observation.prefill
        lead_s, change_s = self._lead_s(observation), pool.role_change_s
        num_helpers = 0
        is_quicker = change_s is not None and change_s < lead_s - observation.interval_s
        if self._targets.mode == "disagg" and is_quicker:
            num_helpers = observation.decode.num_ready - sizing.workers(max(rates)).decode
        backlog = float(num_waiting)
        for step, rate in enumerate(rates[:-1]):
            served_since = observation.at + step * interval_s - lead_s
            num_workers = pool.num_ready + sum(at <= served_since for at in pool.starting_since)
            capacity = (num_workers + max(0, num_helpers)) * sizing.prompts_per_s
            backlog = max(0.0, backlog + (rate - capacity) * interval_s)
        return backlog


class Sizing:
    """The numbers of workers that hold the targets for one shape of request."""

    def __init__(
        self,
        profile: WorkerProfile,
        targets: Targets,
        headroom: Headroom,
        shape: RequestShape,
        burstiness: float,
    ) -> None:
        self._targets, self._headroom, self._shape = targets, headroom, shape
        self._burstiness = burstiness
        waits_s: dict[float, float] = {}  # shares of requests by the time that they may wait
        for length, share in (shape.new_lens or {shape.isl: 1.0}).items():
            wait_s = targets.ttft_s - profile.prefill.prompt_s(length)
            if wait_s > 0:
                waits_s[wait_s] = waits_s.get(wait_s, 0.0) + share
        self._waits_s = waits_s if sum(waits_s.values()) >= _LEAST_SERVABLE else {}
        own_s = profile.prefill.prompt_s(shape.isl)
        num_gpus = targets.decode_gpus if targets.mode == "agg" else targets.prefill_gpus
        self._service_s = shape.isl / (profile.prefill.tokens_per_s(shape.isl) * num_gpus)
        self._decode = profile.decode
        self._itl_s = targets.itl_s
        self.unreachable = (
            f"TTFT of {targets.ttft_s * 1e3:.0f} ms: a prompt of {shape.isl:.0f} new tokens alone takes"
            f" {own_s * 1e3:.0f} ms; scaling for throughput"
            if not self._waits_s
            else ""
        )
        least_itl_s = profile.decode.itl_s(0.0, shape.context)
        if least_itl_s > targets.itl_s:
            self._itl_s = math.inf  # emptier workers would not meet it either
            self.unreachable = (
                f"ITL of {targets.itl_s * 1e3:.0f} ms: an idle worker takes {least_itl_s * 1e3:.0f} ms;"
                " scaling for throughput"
            )
        self._aggregated_rate = self._find_aggregated_rate() if targets.mode == "agg" else 0.0

    @property
    def prompts_per_s(self) -> float:
        """Return the prompts that one worker computes in a second."""
        if self._targets.mode == "agg":
            return self._aggregated_rate
        return 1 / self._service_s

    def workers(self, requests_per_s: float, *, extra_per_s: float = 0.0) -> Replicas:
        """Return the least workers for a rate of arrivals, with room for `extra_per_s` from a queue."""
        if self._targets.mode == "agg":
            rate = self._aggregated_rate
            num_workers = math.ceil((requests_per_s + extra_per_s) / rate - 1e-9)
            busy_share = requests_per_s * self._service_s / max(1, num_workers)
            if self._waits_s and busy_share < 1:
                num_workers = max(num_workers, self._for_waiting_time(requests_per_s))
            return Replicas(0, num_workers)
        total = requests_per_s + extra_per_s
        num_prefill = math.ceil(total * self._service_s / self._busy_limit - 1e-9)
        if self._waits_s:
            num_prefill = max(num_prefill, self._for_waiting_time(requests_per_s))
        rate = self._decode_rate(self._itl_s)
        return Replicas(num_prefill, math.ceil(total * self._shape.osl / rate - 1e-9))

    def most_requests_per_s(self, replicas: Replicas) -> float:
        """Return the highest rate of arrivals for which so many workers are enough."""
        low, high = 0.0, sum(replicas) * self.prompts_per_s
        for _ in range(20):
            rate = (low + high) / 2
            needed = self.workers(rate)
            is_enough = needed.prefill <= replicas.prefill and needed.decode <= replicas.decode
            low, high = (rate, high) if is_enough else (low, rate)
        return low

    def tokens_in_use(self, load: PoolLoad, num_ready: int) -> float:
        """Return the tokens in the KV caches of a decode pool, and those of the answers that wait for it."""
        in_caches = load.kv_usage * num_ready * self._decode.max_kv_tokens
        return in_caches + load.num_waiting * self._shape.context

    def decode_workers_for(self, num_tokens: float) -> int:
        """Return the least decode workers that hold so many tokens in their KV caches."""
        fullest = self._decode.best_rate(self._itl_s, self._shape.context).kv_usage
        most = fullest * self._headroom.most_busy * self._decode.max_kv_tokens
        return math.ceil(num_tokens / max(self._shape.context, most) - 1e-9)

    @property
    def _busy_limit(self) -> float:
        return 1.0 if self._waits_s else self._headroom.most_busy

    def _for_waiting_time(self, requests_per_s: float) -> int:
        return policies.least_workers(
            requests_per_s=requests_per_s,
            service_s=self._service_s,
            waits_s=self._waits_s,
            burstiness=self._burstiness,
            most_late=self._headroom.most_late,
        )

    def _decode_rate(self, itl_s: float) -> float:
        best = self._decode.best_rate(itl_s, self._shape.context)
        return best.throughput * self._targets.decode_gpus * self._headroom.most_busy

    def _find_aggregated_rate(self) -> float:
        """Return the requests per second of one worker that computes prompts between its decode steps.

        A share of its time goes to prompts, so a decode step takes longer by as much: find the rate at which both fit.
        """
        without_prompts = self._decode_rate(self._itl_s) / self._shape.osl
        low, high = 0.0, min(1 / self._service_s, without_prompts)
        for _ in range(12):
            rate = (low + high) / 2
            free_share = 1 - rate * self._service_s
            decode_rate = self._decode_rate(self._itl_s * free_share) * free_share
            low, high = (rate, high) if rate * self._shape.osl <= decode_rate else (low, rate)
        return max(low, 1e-9)
