"""The metrics of the frontend, with the original's names, labels and buckets, so that its dashboards work.

Labels are looked up once per model or once per request. A token costs one observation and one addition.
The life of a request in the gauges: *inflight* from its arrival to its end, *queued* until its first
token, *active* while a worker has it.

A `RequestMeter` also records when each stage of its request ended, and which worker had it. Records of requests (spans,
request trace, the console's history) are made by a `RequestObserver`, which is given the meter once, when the request
has ended; until then it is one of `FrontendMetrics.open_requests`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from dynamo.base import errors
from dynamo.frontend import migration, stage_metrics
from dynamo.observability import metrics
from dynamo.protocols import encoders, generate, model_card, model_errors, trace_context
from dynamo.router import explanation, route
from dynamo.runtime import component, credentials

_TOKENS_IN = (0, 100, 210, 430, 870, 1800, 3600, 7400, 15000, 31000, 63000, 130000)
_TOKENS_OUT = (0, 100, 210, 430, 880, 1800, 3700, 7600, 16000, 32000)
_DURATION = (0, 2, 4, 8, 16, 32, 64, 130, 260, 510)
_TTFT = (0, 0.0022, 0.0047, 0.01, 0.022, 0.047, 0.1, 0.22, 0.47, 1, 2.2, 4.7, 10, 22, 48, 100, 220, 480)  # fmt: skip
_ITL = (
    *(0, 0.0018, 0.0033, 0.0059, 0.011, 0.02, 0.035, 0.064, 0.12, 0.21, 0.38, 0.69),
    *(1.2, 2.3, 4.1, 7.4, 13, 24, 44, 80),
)
MAX_WORKERS = 1000  # of which the last request is shown
_CARD_GAUGES: dict[str, Callable[[model_card.ModelCard], int]] = {
    "model_context_length": lambda card: card.context_length,
    "model_kv_cache_block_size": lambda card: card.kv_cache_block_size,
    "model_total_kv_blocks": lambda card: card.runtime_config.total_kv_blocks,
    "model_max_num_seqs": lambda card: card.runtime_config.max_num_seqs,
    "model_max_num_batched_tokens": lambda card: card.runtime_config.max_num_batched_tokens,
}
UNKNOWN_MODEL = "unknown"  # the label of unknown names: clients cannot make labels
Now = Callable[[], float]


class TimedChoice(Protocol):
    """The time of a choice's last token; None before the first."""

    last_at: float | None


class RequestObserver(Protocol):
    """Is informed of each request that has ended."""

    def ended(self, request: "RequestMeter") -> None:
        """Record a request that has ended. Must not block."""
        ...


class FrontendMetrics:
    """All metric families of the frontend."""

    def __init__(
        self,
        registry: metrics.Registry,
        now: Now,
        observers: Sequence[RequestObserver] = (),
        migration_rules: migration.MigrationPolicy = migration.MigrationPolicy(),  # noqa: B008 (a frozen value)
    ) -> None:
        self.now = now
        self.certificates = credentials.ExpiryMetric(registry)
        self.observers = tuple(observers)
        self.open_requests: dict[RequestMeter, None] = {}  # the oldest first
        by_model = ("model",)
        self.queries = registry.fast_counter("id_queries_total", "Questions for workers", by_model)
        self.started = registry.fast_counter(
            "requests_started_total", "Requests that arrived", ("endpoint", "model", "request_type")
        )
        self.requests = registry.fast_counter(
            "requests_total",
            "Requests that ended",
            ("endpoint", "error_type", "model", "request_type", "status"),
        )
        self.further_prompts = registry.fast_counter(
            "further_prompts_total", "Prompts of requests beside the first of each", by_model
        )
        self.disconnected = registry.gauge(
            "disconnected_clients", "Clients that went away before their answer was complete"
        )
        self.failures = registry.counter(
            "failures_total", "Requests that ended by an error, by its kind", ("class", "reason")
        )
        self.cancelled = registry.counter(
            "model_cancellation_total", "Requests whose client went away", by_model
        )
        self._limit_of = migration_rules.limit_of
        self.migration_limit = registry.gauge(
            "model_migration_limit", "How often a request goes on at another worker", by_model
        )
        self.migrations = registry.counter(
            "model_migration_total",
            "Requests that went on at another worker: new ones of which nothing had come, and ongoing ones",
            ("model", "migration_type"),
        )
        self.too_long_to_move = registry.counter(
            "model_migration_max_seq_len_exceeded_total",
            "Requests that were too long to go on at another worker",
            by_model,
        )
        self.migration_duration = registry.fast_histogram(
            "model_migration_duration_seconds",
            "From the loss of a worker until another has the request",
            by_model,
            buckets=stage_metrics.STAGE_S,
        )
        self.inflight = registry.fast_gauge(
            "inflight_requests", "Requests between arrival and end", by_model
        )
        self.queued = registry.fast_gauge(
            "queued_requests", "Requests that wait for their first token", by_model
        )
        self.active = registry.fast_gauge("active_requests", "Requests that a worker has", by_model)
        self.ready = registry.gauge("model_ready", "1 if the model can be asked", by_model)
        self.workers = registry.gauge("model_workers", "Instances that serve the model", by_model)
        self.workers_down = registry.gauge(
            "model_workers_down", "Instances among them that were lost and are asked last", by_model
        )
        self.output_tokens = registry.fast_counter(
            "output_tokens_total", "Generated tokens", by_model
        )
        self.duration = registry.fast_histogram(
            "request_duration_seconds", "From arrival to end", by_model, buckets=_DURATION
        )
        self.input_len = registry.fast_histogram(
            "input_sequence_tokens", "Tokens of a prompt", by_model, buckets=_TOKENS_IN
        )
        self.output_len = registry.fast_histogram(
            "output_sequence_tokens", "Tokens of an answer", by_model, buckets=_TOKENS_OUT
        )
        self.cached_len = registry.fast_histogram(
            "cached_tokens",
            "Prompt tokens that were not computed again",
            by_model,
            buckets=_TOKENS_IN,
        )
        self.ttft = registry.fast_histogram(
            "time_to_first_token_seconds", "From arrival to first token", by_model, buckets=_TTFT
        )
        self.itl = registry.fast_histogram(
            "inter_token_latency_seconds", "Between two tokens of a choice", by_model, buckets=_ITL
        )
        self.segment_hits = registry.fast_counter(
            "tokenizer_cache_hits_total", "Segments of prompts whose tokens were known", ()
        ).labels()
        self.segment_misses = registry.fast_counter(
            "tokenizer_cache_misses_total", "Segments of prompts that had to be tokenized", ()
        ).labels()
        self.cached_tokens = registry.fast_counter(
            "tokenizer_cache_cached_tokens_total", "Prompt tokens of known segments", by_model
        )
        self.uncached_tokens = registry.fast_counter(
            "tokenizer_cache_uncached_tokens_total", "Prompt tokens of new segments", by_model
        )
        self.stages = stage_metrics.StageMetrics(registry)
        self.rejections = registry.counter(
            "model_rejection_total",
            "Requests that were refused because there was no worker, or all were busy",
            ("endpoint", "model"),
        )
        self.last_requests = LastRequests(registry)
        self._card_gauges = {
            name: registry.gauge(name, "From the model's card", by_model) for name in _CARD_GAUGES
        }
        self._by_model: dict[str, ModelMetrics] = {}

    def follow(self, runtime: component.DistributedRuntime) -> None:
        """Show the certificates of the process, and the bytes of its request plane."""
        self.certificates.follow(runtime.credential_watch.expiries)
        self.stages.follow(runtime.requests)

    def for_model(self, name: str) -> "ModelMetrics":
        """Return the metrics of one model, with its labels looked up."""
        label = name.lower()
        model_metrics = self._by_model.get(label)
        if model_metrics is None:
            model_metrics = self._by_model[label] = ModelMetrics(self, label)
        return model_metrics

    @property
    def by_model(self) -> "Mapping[str, ModelMetrics]":
        return self._by_model

    def update_model(
        self,
        card: model_card.ModelCard,
        num_workers: int,
        count_down: Callable[[], int],
        *,
        is_ready: bool,
    ) -> None:
        """Show the facts of a model's card, the numbers of its workers, and whether it is ready."""
        label = card.display_name.lower()
        self.workers.labels(label).set(num_workers)
        self.workers_down.labels(label).set_function(count_down)
        self.ready.labels(label).set(int(is_ready))
        self.for_model(label).block_size = card.kv_cache_block_size
        self.migration_limit.labels(label).set(self._limit_of(card.migration_limit))
        for name, fact in _CARD_GAUGES.items():
            self._card_gauges[name].labels(label).set(fact(card))


class LastRequests:
    """The latest request of each worker, for `MAX_WORKERS` of them: those heard last."""

    def __init__(self, registry: metrics.Registry) -> None:
        labels = ("dp_rank", "worker_id", "worker_type")
        self._families = [
            registry.fast_gauge(
                f"worker_last_{name}", f"{text} of a worker's latest request", labels
            )
            for name, text in (
                ("input_sequence_tokens", "Prompt tokens"),
                ("time_to_first_token_seconds", "Time from arrival to first token"),
                ("inter_token_latency_seconds", "Mean time between two tokens"),
            )
        ]
        self._workers: dict[tuple[int, int], Sequence[metrics.FastNumber]] = {}  # by rank and id

    def show(self, request: "RequestMeter", ended_at: float) -> None:
        """Show a request that a worker has answered."""
        if request.worker_id is None or request.first_token_at is None:
            return
        rank = (request.request and request.request.data_parallel_rank) or 0
        worker = (rank, request.worker_id)
        gauges = self._workers.pop(worker, None) or self._add(worker)
        self._workers[worker] = gauges
        num_prompt_tokens, ttft_s, itl_s = gauges
        num_prompt_tokens.value = request.num_prompt_tokens
        ttft_s.value = request.first_token_at - request.arrived_at
        itl_s.value = (ended_at - request.first_token_at) / max(1, request.num_tokens - 1)

    def _add(self, worker: tuple[int, int]) -> Sequence[metrics.FastNumber]:
        """Return the gauges of a worker that is new here; the one heard longest ago makes room."""
        if len(self._workers) == MAX_WORKERS:
            oldest = next(iter(self._workers))
            del self._workers[oldest]
            for family in self._families:
                family.remove(*self._labels_of(*oldest))
        return [family.labels(*self._labels_of(*worker)) for family in self._families]

    def _labels_of(self, rank: int, instance_id: int) -> tuple[str, str, str]:
        return str(rank), f"{instance_id:x}", "decode"


class ModelMetrics:
    """The metrics of one model: children of the families."""

    def __init__(self, families: FrontendMetrics, label: str) -> None:
        self.label = label
        self.families = families
        self.block_size = 0  # tokens; 0 as long as it is not known
        self.cancelled = families.cancelled.labels(label)
        self.inflight = families.inflight.labels(label)
        self.queued = families.queued.labels(label)
        self.active = families.active.labels(label)
        self.further_prompts = families.further_prompts.labels(label)
        self.output_tokens = families.output_tokens.labels(label)
        self.duration = families.duration.labels(label)
        self.input_len = families.input_len.labels(label)
        self.output_len = families.output_len.labels(label)
        self.cached_len = families.cached_len.labels(label)
        self.ttft = families.ttft.labels(label)
        self.itl = families.itl.labels(label)
        self.cached_tokens = families.cached_tokens.labels(label)
        self.uncached_tokens = families.uncached_tokens.labels(label)

    def record_lookup(
        self, *, hits: int, misses: int, cached_tokens: int, uncached_tokens: int
    ) -> None:
        """Count the use of the tokenizer cache for one prompt (`preprocess.tokenize.CacheObserver`)."""
        self.families.segment_hits.inc(hits)
        self.families.segment_misses.inc(misses)
        self.cached_tokens.inc(cached_tokens)
        self.uncached_tokens.inc(uncached_tokens)

    def record_times(self, *, template_s: float, tokenize_s: float) -> None:
        """Record how long a prompt took to be made (`preprocess.tokenize.CacheObserver`)."""
        self.families.stages.template.observe(template_s)
        self.families.stages.tokenize.observe(tokenize_s)
        self.families.stages.tokenizer_ms.observe(tokenize_s * 1e3)


class Arrival(msgspec.Struct, frozen=True):
    """The time of a request's arrival, and its ids."""

    at: float  # of the steady clock
    id: str = ""  # made here
    reported_id: str = ""  # shown to the client: its own id, or else `id`
    trace: trace_context.TraceContext | None = None
    parent_id: str | None = None  # the span of the client


class RequestMeter:
    """Measures one request from its arrival to its end. Times are of the steady clock, None until they come."""

    __slots__ = (
        "_is_over",
        "_is_queued",
        "_now",
        "_observe_itl",
        "arrival",
        "arrived_at",
        "ended_at",
        "endpoint",
        "error_type",
        "explanations",
        "first_token_at",
        "key_name",
        "model",
        "num_cached",
        "num_migrations",
        "num_prompt_tokens",
        "num_prompts",
        "num_tokens",
        "on_end",
        "opened_at",
        "prefill",
        "prepared_at",
        "request",
        "request_type",
        "tenant",
        "tier_tokens",
        "worker_id",
    )

    def __init__(
        self,
        model: ModelMetrics,
        endpoint: str,
        *,
        is_stream: bool,
        arrival: Arrival | None = None,
    ) -> None:
        self.model = model
        self.endpoint = endpoint
        self.request_type = "stream" if is_stream else "unary"
        self._now = model.families.now
        self._observe_itl = model.itl.observe
        self.arrival = arrival or Arrival(self._now())
        self.arrived_at = self.arrival.at
        self.prepared_at: float | None = None  # when the first prompt was sent
        self.opened_at: float | None = None  # when a worker had the last prompt
        self.first_token_at: float | None = None
        self.ended_at: float | None = None
        self.request: generate.Request | None = None  # of the first prompt; None once it has ended
        self.num_prompts = self.num_prompt_tokens = self.num_tokens = self.num_cached = 0
        self.num_migrations = 0
        self.key_name = self.tenant = ""  # of the API key, where there are keys
        self.worker_id: int | None = None  # the instance that has the request, or had it last
        self.prefill: route.PrefillResult | None = None
        # the decisions of the router and the hashes of their prompts; None: they are not explained
        self.explanations: list[tuple[explanation.RoutingExplanation, Sequence[int]]] | None = None
        self.tier_tokens: dict[str, int] = {}  # of `num_cached`, those of slower tiers
        self.error_type = ""
        self._is_over, self._is_queued = False, True
        self.on_end: Callable[[int], None] | None = None  # called once, with the generated tokens
        model.families.open_requests[self] = None
        model.families.started.labels(endpoint, model.label, self.request_type).value += 1
        model.inflight.value += 1
        model.queued.value += 1

    def record_prompt(self, request: generate.Request | encoders.EmbeddingRequest) -> None:
        """Record that a prompt, or the inputs of an embedding request, are sent to a worker."""
        num_tokens = request.prompt_len
        self.num_prompts += 1
        self.num_prompt_tokens += num_tokens
        self.model.input_len.observe(num_tokens)
        if self.prepared_at is None:
            self.request = request if isinstance(request, generate.Request) else None
            self.prepared_at = now = self._now()
            self.model.families.stages.preprocess.observe(now - self.arrived_at)
            self.model.active.value += 1
            self.model.families.stages.plane_inflight.value += 1

    def record_prefill(self, result: route.PrefillResult) -> None:
        """Record that another worker has computed the prompt, or the latest one."""
        self.prefill = result

    def record_dispatched(self) -> None:
        """Record that the workers have all prompts."""
        if self.prepared_at is not None:
            self.opened_at = now = self._now()
            self.model.families.stages.route.observe(now - self.prepared_at)
            self.model.families.stages.plane_queue.observe(now - self.prepared_at)

    def record_cached(
        self, num_tokens: int, tier_tokens: Iterable[tuple[str, int]] | None = None
    ) -> None:
        """Record how many tokens of a prompt a worker had in its cache, and how many of them in which slower tier."""
        self.num_cached += num_tokens
        for tier, count in tier_tokens or ():
            self.tier_tokens[tier] = self.tier_tokens.get(tier, 0) + count
        self.model.cached_len.observe(num_tokens)

    def record_tokens(self, choice: TimedChoice, num_tokens: int) -> None:
        """Record tokens of a choice. The only call per token."""
        now = self._now()
        last, choice.last_at = choice.last_at, now
        self.num_tokens += num_tokens
        self.model.output_tokens.value += num_tokens
        if last is not None:
            self._observe_itl((now - last) / (num_tokens or 1), num_tokens)
        elif self._is_queued:
            self._first_token(now)

    def record_migration(self, duration_s: float, *, is_new: bool) -> None:
        """Record that another worker has the rest of the request, so many seconds after the loss."""
        self.num_migrations += 1
        families, label = self.model.families, self.model.label
        kind = "new_request" if is_new else "ongoing_request"
        families.migrations.labels(label, kind).inc()
        families.migration_duration.labels(label).observe(duration_s)

    def record_too_long(self) -> None:
        """Record that the request has lost its worker and is too long to migrate."""
        self.model.families.too_long_to_move.labels(self.model.label).inc()

    def record_success(self) -> None:
        """Record that the answer is complete."""
        self._end("success", "")

    def record_failure(self, error: errors.DynamoError) -> None:
        """Record that the request ended by an error. Does nothing if it has ended before."""
        if not self._is_over:
            families = self.model.families
            families.failures.labels(type(error).__name__, error.code).inc()
            if isinstance(error, errors.Unavailable):
                families.rejections.labels(self.endpoint, self.model.label).inc()
        self._end("error", _error_type(error))

    def record_disconnect(self) -> None:
        """Record that the client disconnected. Does nothing if the request has ended before."""
        if not self._is_over:
            self.model.families.disconnected.inc()
            self.model.cancelled.inc()
            self._end("error", "cancelled")

    def _first_token(self, now: float) -> None:
        self._is_queued = False
        self.model.queued.value -= 1
        self.first_token_at = now
        self.model.ttft.observe(now - self.arrived_at)
        if self.prepared_at is not None:
            self.model.families.stages.roundtrip.observe(now - self.prepared_at)
            self.model.families.stages.plane_ttft.observe(now - self.prepared_at)

    def _end(self, status: str, error_type: str) -> None:
        if self._is_over:
            return
        self._is_over = True
        self.ended_at = self._now()
        self.error_type = error_type
        model = self.model
        model.families.open_requests.pop(self, None)
        if self._is_queued:
            self._is_queued = False
            model.queued.value -= 1
        if self.prepared_at is not None:
            model.active.value -= 1
            model.families.stages.plane_inflight.value -= 1
            model.families.last_requests.show(self, self.ended_at)
            model.output_len.observe(self.num_tokens)
        model.inflight.value -= 1
        model.duration.observe(self.ended_at - self.arrived_at)
        model.families.requests.labels(
            self.endpoint, error_type, model.label, self.request_type, status
        ).value += 1
        if self.on_end is not None:
            self.on_end(self.num_tokens)
            self.on_end = None
        for observer in model.families.observers:
            observer.ended(self)
        self.request = None  # its tokens are large, and an observer may keep this object


def _error_type(error: errors.DynamoError) -> str:
    """Return the label of an error, as the original names it, which has no limits of keys."""
    match error:
        case model_errors.ModelNotFound():
            return "not_found"
        case errors.Cancelled():
            return "cancelled"
        case errors.RateLimited():
            return "rate_limit"
        case errors.RequestError():
            return "validation"
        case errors.Unavailable():
            return "overload"
        case _:
            return "internal"
