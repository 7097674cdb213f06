"""The metrics of the planner, under the original's names (`dynamo_planner_*`) and those of its announcement."""

from dynamo.observability import metrics
from dynamo.planner.observation import Fresh, Observation
from dynamo.planner.policies import Targets
from dynamo.planner.scaling_pipeline import Decision

_POOLS = ("prefill", "decode")


class PlannerMetrics:
    """Shows the last observation and decision, and counts decisions."""

    def __init__(self, targets: Targets, model: str) -> None:
        self.registry = registry = metrics.Registry("dynamo_planner")
        self._model = model
        self._targets = targets
        self._gpu_seconds = 0.0
        self._last_at: float | None = None
        by_model = ("model_name",)
        gauges = {
            "num_prefill_replicas": "Prefill workers that are ready",
            "num_decode_replicas": "Decode or aggregated workers that are ready",
            "predicted_num_prefill_replicas": "Prefill workers that the policy proposes",
            "predicted_num_decode_replicas": "Decode or aggregated workers that the policy proposes",
            "predicted_requests_per_second": "Predicted arrivals",
            "predicted_input_sequence_tokens": "Predicted new prompt tokens of a request",
            "predicted_output_sequence_tokens": "Predicted tokens of an answer",
            "observed_requests_per_second": "Arrivals in the last interval",
            "observed_input_sequence_tokens": "Mean prompt tokens in the last interval",
            "observed_output_sequence_tokens": "Mean tokens of an answer in the last interval",
            "observed_ttft_ms": "Mean time to first token in the last interval",
            "observed_itl_ms": "Mean time between two tokens in the last interval",
            "sla_target_ttft_ms": "Target time to first token",
            "sla_target_itl_ms": "Target time between two tokens",
            "estimated_ttft_ms": "Time to first token of a request that comes now, by profile and queue",
            "estimated_itl_ms": "Time between two tokens by the profile, at the present use of the KV cache",
            "engine_prefill_requests_per_second": "Prompts that one worker can compute, by the profile",
            "engine_queued_prefill_tokens": "Prompt tokens that wait in the workers",
            "engine_queued_decode_kv_tokens": "Tokens of requests that wait in decode workers",
            "gpu_hours": "GPU hours of all workers since the planner's start",
            "metrics_missing": "1 while the traffic cannot be read, and nothing is scaled",
            "is_leader": "1 if this planner acts, 0 if another one does",
        }
        self._gauges = {name: registry.gauge(name, text, by_model) for name, text in gauges.items()}
        self._desired = registry.gauge(
            "desired_replicas", "Workers that the last decision asks for", (*by_model, "pool")
        )
        self._events = registry.counter(
            "scaling_events_total",
            "Decisions that changed a pool",
            (*by_model, "pool", "direction"),
        )
        self._decisions = registry.counter(
            "decisions_total", "Decisions by outcome", (*by_model, "outcome")
        )
        self._set("sla_target_ttft_ms", targets.ttft_s * 1e3)
        self._set("sla_target_itl_ms", targets.itl_s * 1e3)

    def record(self, observation: Observation, decision: Decision, *, is_leader: bool) -> None:
        """Show an observation and what was decided."""
        self._set("is_leader", is_leader)
        self._set("metrics_missing", not isinstance(observation.traffic, Fresh))
        self._set("num_prefill_replicas", observation.prefill.num_ready)
        self._set("num_decode_replicas", observation.decode.num_ready)
        loads = (observation.prefill_load, observation.decode_load)
        self._set("engine_queued_prefill_tokens", sum(load.waiting_tokens for load in loads))
        num_gpus = (
            observation.prefill.num_billed * self._targets.prefill_gpus
            + observation.decode.num_billed * self._targets.decode_gpus
        )
        self._set("engine_queued_decode_kv_tokens", observation.decode_load.waiting_tokens)
        if self._last_at is not None:
            self._gpu_seconds += num_gpus * (observation.at - self._last_at)
        self._last_at = observation.at
        self._set("gpu_hours", self._gpu_seconds / 3600)
        self._show_traffic(observation)
        self._show_proposal(decision)
        self._decisions.labels(self._model, decision.outcome).inc()
        for pool, before, after in zip(_POOLS, decision.present, decision.replicas, strict=True):
            self._desired.labels(self._model, pool).set(after)
            if after != before and is_leader and decision.outcome != "advisory":
                direction = "up" if after > before else "down"
                self._events.labels(self._model, pool, direction).inc()

    def _show_traffic(self, observation: Observation) -> None:
        if not isinstance(observation.traffic, Fresh):
            return
        traffic = observation.traffic.value
        self._set("observed_requests_per_second", traffic.num_requests / observation.interval_s)
        for name, value, factor in (
            ("observed_input_sequence_tokens", traffic.isl, 1.0),
            ("observed_output_sequence_tokens", traffic.osl, 1.0),
            ("observed_ttft_ms", traffic.ttft_s, 1e3),
            ("observed_itl_ms", traffic.itl_s, 1e3),
        ):
            if value is not None:
                self._set(name, value * factor)

    def _show_proposal(self, decision: Decision) -> None:
        if decision.proposal is None:
            return
        self._set("predicted_num_prefill_replicas", decision.proposal.replicas.prefill)
        self._set("predicted_num_decode_replicas", decision.proposal.replicas.decode)
        prediction = decision.proposal.prediction
        if prediction is not None:
            self._set("predicted_requests_per_second", prediction.requests_per_s)
            self._set("predicted_input_sequence_tokens", prediction.isl)
            self._set("predicted_output_sequence_tokens", prediction.osl)
        estimate = decision.proposal.estimate
        if estimate is not None:
            self._set("estimated_ttft_ms", estimate.ttft_s * 1e3)
            self._set("estimated_itl_ms", estimate.itl_s * 1e3)
            self._set("engine_prefill_requests_per_second", estimate.prompts_per_s)

    def _set(self, name: str, value: float) -> None:
        self._gauges[name].labels(self._model).set(value)
