"""Metrics in Prometheus's format; the only door to prometheus_client.

A process owns one `Registry` and hands it to whoever counts something. Counters and gauges are prometheus_client's own.
What is counted per token or several times per request is *fast*: a number or a list of counts without the locks and
checks of prometheus_client, which cost ten times as much as the addition. A fast metric is written from one thread
only, the event loop's, which also renders it.
"""

import abc
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

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


class FastNumber:
    """One counter or gauge for one set of label values."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """It grows."""
        self.value += amount

    def dec(self, amount: float = 1.0) -> None:
        """It shrinks; not for a counter."""
        self.value -= amount


C = TypeVar("C", FastHistogram, FastNumber)


class FastFamily(abc.ABC, Generic[C]):
    """All fast metrics of one name; `labels` gives the one for these label values, to be kept by the caller."""

    def __init__(self, name: str, text: str, label_names: Sequence[str]) -> None:
        self._name, self._text = name, text
        self._label_names = tuple(label_names)
        self._children: dict[tuple[str, ...], C] = {}

    def labels(self, *values: str) -> C:
        """The child for these values, in the order of the names."""
        found = self._children.get(values)
        if found is None:
            if len(values) != len(self._label_names):
                raise ValueError(
                    f"{self._name}: expected values for {self._label_names}, got {values}"
                )
            found = self._children[values] = self._make()
        return found

    @abc.abstractmethod
    def _make(self) -> C:
        """A child."""

    @abc.abstractmethod
    def collect(self) -> Iterable[core.Metric]:
        """For prometheus_client."""


class FastHistogramFamily(FastFamily[FastHistogram]):
    """Histograms with these upper bounds."""

    def __init__(
        self, name: str, text: str, label_names: Sequence[str], bounds: Sequence[float]
    ) -> None:
        super().__init__(name, text, label_names)
        self._bounds = tuple(bounds)

    def _make(self) -> FastHistogram:
        return FastHistogram(self._bounds)

    def collect(self) -> Iterable[core.Metric]:
        family = core.HistogramMetricFamily(self._name, self._text, labels=self._label_names)
        for values, child in self._children.items():
            family.add_metric(values, buckets=child.cumulative(), sum_value=child.sum)
        yield family


class FastNumberFamily(FastFamily[FastNumber]):
    """Counters or gauges."""

    def __init__(
        self, name: str, text: str, label_names: Sequence[str], *, is_counter: bool
    ) -> None:
        super().__init__(name, text, label_names)
        self._kind = core.CounterMetricFamily if is_counter else core.GaugeMetricFamily

    def _make(self) -> FastNumber:
        return FastNumber()

    def collect(self) -> Iterable[core.Metric]:
        family = self._kind(self._name, self._text, labels=self._label_names)
        for values, child in self._children.items():
            family.add_metric(values, child.value)
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

    def fast_counter(self, name: str, text: str, labels: Sequence[str]) -> FastNumberFamily:
        """For what is counted several times per request, on the event loop's thread. Its name ends with _total."""
        return self._fast_numbers(name, text, labels, is_counter=True)

    def fast_gauge(self, name: str, text: str, labels: Sequence[str]) -> FastNumberFamily:
        """The same, up and down."""
        return self._fast_numbers(name, text, labels, is_counter=False)

    def _fast_numbers(
        self, name: str, text: str, labels: Sequence[str], *, is_counter: bool
    ) -> FastNumberFamily:
        family = FastNumberFamily(f"{self._prefix}_{name}", text, labels, is_counter=is_counter)
        self._registry.register(family)
        return family

    def render(self) -> bytes:
        """The exposition, to be served with CONTENT_TYPE."""
        return prometheus_client.generate_latest(self._registry)


class _Named:
    """Those of a registry whose names begin so."""

    def __init__(self, registry: prometheus_client.CollectorRegistry, prefix: str) -> None:
        self._registry, self._prefix = registry, prefix

    def collect(self) -> Iterable[core.Metric]:
        return (one for one in self._registry.collect() if one.name.startswith(self._prefix))


def render_named(prefix: str) -> bytes:
    """The exposition of what others than we count in this process, under names that begin so."""
    return prometheus_client.generate_latest(_Named(prometheus_client.REGISTRY, prefix))
