"""The metrics of the semantic router, under the original's names (`llm_…`)."""

from typing import Any

from dynamo.observability import metrics
from dynamo.semantic import guards, router, routing_outcome

_LATENCY_BOUNDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1)
_ANSWER_BOUNDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TPOT_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1)
_TOKEN_BOUNDS = (1, 10, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 50_000, 100_000)
_KINDS = {"prompt": "prompts", "completion": "answers"}
UNKNOWN_MODEL = "unknown"


class SemanticMetrics:
    """Counts requests, changes of model, refusals, classifications and the cache's hits."""

    def __init__(self, registry: metrics.Registry) -> None:
        registry = registry.with_prefix("llm")
        self._requests = registry.counter(
            "model_requests_total", "requests by the model that gets them", ("model",)
        )
        self._errors = registry.counter(
            "request_errors_total", "requests that were refused or failed", ("model", "reason")
        )
        self._changes = registry.counter(
            "model_routing_modifications_total",
            "requests whose model the router changed",
            ("source_model", "target_model"),
        )
        self._reasons = registry.counter(
            "routing_reason_codes_total", "decisions of the router", ("reason_code", "model")
        )
        self._latency = registry.histogram(
            "model_routing_latency_seconds", "time to route a request", buckets=_LATENCY_BOUNDS
        )
        self._classifier_latency = registry.histogram(
            "classifier_latency_seconds",
            "time of a classifier",
            ("classifier",),
            buckets=_LATENCY_BOUNDS,
        )
        self._categories = registry.counter(
            "category_classifications_total", "requests by their domain", ("category",)
        )
        self._pii = registry.counter(
            "pii_violations_total", "personal data found", ("model", "pii_type")
        )
        self._reasoning = registry.counter(
            "reasoning_decisions_total",
            "requests by domain, model and reasoning",
            ("category", "model", "enabled"),
        )
        self._hits = registry.counter("cache_hits_total", "answers from the semantic cache")
        self._misses = registry.counter("cache_misses_total", "questions that it did not know")
        self._entries = registry.gauge("cache_entries_total", "answers that it holds")
        self._operations = registry.counter(
            "cache_operations_total",
            "lookups, writes and deletions in Milvus by what became of them",
            ("backend", "operation", "status"),
        )
        self._verdicts = registry.counter(
            "guard_verdicts_total",
            "requests that a guard stopped, sent to its model or observed",
            ("guard", "action"),
        )
        self._unread = registry.counter(
            "guard_unread_texts_total", "requests of which a guard could not read all", ("guard",)
        )
        self._observed = registry.counter(
            "observed_decisions_total", "decisions that are only observed", ("decision",)
        )
        self._ttft = registry.histogram(
            "model_ttft_seconds",
            "time to the first piece of an answer",
            ("model",),
            buckets=_ANSWER_BOUNDS,
        )
        self._completion = registry.histogram(
            "model_completion_latency_seconds",
            "time of a whole answer",
            ("model",),
            buckets=_ANSWER_BOUNDS,
        )
        self._tokens = registry.counter(
            "model_tokens_total", "tokens of prompts and answers", ("model", "kind")
        )
        self._tokens_by_kind = {
            kind: registry.counter(f"model_{kind}_tokens_total", f"tokens of {what}", ("model",))
            for kind, what in _KINDS.items()
        }
        self._tokens_per_request = {
            kind: registry.histogram(
                f"{kind}_tokens_per_request",
                f"tokens of {what}, each",
                ("model",),
                buckets=_TOKEN_BOUNDS,
            )
            for kind, what in _KINDS.items()
        }
        self._tpot = registry.histogram(
            "model_tpot_seconds",
            "time of an answer after its first piece, by its tokens",
            ("model",),
            buckets=_TPOT_BOUNDS,
        )
        self._cost = registry.counter(
            "model_cost_total", "price of the tokens, by model_config", ("model", "currency")
        )

    def record_outcome(
        self,
        outcome: routing_outcome.RoutedRequest,
        model: str,
        requested_model: str,
        seconds: float,
        num_entries: int,
    ) -> None:
        """Count a routed request and the time that its routing took; the names are those of known models."""
        explanation = outcome.explanation
        self._latency.observe(seconds)
        self._entries.set(num_entries)
        if not explanation.failed:  # else it was counted when it went to the model that failed
            self._record_signals(outcome, model)
        if outcome.answer is not None:
            return
        self._requests.labels(model).inc()
        self._reasons.labels(explanation.decision or router.FALLBACK, model).inc()
        self._reasoning.labels(explanation.category, model, explanation.reasoning).inc()
        if model != requested_model:
            self._changes.labels(requested_model, model).inc()

    def _record_signals(self, outcome: routing_outcome.RoutedRequest, model: str) -> None:
        """Count what a request says, once for all models that it goes to."""
        explanation = outcome.explanation
        if explanation.category:
            self._categories.labels(explanation.category).inc()
        if explanation.observed:
            self._observed.labels(explanation.observed).inc()
        for verdict in explanation.verdicts:
            self._record_verdict(verdict, model)
        if explanation.path == "cache":
            self._hits.inc()
        elif outcome.cache_key is not None:
            self._misses.inc()

    def record_refusal(self, model: str, reason: str) -> None:
        """Count a request that could not be routed, or that its model's server answered with an error."""
        self._errors.labels(model, reason).inc()

    def record_classification(self, classifier: str, seconds: float) -> None:
        """Record the time of one call of the classification API."""
        self._classifier_latency.labels(classifier).observe(seconds)

    def record_milvus(self, operation: str, status: str) -> None:
        """Count an operation of the cache in Milvus. For any thread."""
        self._operations.labels("milvus", operation, status).inc()

    def describe_classifications(self) -> dict[str, Any]:
        """Return how often each classifier was asked over HTTP and its mean time, and the requests by domain."""
        calls: dict[str, dict[str, float]] = {}
        for family in self._classifier_latency.collect():
            for sample in family.samples:
                suffix = sample.name.rpartition("_")[2]
                calls.setdefault(sample.labels["classifier"], {})[suffix] = sample.value
        return {
            "classifiers": {
                name: {
                    "count": int(call["count"]),
                    "mean_ms": call["sum"] / max(call["count"], 1) * 1000,
                }
                for name, call in calls.items()
            },
            "requests_by_category": {
                sample.labels["category"]: int(sample.value)
                for family in self._categories.collect()
                for sample in family.samples
                if sample.name.endswith("_total")
            },
        }

    def record_usage(self, model: str, prompt_tokens: int, completion_tokens: int) -> None:
        """Count the tokens that an answer reports."""
        for kind, number in (("prompt", prompt_tokens), ("completion", completion_tokens)):
            self._tokens.labels(model, kind).inc(number)
            self._tokens_by_kind[kind].labels(model).inc(number)
            self._tokens_per_request[kind].labels(model).observe(number)

    def record_cost(self, model: str, cost: float, currency: str) -> None:
        """Add what an answer cost."""
        self._cost.labels(model, currency).inc(cost)

    def record_token_time(self, model: str, seconds: float) -> None:
        """Record the mean time of a token of an answer after its first piece."""
        self._tpot.labels(model).observe(seconds)

    def record_first_piece(self, model: str, seconds: float) -> None:
        """Record the time from the routing of a request to the first piece of its answer."""
        self._ttft.labels(model).observe(seconds)

    def record_end(self, model: str, seconds: float) -> None:
        """Record the time from the routing of a request to the end of its answer."""
        self._completion.labels(model).observe(seconds)

    def _record_verdict(self, verdict: guards.GuardVerdict, model: str) -> None:
        if verdict.action != "none":
            self._verdicts.labels(verdict.guard, verdict.action).inc()
        if not verdict.is_complete:
            self._unread.labels(verdict.guard).inc()
        has_failed = guards.FAILURE in verdict.labels
        if verdict.guard == "pii" and not has_failed:
            for label in verdict.labels:
                self._pii.labels(model, label).inc()
        if verdict.action == "block":
            reason = "pii_policy_denied" if verdict.guard == "pii" else "jailbreak_block"
            reason = "classification_failed" if has_failed else reason
            self._errors.labels(model, reason).inc()
