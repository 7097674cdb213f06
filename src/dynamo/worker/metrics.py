"""The metrics of a worker, under the names that NVIDIA Dynamo's dashboards use (`dynamo_component_*`)."""

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
    """The metrics of one worker and its main endpoint."""

    def __init__(
        self,
        endpoint: instances.EndpointName,
        clock: clocks.Clock,
        *,
        engine_prefix: str | None = None,
    ) -> None:
        """Render also the metrics that the engine counts itself, under names that begin with `engine_prefix`."""
        self.registry = registry = metrics.Registry("dynamo_component")
        self._engine_prefix = engine_prefix
        self._clock = clock
        self._started_at = clock.now()
        labels = (endpoint.namespace, endpoint.component, endpoint.endpoint)
        self._requests = registry.counter(
            "requests_total", "requests accepted or refused", _LABELS
        ).labels(*labels)
        self._bytes = registry.counter(
            "request_bytes_total", "bytes of request bodies", _LABELS
        ).labels(*labels)
        self._inflight = registry.gauge(
            "inflight_requests", "requests that are not answered in full yet", _LABELS
        ).labels(*labels)
        self._duration = registry.histogram(
            "request_duration_seconds",
            "seconds from receiving a request to its end",
            _LABELS,
            buckets=_DURATION_BUCKETS,
        ).labels(*labels)
        self._cancelled = registry.counter(
            "cancellation_total", "requests that their callers cancelled", _LABELS
        ).labels(*labels)
        self._errors = registry.counter(
            "errors_total", "requests that failed, by kind of error", (*_LABELS, "error_type")
        )
        self._label_values = labels
        self._uptime = registry.gauge("uptime_seconds", "seconds since the worker started")
        self._active_blocks = registry.gauge(
            "kvstats_active_blocks", "KV blocks of running requests"
        )
        self._total_blocks = registry.gauge("kvstats_total_blocks", "KV blocks of the engine")
        self._usage = registry.gauge(
            "kvstats_gpu_cache_usage_percent", "active KV blocks as a share of all, 0 to 1"
        )
        self._hit_rate = registry.gauge(
            "kvstats_gpu_prefix_cache_hit_rate", "cached prompt tokens as a share of all, 0 to 1"
        )

    @property
    def uptime_s(self) -> float:
        """Seconds since the worker started."""
        return self._clock.now() - self._started_at

    def request_accepted(self, request_bytes: int) -> None:
        """Count a request with a body of this size."""
        self._requests.inc()
        self._bytes.inc(request_bytes)
        self._inflight.inc()

    def request_ended(self, duration_s: float, error: errors.DynamoError | None = None) -> None:
        """Count the end of a request `duration_s` seconds after it came: in full, or by an error."""
        self._inflight.dec()
        self._duration.observe(duration_s)
        if isinstance(error, errors.Cancelled):
            self._cancelled.inc()
        elif error is not None:
            self._errors.labels(*self._label_values, error.code).inc()

    def render(self, current: Sequence[load.ForwardPassMetrics]) -> bytes:
        """Return the exposition, with the current load of all ranks (none before the engine has started)."""
        self._uptime.set(self.uptime_s)
        if current:
            stats = [rank.kv_stats for rank in current]
            num_active = sum(rank.kv_active_blocks for rank in stats)
            num_total = sum(rank.kv_total_blocks for rank in stats)
            self._active_blocks.set(num_active)
            self._total_blocks.set(num_total)
            self._usage.set(num_active / num_total if num_total else 0.0)
            self._hit_rate.set(statistics.fmean(rank.gpu_prefix_cache_hit_rate for rank in stats))
        engine_metrics = metrics.render_foreign(self._engine_prefix) if self._engine_prefix else b""
        return self.registry.render() + engine_metrics
