"""The routing service of a process: the router with its file, metrics and log lines.

Frontend, gateway and classification API share it. A log line names model, decision and reasons, never the text.
"""

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.observability import metrics as observed
from dynamo.semantic import loading, metrics, model_choice
from dynamo.semantic import router as semantic_router

_logger = logging.getLogger(__name__)


class RoutingService:
    """Routes requests and records what became of them. Raises ConfigError for a wrong file."""

    def __init__(
        self,
        path: Path,
        registry: observed.Registry,
        clock: clocks.Clock,
        served: model_choice.ServedModels | None = None,
    ) -> None:
        self.loader = loading.RouterLoader(path, clock, served)
        self.metrics = metrics.SemanticMetrics(registry)
        self._clock = clock

    @property
    def router(self) -> semantic_router.SemanticRouter:
        """Return the router with the configuration that is in force."""
        return self.loader.router

    def route(
        self, body: bytes, headers: Mapping[str, str], tenant: str = ""
    ) -> semantic_router.RoutedRequest:
        """Return the outcome of a request. Raises InvalidRequest and NoWorkers."""
        start = self._clock.now()
        try:
            outcome = self.router.route(body, headers, tenant)
        except errors.InvalidRequest:
            self.metrics.record_refusal("unknown", "parse_error")
            raise
        except errors.NoWorkers as error:
            self.metrics.record_refusal("none", "no_model")
            _logger.warning("routing_decision: %s", error)
            raise
        seconds = self._clock.now() - start
        self.metrics.record_outcome(outcome, seconds, len(self.router.cache))
        self._log(outcome, seconds)
        return outcome

    def record_answer(self, outcome: semantic_router.RoutedRequest, body: bytes | None) -> None:
        """Count the usage of a complete answer, and store it where the request's decision caches."""
        if body is None:
            return
        if outcome.cache_key is not None:
            self.router.cache.store(outcome.cache_key, body)
        try:
            usage = msgspec.json.decode(body)["usage"]
            self.metrics.record_usage(
                outcome.explanation.model, usage["prompt_tokens"], usage["completion_tokens"]
            )
        except (msgspec.DecodeError, KeyError, TypeError, ValueError):
            _logger.debug("an answer without usage")

    def _log(self, outcome: semantic_router.RoutedRequest, seconds: float) -> None:
        explanation = outcome.explanation
        for verdict in explanation.verdicts:
            if verdict.action != "none" or "error" in verdict.labels:
                _logger.warning(
                    "security_block: guard %s, action %s, decision %r, labels %s, %s",
                    verdict.guard,
                    verdict.action,
                    explanation.decision,
                    ",".join(verdict.labels),
                    verdict.reason,
                )
        if explanation.path == "cache":
            _logger.info("cache_hit: decision %r", explanation.decision)
        elif outcome.answer is None:
            _logger.info(
                "routing_decision: model %r asked, %r chosen, decision %r (%s), category %r, reasoning %s, %.2f ms",
                explanation.requested_model[:100],
                explanation.model,
                explanation.decision,
                ", ".join(explanation.reasons),
                explanation.category,
                explanation.reasoning,
                seconds * 1000,
            )


def tenant_of(headers: Mapping[str, str]) -> str:
    """Return what tells callers apart in cache and conversations: a hash of their key, or nothing."""
    key = headers.get("authorization") or headers.get("x-api-key") or ""
    return hashlib.sha256(key.encode()).hexdigest()[:16] if key else ""
