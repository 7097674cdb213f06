"""The command `python -m dynamo.metrics`: one page of metrics with the load of all workers of a component.

It is the aggregator of Dynamo 0.3 (its dashboards read `llm_*`): for each worker the KV blocks and requests that it
publishes, over all workers the mean and the deviation of the active blocks, and the prompt blocks that routers with
`--router-replica-sync` publish. Prometheus fetches the page, or with `--push` a push gateway is sent it.
"""

import asyncio
import logging
import statistics
import sys
from collections.abc import Container, Iterable
from dataclasses import dataclass

import msgspec

from dynamo.base import addresses, config, errors, process_setup, tasks
from dynamo.base import clock as clocks
from dynamo.observability import logs, metrics
from dynamo.protocols import instances, load, wire
from dynamo.runtime import component, events
from dynamo.runtime.http import exchange, server

_PROG = "python -m dynamo.metrics"
_STALE_S = 20.0  # workers report every second or so
_JOB = "dynamo"  # of what a push gateway is sent
_LABELS = ("component", "endpoint")
_logger = logging.getLogger(__name__)
_decode_load = msgspec.msgpack.Decoder(load.LoadEvent).decode
_decode_sequences = msgspec.msgpack.Decoder(list[load.ActiveSequenceEvent]).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatorConfig(component.RuntimeConfig):
    """Collect the load of all workers of a component as one page of metrics."""

    component: str = config.option("backend", help="component of the workers")
    endpoint: str = config.option("generate", help="endpoint of the workers")
    model_name: str | None = config.option(None, help="value of the label model of each metric")
    poll_interval: float = config.option(
        1.0, help="seconds between two updates of the figures", least=0.05
    )
    host: str = config.option(
        "127.0.0.1",
        help="address of /metrics, 0.0.0.0 for all networks; with --push: host of the push gateway",
    )
    port: int = config.option(
        9091, help="port of /metrics, 0: any; with --push: of the push gateway", least=0, most=65535
    )
    push: bool = config.option(False, help="send the page to a push gateway instead of serving it")
    push_interval: float = config.option(2.0, help="seconds between two pushes", least=0.05)


class LoadMetrics:
    """The metrics of the workers of one endpoint."""

    def __init__(self, name: instances.EndpointName, model: str | None) -> None:
        self.registry = metrics.Registry("llm")
        self._labels = (name.component, name.endpoint, *([model] if model else []))
        common = (*_LABELS, *(["model"] if model else []))
        worker = (*common, "worker_id")
        gauge, counter = self.registry.gauge, self.registry.counter
        self._blocks_active = gauge("kv_blocks_active", "KV blocks of running requests", worker)
        self._blocks_total = gauge("kv_blocks_total", "KV blocks of the worker", worker)
        self._slots_active = gauge("requests_active_slots", "running requests", worker)
        self._slots_total = gauge("requests_total_slots", "requests that may run at once", worker)
        self._hit_rate = gauge(
            "kv_hit_rate_percent", "cached prompt tokens as a percentage of all", worker
        )
        self._load_mean = gauge("load_avg", "mean of the workers' active KV blocks", common)
        self._load_deviation = gauge(
            "load_std", "standard deviation of the workers' active KV blocks", common
        )
        self._prompt_blocks = counter(
            "kv_hit_rate_isl_blocks_total", "prompt blocks of routed requests", worker
        )
        self._cached_blocks = counter(
            "kv_hit_rate_overlap_blocks_total", "prompt blocks that were cached", worker
        )
        self._counted: set[int] = set()  # workers with counters

    def update(self, reports: Iterable[tuple[int, load.ForwardPassMetrics]]) -> None:
        """Show these reports, one for each data-parallel rank of each worker, and forget all others."""
        ranks_by_worker: dict[int, list[load.ForwardPassMetrics]] = {}
        for worker_id, report in reports:
            ranks_by_worker.setdefault(worker_id, []).append(report)
        for family in (
            *(self._blocks_active, self._blocks_total, self._hit_rate),
            *(self._slots_active, self._slots_total),
        ):
            family.clear()
        active_blocks = []
        for worker_id, ranks in ranks_by_worker.items():
            labels = (*self._labels, f"{worker_id:x}")
            blocks = [rank.kv_stats for rank in ranks]
            slots = [rank.worker_stats for rank in ranks]
            active_blocks.append(sum(each.kv_active_blocks for each in blocks))
            self._blocks_active.labels(*labels).set(active_blocks[-1])
            self._blocks_total.labels(*labels).set(sum(each.kv_total_blocks for each in blocks))
            self._slots_active.labels(*labels).set(sum(each.request_active_slots for each in slots))
            self._slots_total.labels(*labels).set(sum(each.request_total_slots for each in slots))
            hit_rate = statistics.fmean(each.gpu_prefix_cache_hit_rate for each in blocks)
            self._hit_rate.labels(*labels).set(100 * hit_rate)
        mean = statistics.fmean(active_blocks) if active_blocks else 0.0
        deviation = statistics.pstdev(active_blocks) if active_blocks else 0.0
        self._load_mean.labels(*self._labels).set(mean)
        self._load_deviation.labels(*self._labels).set(deviation)

    def count_routed_prompt(self, worker_id: int, num_blocks: int, num_cached: float) -> None:
        labels = (*self._labels, f"{worker_id:x}")
        self._counted.add(worker_id)
        self._prompt_blocks.labels(*labels).inc(num_blocks)
        self._cached_blocks.labels(*labels).inc(num_cached)

    def remove_lost(self, workers: Container[int]) -> None:
        """Show the counters of these workers only."""
        for worker_id in [counted for counted in self._counted if counted not in workers]:
            self._counted.remove(worker_id)
            for family in (self._prompt_blocks, self._cached_blocks):
                family.remove(*self._labels, f"{worker_id:x}")


class Aggregator:
    """Follows the reports of one endpoint's workers and keeps `LoadMetrics` of them."""

    def __init__(
        self, settings: AggregatorConfig, runtime: component.DistributedRuntime, clock: clocks.Clock
    ) -> None:
        self._settings, self._runtime, self._clock = settings, runtime, clock
        name = instances.EndpointName(settings.namespace, settings.component, settings.endpoint)
        self._metrics = LoadMetrics(name, settings.model_name)
        self._workers = runtime.client(name).instances
        self._topic = f"{name.namespace}/{name.component}"
        self._reports: dict[tuple[int, int], tuple[float, load.ForwardPassMetrics]] = {}
        routes = {("GET", "/metrics"): self._answer}
        self._server = server.HttpServer(exchange.HttpRouter(routes, error_body=server.plain_error))

    async def run(self, stop: asyncio.Event) -> None:
        """Collect and serve, or push, until `stop` is set. Raises ConfigError if the port is taken."""
        plane, settings = self._runtime.events, self._settings
        running = tasks.Tasks()
        subscriptions = [
            await plane.subscribe(f"{self._topic}/kv_metrics", self._take_loads),
            await plane.subscribe(
                f"{self._topic}/{load.ACTIVE_SEQUENCES_SUBJECT}", self._take_sequences
            ),
        ]
        try:
            if settings.push:
                running.start("push", self._push_for_ever())
            else:
                port = await self._server.start(settings.host, settings.port, port_flag="--port")
                where = addresses.join(settings.host, port)
                sys.stderr.write(f"{_PROG}: metrics at http://{where}/metrics\n")
            running.start("update", self._update_for_ever())
            await running.run_until(stop)
        finally:
            await running.close()
            await self._server.close()
            for subscription in subscriptions:
                await subscription.close()

    def _take_loads(self, batch: list[events.Event]) -> None:
        for event in batch:
            try:
                report = _decode_load(event.payload)
            except wire.DECODE_ERRORS as error:
                _logger.warning("ignored the load reported by %x: %s", event.publisher, error)
                continue
            key = (report.worker_id, report.data.worker_stats.data_parallel_rank)
            self._reports[key] = (self._clock.now(), report.data)

    def _take_sequences(self, batch: list[events.Event]) -> None:
        for event in batch:
            try:
                changes = _decode_sequences(event.payload)
            except wire.DECODE_ERRORS as error:
                _logger.warning("ignored the requests of router %x: %s", event.publisher, error)
                continue
            for change in changes:
                if isinstance(added := change.data, load.AddRequest):
                    self._metrics.count_routed_prompt(
                        change.worker_id, len(added.token_sequence), added.overlap
                    )

    async def _update_for_ever(self) -> None:
        while True:
            oldest = self._clock.now() - _STALE_S
            self._reports = {
                key: report
                for key, report in self._reports.items()
                if report[0] > oldest and key[0] in self._workers
            }
            self._metrics.update((key[0], report[1]) for key, report in self._reports.items())
            self._metrics.remove_lost(self._workers)
            await self._clock.sleep(self._settings.poll_interval)

    async def _push_for_ever(self) -> None:
        gateway = addresses.join(self._settings.host, self._settings.port)
        while True:
            try:
                await asyncio.to_thread(self._metrics.registry.push, gateway, _JOB)
            except errors.Unavailable as error:
                _logger.warning("%s", error)
            await self._clock.sleep(self._settings.push_interval)

    def _answer(self, request: exchange.Exchange) -> None:
        request.respond(200, self._metrics.registry.render(), content_type=metrics.CONTENT_TYPE)


def main() -> int:
    """Collect until SIGTERM or SIGINT; return the exit status of the process."""
    return process_setup.run_command(_PROG, _run)


def _run() -> None:
    logs.configure()
    asyncio.run(_serve(config.load(AggregatorConfig, prog=_PROG)))


async def _serve(settings: AggregatorConfig) -> None:
    async with await component.DistributedRuntime.open(settings) as runtime:
        stop = process_setup.stop_on_signals()
        await Aggregator(settings, runtime, clocks.SystemClock()).run(stop)
