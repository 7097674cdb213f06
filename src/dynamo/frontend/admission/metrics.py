"""What admission counts. The names are the original's; what waits has one class and is sent to aggregated workers."""

from enum import StrEnum

from dynamo.observability import metrics

_CLASS = ("default", "aggregated")  # policy_class, worker_type


class RejectionReason(StrEnum):
    """What a request can be stopped by: the label `gate`."""

    REQUEST_CONCURRENCY = "request_concurrency"
    WORKERS_BUSY = "workers_busy"
    API_KEY = "api_key"
    KEY_LIMIT = "key_limit"


class AdmissionMetrics:
    """All families of admission."""

    def __init__(self, registry: metrics.Registry) -> None:
        self._rejections = registry.counter(
            "admission_rejection_total", "Requests that were not let in", ("gate", "model")
        )
        self._limits = registry.gauge(
            "admission_gate_limit", "How many requests a gate lets in, for each model", ("gate",)
        )
        queue = ("model", "policy_class", "worker_type")
        self._pending = registry.gauge(
            "admission_queue_pending_requests", "Requests that wait for room", queue
        )
        self._pending_tokens = registry.gauge(
            "admission_queue_pending_isl_tokens", "Tokens of the prompts that wait for room", queue
        )
        self._backpressure = registry.counter(
            "admission_queue_backpressure_total",
            "Requests that could not wait (reason: full), or waited in vain (timeout)",
            ("model", "policy_class", "reason", "worker_type"),
        )

    def show_limit(self, gate: RejectionReason, limit: int) -> None:
        """How many a gate lets in."""
        self._limits.labels(gate).set(limit)

    def rejected(self, gate: RejectionReason, model: str) -> None:
        """A request was not let in."""
        self._rejections.labels(gate, model.lower()).inc()

    def show_line(self, model: str, num_requests: int, num_tokens: int) -> None:
        """How long the line of a model is now."""
        self._pending.labels(model.lower(), *_CLASS).set(num_requests)
        self._pending_tokens.labels(model.lower(), *_CLASS).set(num_tokens)

    def backpressure(self, model: str, reason: str) -> None:
        """The line did not help: `full` or `timeout`."""
        policy_class, worker_type = _CLASS
        self._backpressure.labels(model.lower(), policy_class, reason, worker_type).inc()
