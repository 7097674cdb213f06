"""What a worker counts, under the names that dashboards of the original know (`dynamo_component_*`)."""

import statistics
from collections.abc import Sequence

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.observability import metrics
from dynamo.protocols import instances, load

_DURATION_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600,
)  # fmt: skip
_LABELS = ("dynamo_namespace", "dynamo_component", "dynamo_endpoint")


class WorkerMetrics:
    """The counts of one worker's `generate` endpoint."""

    def __init__(
        self,
        endpoint: instances.EndpointName,
        clock: clocks.Clock,
        *,
        passed_on: str | None = None,
    ) -> None:
        """`passed_on` begins the names of what an engine counts itself; it is rendered, too."""
        self.registry = registry = metrics.Registry("dynamo_component")
        self._passed_on = passed_on
        self._clock = clock
        self._started_at = clock.now()
        at = (endpoint.namespace, endpoint.component, endpoint.endpoint)
        self._requests = registry.counter("requests_total", "requests taken", _LABELS).labels(*at)
        self._bytes = registry.counter("request_bytes_total", "bytes of requests", _LABELS).labels(
            *at
        )
        self._inflight = registry.gauge(
            "inflight_requests", "requests not yet answered in full", _LABELS
        ).labels(*at)
        self._duration = registry.histogram(
            "request_duration_seconds",
            "from taking a request to its end",
            _LABELS,
            buckets=_DURATION_BUCKETS,
        ).labels(*at)
        self._cancelled = registry.counter(
            "cancellation_total", "requests whose caller went away", _LABELS
        ).labels(*at)
        self._errors = registry.counter(
            "errors_total", "requests that failed", (*_LABELS, "error_type")
        )
        self._at = at
        self._uptime = registry.gauge("uptime_seconds", "since the worker started")
        self._active_blocks = registry.gauge("kvstats_active_blocks", "blocks of running requests")
        self._total_blocks = registry.gauge("kvstats_total_blocks", "blocks there are")
        self._usage = registry.gauge(
            "kvstats_gpu_cache_usage_percent", "active blocks as a share of all, 0..1"
        )
        self._hit_rate = registry.gauge(
            "kvstats_gpu_prefix_cache_hit_rate", "cached prompt tokens as a share of all, 0..1"
        )

    @property
    def uptime_s(self) -> float:
        """Since the worker started."""
        return self._clock.now() - self._started_at

    def taken(self, request_bytes: int) -> None:
        """A request came in."""
        self._requests.inc()
        self._bytes.inc(request_bytes)
        self._inflight.inc()

    def ended(self, duration_s: float, error: errors.DynamoError | None = None) -> None:
        """It is over: answered in full, or by an error."""
        self._inflight.dec()
        self._duration.observe(duration_s)
        if isinstance(error, errors.Cancelled):
            self._cancelled.inc()
        elif error is not None:
            self._errors.labels(*self._at, error.code).inc()

    def render(self, current: Sequence[load.ForwardPassMetrics]) -> bytes:
        """The exposition, with the load of all ranks as it is now, if there are any yet."""
        self._uptime.set(self.uptime_s)
        if current:
            stats = [state.kv_stats for state in current]
            num_active = sum(one.kv_active_blocks for one in stats)
            num_total = sum(one.kv_total_blocks for one in stats)
            self._active_blocks.set(num_active)
            self._total_blocks.set(num_total)
            self._usage.set(num_active / num_total if num_total else 0.0)
            self._hit_rate.set(statistics.fmean(one.gpu_prefix_cache_hit_rate for one in stats))
        others = metrics.render_foreign(self._passed_on) if self._passed_on else b""
        return self.registry.render() + others
