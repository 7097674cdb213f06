"""The health of a worker: its metrics, its system port, and the probe of a quiet engine.

GET /live       200 as long as the event loop of the process runs; during a start, `startup` answers
GET /health     200 once the worker serves; 503 before, while it drains, while it sleeps and after its engine died
GET /metrics    the metrics, in Prometheus's format
POST /engine/drain   end the process as SIGTERM does: it leaves discovery and finishes its requests

Commands bring their own routes (`sleep`, `lora_adapters`) and answer through `respond`; no page in a browser, which may
send a POST to any port of its user's host, can give one. Metrics have the names that
NVIDIA Dynamo's dashboards use (`dynamo_component_*`).

An engine that hangs looks like an idle one, so an engine with a load that has not changed for a while is probed with a
request. One that computes a long prompt is not quiet: its load shows how much of the prompt is left; new requests that
come to a hung one only add to that. So the worker
gives up only an engine that neither answers the probe nor makes any progress.
"""

import asyncio
import logging
import signal
import socket
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.kvbm import tier_report, tiered_cache
from dynamo.observability import metrics
from dynamo.protocols import blocks, generate, instances, kv_transfer, load, model_errors
from dynamo.runtime import component, credentials, requests
from dynamo.runtime.http import exchange, server
from dynamo.worker import startup

STATISTICS_S = 5.0
_logger = logging.getLogger(__name__)
_BROWSER_HEADERS = frozenset(("origin", "sec-fetch-site"))
_STATUS_BY_ERROR: tuple[tuple[type[errors.DynamoError], int], ...] = (
    (model_errors.ModelNotFound, 404),  # before RequestError, of which it is one
    (errors.Conflict, 409),
    (errors.RequestError, 400),
    (errors.Unavailable, 503),
)


class SystemPort:
    """Serves the system port of one process; calls `is_ready`, `uptime_s` and `render` for each request."""

    def __init__(
        self,
        *,
        endpoints: tuple[str, ...],
        is_ready: Callable[[], bool],
        uptime_s: Callable[[], float],
        render: Callable[[], bytes],
        command_routes: Mapping[tuple[str, str], exchange.Handler] = MappingProxyType({}),
    ) -> None:
        self._endpoints = endpoints
        self._is_ready = is_ready
        self._uptime_s = uptime_s
        self._render = render
        table = {
            ("GET", "/live"): self._live,
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._metrics,
            ("POST", "/engine/drain"): self._drain,
            **command_routes,
        }
        routes = {
            route: handler if route[0] == "GET" else refuse_pages(handler)
            for route, handler in table.items()
        }
        self._server = server.HttpServer(exchange.HttpRouter(routes, error_body=server.plain_error))

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port, which the system chooses for 0. Raises ConfigError if the port is taken."""
        return await self._server.start(host, port, port_flag="--system-port")

    async def start_on(self, listener: socket.socket) -> None:
        """Go on at the socket of a `startup.StartPort`."""
        await self._server.start_on(listener)

    async def close(self) -> None:
        """Stop listening and close the connections."""
        await self._server.close()

    def _live(self, request: exchange.Exchange) -> None:
        request.respond(200, self._status_body())

    def _health(self, request: exchange.Exchange) -> None:
        request.respond(200 if self._is_ready() else 503, self._status_body())

    def _drain(self, request: exchange.Exchange) -> None:
        request.respond(200, b'{"status":"draining"}')
        signal.raise_signal(signal.SIGTERM)

    def _metrics(self, request: exchange.Exchange) -> None:
        request.respond(200, self._render(), content_type=metrics.CONTENT_TYPE)

    def _status_body(self) -> bytes:
        status = "ready" if self._is_ready() else "notready"
        endpoints = dict.fromkeys(self._endpoints, status)
        return startup.render_status(status, self._uptime_s(), endpoints=endpoints)


def refuse_pages(handler: exchange.Handler) -> exchange.Handler:
    """Wrap the handler of a command so that no page in a browser gives it; such requests have headers of their own."""

    def handle(request: exchange.Exchange) -> Awaitable[None] | None:
        if _BROWSER_HEADERS.isdisjoint(request.request.headers):
            return handler(request)
        message = "a page in a browser may not command a worker"
        request.respond(403, server.plain_error(403, message, request.request.path))
        return None

    return handle


async def respond(request: exchange.Exchange, command: Awaitable[Mapping[str, object]]) -> None:
    """Await a command and answer with its result as JSON, or with the status of the error that it raised.

    400 names the field that is wrong, 404 a name that does not exist, 409 says that the worker's state forbids it now.
    """
    try:
        result = await command
    except errors.DynamoError as error:
        status = next((code for kind, code in _STATUS_BY_ERROR if isinstance(error, kind)), 500)
        request.respond(status, server.plain_error(status, str(error), request.request.path))
    else:
        request.respond(200, msgspec.json.encode(result))


_LABELS = ("dynamo_namespace", "dynamo_component", "dynamo_endpoint")


class WorkerMetrics:
    """The metrics of one worker and its main endpoint."""

    def __init__(
        self,
        endpoint: instances.EndpointName,
        clock: clocks.Clock,
        *,
        engine_prefix: str | None = None,
    ) -> None:
        """Render also the metrics that the engine counts itself, under names that begin with `engine_prefix`."""
        self.registry = registry = metrics.Registry("dynamo_component")
        self.certificates = credentials.ExpiryMetric(registry)
        self._engine_prefix = engine_prefix
        self._clock = clock
        self._started_at = clock.now()
        labels = (endpoint.namespace, endpoint.component, endpoint.endpoint)
        self._requests = registry.counter(
            "requests_total", "requests accepted or refused", _LABELS
        ).labels(*labels)
        self._bytes = registry.counter(
            "request_bytes_total", "bytes of request bodies", _LABELS
        ).labels(*labels)
        self._response_bytes = registry.fast_counter(
            "response_bytes_total", "bytes of the frames that carried answers", _LABELS
        )
        self._inflight = registry.gauge(
            "inflight_requests", "requests that are not answered in full yet", _LABELS
        ).labels(*labels)
        self._duration = registry.histogram(
            "request_duration_seconds",
            "seconds from receiving a request to its end",
            _LABELS,
            buckets=metrics.DURATION_BUCKETS,
        ).labels(*labels)
        self._cancelled = registry.counter(
            "cancellation_total", "requests that their callers cancelled", _LABELS
        ).labels(*labels)
        self._errors = registry.counter(
            "errors_total", "requests that failed, by kind of error", (*_LABELS, "error_type")
        )
        self._label_values = labels
        self._endpoint_path = endpoint.path
        self._prefill_latency = (
            registry.with_prefix("dynamo_worker")
            .histogram(
                "prefill_latency_ms",
                "milliseconds from receiving a request to the first output of its answer",
                _LABELS,
                buckets=[1000 * bound for bound in metrics.DURATION_BUCKETS],
            )
            .labels(*labels)
        )
        self._uptime = registry.gauge("uptime_seconds", "seconds since the worker started")
        self._active_blocks = registry.gauge(
            "kvstats_active_blocks", "KV blocks of running requests"
        )
        self._total_blocks = registry.gauge("kvstats_total_blocks", "KV blocks of the engine")
        self._usage = registry.gauge(
            "kvstats_gpu_cache_usage_percent", "active KV blocks as a share of all, 0 to 1"
        )
        self._later_total_blocks, self._later_usage = (  # by their names since Dynamo 1.0
            registry.gauge(name, text, _LABELS).labels(*labels)
            for name, text in (
                ("total_blocks", "KV blocks of the engine"),
                ("gpu_cache_usage_percent", "active KV blocks as a share of all, 0 to 1"),
            )
        )
        self._hit_rate = registry.gauge(
            "kvstats_gpu_prefix_cache_hit_rate", "cached prompt tokens as a share of all, 0 to 1"
        )

    def follow(self, runtime: component.DistributedRuntime) -> None:
        """Show the certificates of the process, and the bytes of its answers."""
        self.certificates.follow(runtime.credential_watch.expiries)
        self._response_bytes.adopt(
            runtime.requests.traffic.responses(self._endpoint_path), *self._label_values
        )

    @property
    def uptime_s(self) -> float:
        """Seconds since the worker started."""
        return self._clock.now() - self._started_at

    def request_accepted(self, request_bytes: int) -> None:
        """Count a request with a body of this size."""
        self._requests.inc()
        self._bytes.inc(request_bytes)
        self._inflight.inc()

    def answer_began(self, latency_s: float) -> None:
        """Record that the first output of an answer came `latency_s` seconds after its request."""
        self._prefill_latency.observe(1000 * latency_s)

    def request_ended(self, duration_s: float, error: errors.DynamoError | None = None) -> None:
        """Count the end of a request `duration_s` seconds after it came: in full, or by an error."""
        self._inflight.dec()
        self._duration.observe(duration_s)
        if isinstance(error, errors.Cancelled):
            self._cancelled.inc()
        elif error is not None:
            self._errors.labels(*self._label_values, error.code).inc()

    def render(self, current: Sequence[load.ForwardPassMetrics]) -> bytes:
        """Return the exposition, with the current load of all ranks (none before the engine has started)."""
        self._uptime.set(self.uptime_s)
        if current:
            stats = [rank.kv_stats for rank in current]
            num_active = sum(rank.kv_active_blocks for rank in stats)
            num_total = sum(rank.kv_total_blocks for rank in stats)
            self._active_blocks.set(num_active)
            for blocks_gauge in (self._total_blocks, self._later_total_blocks):
                blocks_gauge.set(num_total)
            for usage_gauge in (self._usage, self._later_usage):
                usage_gauge.set(num_active / num_total if num_total else 0.0)
            self._hit_rate.set(statistics.fmean(rank.gpu_prefix_cache_hit_rate for rank in stats))
        engine_metrics = metrics.render_foreign(self._engine_prefix) if self._engine_prefix else b""
        return self.registry.render() + engine_metrics


_PROBE_REQUEST = generate.Request(
    id="canary",
    model="canary",
    token_ids=blocks.pack((0,)),
    stop_conditions=generate.StopConditions(max_tokens=1, ignore_eos=True),
    sampling_options=generate.SamplingOptions(temperature=0.0),
)


class TokenTotals(Protocol):
    """The tokens of a worker's requests since its start."""

    num_prompt_tokens: int
    num_output_tokens: int


async def log_statistics(
    counts: TokenTotals,
    measure: Callable[[], Sequence[load.ForwardPassMetrics]],
    clock: clocks.Clock,
    report_tiers: Callable[[], tier_report.TierReport | None] = lambda: None,
) -> None:
    """Log the throughput and the load every `STATISTICS_S` seconds in which there was work, in vLLM's words.

    `report_tiers` returns the state of the KV cache tiers (host memory is logged as CPU); None if there are none.
    """
    was_idle = True
    while True:
        num_prompt, num_output = counts.num_prompt_tokens, counts.num_output_tokens
        began_at = clock.now()
        await clock.sleep(STATISTICS_S)
        elapsed_s = clock.now() - began_at
        num_prompt = counts.num_prompt_tokens - num_prompt
        num_output = counts.num_output_tokens - num_output
        ranks = measure()
        num_running = sum(rank.worker_stats.request_active_slots for rank in ranks)
        is_idle = not (num_prompt or num_output or num_running)
        if not (is_idle and was_idle):
            rates = num_prompt / elapsed_s, num_output / elapsed_s
            _log_load(rates, num_running, ranks, report_tiers())
        was_idle = is_idle


def _log_load(
    rates: tuple[float, float],
    num_running: int,
    ranks: Sequence[load.ForwardPassMetrics],
    tiers: tier_report.TierReport | None,
) -> None:
    num_waiting = sum(rank.worker_stats.num_requests_waiting for rank in ranks)
    num_active = sum(rank.kv_stats.kv_active_blocks for rank in ranks)
    num_blocks = sum(rank.kv_stats.kv_total_blocks for rank in ranks)
    hit_rate = statistics.fmean(rank.kv_stats.gpu_prefix_cache_hit_rate for rank in ranks)
    host_hit_rate = tiers.host_hit_rate if tiers is not None else 0.0
    uses = tiers.tiers if tiers is not None else ()
    host_used = sum(use.used_percent for use in uses if use.tier == tiered_cache.HOST)
    _logger.info(
        "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs,"
        " Swapped: 0 reqs, Pending: %d reqs, GPU KV cache usage: %.1f%%, CPU KV cache usage: %.1f%%.",
        *rates, num_running, num_waiting, 100 * num_active / max(1, num_blocks), host_used,
    )  # fmt: skip
    _logger.info(
        "Prefix cache hit rate: GPU: %.2f%%, CPU: %.2f%%", 100 * hit_rate, 100 * host_hit_rate
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheck:
    """The time limits of a health check, in seconds."""

    wait_s: float = 10.0  # without progress, before the probe
    answer_s: float = 3.0  # for the answer to the probe


class Canary:
    """Probes one engine: `handle` accepts requests, `measure` returns the load of each rank.

    `is_occupied`: the engine does what may keep it from computing, for a bounded time. `may_be_remote`: a prefill
    worker could compute the probe, which says so that the engine has to; a slow prefill worker is no fault of it.
    """

    def __init__(
        self,
        handle: requests.Handler,
        measure: Callable[[], Sequence[load.ForwardPassMetrics]],
        check: HealthCheck,
        clock: clocks.Clock,
        *,
        is_occupied: Callable[[], bool] = lambda: False,
        may_be_remote: bool = False,
    ) -> None:
        self._is_occupied = is_occupied
        self._params = kv_transfer.COMPUTE_LOCALLY if may_be_remote else None
        self._handle = handle
        self._measure = measure
        self._check = check
        self._clock = clock

    async def watch(self) -> errors.EngineFailed:
        """Probe the engine whenever it is quiet; return the error once it hangs."""
        while True:
            load_before = self._measure()
            await self._clock.sleep(self._check.wait_s)
            if not has_progressed(load_before, self._measure()) and not await self._is_alive():
                return errors.EngineFailed(
                    f"the engine hangs: it did not answer a token within {self._check.answer_s:g} s"
                )

    async def _is_alive(self) -> bool:
        probe = Probe(msgspec.structs.replace(_PROBE_REQUEST, kv_transfer_params=self._params))
        self._handle(probe)
        load_before, was_occupied = self._measure(), self._is_occupied()
        try:
            async with self._clock.timeout(self._check.answer_s):
                await probe.is_answered.wait()
        except TimeoutError:
            is_excused = was_occupied or self._is_occupied()
            return is_excused or has_progressed(load_before, self._measure())
        finally:  # after the load was measured, of which the probe is a part
            probe.cancel()
        return True


def has_progressed(
    before: Sequence[load.ForwardPassMetrics], after: Sequence[load.ForwardPassMetrics]
) -> bool:
    """Return whether the ranks of an engine did anything; that there are more prompts to compute is no sign of it."""

    def bound(earlier: load.ForwardPassMetrics, later: load.ForwardPassMetrics) -> object:
        most = earlier.worker_stats.active_prefill_tokens
        num_tokens = min(most, later.worker_stats.active_prefill_tokens)
        stats = msgspec.structs.replace(later.worker_stats, active_prefill_tokens=num_tokens)
        return msgspec.structs.replace(later, worker_stats=stats)

    return list(map(bound, before, after)) != list(before)


class Probe:
    """A `requests.Call` without a caller. Any answer ends it: an engine that refuses is alive, too."""

    endpoint = "canary"
    headers: Mapping[str, str] = {}

    def __init__(self, request: generate.Request) -> None:
        self.body = msgspec.Raw(msgspec.msgpack.encode(request))
        self.is_answered = asyncio.Event()
        self._on_cancel: Callable[[], None] | None = None

    def cancel(self) -> None:
        """Abort the probe in the engine."""
        if self._on_cancel is not None:
            self._on_cancel()

    def on_cancel(self, callback: Callable[[], None]) -> None:
        self._on_cancel = callback

    def on_signal(self, callback: Callable[[int], None]) -> None:
        """Ignore the callback: the probe has one choice."""

    def send(self, output: generate.Output) -> None:
        self.is_answered.set()

    def reply(self, value: Any) -> None:
        self.is_answered.set()

    def finish(self) -> None:
        self.is_answered.set()

    def fail(self, error: errors.DynamoError) -> None:
        self.is_answered.set()
