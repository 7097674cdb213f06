"""Metrics in Prometheus's format; the only door to prometheus_client.

A process owns one `Registry` and hands it to whoever counts something. Counters and gauges are prometheus_client's own.
What is observed once per token uses `FastHistogram`: a list of counts and one bisection, without the locks of
prometheus_client's histogram. It is written from one thread only, the event loop's, which also renders it.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import prometheus_client
from prometheus_client import core

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST

Counter = prometheus_client.Counter
Gauge = prometheus_client.Gauge
Histogram = prometheus_client.Histogram


class FastHistogram:
    """One histogram for one set of label values."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    @property
    def count(self) -> int:
        """How many values were observed."""
        return sum(self._counts)

    @property
    def sum(self) -> float:
        """Their sum."""
        return self._sum

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, how many values are at most that), as Prometheus wants it."""
        total, rows = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            rows.append((bound_text(bound), float(total)))
        return rows


def bound_text(bound: float) -> str:
    """A bucket's upper bound as it is written in the exposition format."""
    return "+Inf" if bound == float("inf") else repr(float(bound))


class FastHistogramFamily:
    """All histograms of one name; `labels` gives the one for these label values, to be kept by the caller."""

    def __init__(
        self, name: str, text: str, label_names: Sequence[str], bounds: Sequence[float]
    ) -> None:
        self._name, self._text = name, text
        self._label_names, self._bounds = tuple(label_names), tuple(bounds)
        self._children: dict[tuple[str, ...], FastHistogram] = {}

    def labels(self, *values: str) -> FastHistogram:
        """The child for these values, in the order of the names."""
        if len(values) != len(self._label_names):
            raise ValueError(f"{self._name}: expected values for {self._label_names}, got {values}")
        return self._children.setdefault(values, FastHistogram(self._bounds))

    def collect(self) -> Iterable[core.HistogramMetricFamily]:
        """For prometheus_client."""
        family = core.HistogramMetricFamily(self._name, self._text, labels=self._label_names)
        for values, child in self._children.items():
            family.add_metric(values, buckets=child.cumulative(), sum_value=child.sum)
        yield family


class Registry:
    """All metrics of one process; `prefix` begins every name (dynamo_frontend, dynamo_component)."""

    def __init__(
        self, prefix: str, collectors: prometheus_client.CollectorRegistry | None = None
    ) -> None:
        self._prefix = prefix
        self._registry = collectors or prometheus_client.CollectorRegistry()
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # nobody reads them

    def under(self, prefix: str) -> "Registry":
        """The same metrics, for who names its own by another prefix."""
        return Registry(prefix, self._registry)

    @property
    def collectors(self) -> prometheus_client.CollectorRegistry:
        """All families, for whoever lists them."""
        return self._registry

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        """A number that only grows. Its name ends with _total, here and in the exposition."""
        return Counter(f"{self._prefix}_{name}", text, labels, registry=self._registry)

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        """A number that goes up and down."""
        return Gauge(f"{self._prefix}_{name}", text, labels, registry=self._registry)

    def histogram(
        self, name: str, text: str, labels: Sequence[str] = (), *, buckets: Sequence[float]
    ) -> Histogram:
        """For what happens at most a few times per request."""
        return Histogram(
            f"{self._prefix}_{name}", text, labels, buckets=buckets, registry=self._registry
        )

    def fast_histogram(
        self, name: str, text: str, labels: Sequence[str] = (), *, buckets: Sequence[float]
    ) -> FastHistogramFamily:
        """For what happens per token, on the event loop's thread."""
        family = FastHistogramFamily(f"{self._prefix}_{name}", text, labels, buckets)
        self._registry.register(family)
        return family

    def render(self) -> bytes:
        """The exposition, to be served with CONTENT_TYPE."""
        return prometheus_client.generate_latest(self._registry)
