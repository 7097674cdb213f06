"""Predictors: the next values of a series that is measured once per interval. None of them returns less than 0.

`arima` is an autoregression on the series or on its differences, whichever varies less; its coefficients follow from
the autocovariances by the recursion of Levinson and Durbin, its order from Akaike's criterion. `kalman` is the local
linear trend of the original's later versions, with its variances. `seasonal` repeats what came one period ago, moved by
the present difference; without a clear period, or if that would have foretold what came since badly, it forecasts as
`kalman` does, and never less than the recent peak.
"""  # decider

import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from dynamo.base import errors

DEFAULT_WINDOW = 50
SEASONAL = "seasonal"
_LEAST_POINTS = 5  # below, arima and kalman return the last value
_MAX_ORDER = 5
_LEAST_LIKENESS = 0.7  # of a series with itself one period ago
_MULTIPLES = 0.1  # by which twice the period may be more alike than the period
_LEAST_PERIOD = 4  # intervals
RECENT = 3  # intervals, below the peak of which a trend of the seasonal predictor does not fall
_MOST_ERROR = 0.25  # squared, of forecasts by a period, as a share of that of the last value


class Predictor(Protocol):
    """The forecaster of one series.

    `basis` is what its forecasts rest on, such as a period; errors on another basis say nothing of the next forecast.
    """

    basis: object

    def add(self, value: float) -> None:
        """Record the value of the interval that has ended."""
        ...

    def forecast(self, num_steps: int) -> list[float]:
        """Return the values of the next intervals, nearest first; zeros before the first value."""
        ...


class _WindowPredictor:
    """Keeps the last values of the series."""

    basis: object = None

    def __init__(self, window: int = DEFAULT_WINDOW) -> None:
        self._values: deque[float] = deque(maxlen=window)

    def add(self, value: float) -> None:
        self._values.append(value)


class MovingAveragePredictor(_WindowPredictor):
    """Repeats the mean of the last values; of the last one alone with a window of 1."""

    def forecast(self, num_steps: int) -> list[float]:
        """Return the mean of the window for each step."""
        return [max(0.0, statistics.fmean(self._values or (0.0,)))] * num_steps


class ArimaPredictor(_WindowPredictor):
    """Autoregression on the series or on its differences."""

    def forecast(self, num_steps: int) -> list[float]:
        """Return the forecast; the last value with fewer than five points or a constant series."""
        values = list(self._values)
        if len(values) < _LEAST_POINTS or min(values) == max(values):
            return [max(0.0, values[-1] if values else 0.0)] * num_steps
        differences = [b - a for a, b in itertools.pairwise(values)]
        if statistics.pvariance(differences) < statistics.pvariance(values):
            level, forecast = values[-1], []
            for change in _autoregress(differences, num_steps):
                level += change
                forecast.append(level)
        else:
            forecast = _autoregress(values, num_steps)
        ceiling = 2 * max(values)  # an unlucky fit must not explode
        return [min(ceiling, max(0.0, value)) for value in forecast]


def _autoregress(values: Sequence[float], num_steps: int) -> list[float]:
    mean = statistics.fmean(values)
    series = [value - mean for value in values]
    weights = _autoregression(series)
    for _ in range(num_steps):
        series.append(sum(w * series[-1 - i] for i, w in enumerate(weights)))
    return [mean + value for value in series[len(values) :]]


def _autoregression(series: Sequence[float]) -> list[float]:
    """Return the coefficients for the last value, the one before it and so on, of the order with the best AIC."""
    size = len(series)
    covariances = [
        sum(series[i] * series[i - lag] for i in range(lag, size)) / size
        for lag in range(min(_MAX_ORDER, size // 3) + 1)
    ]
    if covariances[0] <= 0:
        return []
    error, weights, best = covariances[0], list[float](), list[float]()
    least_criterion = size * math.log(error)
    for order in range(1, len(covariances)):
        reflection = covariances[order] - sum(
            w * covariances[order - 1 - i] for i, w in enumerate(weights)
        )
        reflection /= error
        weights = [w - reflection * v for w, v in zip(weights, weights[::-1], strict=True)]
        weights.append(reflection)
        error *= 1 - reflection**2
        if error <= 0:
            return weights
        criterion = size * math.log(error) + 2 * order
        if criterion < least_criterion:
            least_criterion, best = criterion, list(weights)
    return best


_LEVEL_VARIANCE, _TREND_VARIANCE, _NOISE_VARIANCE = 1.0, 0.1, 10.0


class KalmanPredictor:
    """A level and a trend, each a random walk, seen through noise."""

    basis: object = None

    def __init__(self, window: int = DEFAULT_WINDOW) -> None:
        self._level = self._trend = 0.0
        self._covariance = (1e3, 0.0, 1e3)  # level, both, trend
        self._num_points = 0

    def add(self, value: float) -> None:
        self._num_points += 1
        if self._num_points == 1:
            self._level = value
            return
        level_cov, cross_cov, trend_cov = self._covariance
        level_cov, cross_cov = (
            level_cov + 2 * cross_cov + trend_cov + _LEVEL_VARIANCE,
            cross_cov + trend_cov,
        )
        trend_cov += _TREND_VARIANCE
        surprise = value - (self._level + self._trend)
        total = level_cov + _NOISE_VARIANCE
        level_gain, trend_gain = level_cov / total, cross_cov / total
        self._level += self._trend + level_gain * surprise
        self._trend += trend_gain * surprise
        self._covariance = (
            (1 - level_gain) * level_cov,
            (1 - level_gain) * cross_cov,
            trend_cov - trend_gain * cross_cov,
        )

    def forecast(self, num_steps: int) -> list[float]:
        """Return level and trend continued; the level with fewer than five points."""
        trend = self._trend if self._num_points >= _LEAST_POINTS else 0.0
        return [max(0.0, self._level + trend * step) for step in range(1, num_steps + 1)]


class SeasonalPredictor:
    """Repeats the last period, where there is one."""

    basis: object = None

    def __init__(self, window: int = DEFAULT_WINDOW) -> None:
        self._values: deque[float] = deque(maxlen=max(4 * window, 200))
        self._trend = KalmanPredictor(window)

    def add(self, value: float) -> None:
        self._values.append(value)
        self._trend.add(value)

    def forecast(self, num_steps: int) -> list[float]:
        """Return the values of one period ago moved by the present difference, or the trend."""
        values = list(self._values)
        period = find_period(values)
        if period is not None and _has_foretold(values, period, num_steps):
            self.basis = "period"
            return _repeat(values, period, num_steps)
        self.basis = "trend"
        recent, ceiling = max(values[-RECENT:], default=0.0), max(values, default=0.0)
        return [min(ceiling, max(recent, v)) for v in self._trend.forecast(num_steps)]


def _repeat(values: Sequence[float], period: int, num_steps: int) -> list[float]:
    """Return the values of one period ago moved by the present difference."""
    season = smooth(values[-period - 1 :])[-period:]
    num_recent = max(1, period // 4)
    earlier = values[-num_recent - period : -period or None][:num_recent]
    difference = statistics.fmean(values[-num_recent:]) - statistics.fmean(earlier)
    return [max(0.0, season[step % period] + difference) for step in range(num_steps)]


def _has_foretold(values: Sequence[float], period: int, num_steps: int) -> bool:
    """Return True if this period would have foretold the last step of earlier forecasts far better than no change."""
    of_period = of_last = 0.0
    for size in range(period + 1, len(values) - num_steps + 1):
        actual = values[size + num_steps - 1]
        of_period += (_repeat(values[:size], period, num_steps)[-1] - actual) ** 2
        of_last += (values[size - 1] - actual) ** 2
    return of_period < _MOST_ERROR * of_last


def smooth(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and its two neighbours."""
    return [statistics.fmean(values[max(0, i - 1) : i + 2]) for i in range(len(values))]


def find_period(values: Sequence[float]) -> int | None:
    """Return the shortest clear period of a series in intervals, or None; it must have come one and a half times."""
    series = smooth(values)
    lags = range(_LEAST_PERIOD, int(len(series) / 1.5) + 1)
    spread = 2 * statistics.pvariance(series) if lags else 0.0
    likeness = {lag: _likeness(series, lag, spread) for lag in lags}
    least = max(_LEAST_LIKENESS, max(likeness.values(), default=0.0) - _MULTIPLES)
    period = next((lag for lag in lags if likeness[lag] >= least), None)
    if period is None:
        return None
    while likeness.get(period + 1, 0.0) > likeness[period]:
        period += 1
    if period == lags[-1]:  # the next lag may be still more alike
        return None
    # half of it ago the series was elsewhere, unlike a steady trend or noise
    return period if _likeness(series, period // 2, spread) < 0 else None


def _likeness(series: Sequence[float], lag: int, spread: float) -> float:
    """Return how like a series is to itself `lag` intervals ago: 1 if equal, about 0 if it is as far from it as chance.

    Unlike a correlation it sees the level: two slopes are not alike because both rise. `spread` is twice the variance.
    """
    pairs = list(zip(series[lag:], series[:-lag], strict=False))
    if len(pairs) < _LEAST_PERIOD or not spread:
        return 0.0
    return 1 - statistics.fmean((a - b) ** 2 for a, b in pairs) / spread


PREDICTORS: dict[str, Callable[[int], Predictor]] = {
    "constant": lambda window: MovingAveragePredictor(1),
    "moving-average": MovingAveragePredictor,
    "arima": ArimaPredictor,
    "kalman": KalmanPredictor,
    SEASONAL: SeasonalPredictor,
}


def make_predictor(name: str, window: int = DEFAULT_WINDOW) -> Predictor:
    """Make a predictor by its name. Raises ConfigError, which lists the names."""
    if name not in PREDICTORS:
        raise errors.ConfigError(
            f"--load-predictor {name}: expected one of {', '.join(PREDICTORS)}"
        )
    return PREDICTORS[name](window)
