"""What a decode worker counts of prompts that others computed, or were to compute."""

from dynamo.observability import metrics

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class DisaggMetrics:
    """Beside the worker's own."""

    def __init__(self, registry: metrics.Registry) -> None:
        prefills = registry.counter(
            "prefills_total",
            "prompts by where they were computed; fallback: here, because it failed elsewhere",
            ("where",),
        )
        self.local, self.remote, self.fallback = (
            prefills.labels(where) for where in ("local", "remote", "fallback")
        )
        self.retries = registry.counter(
            "prefill_retries_total", "prompts given to another prefill worker, because one failed"
        )
        self.redelivered = registry.counter(
            "prefill_redelivered_total",
            "prompts that a prefill worker took from the queue after another had taken them",
        )
        self.prefill_s = registry.histogram(
            "remote_prefill_seconds", "from asking a prefill worker to its answer", buckets=_SECONDS
        )
        self.transfer_s = registry.histogram(
            "kv_transfer_seconds",
            "copies of a prompt's blocks from a prefill worker",
            buckets=_SECONDS,
        )


class RoutedMetrics:
    """What a frontend counts of prompts that it had computed before it asked for the answer."""

    def __init__(self, registry: metrics.Registry) -> None:
        by_model = ("model",)
        self.prefills = registry.counter(
            "routed_prefills_total",
            "prompts by where the frontend had them computed; fallback: by who answers, because it failed elsewhere",
            (*by_model, "where"),
        )
        self.fallbacks = registry.counter(
            "routed_prefill_fallbacks_total",
            "prompts that could not be computed elsewhere, by why: lost, refused, late, failed, undelivered",
            (*by_model, "reason"),
        )
        self.retries = registry.counter(
            "routed_prefill_retries_total",
            "prompts given to another prefill worker, because one failed",
            by_model,
        )
        self.prefill_s = registry.histogram(
            "routed_prefill_seconds",
            "from asking for a prefill worker to its answer",
            by_model,
            buckets=_SECONDS,
        )


class ModelRoutedMetrics:
    """The same of one model, with its labels looked up."""

    def __init__(self, families: RoutedMetrics, model: str) -> None:
        label = model.lower()
        self._families, self._label = families, label
        self.local, self.remote, self._fallback = (
            families.prefills.labels(label, where) for where in ("local", "remote", "fallback")
        )
        self.retries = families.retries.labels(label)
        self.prefill_s = families.prefill_s.labels(label)

    def fell_back(self, reason: str) -> None:
        """Of one prompt."""
        self._fallback.inc()
        self._families.fallbacks.labels(self._label, reason).inc()


class TakerMetrics:
    """What a prefill worker counts of the tickets that it took from a queue."""

    def __init__(self, registry: metrics.Registry) -> None:
        tickets = registry.counter(
            "prefill_tickets_total",
            "tickets taken from the prefill queue; given_back: another is to compute it; dropped: of nobody we know",
            ("outcome",),
        )
        self.done, self.given_back, self.dropped = (
            tickets.labels(outcome) for outcome in ("done", "given_back", "dropped")
        )
