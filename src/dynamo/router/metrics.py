"""What the router counts, by the original's names, and by the one that the articles show (`kv_cache_hit_ratio`).

*Predicted* is what the router believed of a prompt when it chose; *confirmed* is what the worker then had.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from dynamo.observability import metrics
from dynamo.router import api, worker_load

_MS_FINE = tuple(0.001 * 2**k for k in range(15))
_MS_COARSE = tuple(0.01 * 3**k for k in range(17))
_SHARES = tuple(round(0.05 * k, 2) for k in range(21))
_WAITS_S = (0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60)
_WORKER = ("worker_id", "dp_rank")
_CLASS = ("default", "aggregated")  # policy_class, worker_type


class RouterMetrics:
    """All families of the routers of one process. `registry` names what the frontend's dashboards show."""

    def __init__(self, registry: metrics.Registry, router_id: str) -> None:
        router = registry.with_prefix("dynamo_router")
        component = registry.with_prefix("dynamo_component_router")
        self.router_id = router_id
        self.hashing_ms = self._overhead(router, "block_hashing", _MS_FINE)
        self.sequence_hashing_ms = self._overhead(router, "seq_hashing", _MS_FINE)
        self.finding_ms = self._overhead(router, "indexer_find_matches", _MS_COARSE)
        self.scheduling_ms = self._overhead(router, "scheduling", _MS_COARSE)
        self.total_ms = self._overhead(router, "total", _MS_COARSE)
        by_model = ("router_id", "model")
        self.hit_ratio = router.gauge(
            "kv_cache_hit_ratio", "Prompt tokens that workers had / prompt tokens", by_model
        )
        self.predicted_hit_ratio = router.gauge(
            "kv_cache_predicted_hit_ratio",
            "The same, as the router believed when it chose",
            by_model,
        )
        self.hit_rate = component.fast_histogram(
            "kv_hit_rate",
            "Share of a prompt that the chosen worker was believed to hold",
            by_model,
            buckets=_SHARES,
        )
        self.requests = component.counter(
            "requests_total", "Requests sent to a worker", ("router_id", *_WORKER)
        )
        waiting = ("model", "policy_class", "worker_type")
        self.waiting = registry.gauge(
            "router_queue_pending_requests", "Requests that wait in the router", waiting
        )
        self.waiting_tokens = registry.gauge(
            "router_queue_pending_isl_tokens", "Prompt tokens of those that wait", waiting
        )
        self.given_up = registry.counter(
            "router_queue_backpressure_total",
            "Requests that waited too long",
            (*waiting, "reason"),
        )
        self.wait_s = registry.fast_histogram(
            "router_queue_wait_seconds", "Time in the router's queue", ("model",), buckets=_WAITS_S
        )
        self.active_blocks = registry.gauge(
            "worker_active_decode_blocks", "Blocks of the requests in flight", _WORKER
        )
        self.prefill_tokens = registry.gauge(
            "worker_active_prefill_tokens", "Prompt tokens sent and not computed yet", _WORKER
        )

    def _overhead(
        self, registry: metrics.Registry, stage: str, buckets: Sequence[float]
    ) -> metrics.FastHistogram:
        text = f"Milliseconds that routing a request took: {stage.replace('_', ' ')}"
        family = registry.fast_histogram(
            f"overhead_{stage}_ms", text, ("router_id",), buckets=buckets
        )
        return family.labels(self.router_id)


class RouteMetrics:
    """What is counted for one model, with its labels looked up; its prefill workers and the others count together."""

    def __init__(self, families: RouterMetrics, model: str) -> None:
        label = model.lower()
        self.router_id = families.router_id
        self._families = families
        self._hit_ratio = families.hit_ratio.labels(families.router_id, label)
        self._predicted_ratio = families.predicted_hit_ratio.labels(families.router_id, label)
        self._hit_rate = families.hit_rate.labels(families.router_id, label)
        self._waiting = families.waiting.labels(label, *_CLASS)
        self._waiting_tokens = families.waiting_tokens.labels(label, *_CLASS)
        self._given_up = families.given_up.labels(label, *_CLASS, "timeout")
        self._wait_s = families.wait_s.labels(label)
        self._num_tokens = self._num_confirmed = self._num_sent = 0
        self._num_predicted = 0.0
        self._hashing_s = self._finding_s = 0.0

    def hashed(self, local_s: float, sequence_s: float) -> None:
        """The blocks of a prompt were named."""
        self._families.hashing_ms.observe(local_s * 1e3)
        self._families.sequence_hashing_ms.observe(sequence_s * 1e3)
        self._hashing_s = local_s + sequence_s

    def found(self, duration_s: float) -> None:
        """The index was asked."""
        self._families.finding_ms.observe(duration_s * 1e3)
        self._finding_s = duration_s

    def decided(self, duration_s: float) -> None:
        """A worker was chosen, in this time with the index's."""
        self._families.scheduling_ms.observe((duration_s - self._finding_s) * 1e3)
        self._families.total_ms.observe((duration_s + self._hashing_s) * 1e3)
        self._finding_s = 0.0

    def sent(self, worker: api.Worker, prompt: api.Prompt, overlap_blocks: float) -> None:
        """A request goes to this worker, which is believed to hold so much of its prompt."""
        self._families.requests.labels(self._families.router_id, *_labels(worker)).inc()
        if prompt.is_prefilled:
            return  # nobody hoped to find it there
        num_predicted = overlap_blocks * prompt.block_size
        self._hit_rate.observe(num_predicted / prompt.num_tokens)
        self._num_sent += prompt.num_tokens
        self._num_predicted += num_predicted
        self._predicted_ratio.set(self._num_predicted / self._num_sent)

    def computed(self, prompt: api.Prompt, num_cached: int | None) -> None:
        """A prompt is computed, and its worker has told how much of it it had."""
        if num_cached is not None and not prompt.is_prefilled:
            self._num_tokens += prompt.num_tokens
            self._num_confirmed += num_cached
            self._hit_ratio.set(self._num_confirmed / self._num_tokens)

    def waits(self, num_tokens: int) -> None:
        """A request begins to wait."""
        self._waiting.inc()
        self._waiting_tokens.inc(num_tokens)

    def waited(self, num_tokens: int, duration_s: float) -> None:
        """It waits no more."""
        self._waiting.dec()
        self._waiting_tokens.dec(num_tokens)
        self._wait_s.observe(duration_s)

    def gave_up(self) -> None:
        """It waited too long."""
        self._given_up.inc()

    def show(
        self, loads: Mapping[api.Worker, worker_load.Load], gone: Collection[api.Worker]
    ) -> None:
        """Tell from now on what the router believes these are doing, and nothing more of those."""
        families = self._families
        for worker, one in loads.items():
            labels = _labels(worker)
            families.active_blocks.labels(*labels).set_function(_reading(one, "active_blocks"))
            families.prefill_tokens.labels(*labels).set_function(_reading(one, "prefill_tokens"))
        for worker in gone:
            families.active_blocks.remove(*_labels(worker))
            families.prefill_tokens.remove(*_labels(worker))


def _reading(one: worker_load.Load, fact: str) -> Callable[[], float]:
    return lambda: getattr(one, fact)


def _labels(worker: api.Worker) -> tuple[str, str]:
    return f"{worker.instance_id:x}", str(worker.dp_rank)
