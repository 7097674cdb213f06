"""The metrics of the router, with Dynamo's names, and `kv_cache_hit_ratio`, which Dynamo's articles show.

*Predicted* tokens are those that the router expected the selected worker to have cached; *confirmed* ones those that
the worker then found.
"""

import contextlib
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

from dynamo.observability import metrics
from dynamo.router import api, worker_load

_MS_FINE = tuple(0.001 * 2**k for k in range(15))
_MS_COARSE = tuple(0.01 * 3**k for k in range(17))
_SHARES = tuple(round(0.05 * k, 2) for k in range(21))
_WAITS_S = (0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60)
_TOKENS_IN = (0, 100, 210, 430, 870, 1800, 3600, 7400, 15000, 31000, 63000, 130000)
_TTFT_S = (0, 0.0022, 0.0047, 0.01, 0.022, 0.047, 0.1, 0.22, 0.47, 1, 2.2, 4.7, 10, 22, 48, 100, 220, 480)  # fmt: skip
_WORKER = ("worker_id", "dp_rank")
_LOAD = (*_WORKER, "worker_type")
_CLASS = ("default", "aggregated")  # policy_class, worker_type


class RouterMetrics:
    """All metric families of the routers of one process. `registry` has the prefix that dashboards expect."""

    def __init__(self, registry: metrics.Registry, router_id: str) -> None:
        router = registry.with_prefix("dynamo_router")
        component = registry.with_prefix("dynamo_component_router")
        self.router_id = router_id
        self.request_numbers = itertools.count()  # by which other routers know the requests
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
        self.started = component.counter(
            "requests_started_total", "Requests that a router got", ("router_id",)
        ).labels(router_id)
        self.input_len = component.fast_histogram(
            "input_sequence_tokens", "Tokens of a prompt", by_model, buckets=_TOKENS_IN
        )
        self.ttft = component.fast_histogram(
            "time_to_first_token_seconds",
            "From the router's decision to the first token",
            ("router_id",),
            buckets=_TTFT_S,
        ).labels(router_id)
        self.events_applied = registry.with_prefix("dynamo_component").fast_gauge(
            "kv_cache_events_applied",
            "KV events since the start, by kind and by whether the index took them",
            ("event_type", "status"),
        )
        waiting = ("model", "policy_class", "worker_type")
        self.waiting = registry.gauge(
            "router_queue_pending_requests", "Requests that wait in the router", waiting
        )
        self.waiting_tokens = registry.gauge(
            "router_queue_pending_isl_tokens", "Prompt tokens of those that wait", waiting
        )
        self.timeouts = registry.counter(
            "router_queue_backpressure_total",
            "Requests that waited too long",
            (*waiting, "reason"),
        )
        self.prefix_copies = registry.counter(
            "router_prefix_copies_total",
            "Prefixes copied to another worker ahead of need, because the queue of the only one that had them grew",
            ("model",),
        )
        self.wait_s = registry.fast_histogram(
            "router_queue_wait_seconds", "Time in the router's queue", ("model",), buckets=_WAITS_S
        )
        self.active_blocks = registry.gauge(
            "worker_active_decode_blocks", "Blocks of the requests in flight", _LOAD
        )
        self.event_age_s = router.gauge(
            "seconds_since_kv_event",
            "Seconds since a KV event or heartbeat of a worker was heard",
            ("worker_id",),
        )
        self.prefill_tokens = registry.gauge(
            "worker_active_prefill_tokens", "Prompt tokens sent and not computed yet", _LOAD
        )

    def count_event(self, event_type: str, *, is_applied: bool) -> None:
        """Count a KV event that the index took, or could not."""
        self.events_applied.labels(event_type, "ok" if is_applied else "error").inc()

    def set_event_age(self, instance_id: int, age_s: float | None) -> None:
        """Set how long ago an instance was heard; None: it is gone."""
        if age_s is not None:
            self.event_age_s.labels(f"{instance_id:x}").set(age_s)
        else:
            with contextlib.suppress(KeyError):  # it was never heard
                self.event_age_s.remove(f"{instance_id:x}")

    def _overhead(
        self, registry: metrics.Registry, stage: str, buckets: Sequence[float]
    ) -> metrics.FastHistogram:
        text = f"Milliseconds that routing a request took: {stage.replace('_', ' ')}"
        family = registry.fast_histogram(
            f"overhead_{stage}_ms", text, ("router_id",), buckets=buckets
        )
        return family.labels(self.router_id)


class RouteMetrics:
    """The metrics of one model, with its labels looked up; prefill workers and others count together."""

    def __init__(self, families: RouterMetrics, model: str) -> None:
        label = model.lower()
        self.router_id = families.router_id
        self._families = families
        self._hit_ratio = families.hit_ratio.labels(families.router_id, label)
        self._predicted_ratio = families.predicted_hit_ratio.labels(families.router_id, label)
        self._hit_rate = families.hit_rate.labels(families.router_id, label)
        self._input_len = families.input_len.labels(families.router_id, label)
        self._waiting = families.waiting.labels(label, *_CLASS)
        self._waiting_tokens = families.waiting_tokens.labels(label, *_CLASS)
        self._timeouts = families.timeouts.labels(label, *_CLASS, "timeout")
        self._prefix_copies = families.prefix_copies.labels(label)
        self._wait_s = families.wait_s.labels(label)
        self._num_tokens = self._num_confirmed = self._num_sent = 0
        self._num_predicted = 0.0
        self._hashing_s = self._finding_s = 0.0

    def count_start(self, num_tokens: int) -> int:
        """Count a request with a prompt of `num_tokens` that the router got; return its number among all models."""
        self._families.started.inc()
        self._input_len.observe(num_tokens)
        return next(self._families.request_numbers)

    def observe_first_output(self, duration_s: float) -> None:
        """Observe how long after it was sent a request had its first output, in seconds."""
        self._families.ttft.observe(duration_s)

    def observe_hashing(self, local_s: float, sequence_s: float) -> None:
        """Observe how long the local and the sequence hashes of a prompt took, in seconds."""
        self._families.hashing_ms.observe(local_s * 1e3)
        self._families.sequence_hashing_ms.observe(sequence_s * 1e3)
        self._hashing_s = local_s + sequence_s

    def observe_index_lookup(self, duration_s: float) -> None:
        """Observe how long a look-up in the index took, in seconds."""
        self._families.finding_ms.observe(duration_s * 1e3)
        self._finding_s = duration_s

    def begin_decision(self) -> None:
        """Forget look-ups in the index that were made for something else, such as an estimate."""
        self._finding_s = 0.0

    def observe_decision(self, duration_s: float) -> None:
        """Observe how long a decision took, its look-up in the index included, in seconds."""
        self._families.scheduling_ms.observe((duration_s - self._finding_s) * 1e3)
        self._families.total_ms.observe((duration_s + self._hashing_s) * 1e3)

    def count_request(self, worker: api.Worker, prompt: api.Prompt, overlap_blocks: float) -> None:
        """Count a request that is sent to `worker`, which is expected to have `overlap_blocks` of its prompt."""
        self._families.requests.labels(self._families.router_id, *_labels(worker)).inc()
        if prompt.is_prefilled:
            return  # such a decision does not depend on the cache
        num_predicted = overlap_blocks * prompt.block_size
        self._hit_rate.observe(num_predicted / prompt.num_tokens)
        self._num_sent += prompt.num_tokens
        self._num_predicted += num_predicted
        self._predicted_ratio.set(self._num_predicted / self._num_sent)

    def count_cached_tokens(self, prompt: api.Prompt, num_cached: int | None) -> None:
        """Count the prompt tokens that the worker found in its cache; None: it does not say."""
        if num_cached is not None and not prompt.is_prefilled:
            self._num_tokens += prompt.num_tokens
            self._num_confirmed += num_cached
            self._hit_ratio.set(self._num_confirmed / self._num_tokens)

    def enter_queue(self, num_tokens: int) -> None:
        """Count a prompt of `num_tokens` that begins to wait in the router's queue."""
        self._waiting.inc()
        self._waiting_tokens.inc(num_tokens)

    def leave_queue(self, num_tokens: int, duration_s: float) -> None:
        """Count the end of a wait in the queue, for whatever reason."""
        self._waiting.dec()
        self._waiting_tokens.dec(num_tokens)
        self._wait_s.observe(duration_s)

    def count_prefix_copy(self) -> None:
        """Count a prefix that is copied to another worker ahead of need."""
        self._prefix_copies.inc()

    def count_queue_timeout(self) -> None:
        """Count a request that was refused because it waited too long."""
        self._timeouts.inc()

    def show_workers(
        self,
        worker_type: str,
        loads: Mapping[api.Worker, worker_load.WorkerLoad],
        removed: Collection[api.Worker],
    ) -> None:
        """Export the predicted loads of these workers from now on, and remove the series of the removed ones."""
        families = self._families
        for worker, load in loads.items():
            labels = (*_labels(worker), worker_type)
            families.active_blocks.labels(*labels).set_function(_read_field(load, "active_blocks"))
            families.prefill_tokens.labels(*labels).set_function(
                _read_field(load, "prefill_tokens")
            )
        for worker in removed:
            families.active_blocks.remove(*_labels(worker), worker_type)
            families.prefill_tokens.remove(*_labels(worker), worker_type)
            with contextlib.suppress(KeyError):  # no request was sent to it
                families.requests.remove(families.router_id, *_labels(worker))


def _read_field(load: worker_load.WorkerLoad, name: str) -> Callable[[], float]:
    return lambda: getattr(load, name)


def _labels(worker: api.Worker) -> tuple[str, str]:
    return f"{worker.instance_id:x}", str(worker.dp_rank)
