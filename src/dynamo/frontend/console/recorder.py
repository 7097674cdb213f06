"""The recorder of the console: what is always kept, and what is made only while a page is open.

Always: the last ended requests (their meters, without tokens), the sums of `/usage`, the last log lines, and a sample
of the counters every few seconds. Only while a console is open: the explanations of decisions, at most
`_EXPLAINED_PER_S` of them a second, and the load that workers publish.
"""

import asyncio
import contextlib
import logging
import os
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.console import log_lines, metric_history, shared_prefixes, topology, usage
from dynamo.frontend import metrics
from dynamo.frontend.model_registry import registry
from dynamo.observability import metrics as observed
from dynamo.protocols import load
from dynamo.runtime import events

MAX_RECENT = 1000  # ended requests
MAX_DECISIONS = 16  # of an ended request; one with thousands of prompts has as many
_EXPLAINED_PER_S = 20
_WRITE_S = 10.0  # between two writes of the usage
_STALE_S = 5.0  # a load that is older is unknown
_decode_load = msgspec.msgpack.Decoder(load.LoadEvent).decode
_logger = logging.getLogger(__name__)


class ConsoleRecorder:
    """A `metrics.RequestObserver`. One event loop owns it, except for its log lines."""

    def __init__(self, clock: clocks.Clock, usage_file: str | None = None) -> None:
        """Raises ConfigError for a file of usage that cannot be read, or in no directory."""
        self.clock = clock
        self.started_at = clock.wall()
        self.usage = usage.UsageTable()
        self.history = metric_history.MetricHistory()
        self.log = log_lines.LogRing()
        self.recent: deque[metrics.RequestMeter] = deque(maxlen=MAX_RECENT)
        self.prompts = shared_prefixes.RecentPrompts()
        self.workers = topology.WorkerMemory()
        self.num_viewers = 0
        # by worker and its data-parallel rank, with the time of the report
        self._loads: dict[int, dict[int, tuple[load.LoadEvent, float]]] = {}
        self._explain_second, self._num_explained = 0.0, 0
        self._usage_file = Path(usage_file) if usage_file else None
        self._num_written = 0
        self._write_lock = threading.Lock()  # a write that was begun goes on while the last one is
        if self._usage_file is not None and not self._usage_file.parent.is_dir():
            raise errors.ConfigError(
                f"--usage-file {self._usage_file}: expected a file in a directory that exists"
            )
        if self._usage_file is not None and self._usage_file.exists():
            try:
                rows = msgspec.json.decode(self._usage_file.read_bytes(), type=list[usage.UsageRow])
                self.usage.load(rows)
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                raise errors.ConfigError(
                    f"--usage-file {self._usage_file}: expected the rows that a frontend has written: {error}"
                ) from error
            self._num_written = self.usage.num_changes

    @property
    def keeps_usage(self) -> bool:
        """Return whether the usage survives a restart."""
        return self._usage_file is not None

    def start_log(self) -> None:
        """Keep the lines of the process's log from now on."""
        logging.getLogger().addHandler(self.log)

    async def close(self) -> None:
        """Keep no more lines of the log, and write the usage."""
        logging.getLogger().removeHandler(self.log)
        await asyncio.to_thread(self.write_usage)

    def ended(self, request: metrics.RequestMeter) -> None:
        """Keep a request that has ended, and add it to the usage."""
        self.recent.append(request)
        counts = self.usage.count(
            self.clock.wall(),
            key=request.key_name,
            tenant=request.tenant,
            model=request.model.label,
            api=request.endpoint,
        )
        counts.num_requests += 1
        counts.num_errors += request.error_type != ""
        counts.prompt_tokens += request.num_prompt_tokens
        counts.cached_tokens += request.num_cached
        counts.output_tokens += request.num_tokens
        counts.duration_s += (request.ended_at or request.arrived_at) - request.arrived_at
        for explained, hashes in request.explanations or ():
            if explained.num_blocks:
                self.prompts.add(request.model.label, hashes)
        if request.explanations:  # kept without the hashes, which are large
            kept = request.explanations[:MAX_DECISIONS]
            request.explanations = [(explained, ()) for explained, _ in kept]

    def wants_explanation(self) -> bool:
        """Return whether the decision for a new request is to be explained: only while a console is open."""
        if not self.num_viewers:
            return False
        second = self.clock.now() // 1
        if second != self._explain_second:
            self._explain_second, self._num_explained = second, 0
        self._num_explained += 1
        return self._num_explained <= _EXPLAINED_PER_S

    async def watch(self, frontend_metrics: metrics.FrontendMetrics) -> None:
        """Sample the counters, and write the usage, until cancelled."""
        written_at = self.clock.now()
        while True:
            self.sample(frontend_metrics)
            await self.clock.sleep(metric_history.INTERVAL_S)
            if self.clock.now() - written_at >= _WRITE_S:
                await asyncio.to_thread(self.write_usage)
                written_at = self.clock.now()

    def sample(self, frontend_metrics: metrics.FrontendMetrics) -> None:
        """Add a point to the history of each model."""
        wall, now = self.clock.wall(), self.clock.now()
        failed: defaultdict[str, float] = defaultdict(float)
        for family in frontend_metrics.requests.collect():
            for row in family.samples:
                if row.labels["status"] == "error":
                    failed[row.labels["model"]] += row.value
        samples = {
            label: metric_history.Sample(
                at=wall,
                read_at=now,
                num_ended=model.duration.count,
                num_failed=failed.get(label, 0.0),
                input_tokens=model.input_len.sum,
                cached_tokens=model.cached_len.sum,
                output_tokens=model.output_tokens.value,
                num_inflight=model.inflight.value,
                num_queued=model.queued.value,
                ttft=_buckets(model.ttft),
                itl=_buckets(model.itl),
            )
            for label, model in frontend_metrics.by_model.items()
        }
        self.history.add(samples, wall, now)

    def write_usage(self) -> None:
        """Write the usage to its file, if it has changed. Blocks, and may be called in any thread."""
        with self._write_lock:
            changes = self.usage.num_changes
            if self._usage_file is None or changes == self._num_written:
                return
            try:
                new = self._usage_file.with_name(self._usage_file.name + ".new")
                new.write_bytes(msgspec.json.encode(self.usage.rows()))
                with new.open("rb") as written:  # or a host that crashes may leave an empty file
                    os.fsync(written.fileno())
                new.replace(self._usage_file)
                self._num_written = changes
            except OSError as error:
                _logger.warning("the usage cannot be written to %s: %s", self._usage_file, error)

    def load_of(self, instance_id: int) -> load.LoadEvent | None:
        """Return the load that a worker published last, its ranks together; None if that is too long ago."""
        now, ranks = self.clock.now(), self._loads.get(instance_id, {})
        fresh = [report for report, at in ranks.values() if now - at <= _STALE_S]
        return _add_ranks(fresh) if fresh else None

    async def follow_loads(
        self, models: registry.ModelRegistry, event_plane: events.EventPlane
    ) -> None:
        """Take the loads that the workers of all models publish, until cancelled."""
        subscriptions: dict[str, events.Subscription] = {}
        try:
            while True:
                topics = {
                    f"{endpoint.namespace}/{endpoint.component}/kv_metrics"
                    for model in models.ready
                    for endpoint in model.replicas
                } | {
                    f"{record.namespace}/{record.component}/kv_metrics"
                    for record in models.prefill_workers
                }
                for topic in topics - subscriptions.keys():
                    subscriptions[topic] = await event_plane.subscribe(topic, self._receive_loads)
                await self.clock.sleep(1.0)
        finally:
            self._loads.clear()
            for subscription in subscriptions.values():
                await subscription.close()

    def _receive_loads(self, batch: list[events.Event]) -> None:
        now = self.clock.now()
        for event in batch:
            with contextlib.suppress(msgspec.MsgspecError):  # the load monitor reports it
                report = _decode_load(event.payload)
                rank = report.data.worker_stats.data_parallel_rank
                self._loads.setdefault(report.worker_id, {})[rank] = (report, now)


def _add_ranks(reports: Sequence[load.LoadEvent]) -> load.LoadEvent:
    """Return the load of one worker from those of its ranks; its hit rate is their mean."""
    stats = [report.data.worker_stats for report in reports]
    blocks = [report.data.kv_stats for report in reports]
    data = load.ForwardPassMetrics(
        worker_stats=load.WorkerStats(
            request_active_slots=sum(rank.request_active_slots for rank in stats),
            request_total_slots=sum(rank.request_total_slots for rank in stats),
            num_requests_waiting=sum(rank.num_requests_waiting for rank in stats),
        ),
        kv_stats=load.KvStats(
            kv_active_blocks=sum(rank.kv_active_blocks for rank in blocks),
            kv_total_blocks=sum(rank.kv_total_blocks for rank in blocks),
            gpu_prefix_cache_hit_rate=fmean(rank.gpu_prefix_cache_hit_rate for rank in blocks),
        ),
    )
    return msgspec.structs.replace(reports[-1], data=data)


def _buckets(histogram: observed.FastHistogram) -> metric_history.Buckets:
    return [(float(bound), count) for bound, count in histogram.cumulative()]


def group_by_worker(open_requests: Mapping[metrics.RequestMeter, None]) -> dict[int, int]:
    """Return the number of requests in flight by the instance that has them."""
    return Counter(each.worker_id for each in open_requests if each.worker_id is not None)
