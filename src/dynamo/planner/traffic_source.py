"""The traffic of a model: read from the frontends' /metrics, or asked of a Prometheus server.

A frontend counts since its start; the traffic of an interval is the difference of two readings, without the requests
that were refused before any worker had them. A counter that fell belongs to a frontend that was restarted, and counts
from zero; after a reading that failed two are needed again. Without any answer the reading is `Missing`; if that lasts
longer than `STALE_INTERVALS` intervals it is `Stale`.

Frontends count a request for a LoRA adapter under the adapter's name; with a model named, those of its adapters count,
too (`ListAdapters`). A request for completions of several prompts counts as so many, each with its share of the answer.
Requests for unknown models, those that a semantic router answers itself, and questions which worker would answer, as an
endpoint picker asks them, are no traffic.

The load of the pools comes from the load reports that workers publish on the event plane (`LoadSource`), and from the
queues of KV routers, whose requests no worker knows yet.
"""

import asyncio
import logging
import math
import re
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
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
from dynamo.protocols import instances, load, model_card
from dynamo.runtime import discovery, events
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
_FURTHER = "further_prompts_total"  # of requests with several
_QUERIES = "id_queries_total"  # which no worker answered
_NO_MODEL = "unknown"  # the label of requests that no model has
_EVER = "requests_ever"  # since the frontends' start
_ENDED, _REFUSED = f"{_PREFIX}requests_total", "requests_refused"
_REFUSALS = "validation|rate_limit"  # error types of requests that no worker has worked on
_REFUSAL = re.compile(f'error_type="({_REFUSALS})"')
_INFLIGHT, _HELD = "inflight_requests", "requests_waiting_for_worker"
_QUEUED, _QUEUED_TOKENS = "router_queue_pending_requests", "router_queue_pending_isl_tokens"
_LENGTHS, _LENGTHS_BUCKET = "prompt_lens_le_", f"{_PREFIX}input_sequence_tokens_bucket"
_EDGE = re.compile(r'le="([^"]+)"')
_MODEL = re.compile(r'(?:^|,)model="((?:[^"\\]|\\.)*)"')
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


def parse_metrics(exposition: str) -> dict[str, dict[str, float]]:
    """Return the sum of each frontend metric over its labels, by the label of the model as it is written.

    Of the buckets those of the prompts' lengths are kept, as `prompt_lens_le_EDGE`. Values that are no finite number of
    at least 0 are left out, but where they count requests: such a sum is NaN, as a zero in its place would take workers
    away. Raises Unavailable if there is no metric of a frontend.
    """
    if _PREFIX not in exposition:
        raise errors.Unavailable(f"expected metrics {_PREFIX}..., got none")
    sums_by_model: dict[str, dict[str, float]] = {}
    for line in exposition.splitlines():
        if not line.startswith(_PREFIX):
            continue
        name, _, rest = line.partition("{")
        labels, _, value = rest.rpartition("}")
        if not rest:
            name, _, value = line.partition(" ")
        key = _key_of(name, labels)
        if key is None:
            continue
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not 0 <= number < math.inf:
            if key not in (_STARTED, _INFLIGHT, _HELD):
                continue
            number = math.nan
        model = _MODEL.search(labels)
        sums = sums_by_model.setdefault(model[1] if model else "", {})
        sums[key] = sums.get(key, 0.0) + number
    return sums_by_model


def sum_models(
    sums_by_model: Mapping[str, Mapping[str, float]], labels: Collection[str] | None
) -> dict[str, float]:
    """Return the sums of the models with these labels, or of all. Raises Unavailable for a count that is no number."""
    totals: dict[str, float] = {}
    for label, sums in sums_by_model.items():
        if label in labels if labels is not None else label != _NO_MODEL:
            for name, value in sums.items():
                totals[name] = totals.get(name, 0.0) + value
    for name in (_STARTED, _INFLIGHT, _HELD):
        if math.isnan(totals.get(name, 0.0)):
            raise errors.Unavailable(f"expected numbers of at least 0 as {_PREFIX}{name}")
    return totals


def _label_of(model: str) -> str:
    """Return a model's name as frontends write it in their metrics, and as PromQL does."""
    return model.lower().replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


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


ListAdapters = Callable[[str], Awaitable[Collection[str]]]  # of a base model


async def keep_url(url: str) -> Sequence[str]:
    """Return a URL as that of the one frontend that it leads to."""
    return (url,)


async def list_none(model: str) -> Collection[str]:
    """Return the adapters of a model that has none."""
    return ()


async def read_adapters(registry: discovery.Discovery, model: str) -> set[str]:
    """Return the LoRA adapters of a model, by the cards of its workers; other models keep their names.

    Raises Unavailable.
    """
    adapters: set[str] = set()
    models: set[str] = set()
    for value in (await registry.get_prefix(instances.CARDS)).values():
        try:
            card = msgspec.json.decode(value, type=model_card.CardRecord).card_json
        except msgspec.DecodeError:  # of another version, perhaps: frontends do not serve it
            continue
        models.add(card.display_name)
        if card.display_name.lower() == model.lower():
            adapters.update(card.lora_names)
    return adapters - models


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
        list_adapters: ListAdapters = list_none,
    ) -> None:
        self.frontend_load = FrontendLoad()
        self._urls = urls
        if not urls:
            raise errors.ConfigError(
                "--frontend-url, or DYN_PLANNER_FRONTEND_URL: expected at least one frontend, got none"
            )
        for url in urls:
            client.split_url(url)
        self._model = model
        self._expand, self._list_adapters = expand, list_adapters
        self._memory = _Memory(clock)
        self._adapters: Collection[str] = ()  # at the last reading
        self._last: dict[str, dict[str, dict[str, float]]] = {}  # by URL and model

    async def read(self, interval_s: float) -> Reading:
        """Return the traffic of the interval that ends now, of all frontends that answered at its beginning, too."""
        try:
            labels = await self._read_labels()
            urls = [frontend for url in self._urls for frontend in await self._expand(url)]
            pages = await asyncio.gather(*(get(url.rstrip("/") + "/metrics") for url in urls))
            sums = [parse_metrics(page.decode("utf-8", "replace")) for page in pages]
            totals = [sum_models(each, labels) for each in sums]
        except errors.Unavailable as error:
            self._last = {}  # what comes until the next answer is no traffic of one interval
            return self._memory.describe_failure(str(error), interval_s)
        last, self._last = self._last, dict(zip(urls, sums, strict=True))
        self._memory.note_success()
        gauges = {name: sum(each.get(name, 0.0) for each in totals) for name in _GAUGES}
        self.frontend_load = frontend_load_of(gauges)
        if not last.keys() & set(urls):
            return Missing("the first reading: an interval needs two")
        changes: dict[str, float] = {}
        for url, after in zip(urls, totals, strict=True):
            if url not in last:
                continue
            before = sum_models(last[url], labels)
            if after.get(_STARTED, 0.0) < before.get(_STARTED, 0.0):
                before = {}  # it was restarted, and all its sums are new
            for name, value in after.items():
                rise = value - before.get(name, 0.0)
                changes[name] = changes.get(name, 0.0) + (rise if rise >= 0 else value)
        return Fresh(traffic_of(changes))

    async def _read_labels(self) -> Collection[str] | None:
        """Return the names that count, those of adapters that have gone since the last reading among them."""
        if self._model is None:
            return None
        earlier, self._adapters = self._adapters, await self._list_adapters(self._model)
        return {_label_of(name) for name in (self._model, *earlier, *self._adapters)}


def traffic_of(changes: Mapping[str, float]) -> Traffic:
    """Return the traffic that the changes of the frontends' counters describe."""
    num_prompt = changes.get("input_sequence_tokens_sum", 0.0)
    num_queries = changes.get(_QUERIES, 0.0)
    means: dict[str, float] = {}
    for field, metric in _MEANS.items():
        count = changes.get(f"{metric}_count", 0.0)
        if field == "duration_s":
            count -= num_queries
        if count > 0 and f"{metric}_sum" in changes:
            means[field] = changes[f"{metric}_sum"] / count
    num_others = changes.get(_REFUSED, 0.0) + num_queries
    num_requests = max(0.0, changes.get(_STARTED, 0.0) - num_others)
    num_further = changes.get(_FURTHER, 0.0)
    if "osl" in means:  # of all prompts of a request together
        means["osl"] *= max(1.0, num_requests) / (max(1.0, num_requests) + num_further)
    return Traffic(
        num_requests=num_requests + num_further,
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


def _make_queries(selector: str, range_text: str) -> tuple[dict[str, str], str]:
    """Return a query for each change of a counter and each gauge, and that for the lengths of prompts."""
    names = [_STARTED, _CACHED, _FURTHER, _QUERIES]
    names += [f"{metric}_{part}" for metric in _MEANS.values() for part in ("sum", "count")]
    queries = {name: f"sum(increase({_PREFIX}{name}{selector}{range_text}))" for name in names}
    refused = f'{_ENDED}{{error_type=~"{_REFUSALS}",{selector[1:-1]}}}{range_text}'
    queries[_STARTED] += f" - (sum(increase({refused})) or vector(0))"
    queries |= {name: f"sum({_PREFIX}{name}{selector})" for name in _GAUGES}
    queries[_EVER] = f"sum({_PREFIX}{_STARTED}{selector})"
    return queries, f"sum by (le) (increase({_LENGTHS_BUCKET}{selector}{range_text}))"


class PrometheusSource:
    """Asks a Prometheus server, which has read the frontends; `url` is an http URL, else ConfigError."""

    def __init__(
        self,
        url: str,
        model: str | None,
        clock: clocks.Clock,
        *,
        list_adapters: ListAdapters = list_none,
    ) -> None:
        self.frontend_load = FrontendLoad()
        client.split_url(url)
        self._url = url.rstrip("/")
        self._model, self._list_adapters = model, list_adapters
        self._memory = _Memory(clock)

    async def read(self, interval_s: float) -> Reading:
        try:
            selector = await self._make_selector()
            queries, buckets = _make_queries(selector, f"[{max(1, round(interval_s))}s]")
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
        if changes.keys() & {_HELD, _INFLIGHT} and _EVER not in changes:
            changes.setdefault(_STARTED, 0.0)  # of a model that frontends know, it was never served
        if _STARTED not in changes:
            reason = (
                f"{self._url} has no two values of {_PREFIX}{_STARTED}{selector} in {max(1, round(interval_s))}s:"
                " expected --adjustment-interval to be at least twice the time between its scrapes"
            )
            return self._memory.describe_failure(reason, interval_s)
        self._memory.note_success()
        self.frontend_load = frontend_load_of(changes)
        return Fresh(traffic_of(changes))

    async def _make_selector(self) -> str:
        """Return what selects the series of the model and its adapters in PromQL, or of all models."""
        if self._model is None:
            return f'{{model!="{_NO_MODEL}"}}'
        names = [self._model.lower(), *map(str.lower, await self._list_adapters(self._model))]
        if len(names) == 1:
            return f'{{model="{_label_of(names[0])}"}}'
        return f'{{model=~"{_label_of("|".join(map(re.escape, names)))}"}}'

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
