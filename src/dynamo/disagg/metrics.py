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
