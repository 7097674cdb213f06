"""The history of metrics that the console draws: rates and quantiles of the last hour, one point every few seconds.

`make_point` compares two samples of counters that only grow, so that a missed sample widens an interval and loses
nothing. Quantiles are interpolated within the buckets of a histogram, as Prometheus's `histogram_quantile` does.
"""  # decider

from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

INTERVAL_S = 5.0
MAX_POINTS = 720  # an hour
MAX_MODELS = 16
ALL_MODELS = ""  # the key of the sums over all models

Buckets = Sequence[tuple[float, float]]  # upper bound, number of values at most that large


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """The counters of one model, or of all, at one time."""

    at: float  # seconds since 1970
    read_at: float  # seconds on a steady clock, by which rates are computed: the other one may jump
    num_ended: float
    num_failed: float
    input_tokens: float
    cached_tokens: float
    output_tokens: float
    num_inflight: float
    num_queued: float
    ttft: Buckets
    itl: Buckets


class MetricPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The rates and quantiles between two samples; a quantile is None where nothing was measured."""

    at: float  # seconds since 1970, of the later sample
    requests_per_s: float
    errors_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    cached_share: float | None  # of the prompt tokens
    num_inflight: float
    num_queued: float
    ttft_p50: float | None  # seconds
    ttft_p95: float | None
    itl_p50: float | None
    itl_p95: float | None


def make_point(earlier: Sample, later: Sample) -> MetricPoint:
    """Return the point between two samples of the same counters."""
    elapsed_s = max(later.read_at - earlier.read_at, 1e-3)
    input_tokens = later.input_tokens - earlier.input_tokens
    ttft, itl = subtract(later.ttft, earlier.ttft), subtract(later.itl, earlier.itl)
    return MetricPoint(
        at=later.at,
        requests_per_s=(later.num_ended - earlier.num_ended) / elapsed_s,
        errors_per_s=(later.num_failed - earlier.num_failed) / elapsed_s,
        input_tokens_per_s=input_tokens / elapsed_s,
        output_tokens_per_s=(later.output_tokens - earlier.output_tokens) / elapsed_s,
        cached_share=(
            (later.cached_tokens - earlier.cached_tokens) / input_tokens if input_tokens else None
        ),
        num_inflight=later.num_inflight,
        num_queued=later.num_queued,
        ttft_p50=quantile(ttft, 0.5),
        ttft_p95=quantile(ttft, 0.95),
        itl_p50=quantile(itl, 0.5),
        itl_p95=quantile(itl, 0.95),
    )


def subtract(later: Buckets, earlier: Buckets) -> Buckets:
    """Return the values that came between two states of a histogram."""
    if not earlier:
        return later
    return [
        (bound, count - before) for (bound, count), (_, before) in zip(later, earlier, strict=True)
    ]


def quantile(buckets: Buckets, share: float) -> float | None:
    """Return the value below which this share of the values lies; None without values.

    A value beyond the last finite bound counts as that bound.
    """
    total = buckets[-1][1] if buckets else 0.0
    if not total:
        return None
    rank, lower, below = share * total, 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            if bound == float("inf"):
                return lower
            return (
                lower + (bound - lower) * (rank - below) / (count - below)
                if count > below
                else bound
            )
        lower, below = bound, count
    return lower


def add_samples(samples: Sequence[Sample], at: float, read_at: float) -> Sample:
    """Return the sum of the samples of several models."""
    return Sample(
        at=at,
        read_at=read_at,
        num_ended=sum(sample.num_ended for sample in samples),
        num_failed=sum(sample.num_failed for sample in samples),
        input_tokens=sum(sample.input_tokens for sample in samples),
        cached_tokens=sum(sample.cached_tokens for sample in samples),
        output_tokens=sum(sample.output_tokens for sample in samples),
        num_inflight=sum(sample.num_inflight for sample in samples),
        num_queued=sum(sample.num_queued for sample in samples),
        ttft=_add_buckets([sample.ttft for sample in samples]),
        itl=_add_buckets([sample.itl for sample in samples]),
    )


def _add_buckets(histograms: Sequence[Buckets]) -> Buckets:
    return [
        (column[0][0], sum(count for _, count in column))
        for column in zip(*histograms, strict=True)
    ]


class MetricHistory:
    """The points of the last hour, by model; under `ALL_MODELS` those of all together."""

    def __init__(self) -> None:
        self._last: dict[str, Sample] = {}
        self._points: dict[str, deque[MetricPoint]] = {}

    @property
    def models(self) -> list[str]:
        return sorted(self._points.keys() - {ALL_MODELS})

    def add(self, samples: Mapping[str, Sample], at: float, read_at: float) -> None:
        """Add one sample of each model. Models beyond the first `MAX_MODELS` count in the sums alone."""
        total = {ALL_MODELS: add_samples(list(samples.values()), at, read_at)}
        for model, sample in (total | dict(samples)).items():
            earlier = self._last.get(model)
            if earlier is None and len(self._last) > MAX_MODELS:
                continue
            self._last[model] = sample
            points = self._points.setdefault(model, deque(maxlen=MAX_POINTS))
            if earlier is not None:
                points.append(make_point(earlier, sample))

    def points(self, model: str = ALL_MODELS) -> Sequence[MetricPoint]:
        """Return the points of a model, the oldest first; none for an unknown one."""
        return list(self._points.get(model, ()))

    def latest(self, model: str = ALL_MODELS) -> MetricPoint | None:
        """Return the last point of a model; None before the first."""
        points = self._points.get(model)
        return points[-1] if points else None
