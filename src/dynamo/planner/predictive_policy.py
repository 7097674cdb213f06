"""The predictive policy, the default where there is a profile: enough workers for the time when a new one would serve.

A worker that is ordered now serves after its start-up time. The policy therefore predicts the traffic until then, and

- asks for more workers for the traffic at that time, plus those that work off, within `catch_up_s`, the prompts that
  will be waiting by then, with a margin for what forecasts of this length lacked so far;
- gives up a worker only if none of the predictions until then needs it: it could not be back in time. Where a period
  foretells the load, that alone decides; otherwise the limits wait whether the load stays low.

The number of workers for a rate of requests follows from the waiting time (`policies`): prompts are computed without
what the prefix cache holds, and at most one in twenty may wait longer than the target leaves beside its own prefill.
Prompts that alone exceed the target are left out of that count, but not out of the work; if most of them do, no number
of workers meets the target, and the policy scales for throughput. Decode workers run at the fullest point of the
profile that holds the ITL, for the answers that are expected and for those that are there.
"""  # decider

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dynamo.planner import policies
from dynamo.planner.observation import Observation, PoolLoad, Replicas, Traffic
from dynamo.planner.policies import Prediction, Proposal, Targets, in_mode
from dynamo.planner.predictors import Predictor
from dynamo.planner.profile import ProfileCorrection, WorkerProfile

_SMOOTHING = 0.3  # weight of the newest interval in means of lengths and rates
_MOST_BURSTINESS = 6.0
_VARIETY_WEIGHT = 5  # intervals
_NUM_OUTCOMES = 40
_MEMORY = 0.9  # weight of the lengths of the interval before
_LEAST_SERVABLE = 0.5  # share of requests whose own prefill leaves time for the TTFT target
_TREND_INTERVALS = 3  # that a growing number of answers is continued
_LEAD_STEPS = 7  # intervals of the series in the time until a new worker serves, at most
_FIRST_MARGIN, _MOST_MARGIN = 1.15, 1.25  # before enough forecasts came due, and at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """The margins of the predictive policy."""

    startup_s: float = 60.0  # until one is measured
    most_busy: float = 0.85  # utilisation of prefill without a waiting-time target, and of decode
    most_late: float = 0.05  # share of requests beyond the TTFT target
    catch_up_s: float = 30.0  # to work off a queue once the workers are there


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShape:
    """The mean request, of which `isl` counts only tokens that no cache holds."""

    isl: float
    osl: float
    context: float  # tokens in the KV cache, on average while it decodes
    new_lens: Mapping[float, float] = field(default_factory=dict)  # shares by new tokens; {}: equal


class Forecast:
    """The series of prompt tokens, the slow means of lengths, and how far earlier forecasts were too low.

    The series is one of tokens per second: the seconds of its values change with the measured start-up time.
    """

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._isl: float | None = None
        self._osl: float | None = None
        self._hit_rate: float | None = None
        self._prompt_lens: dict[float, float] = {}  # requests by length, older ones for less
        self._work: deque[float] = deque(maxlen=20)  # prompt tokens of an interval
        self._pending: deque[tuple[int, float]] = deque()  # forecasts, by the interval they are for
        self._outcomes: deque[tuple[float, float]] = deque(maxlen=_NUM_OUTCOMES)  # foretold, actual
        self._interval_s = 0.0  # of the values in `_work`
        self._num_intervals = 0
        self._open_work = self._open_s = 0.0  # of the interval that is not complete

    def add(self, traffic: Traffic, elapsed_s: float, interval_s: float) -> None:
        """Record traffic; the series has a value for each `interval_s` seconds or a little more."""
        if traffic.num_requests:
            self._isl = _blend(self._isl, traffic.isl)
            self._osl = _blend(self._osl, traffic.osl)
            self._hit_rate = _blend(self._hit_rate, traffic.hit_rate)
            lens = {length: _MEMORY * num for length, num in self._prompt_lens.items()}
            for length, num in traffic.prompt_lens.items():
                lens[length] = lens.get(length, 0.0) + num
            self._prompt_lens = lens
        is_known = traffic.isl is not None and math.isfinite(traffic.isl)
        self._open_work += traffic.num_requests * ((traffic.isl if is_known else self._isl) or 0.0)
        self._open_s += elapsed_s
        if self._open_s < 0.99 * interval_s and self._num_intervals:
            return
        tokens_per_s = self._open_work / self._open_s
        self._open_work = self._open_s = 0.0
        if not 2 / 3 < self._interval_s / interval_s < 3 / 2:
            self._work.clear()  # a jump from one length to the other is no burst
            self._interval_s = interval_s
        self._work.append(tokens_per_s * interval_s)
        self._predictor.add(tokens_per_s)
        self._num_intervals += 1
        while self._pending and self._pending[0][0] <= self._num_intervals:
            _, expected = self._pending.popleft()
            if expected > 0:
                self._outcomes.append((expected, tokens_per_s))

    def rates(self, num_steps: int) -> list[float]:
        """Return the requests per second of the next intervals."""
        basis = self._predictor.basis
        tokens_per_s = self._predictor.forecast(num_steps)
        if self._predictor.basis != basis:
            self._pending.clear()
            self._outcomes.clear()
        lead = max(1, num_steps - 1)
        due = self._num_intervals + lead
        if not self._pending or self._pending[-1][0] < due:
            self._pending.append((due, tokens_per_s[lead - 1]))
        return [each / (self._isl or 1.0) for each in tokens_per_s]

    @property
    def is_periodic(self) -> bool:
        """Return True if the last forecast repeats a period."""
        return self._predictor.basis == "period"

    @property
    def margin(self) -> float:
        """Return the factor that eight of ten forecasts would have needed, at least 1."""
        if len(self._outcomes) < 5:
            return 1.0 if self.is_periodic else _FIRST_MARGIN  # a period has foretold well already
        ratios = sorted(actual / expected for expected, actual in self._outcomes)
        return min(_MOST_MARGIN, max(1.0, ratios[len(ratios) * 8 // 10]))

    @property
    def burstiness(self) -> float:
        """Return the variance of the arriving tokens over that of equal prompts in a Poisson process.

        It is that of second differences, in which a steady rise or fall of the rate leaves nothing. It is at least what
        the lengths of the prompts cause, which also counts as much as five intervals: few of them tell little.
        """
        work = list(self._work)
        if len(work) < 5 or not self._isl:
            return min(_MOST_BURSTINESS, self._variety)
        triples = zip(work, work[1:], work[2:], strict=False)
        squares = sorted((a - 2 * b + c) ** 2 / 6 for a, b, c in triples)
        squares = squares[: len(squares) - len(squares) // 8]  # without the largest: steps
        mean = max(1.0, sum(work) / len(work)) * self._isl
        measured = min(_MOST_BURSTINESS, max(1.0, sum(squares) / len(squares) / mean))
        weight = (len(work) - 4) / (len(work) - 4 + _VARIETY_WEIGHT)
        blended = weight * measured + (1 - weight) * self._variety
        return min(_MOST_BURSTINESS, max(self._variety, blended))

    @property
    def _variety(self) -> float:
        """Return the mean square of the prompts' lengths over the square of their mean."""
        lens = self._prompt_lens
        total = sum(lens.values())
        mean = sum(n * num for n, num in lens.items()) / total if total else 0.0
        return sum(n * n * num for n, num in lens.items()) / total / mean**2 if mean else 1.0

    @property
    def shape(self) -> RequestShape | None:
        """Return the mean request; None before the first, and while prompts have no tokens."""
        if not self._isl:
            return None
        osl = self._osl or 1.0
        new_tokens = max(1.0, self._isl * (1 - (self._hit_rate or 0.0)))
        total = sum(self._prompt_lens.values())
        return RequestShape(
            isl=new_tokens,
            osl=osl,
            context=self._isl + osl / 2,
            new_lens={
                length * new_tokens / self._isl: num / total
                for length, num in self._prompt_lens.items()
            },
        )


def _blend(mean: float | None, value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return mean
    return value if mean is None else mean + _SMOOTHING * (value - mean)


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

    def propose(self, observation: Observation, traffic: Traffic) -> Proposal:
        """Return the workers for the traffic one start-up time ahead."""
        lead_s = self._lead_s(observation)
        interval_s = max(observation.interval_s, lead_s / _LEAD_STEPS)  # shorter ones are noise
        self._forecast.add(traffic, observation.interval_s, interval_s)
        present = observation.num_ordered
        shape = self._forecast.shape
        num_waiting = observation.prefill_load.num_waiting + observation.decode_load.num_waiting
        if shape is None:  # of the workers that an earlier planner has left, some may be busy
            replicas = Replicas(*(max(n, int(num_waiting > 0)) for n in present))
            if not policies.has_load(observation, traffic):
                replicas = Replicas(0, 0)
            reason = "requests wait" if num_waiting else "no request yet"
            return Proposal(replicas=in_mode(self._targets.mode, replicas, present), reason=reason)
        profile = self._corrected_profile(observation, shape)
        self._sizing = sizing = Sizing(
            profile, self._targets, self._headroom, shape, self._forecast.burstiness
        )
        num_steps = max(1, math.ceil(lead_s / interval_s))
        rates = self._forecast.rates(num_steps + 1)
        backlog = self._backlog(observation, sizing, rates, interval_s, num_waiting)
        margin = 1.0 if sizing.unreachable else self._forecast.margin
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
        peak_rate = max(*rates, traffic.num_requests / observation.interval_s)
        retained = sizing.workers(peak_rate, extra_per_s=num_waiting / self._headroom.catch_up_s)
        replicas = Replicas(
            *(
                up if up > now else max(least, min(now, keep))
                for now, up, least, keep in zip(present, ordered, needed, retained, strict=True)
            )
        )
        if not policies.has_load(observation, traffic) and max(rates) * lead_s < 0.5:
            replicas = Replicas(0, 0)
        return Proposal(
            replicas=in_mode(self._targets.mode, replicas, present),
            reason=(
                f"{later_rate:.3g} requests/s of {shape.isl:.0f} new+{shape.osl:.0f} tokens predicted in"
                f" {lead_s:.0f} s, {backlog:.0f} waiting by then{self._correction.describe()}"
            ),
            prediction=Prediction(requests_per_s=later_rate, isl=shape.isl, osl=shape.osl),
            estimate=policies.estimate(
                profile, self._targets, observation, isl=shape.isl, context=shape.context
            ),
            unreachable=sizing.unreachable,
            is_firm=self._forecast.is_periodic,
        )

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
        """Return True if fewer workers would hold the targets at the present rate with a tenth more."""
        if self._sizing is None:
            return True
        needed = self.workers(1.1 * traffic.num_requests / observation.interval_s)
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
