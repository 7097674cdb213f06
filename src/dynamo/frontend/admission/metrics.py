"""The metrics of admission, under the original's names: one policy class, and all waiting requests are "aggregated"."""

from enum import StrEnum

from dynamo.observability import metrics

_POLICY_CLASS, _WORKER_TYPE = "default", "aggregated"


class RejectionReason(StrEnum):
    """Why a request was refused: the label `gate`."""

    REQUEST_CONCURRENCY = "request_concurrency"
    WORKERS_BUSY = "workers_busy"
    API_KEY = "api_key"
    KEY_LIMIT = "key_limit"


class AdmissionMetrics:
    """All metric families of admission."""

    def __init__(self, registry: metrics.Registry) -> None:
        self._rejections = registry.counter(
            "admission_rejection_total", "Requests that were refused", ("gate", "model")
        )
        self._limits = registry.gauge(
            "admission_gate_limit", "Requests that may run at the same time, per model", ("gate",)
        )
        queue_labels = ("model", "policy_class", "worker_type")
        self._pending = registry.gauge(
            "admission_queue_pending_requests", "Requests that wait for a permit", queue_labels
        )
        self._pending_tokens = registry.gauge(
            "admission_queue_pending_isl_tokens",
            "Tokens of the prompts that wait for a permit",
            queue_labels,
        )
        self._backpressure = registry.counter(
            "admission_queue_backpressure_total",
            "Requests that could not wait (reason: full), or waited in vain (timeout)",
            ("model", "policy_class", "reason", "worker_type"),
        )

    def set_limit(self, reason: RejectionReason, limit: int) -> None:
        """Show the number of requests above which others are refused for this reason."""
        self._limits.labels(reason).set(limit)

    def count_rejection(self, reason: RejectionReason, model: str) -> None:
        """Count a refused request."""
        self._rejections.labels(reason, model.lower()).inc()

    def set_queue(self, model: str, num_requests: int, num_tokens: int) -> None:
        """Show the length of a model's queue, in requests and in prompt tokens."""
        labels = (model.lower(), _POLICY_CLASS, _WORKER_TYPE)
        self._pending.labels(*labels).set(num_requests)
        self._pending_tokens.labels(*labels).set(num_tokens)

    def count_backpressure(self, model: str, reason: str) -> None:
        """Count a request for which the queue was full (`full`) or which waited too long (`timeout`)."""
        self._backpressure.labels(model.lower(), _POLICY_CLASS, reason, _WORKER_TYPE).inc()
