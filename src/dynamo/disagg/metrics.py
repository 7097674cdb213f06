"""Metrics of remote prefills: at decode workers, at frontends that route by prefill workers, and at prefill workers."""

from dynamo.observability import metrics

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class DisaggMetrics:
    """Metrics of a decode worker: where its prompts were computed, and how long remote prefills took."""

    def __init__(self, registry: metrics.Registry) -> None:
        prefills = registry.counter(
            "prefills_total",
            "prompts by where they were computed; fallback: by the decode worker, because the remote prefill failed",
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
            "remote_prefill_seconds",
            "seconds from the request to a prefill worker to its output",
            buckets=_SECONDS,
        )
        self.transfer_s = registry.histogram(
            "kv_transfer_seconds",
            "seconds that copies of a prompt's blocks from a prefill worker took",
            buckets=_SECONDS,
        )


class PeerPrefixMetrics:
    """Metrics of a worker that copies prefixes from other workers."""

    def __init__(self, registry: metrics.Registry) -> None:
        prefixes = registry.counter(
            "kv_peer_prefixes_total",
            "prompts for which another worker was known to have more cached blocks; imported: they were copied;"
            " declined: computing was estimated to be faster; failed: lease or copy failed or was late",
            ("outcome",),
        )
        self.imported, self.declined, self.failed = (
            prefixes.labels(outcome) for outcome in ("imported", "declined", "failed")
        )
        self.tokens = registry.counter(
            "kv_peer_tokens_total",
            "prompt tokens whose blocks were copied from other workers' caches",
        )


class PrefillRouteMetrics:
    """Metrics of a frontend that has prompts computed before it routes them to the answering worker."""

    def __init__(self, registry: metrics.Registry) -> None:
        by_model = ("model",)
        self.prefills = registry.counter(
            "routed_prefills_total",
            "prompts by where they were computed; fallback: by the answering worker, because the remote prefill failed",
            (*by_model, "where"),
        )
        self.fallbacks = registry.counter(
            "routed_prefill_fallbacks_total",
            "prompts whose remote prefill failed, by reason: lost, refused, late, failed, undelivered",
            (*by_model, "reason"),
        )
        self.retries = registry.counter(
            "routed_prefill_retries_total",
            "prompts given to another prefill worker, because one failed",
            by_model,
        )
        self.prefill_s = registry.histogram(
            "routed_prefill_seconds",
            "seconds from the request to a prefill worker to its output",
            by_model,
            buckets=_SECONDS,
        )


class ModelPrefillRouteMetrics:
    """`PrefillRouteMetrics` of one model, with its labels looked up."""

    def __init__(self, families: PrefillRouteMetrics, model: str) -> None:
        label = model.lower()
        self._families, self._label = families, label
        self.local, self.remote, self._fallback = (
            families.prefills.labels(label, where) for where in ("local", "remote", "fallback")
        )
        self.retries = families.retries.labels(label)
        self.prefill_s = families.prefill_s.labels(label)

    def count_fallback(self, reason: str) -> None:
        """Count one failed remote prefill."""
        self._fallback.inc()
        self._families.fallbacks.labels(self._label, reason).inc()


class PrefillJobMetrics:
    """Metrics of a prefill worker that takes jobs from a shared queue."""

    def __init__(self, registry: metrics.Registry) -> None:
        jobs = registry.counter(
            "prefill_tickets_total",
            "jobs taken from the prefill queue; given_back: for another worker; dropped: no decode worker wanted it",
            ("outcome",),
        )
        self.done, self.given_back, self.dropped = (
            jobs.labels(outcome) for outcome in ("done", "given_back", "dropped")
        )
