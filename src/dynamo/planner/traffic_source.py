"""The traffic of a model: read from the frontends' /metrics, or asked of a Prometheus server.

A frontend counts since its start; the traffic of an interval is the difference of two readings, without the requests
that were refused before any worker had them. A counter that fell belongs to a frontend that was restarted, and counts
from zero; after a reading that failed two are needed again. Without any answer the reading is `Missing`; if that lasts
longer than `STALE_INTERVALS` intervals it is `Stale`.

The load of the pools comes from the load reports that workers publish on the event plane (`LoadSource`), and from the
queues of KV routers, whose requests no worker knows yet.
"""

import asyncio
import logging
import math
import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol
from urllib import parse

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.planner.observation import (
    Fresh,
    Missing,
    PoolLoad,
    ReportedLoad,
    Stale,
    Traffic,
    spread_buckets,
)
from dynamo.protocols import load
from dynamo.runtime import events
from dynamo.runtime.http import client

STALE_INTERVALS = 3
_TIMEOUT_S = 3.0
_PREFIX = "dynamo_frontend_"
_MEANS = {  # field of Traffic: metric
    "isl": "input_sequence_tokens",
    "osl": "output_sequence_tokens",
    "ttft_s": "time_to_first_token_seconds",
    "itl_s": "inter_token_latency_seconds",
    "duration_s": "request_duration_seconds",
}
_STARTED, _CACHED = "requests_started_total", "cached_tokens_sum"
_EVER = "requests_ever"  # since the frontends' start
_ENDED, _REFUSED = f"{_PREFIX}requests_total", "requests_refused"
_REFUSALS = "validation|rate_limit"  # error types of requests that no worker has worked on
_REFUSAL = re.compile(f'error_type="({_REFUSALS})"')
_INFLIGHT, _HELD = "inflight_requests", "requests_waiting_for_worker"
_QUEUED, _QUEUED_TOKENS = "router_queue_pending_requests", "router_queue_pending_isl_tokens"
_LENGTHS, _LENGTHS_BUCKET = "prompt_lens_le_", f"{_PREFIX}input_sequence_tokens_bucket"
_EDGE = re.compile(r'le="([^"]+)"')
_GAUGES = (_INFLIGHT, _HELD, _QUEUED, _QUEUED_TOKENS)
Reading = Fresh[Traffic] | Missing | Stale


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendLoad:
    """The requests in the frontends at one time; those that their KV routers hold back are at no worker yet."""

    num_open: int = 0  # between arrival and end
    num_queued: int = 0  # in the queue of a KV router
    queued_tokens: int = 0  # of their prompts


def frontend_load_of(gauges: Mapping[str, float]) -> FrontendLoad:
    """Return the load that the frontends' gauges describe."""
    return FrontendLoad(
        num_open=int(gauges.get(_INFLIGHT, 0.0) + gauges.get(_HELD, 0.0)),
        num_queued=int(gauges.get(_QUEUED, 0.0)),
        queued_tokens=int(gauges.get(_QUEUED_TOKENS, 0.0)),
    )


class TrafficSource(Protocol):
    """Reads the traffic since the last reading."""

    frontend_load: FrontendLoad  # when it was last read

    async def read(self, interval_s: float) -> Reading:
        """Return the traffic of the interval that ends now."""
        ...


async def get(url: str) -> bytes:
    """Return the body of an http URL. Raises Unavailable if there is no answer with status 200."""
    status, body = await client.request("GET", url, timeout_s=_TIMEOUT_S)
    if status != 200:
        raise errors.Unavailable(f"{url}: expected status 200, got {status}")
    return body


def parse_metrics(exposition: str, model: str | None) -> dict[str, float]:
    """Return the sum of each frontend metric over its labels, those of one model if one is named.

    Of the buckets those of the prompts' lengths are kept, as `prompt_lens_le_EDGE`. Values that are no finite number of
    at least 0 are left out. Raises Unavailable if there is no metric of a frontend, or such a value counts requests: a
    zero in its place would take workers away.
    """
    if _PREFIX not in exposition:
        raise errors.Unavailable(f"expected metrics {_PREFIX}..., got none")
    totals: dict[str, float] = {}
    for line in exposition.splitlines():
        if not line.startswith(_PREFIX):
            continue
        name, _, rest = line.partition("{")
        labels, _, value = rest.rpartition("}")
        if not rest:
            name, _, value = line.partition(" ")
        key = _key_of(name, labels)
        if key is None or (model and f'model="{model.lower()}"' not in labels):
            continue
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if 0 <= number < math.inf:
            totals[key] = totals.get(key, 0.0) + number
        elif key in (_STARTED, _INFLIGHT, _HELD):
            raise errors.Unavailable(f"expected a number of at least 0 as {name}, got {value}")
    return totals


def _key_of(name: str, labels: str) -> str | None:
    """Return what a sample counts; None for the buckets of other histograms than that of the prompts' lengths."""
    if name == _ENDED and _REFUSAL.search(labels):
        return _REFUSED
    if name == _LENGTHS_BUCKET and (edge := _EDGE.search(labels)):
        return f"{_LENGTHS}{edge[1]}"
    return None if name.endswith("_bucket") else name.removeprefix(_PREFIX)


class _Memory:
    """The time of the last good reading, to tell a missing one from a stale one."""

    def __init__(self, clock: clocks.Clock) -> None:
        self._clock = clock
        self._good_at: float | None = None

    def note_success(self) -> None:
        self._good_at = self._clock.now()

    def describe_failure(self, reason: str, interval_s: float) -> Missing | Stale:
        if self._good_at is None:
            return Missing(reason)
        age_s = self._clock.now() - self._good_at
        return Stale(age_s, reason) if age_s > STALE_INTERVALS * interval_s else Missing(reason)


Expand = Callable[[str], Awaitable[Sequence[str]]]


async def keep_url(url: str) -> Sequence[str]:
    """Return a URL as that of the one frontend that it leads to."""
    return (url,)


class FrontendSource:
    """Reads the /metrics of some frontends, all of which must answer; each is an http URL, else ConfigError.

    `expand` returns the frontends behind a URL: that of a Service leads to any one of its pods, each of which counts by
    itself.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model: str | None,
        clock: clocks.Clock,
        *,
        expand: Expand = keep_url,
    ) -> None:
        self.frontend_load = FrontendLoad()
        self._urls = urls
        for url in urls:
            client.split_url(url)
        self._model = model
        self._expand = expand
        self._memory = _Memory(clock)
        self._last: dict[str, dict[str, float]] = {}  # by URL

    async def read(self, interval_s: float) -> Reading:
        """Return the traffic of the interval that ends now, of all frontends that answered at its beginning, too."""
        try:
            urls = [frontend for url in self._urls for frontend in await self._expand(url)]
            pages = await asyncio.gather(*(get(url.rstrip("/") + "/metrics") for url in urls))
            totals = [parse_metrics(page.decode("utf-8", "replace"), self._model) for page in pages]
        except errors.Unavailable as error:
            self._last = {}  # what comes until the next answer is no traffic of one interval
            return self._memory.describe_failure(str(error), interval_s)
        last, self._last = self._last, dict(zip(urls, totals, strict=True))
        self._memory.note_success()
        gauges = {name: sum(each.get(name, 0.0) for each in totals) for name in _GAUGES}
        self.frontend_load = frontend_load_of(gauges)
        if not last.keys() & set(urls):
            return Missing("the first reading: an interval needs two")
        changes: dict[str, float] = {}
        for url, after in zip(urls, totals, strict=True):
            if url not in last:
                continue
            before = last[url]
            if after.get(_STARTED, 0.0) < before.get(_STARTED, 0.0):
                before = {}  # it was restarted, and all its sums are new
            for name, value in after.items():
                rise = value - before.get(name, 0.0)
                changes[name] = changes.get(name, 0.0) + (rise if rise >= 0 else value)
        return Fresh(traffic_of(changes))


def traffic_of(changes: Mapping[str, float]) -> Traffic:
    """Return the traffic that the changes of the frontends' counters describe."""
    num_prompt = changes.get("input_sequence_tokens_sum", 0.0)
    means = {
        field: changes[f"{metric}_sum"] / count
        for field, metric in _MEANS.items()
        if (count := changes.get(f"{metric}_count", 0.0)) > 0 and f"{metric}_sum" in changes
    }
    return Traffic(
        num_requests=max(0.0, changes.get(_STARTED, 0.0) - changes.get(_REFUSED, 0.0)),
        hit_rate=min(1.0, changes.get(_CACHED, 0.0) / num_prompt) if num_prompt else 0.0,
        prompt_lens=prompt_lens_of(changes),
        **means,
    )


def prompt_lens_of(changes: Mapping[str, float]) -> dict[float, float]:
    """Return the requests by prompt length from the cumulative buckets of the frontends' histogram."""
    up_to = {
        float(name.removeprefix(_LENGTHS)): number
        for name, number in changes.items()
        if name.startswith(_LENGTHS)
    }
    edges = sorted(up_to)
    counts = {
        edge: max(0.0, up_to[edge] - (up_to[edges[i - 1]] if i else 0.0))
        for i, edge in enumerate(edges)
    }
    return spread_buckets(counts)


class PrometheusSource:
    """Asks a Prometheus server, which has read the frontends; `url` is an http URL, else ConfigError."""

    def __init__(self, url: str, model: str | None, clock: clocks.Clock) -> None:
        self.frontend_load = FrontendLoad()
        client.split_url(url)
        self._url = url.rstrip("/")
        self._labels = f'{{model="{model.lower()}"}}' if model else ""
        self._memory = _Memory(clock)

    async def read(self, interval_s: float) -> Reading:
        """Return the traffic of the interval that ends now."""
        range_text = f"[{max(1, round(interval_s))}s]"
        names = [_STARTED, _CACHED]
        names += [f"{metric}_{part}" for metric in _MEANS.values() for part in ("sum", "count")]
        queries = {
            name: f"sum(increase({_PREFIX}{name}{self._labels}{range_text}))" for name in names
        }
        refused = f'{_ENDED}{{error_type=~"{_REFUSALS}",{self._labels[1:-1]}}}{range_text}'
        queries[_STARTED] += f" - (sum(increase({refused})) or vector(0))"
        queries |= {name: f"sum({_PREFIX}{name}{self._labels})" for name in _GAUGES}
        queries[_EVER] = f"sum({_PREFIX}{_STARTED}{self._labels})"
        buckets = f"sum by (le) (increase({_LENGTHS_BUCKET}{self._labels}{range_text}))"
        try:
            *values, lengths = await asyncio.gather(
                *(self._query(query) for query in (*queries.values(), buckets))
            )
        except errors.Unavailable as error:
            return self._memory.describe_failure(str(error), interval_s)
        changes = {
            name: number
            for name, rows in zip(queries, values, strict=True)
            for _, number in rows[:1]
        }
        changes |= {f"{_LENGTHS}{labels.get('le', '+Inf')}": number for labels, number in lengths}
        if _HELD in changes and _EVER not in changes:  # a model is asked for, and was never served
            changes[_STARTED] = 0.0
        if _STARTED not in changes:
            reason = (
                f"{self._url} has no two values of {_PREFIX}{_STARTED}{self._labels} in {range_text[1:-1]}:"
                " expected --adjustment-interval to be at least twice the time between its scrapes"
            )
            return self._memory.describe_failure(reason, interval_s)
        self._memory.note_success()
        self.frontend_load = frontend_load_of(changes)
        return Fresh(traffic_of(changes))

    async def _query(self, query: str) -> list[tuple[dict[str, str], float]]:
        """Return the labels and the value of each row whose value is a finite number."""
        body = await get(f"{self._url}/api/v1/query?{parse.urlencode({'query': query})}")
        try:
            rows = [
                (row.get("metric", {}), float(row["value"][1]))
                for row in msgspec.json.decode(body)["data"]["result"]
            ]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise errors.Unavailable(
                f"{self._url}: expected Prometheus's answer: {error}"
            ) from error
        return [(labels, value) for labels, value in rows if math.isfinite(value)]


_STALE_S = 20.0  # workers report every second or so
_MOST_PASSES = 64  # of a worker, between two readings
_decode = msgspec.msgpack.Decoder(load.LoadEvent).decode
_logger = logging.getLogger(__name__)


class LoadSource:
    """Keeps the last report of each data-parallel rank of the workers of one component."""

    def __init__(self, plane: events.EventPlane, topic: str, clock: clocks.Clock) -> None:
        self._plane, self._topic, self._clock = plane, topic, clock
        self._reports: dict[tuple[int, int], tuple[float, load.LoadEvent]] = {}
        self._passes: dict[tuple[int, int], deque[load.ForwardPass]] = {}  # since the last reading

    async def start(self) -> None:
        """Subscribe to the reports of present and future workers."""
        await self._plane.subscribe(self._topic, self._receive)

    def read(self) -> PoolLoad:
        """Return the load of all workers that reported lately, with their forward passes since the last reading."""
        now = self._clock.now()
        self._reports = {key: row for key, row in self._reports.items() if row[0] > now - _STALE_S}
        passes, self._passes = self._passes, {}
        return pool_load({key: row[1] for key, row in self._reports.items()}, passes)

    def _receive(self, batch: list[events.Event]) -> None:
        for event in batch:
            try:
                report = _decode(event.payload)
            except msgspec.MsgspecError as error:
                _logger.warning("ignored the load reported by %x: %s", event.publisher, error)
                continue
            key = (report.worker_id, report.data.worker_stats.data_parallel_rank)
            known = self._reports[key][1].data.last_passes if key in self._reports else ()
            kept = self._passes.setdefault(key, deque(maxlen=_MOST_PASSES))
            kept.extend(each for each in report.data.last_passes if each not in known)
            self._reports[key] = (self._clock.now(), report)


def pool_load(
    reports: Mapping[tuple[int, int], load.LoadEvent],
    passes: Mapping[tuple[int, int], Iterable[load.ForwardPass]] = MappingProxyType({}),
) -> PoolLoad:
    """Return the load of a pool: the mean of the ranks' cache usage, the sums of their requests, and each by itself.

    Of workers that drain, only what they run counts: others take what comes.
    """
    ready = {key: report.data for key, report in reports.items() if not report.is_draining}
    ranks = ready.values()
    num_blocks = sum(rank.kv_stats.kv_total_blocks for rank in ranks)
    num_active = sum(rank.kv_stats.kv_active_blocks for rank in ranks)
    return PoolLoad(
        kv_usage=num_active / num_blocks if num_blocks else 0.0,
        num_running=sum(each.data.worker_stats.request_active_slots for each in reports.values()),
        num_waiting=sum(rank.worker_stats.num_requests_waiting for rank in ranks),
        waiting_tokens=sum(rank.worker_stats.active_prefill_tokens for rank in ranks),
        workers=tuple(
            ReportedLoad(
                waiting_tokens=rank.worker_stats.active_prefill_tokens,
                passes=tuple(passes.get(key, ())),
            )
            for key, rank in ready.items()
        ),
        is_reported=bool(ready),
    )
