"""The views of the console as plain values, made from the state of the frontend for one viewer."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from dynamo.console import metric_history, request_rows, topology
from dynamo.frontend import metrics
from dynamo.frontend.admission import api_keys
from dynamo.frontend.console import recorder as recording
from dynamo.frontend.model_registry import registered_model, registry
from dynamo.protocols import instances, load, model_card

_ID_CHARS = 200


class Viewer(msgspec.Struct, frozen=True, kw_only=True):
    """The holder of a console. Without API keys each user sees all requests, and this machine alone the log."""

    entry: api_keys.ApiKeyEntry | None = None  # None: no keys are used
    is_local: bool = False

    @property
    def sees_processes(self) -> bool:
        """Return whether the viewer sees other frontends and routers, whoever's models these serve."""
        return self.entry is None or self.entry.admin

    @property
    def may_administer(self) -> bool:
        """Return whether the viewer sees the log, the cache and the requests of all keys."""
        return self.is_local if self.entry is None else self.entry.admin

    def sees_key(self, name: str) -> bool:
        return self.entry is None or self.entry.admin or self.entry.name == name

    def sees_model(self, name: str) -> bool:
        """Return whether the viewer's key allows this model, or one with this label of metrics, in lower case."""
        models = None if self.entry is None else self.entry.models
        return models is None or name in models or name in map(str.lower, models)


class ConsoleSession(msgspec.Struct, frozen=True, kw_only=True):
    """The viewer's key and rights, and the process that answers."""

    key: str  # name of the API key; empty where no keys are used
    may_administer: bool
    version: str
    process: str  # of several at one port (`--http-workers`); empty: it is alone
    router_mode: str
    started_at: float  # seconds since 1970
    keeps_usage: bool  # in a file, over restarts


class ModelRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model that is served, or can be loaded on demand."""

    name: str
    kind: Literal["text", "embeddings"]
    num_workers: int
    num_prefill_workers: int = 0
    context_length: int = 0
    kv_cache_block_size: int = 0
    total_kv_blocks: int = 0  # of one worker
    max_num_seqs: int = 0
    aliases: Sequence[str] = ()
    loras: Sequence[str] = ()
    base: str = ""  # of a LoRA adapter
    created: int = 0
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    supports_logprobs: bool = False
    supports_guided: bool = False
    files: Mapping[str, str] = {}  # checksums by name
    chat_template: str = ""  # an adapter has that of its base
    is_on_demand: bool = False  # it is loaded when a request comes for it
    phase: str = ""  # of a model on demand: unloaded, loading, loaded, unloading
    is_pinned: bool = False  # it stays loaded
    is_changeable: bool = False  # POST /models/load and its like are taken for it
    estimate_s: float = 0.0  # until a request that comes now is answered
    failure: str = ""  # why its last load failed


class ModelPage(msgspec.Struct, frozen=True, kw_only=True):
    """All models that the viewer may see."""

    models: Sequence[ModelRow]


class MetricPage(msgspec.Struct, frozen=True, kw_only=True):
    """The last hour of one model, or of all together (`model` empty)."""

    model: str
    models: Sequence[str]  # that have a history of their own
    interval_s: float
    points: Sequence[metric_history.MetricPoint]


class CachedPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix that recent prompts share, and the workers that have it."""

    id: str  # hash of its last block, hexadecimal
    model: str
    num_blocks: int
    num_prompts: int
    blocks_by_tier: Mapping[str, Mapping[str, int]]  # by tier, and by instance id


class CachePage(msgspec.Struct, frozen=True, kw_only=True):
    """The prefixes that are shared most, and the share of cached tokens of the last ended requests."""

    is_indexed: bool  # false: this router mode does not know which worker has which block
    prompt_tokens: int
    cached_tokens: int
    tier_tokens: Mapping[str, int]  # of the cached ones, those of slower tiers
    prefixes: Sequence[CachedPrefix]


def request_row(
    request: metrics.RequestMeter, now: float, wall: float, *, with_decisions: bool = False
) -> request_rows.RequestRow:
    """Return the row of a request. `now` and `wall` are the same time on the two clocks."""
    prefill, opened_at = request.prefill, request.opened_at
    if prefill is not None and opened_at is not None and not request.num_migrations:
        # another worker computed the prompt before the answering one had it: that is no time of the router
        opened_at = max(request.prepared_at or 0.0, opened_at - prefill.duration_s)
    stages = request_rows.Stages(
        arrived_at=request.arrived_at,
        prepared_at=request.prepared_at,
        opened_at=opened_at,
        first_token_at=request.first_token_at,
        ended_at=request.ended_at,
    )
    until = now if request.ended_at is None else request.ended_at
    return request_rows.RequestRow(
        id=request.arrival.reported_id[:_ID_CHARS],
        model=request.model.label,
        endpoint=request.endpoint,
        request_type=request.request_type,
        state=request_rows.state_of(stages, request.error_type),
        arrived_at=wall - (now - request.arrived_at),
        key=request.key_name,
        error=request.error_type,
        **request_rows.durations_ms(stages, now),
        total_ms=round((until - request.arrived_at) * 1000, 3),
        prompt_tokens=request.num_prompt_tokens,
        cached_tokens=request.num_cached,
        tier_tokens=request.tier_tokens,
        output_tokens=request.num_tokens,
        worker="" if request.worker_id is None else f"{request.worker_id:x}",
        prefill_worker="" if prefill is None else f"{prefill.instance_id:x}",
        num_migrations=request.num_migrations,
        decisions=[one for one, _ in request.explanations or ()] if with_decisions else (),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewSources:
    """What the router, discovery and the starting workers tell, each asked when a view is made."""

    find_matches: Callable[[Sequence[int]], Mapping[str, Mapping[str, int]]]
    list_tiers: Callable[[], Mapping[int, Sequence[str]]]
    list_starting: Callable[[], Iterable[instances.WorkerStart]]
    list_sleeping: Callable[[], Iterable[instances.WorkerStart]]
    list_on_demand: Callable[[], Iterable[instances.WorkerStart]]
    list_processes: Callable[[], Sequence[topology.ProcessRow]]


class Views:
    """Makes the views of one frontend."""

    def __init__(
        self,
        models: registry.ModelRegistry,
        frontend_metrics: metrics.FrontendMetrics,
        recorder: recording.ConsoleRecorder,
        *,
        router_mode: str,
        sources: ViewSources,
    ) -> None:
        self.recorder = recorder
        self.router_mode = router_mode
        self._models = models
        self._metrics = frontend_metrics
        self._sources = sources

    def list_requests(
        self, viewer: Viewer, query: request_rows.RequestQuery
    ) -> request_rows.RequestPage:
        """Return the requests in flight and the last ended ones, the latest first."""
        now, wall = self.recorder.clock.now(), self.recorder.clock.wall()
        matching = [
            request
            for request in reversed(self._metrics.open_requests)
            if viewer.sees_key(request.key_name) and query.matches(request.model.label, "open")
        ]
        num_open = len(matching)
        matching += [
            request
            for request in reversed(self.recorder.recent)
            if viewer.sees_key(request.key_name)
            and query.matches(request.model.label, "failed" if request.error_type else "done")
        ]
        return request_rows.RequestPage(
            total=len(matching),
            num_open=num_open,
            rows=[request_row(request, now, wall) for request in matching[query.places]],
        )

    def find_request(self, viewer: Viewer, request_id: str) -> request_rows.RequestRow | None:
        """Return one request with the explanations of its decisions; None if it is not kept, or not the viewer's."""
        now, wall = self.recorder.clock.now(), self.recorder.clock.wall()
        for request in (*self._metrics.open_requests, *reversed(self.recorder.recent)):
            if request.arrival.reported_id == request_id and viewer.sees_key(request.key_name):
                return request_row(request, now, wall, with_decisions=True)
        return None

    def show_topology(self, viewer: Viewer, query: topology.WorkerQuery) -> topology.TopologyPage:
        """Return the workers of the models that the viewer may see, and the processes in front of them."""
        num_by_worker = recording.group_by_worker(self._metrics.open_requests)
        known = self.recorder.workers.update(
            self._worker_rows(num_by_worker),
            self.recorder.clock.wall(),
            lambda row: self._draining_row(row, num_by_worker),
        )
        rows = [row for row in known if viewer.sees_model(row.model)]
        processes = [
            row for row in self._sources.list_processes() if row.is_self or viewer.sees_processes
        ]
        return topology.TopologyPage(
            router_mode=self.router_mode,
            num_open_requests=len(self._metrics.open_requests),
            total=len(rows),
            num_by_state=topology.count_by(rows, "state"),
            num_by_role=topology.count_by(rows, "role"),
            starting=[
                topology.StartingWorker(
                    model=start.model, namespace=start.namespace, estimate_s=start.estimate_s
                )
                for start in self._sources.list_starting()
                if viewer.sees_model(start.model)
            ],
            workers=query.select(rows),
            num_processes=topology.count_by(processes, "kind"),
            processes=processes[: topology.MAX_PROCESSES + 1],
            transfers=topology.count_transfers(self._transfers({row.instance for row in rows})),
        )

    def _transfers(self, shown: Container[str]) -> Iterator[tuple[str, str, bool]]:
        """Yield the prompts that another worker computed for one of these, and whether the request is in flight."""
        since = self.recorder.clock.now() - topology.RECENT_S
        for request in (*self._metrics.open_requests, *self.recorder.recent):
            is_recent = request.ended_at is None or request.ended_at >= since
            if request.prefill is None or request.worker_id is None or not is_recent:
                continue
            decode = f"{request.worker_id:x}"
            if decode in shown:
                yield f"{request.prefill.instance_id:x}", decode, request.ended_at is None

    def show_metrics(self, viewer: Viewer, model: str) -> MetricPage:
        """Return the last hour of a model; of all together if it is empty."""
        history = self.recorder.history
        return MetricPage(
            model=model,
            models=[name for name in history.models if viewer.sees_model(name)],
            interval_s=metric_history.INTERVAL_S,
            points=history.points(model.lower()),
        )

    def show_models(self, viewer: Viewer) -> ModelPage:
        """Return the models that the viewer may see, those that can be loaded on demand included."""
        prefill = [record.card_json.display_name for record in self._models.prefill_workers]
        rows = {
            model.name: _model_row(model, prefill.count(model.name)) for model in self._models.ready
        }
        for start in self._sources.list_on_demand():
            row = rows.get(start.model) or ModelRow(
                name=start.model,
                kind="text",
                num_workers=0,
                context_length=start.context_length or 0,
                estimate_s=start.estimate_s,
                failure=start.failure,
            )
            rows[start.model] = msgspec.structs.replace(
                row,
                is_on_demand=True,
                phase=start.phase,
                is_pinned=start.is_pinned,
                is_changeable=bool(start.loader),
            )
        visible = [row for name, row in sorted(rows.items()) if viewer.sees_model(name)]
        return ModelPage(models=visible)

    def show_cache(self) -> CachePage:
        """Return which workers have the prefixes that recent prompts share."""
        recent = self.recorder.recent
        tier_tokens: dict[str, int] = {}
        for request in recent:
            for tier, count in request.tier_tokens.items():
                tier_tokens[tier] = tier_tokens.get(tier, 0) + count
        rows = [*self._worker_rows({})]
        pairs = {(name.lower(), row.instance) for row in rows for name in (row.model, *row.loras)}
        return CachePage(
            is_indexed=self.router_mode == "kv",
            prompt_tokens=sum(request.num_prompt_tokens for request in recent),
            cached_tokens=sum(request.num_cached for request in recent),
            tier_tokens=tier_tokens,
            prefixes=[
                CachedPrefix(
                    id=f"{prefix.hashes[-1]:016x}",
                    model=prefix.model,
                    num_blocks=len(prefix.hashes),
                    num_prompts=prefix.num_prompts,
                    blocks_by_tier={  # of other models, blocks may have the same hashes
                        tier: {key: n for key, n in held.items() if (prefix.model, key) in pairs}
                        for tier, held in self._sources.find_matches(prefix.hashes).items()
                    },
                )
                for prefix in self.recorder.prompts.find_prefixes()
            ],
        )

    def _worker_rows(self, num_by_worker: Mapping[int, int]) -> Iterator[topology.WorkerRow]:
        tiers = self._sources.list_tiers()
        for model in self._models.ready_bases:
            for name, replicas in model.replicas.items():
                for instance in replicas.live_instances:
                    number = instance.instance_id
                    yield self._worker_row(
                        number,
                        name,
                        replicas.cards[number],
                        address=", ".join(instance.transport.values()),
                        state=replicas.state_of(number),
                        num_requests=num_by_worker.get(number, 0),
                        tiers=tiers.get(number, ()),
                    )
        for record in self._models.prefill_workers:
            name = instances.EndpointName(record.namespace, record.component, record.endpoint)
            yield self._worker_row(
                record.instance_id,
                name,
                record.card_json,
                tiers=tiers.get(record.instance_id, ()),
            )
        for start in self._sources.list_sleeping():
            if start.sleeper is not None:
                yield topology.WorkerRow(
                    instance=f"{start.sleeper.instance_id:x}",
                    model=start.model,
                    role=start.sleeper.role,
                    endpoint=start.sleeper.endpoint,
                    address="",
                    state="asleep",
                )

    def _draining_row(
        self, row: topology.WorkerRow, num_by_worker: Mapping[int, int]
    ) -> topology.WorkerRow | None:
        """Return the row of a worker that has left discovery; None if it does not report that it drains."""
        number = int(row.instance, 16)
        report = self.recorder.load_of(number)
        if report is None or not report.is_draining:
            return None
        changed = msgspec.structs.replace(
            row, state="draining", num_requests=num_by_worker.get(number, 0)
        )
        return _with_load(changed, report.data)

    def _worker_row(
        self,
        number: int,
        name: instances.EndpointName,
        card: model_card.ModelCard,
        *,
        address: str = "",
        state: topology.WorkerState = "ready",
        num_requests: int = 0,
        tiers: Sequence[str] = (),
    ) -> topology.WorkerRow:
        report = self.recorder.load_of(number)
        row = topology.WorkerRow(
            instance=f"{number:x}",
            model=card.display_name,
            role=card.worker_type.value,
            endpoint=str(name),
            address=address,
            state="draining" if report is not None and report.is_draining else state,
            num_requests=num_requests,
            loras=card.lora_names,
            tiers=tiers,
        )
        return row if report is None else _with_load(row, report.data)


def _with_load(row: topology.WorkerRow, report: load.ForwardPassMetrics) -> topology.WorkerRow:
    stats, kv = report.worker_stats, report.kv_stats
    return msgspec.structs.replace(
        row,
        num_running=stats.request_active_slots,
        num_waiting=stats.num_requests_waiting,
        kv_active_blocks=kv.kv_active_blocks,
        kv_total_blocks=kv.kv_total_blocks,
        hit_rate=kv.gpu_prefix_cache_hit_rate,
    )


def _guessed(model: registered_model.RegisteredModel, capability: str) -> str:
    """Return how answers are parsed without a parser's name; "" if they are not."""
    return "as the chat template shows" if capability in model.capabilities else ""


def _model_row(model: registered_model.RegisteredModel, num_prefill_workers: int) -> ModelRow:
    card, config = model.card, model.card.runtime_config
    return ModelRow(
        name=model.name,
        kind="text" if model.can_generate else "embeddings",
        num_workers=len(model.instances),
        num_prefill_workers=num_prefill_workers,
        context_length=card.context_length,
        kv_cache_block_size=card.kv_cache_block_size,
        total_kv_blocks=config.total_kv_blocks,
        max_num_seqs=config.max_num_seqs,
        aliases=card.aliases,
        loras=card.lora_names,
        base="" if model.base is None else model.base.name,
        created=card.created,
        tool_call_parser=config.tool_call_parser or _guessed(model, "tools"),
        reasoning_parser=config.reasoning_parser or _guessed(model, "reasoning"),
        supports_logprobs=config.supports_logprobs,
        supports_guided=config.supports_guided,
        files=card.checksums,
        chat_template=model.preparer.template_source
        if model.can_generate and model.base is None
        else "",
    )
