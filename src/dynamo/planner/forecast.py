"""The forecast of the predictive policy: traffic, the mean request, and how good earlier forecasts were."""  # decider

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from dynamo.planner.observation import Traffic
from dynamo.planner.predictors import Predictor

_SMOOTHING = 0.3  # weight of the newest interval in means of lengths and rates
_MOST_BURSTINESS = 6.0
_VARIETY_WEIGHT = 5  # intervals
_NUM_OUTCOMES = 40
_MEMORY = 0.9  # weight of the lengths of the interval before
_DEEP_FALL = 0.4  # of the highest load, below which the load swings
_SWING_INTERVALS = 6
_FIRST_MARGIN, _MOST_MARGIN = 1.15, 1.25  # before enough forecasts came due, and at most


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
        self._request_rates: deque[float] = deque(maxlen=20)  # of an interval, a second
        self._pending: deque[tuple[int, float]] = deque()  # forecasts, by the interval they are for
        self._outcomes: deque[tuple[float, float]] = deque(maxlen=_NUM_OUTCOMES)  # foretold, actual
        self._interval_s = 0.0  # of the values in `_work`
        self._num_intervals = 0
        # of the interval that is not complete
        self._open_work = self._open_requests = self._open_s = 0.0

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
        self._open_requests += traffic.num_requests
        self._open_s += elapsed_s
        if self._open_s < 0.99 * interval_s and self._num_intervals:
            return
        tokens_per_s = self._open_work / self._open_s
        self._request_rates.append(self._open_requests / self._open_s)
        self._open_work = self._open_requests = self._open_s = 0.0
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
    def growth(self) -> float:
        """Return the work of the last interval over the mean of the three before it; 1 if these had none."""
        *earlier, last = list(self._work)[-4:] or [0.0]
        return last * len(earlier) / sum(earlier) if any(earlier) else 1.0

    @property
    def recent_peak(self) -> float:
        """Return the most requests per second of the last intervals where the load has fallen deeply, otherwise 0.

        What it has lost it may have again before a worker that is ordered then would serve. Requests count, not tokens,
        because the lengths of prompts come and go by chance.
        """
        rates = list(self._request_rates)
        means = [statistics.fmean(rates[i : i + 3]) for i in range(len(rates) - 2)]
        if not means or min(means[-_SWING_INTERVALS:]) >= _DEEP_FALL * max(means):
            return 0.0
        return max(rates[-_SWING_INTERVALS:])

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
