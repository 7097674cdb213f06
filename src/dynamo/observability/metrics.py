"""The metrics of a process in Prometheus's format; the only module that imports prometheus_client.

A process owns one `Registry` and passes it to each object that counts something. Counters and gauges are those of
prometheus_client. A metric that is updated per token or several times per request is *fast*: a number or a list of
counts without the locks and checks of prometheus_client, which cost ten times as much as the addition. Only one thread
writes and renders a fast metric: the event loop's.
"""

import functools
import http.client
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NoReturn, TypeVar

import prometheus_client
from prometheus_client import core

from dynamo.base import clock, errors

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
DURATION_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600,
)  # fmt: skip

Counter = prometheus_client.Counter
Gauge = prometheus_client.Gauge
Histogram = prometheus_client.Histogram


class FastHistogram:
    """A histogram of one set of label values."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Record a value, `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    @property
    def count(self) -> int:
        """The number of recorded values."""
        return sum(self._counts)

    @property
    def sum(self) -> float:
        """The sum of the recorded values."""
        return self._sum

    def cumulative(self) -> list[tuple[str, float]]:
        """Return each bucket's upper bound, as text, with the number of values at most that large."""
        total, rows = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            rows.append((bound_text(bound), float(total)))
        return rows


def bound_text(bound: float) -> str:
    """Return a bucket's upper bound as the exposition format writes it."""
    return "+Inf" if bound == float("inf") else repr(float(bound))


class FastNumber:
    """A counter or gauge of one set of label values."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add `amount` to the value."""
        self.value += amount

    def dec(self, amount: float = 1.0) -> None:
        """Subtract `amount`; only from a gauge."""
        self.value -= amount


C = TypeVar("C", FastHistogram, FastNumber)


class FastFamily(Generic[C]):
    """All fast metrics of one name. Callers keep what `labels` returns: the lookup costs more than the update."""

    def __init__(
        self,
        name: str,
        label_names: Sequence[str],
        make_child: Callable[[], C],
        make_family: Callable[[], core.Metric],
    ) -> None:
        """`make_family` returns an empty family of prometheus_client, to which the samples are added."""
        self._name, self._label_names = name, tuple(label_names)
        self._make_child: Callable[[], C] = make_child
        self._make_family = make_family
        self._children: dict[tuple[str, ...], C] = {}

    def labels(self, *values: str) -> C:
        """Return the metric of these label values, in the order of their names. Raises ValueError."""
        child = self._children.get(values)
        if child is None:
            if len(values) != len(self._label_names):
                raise ValueError(
                    f"{self._name}: expected values for {self._label_names}, got {values}"
                )
            child = self._children[values] = self._make_child()
        return child

    def remove(self, *values: str) -> None:
        """Show the metric of these label values no longer. Raises KeyError."""
        del self._children[values]

    def adopt(self, child: C, *values: str) -> None:
        """Show a metric that another object made and updates under these label values."""
        self._children[values] = child

    def collect(self) -> Iterable[core.Metric]:
        """Return the samples, as prometheus_client asks a collector for them."""
        family: Any = self._make_family()
        for values, child in self._children.items():
            if isinstance(child, FastHistogram):
                family.add_metric(values, buckets=child.cumulative(), sum_value=child.sum)
            else:
                family.add_metric(values, child.value)
        yield family


class Registry:
    """All metrics of one process; each name begins with a prefix (dynamo_frontend, dynamo_component)."""

    def __init__(
        self, prefix: str, collectors: prometheus_client.CollectorRegistry | None = None
    ) -> None:
        self._prefix = prefix
        self._registry = collectors or prometheus_client.CollectorRegistry()
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

    def with_prefix(self, prefix: str) -> "Registry":
        """Return a view of this registry that gives new metrics another prefix."""
        return Registry(prefix, self._registry)

    @property
    def collectors(self) -> prometheus_client.CollectorRegistry:
        """The registry of prometheus_client, to list its families."""
        return self._registry

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        """Register a counter. The name must end with _total."""
        return Counter(f"{self._prefix}_{name}", text, labels, registry=self._registry)

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        """Register a gauge of this name."""
        return Gauge(f"{self._prefix}_{name}", text, labels, registry=self._registry)

    def histogram(
        self, name: str, text: str, labels: Sequence[str] = (), *, buckets: Sequence[float]
    ) -> Histogram:
        """Register a histogram that is updated at most a few times per request."""
        return Histogram(
            f"{self._prefix}_{name}", text, labels, buckets=buckets, registry=self._registry
        )

    def fast_histogram(
        self, name: str, text: str, labels: Sequence[str] = (), *, buckets: Sequence[float]
    ) -> FastFamily[FastHistogram]:
        """Register a histogram that the event loop's thread updates per token."""
        return self._register(
            name, text, labels, lambda: FastHistogram(buckets), core.HistogramMetricFamily
        )

    def fast_counter(self, name: str, text: str, labels: Sequence[str]) -> FastFamily[FastNumber]:
        """Register a counter (NAME_total) that the event loop's thread updates several times per request."""
        return self._register(name, text, labels, FastNumber, core.CounterMetricFamily)

    def fast_gauge(self, name: str, text: str, labels: Sequence[str]) -> FastFamily[FastNumber]:
        """Register a gauge that the event loop's thread updates several times per request."""
        return self._register(name, text, labels, FastNumber, core.GaugeMetricFamily)

    def _register(
        self, name: str, text: str, labels: Sequence[str], make_child: Callable[[], C], kind: Any
    ) -> FastFamily[C]:
        full_name = f"{self._prefix}_{name}"
        make_family = functools.partial(kind, full_name, text, labels=tuple(labels))
        family = FastFamily(full_name, labels, make_child, make_family)
        self._registry.register(family)
        return family

    def render(self) -> bytes:
        """Return the exposition, to be served with `CONTENT_TYPE`."""
        return prometheus_client.generate_latest(self._registry)

    def push(self, gateway: str, job: str) -> None:
        """Replace what a push gateway at `host:port` has of this job, and wait for it. Raises Unavailable."""
        try:
            prometheus_client.push_to_gateway(gateway, job, self._registry)
        except (OSError, UnicodeError, http.client.HTTPException) as error:  # no name, no gateway
            raise errors.Unavailable(f"cannot push metrics to {gateway}: {error}") from error


class _PrefixedFamilies:
    """The metric families of a registry with a prefix in their names."""

    def __init__(self, registry: prometheus_client.CollectorRegistry, prefix: str) -> None:
        self._registry, self._prefix = registry, prefix

    def collect(self) -> Iterable[core.Metric]:
        families = self._registry.collect()
        return (family for family in families if family.name.startswith(self._prefix))


def render_foreign(prefix: str) -> bytes:
    """Return the exposition of metrics that other libraries (vLLM) count in this process, of names with this prefix."""
    return prometheus_client.generate_latest(_PrefixedFamilies(prometheus_client.REGISTRY, prefix))


PERIOD_S = 0.1
STALL_S = 0.1
_DELAY_BUCKETS = (0, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class LoopDelay:
    """The delay of the event loop: how much later than asked it runs a task, which every stream of the process feels.

    Ten times a second a task sleeps for `PERIOD_S` and records how much later it woke. A delay of more than `STALL_S`
    is a stall: something blocked the loop, and all streams of the process stood still.
    """

    def __init__(self, registry: Registry, time: clock.Clock) -> None:
        self._clock = time
        family = registry.fast_histogram(
            "event_loop_delay_seconds",
            "Seconds by which the event loop ran a task later than asked",
            (),
            buckets=_DELAY_BUCKETS,
        )
        self._delay = family.labels()
        self._stalls = registry.counter(
            "event_loop_stall_total", f"Times the event loop was more than {STALL_S:g} s late"
        )

    async def watch(self) -> NoReturn:
        """Measure until the task is cancelled."""
        while True:
            began_at = self._clock.now()
            await self._clock.sleep(PERIOD_S)
            delay_s = max(0.0, self._clock.now() - began_at - PERIOD_S)
            self._delay.observe(delay_s)
            if delay_s > STALL_S:
                self._stalls.inc()
