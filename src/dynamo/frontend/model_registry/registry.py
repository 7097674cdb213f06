"""The model registry: follows the model cards that workers put into discovery.

A model appears with the first card of its name and vanishes with the last, and with it its LoRA adapters. The oldest
card defines the model; a card of the same name with other files is refused, because its tokens would mean something
else. A refused card stays recorded, so that it counts once the others are gone.

Prefill workers answer no client, but compute prompts for decode workers: the routes of a model (`disagg.prefill_route`)
get a router to its prefill workers as soon as there is one, and none when the last is gone. A prefill worker works for
the decode workers of its namespace that serve the same files.

A change of discovery is recorded at once. Each model is made to agree with the records by a task of its own, because
its files may take long to come: that delays no other model.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent import futures
from typing import NamedTuple

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.frontend import metrics
from dynamo.frontend.model_registry import file_fetcher, prefill_pools, registered_model
from dynamo.frontend.model_registry.registered_model import EndpointInstances, RegisteredModel
from dynamo.preprocess import loading, tokenize
from dynamo.protocols import instances, model_card, model_errors, wire
from dynamo.router import route
from dynamo.runtime import client, discovery

SETTLE_S = 1.0  # how long a card may be seen before its instance
RELOAD_S = 10.0  # until a model with unreadable files is loaded again
MAX_LOADS = 4  # of models at a time; each may wait for files, and takes memory for its tokenizer
_logger = logging.getLogger(__name__)
RouteFactory = Callable[[client.EndpointClient, model_card.ModelCard], route.Route]
_decode_record = msgspec.json.Decoder(model_card.CardRecord).decode
ModelFilter = Callable[[str], bool]  # of the names of models that a client may see


class RouteFactories(NamedTuple):
    """How routes to workers are made; without `make_prefill_router`, prefill workers are recorded, but not asked."""

    make_route: RouteFactory
    make_prefill_router: prefill_pools.PrefillRouterFactory | None = None


class ModelRegistry:
    """All registered models, by name."""

    def __init__(
        self,
        cards: discovery.Discovery,
        connect: Callable[[instances.EndpointName], client.EndpointClient],
        factories: RouteFactories,
        frontend_metrics: metrics.FrontendMetrics,
        clock: clocks.Clock,
        fetcher: file_fetcher.FileFetcher,
        *,
        namespace: str = "",
        tokenizer_options: tokenize.TokenizerOptions = tokenize.DEFAULT_OPTIONS,
    ) -> None:
        self._cards = cards
        self._connect = connect
        self._make_route = factories.make_route
        self._metrics = frontend_metrics
        self._clock = clock
        self._fetcher = fetcher
        self._namespace = namespace
        self._tokenizer_options = tokenizer_options
        self._records: dict[str, model_card.CardRecord] = {}  # by key, oldest first
        self._prefill_records: dict[str, model_card.CardRecord] = {}  # those of prefill workers
        self._models: dict[str, RegisteredModel] = {}
        self._adapters: Mapping[str, RegisteredModel] = {}  # of these models
        self._names_by_alias: Mapping[str, str] = {}
        self._clients: dict[instances.EndpointName, asyncio.Task[client.EndpointClient]] = {}
        self._tasks = tasks.Tasks()
        self._may_load = asyncio.Semaphore(MAX_LOADS)
        self._changed_names: set[str] = set()  # of models whose records have changed
        self._refreshing_names: set[str] = set()  # of models with a task
        self._reloading_names: set[str] = set()  # of models that are loaded again in a while
        self._lost_names: set[str] = set()  # of models that were served before
        self._base_by_adapter: dict[str, str] = {}  # also of lost ones
        self._look_lock = asyncio.Lock()
        self._looked_at = -math.inf
        self._cards_seen: tuple[bytes, ...] = ()  # at the last look
        # of adapters that left the card of a worker, by base model
        self._unloaded_names: dict[str, set[str]] = {}
        self._pools = (
            prefill_pools.PrefillPools(
                self._connect_endpoint, factories.make_prefill_router, self._prefill_records
            )
            if factories.make_prefill_router is not None
            else None
        )

    @property
    def ready(self) -> list[RegisteredModel]:
        """Return the models that can answer now, by name."""
        return sorted(
            (model for model in self._all_models() if model.is_ready), key=lambda model: model.name
        )

    @property
    def ready_bases(self) -> list[RegisteredModel]:
        """Return the ready models that are no LoRA adapters: every worker serves exactly one of them."""
        return [model for model in self.ready if model.base is None]

    @property
    def prefill_workers(self) -> list[model_card.CardRecord]:
        """Return the records of all prefill workers, whether they are asked from here or by decode workers."""
        return list(self._prefill_records.values())

    def get(self, name: str) -> RegisteredModel | None:
        """Return the model of this name; None if no worker serves it."""
        name = self._names_by_alias.get(name, name)
        return self._models.get(name) or self._adapters.get(name)

    def find(self, name: str, may_see: ModelFilter | None = None) -> RegisteredModel:
        """Return the model of this name.

        Raises ModelNotFound, or NoWorkers if it has lost its workers. To a client that `may_see` some models only, all
        others do not exist, and no error names them.
        """
        served_name = self.served_name(name)
        if may_see is not None and not may_see(served_name):
            raise model_errors.ModelNotFound(
                f"The model {name[:100]!r} does not exist, or this API key may not ask it. "
                f"It may ask: {self._list_ready(may_see)}.",
                param="model",
            )
        if model := self._models.get(served_name) or self._adapters.get(served_name):
            return model
        if served_name in self._lost_names:
            raise errors.NoWorkers(
                f"the model {served_name!r} has lost its last worker: start one, or try again shortly"
            )
        if not self._models:
            raise errors.NoWorkers(
                f"no worker has registered yet, so the model {name[:100]!r} cannot be served: start one "
                "with the same discovery settings, or try again shortly"
            )
        raise model_errors.ModelNotFound(
            f"The model {name[:100]!r} does not exist. Served here: {self._list_ready(may_see)}.",
            param="model",
        )

    def _list_ready(self, may_see: ModelFilter | None) -> str:
        names = (model.name for model in self.ready)
        return ", ".join(repr(name) for name in names if not may_see or may_see(name)) or "none"

    def served_name(self, name: str) -> str:
        """Return the name of the model with this alias, also of one that has lost its workers; else the name itself."""
        return self._names_by_alias.get(name, name)

    def announced_name(self, name: str) -> str:
        """Return the name by which workers of this model announce their start: of an adapter, that of its base."""
        served_name = self.served_name(name)
        return self._base_by_adapter.get(served_name, served_name)

    async def resolve_alias(self, name: str) -> str:
        """Return the name of the model with this alias, which discovery alone may know yet; else the name itself."""
        return self._names_by_alias.get(name) or await self.find_announced(name) or name

    async def find_announced(self, name: str) -> str | None:
        """Look into discovery for a worker of the model with this name or alias, and return the model's name.

        The watch may not have told of it yet. What is in discovery when this begins is seen. One look is made at a
        time, for all that ask meanwhile.
        """
        asked_at = self._clock.now()
        async with self._look_lock:
            if self._looked_at < asked_at:
                began_at = self._clock.now()
                with contextlib.suppress(errors.Unavailable):
                    self._cards_seen = tuple(
                        (await self._cards.get_prefix(instances.CARDS)).values()
                    )
                self._looked_at = began_at
        quoted = msgspec.json.encode(name)
        names = (self._name_served(value, name) for value in self._cards_seen if quoted in value)
        return next(filter(None, names), None)

    def _name_served(self, value: bytes, name: str) -> str | None:
        """Return the model that the worker of a card serves by this name or alias."""
        try:
            record = _decode_record(value)
        except wire.DECODE_ERRORS:
            return None
        card = record.card_json
        is_own = instances.covers_namespace(self._namespace, record.namespace)
        if not is_own or card.worker_type is model_card.WorkerType.PREFILL:
            return None
        if name in (card.display_name, *card.lora_names):
            return name
        return card.display_name if name in card.aliases else None

    async def watch(self) -> None:
        """Follow the model cards in discovery until cancelled."""
        try:
            async for change in self._cards.watch(instances.CARDS):
                for name in self._apply_change(change):
                    self._start_refresh(name)
        finally:
            await self._tasks.close()

    def _start_refresh(self, name: str) -> None:
        """Have a model agree with the records: by the task that runs for it, or by a new one."""
        self._changed_names.add(name)
        if name not in self._refreshing_names:
            self._refreshing_names.add(name)
            self._tasks.start(f"refresh the model {name}", self._refresh_while_changed(name))

    async def _refresh_while_changed(self, name: str) -> None:
        try:
            while name in self._changed_names:
                self._changed_names.discard(name)
                await self._refresh(name)
                self._refresh_adapters(self._unloaded_names.get(name, ()))
                self._refresh_aliases()
        finally:
            self._unloaded_names.pop(name, None)
            self._refreshing_names.discard(name)
        model = self._models.get(name)
        if model is not None and not model.is_loaded and name not in self._reloading_names:
            self._reloading_names.add(name)
            self._tasks.start(f"load the model {name} again", self._load_again(name))

    async def _load_again(self, name: str) -> None:
        """Let a model agree with the records once more: its workers may not have been reached."""
        await self._clock.sleep(RELOAD_S)
        self._reloading_names.discard(name)
        self._start_refresh(name)

    def _apply_change(self, change: discovery.Change) -> Collection[str]:
        """Record a change; return the names of the models that change by it: two if a worker has renamed its model."""
        key, kinds = change.key, (self._records, self._prefill_records)
        names = {records[key].card_json.display_name for records in kinds if key in records}
        if isinstance(change, discovery.Delete):
            for records in kinds:
                records.pop(key, None)
            return names
        try:
            record = _decode_record(change.value)
        except wire.DECODE_ERRORS as error:
            _logger.warning("ignored the model card %s: %s", key, error)
            return ()
        name = record.card_json.display_name
        if not instances.covers_namespace(self._namespace, record.namespace):
            return ()
        if record.card_json.worker_type is model_card.WorkerType.PREFILL:
            self._prefill_records[key] = record
            return {*names, name}
        if key in self._records:
            previous = self._records[key].card_json.lora_names
            unloaded = {*previous} - {*record.card_json.lora_names}
            self._unloaded_names.setdefault(name, set()).update(unloaded)
        self._records[key] = record
        return {*names, name}

    async def _refresh(self, name: str) -> None:
        """Make the model of this name agree with the records."""
        records = self._records_of(name)
        model = self._models.get(name)
        loaded = model if model is not None and model.is_loaded else None
        current = [r for r in records if loaded and _has_same_files(r.card_json, loaded.card)]
        if records and not (loaded and current and loaded.is_described_by(current[0].card_json)):
            async with self._may_load:
                model = await self._load(current or records)
            if loaded and current:  # the rest stays as it is
                model.replicas = loaded.replicas
                model = model if model.is_loaded else loaded
            records = self._records_of(name)  # they may have changed meanwhile
        if not records or model is None:
            lost = self._models.pop(name, None)
            if lost is not None:
                self._lose(lost)
            return
        model.replicas = await self._connect_replicas(model, records)
        if self._pools is not None:
            await self._pools.update_routes(model)
        if name not in self._models and model.is_ready:
            _logger.info("serving the model %r", name)
        self._models[name] = model
        self._lost_names.discard(name)
        self._update_metrics(model)

    def _records_of(self, name: str) -> list[model_card.CardRecord]:
        return [each for each in self._records.values() if each.card_json.display_name == name]

    def _refresh_adapters(self, unloaded_names: Collection[str]) -> None:
        """Make the LoRA adapters agree with the cards of the base models, the model of the oldest card first."""
        previous = self._adapters
        names = [record.card_json.display_name for record in self._records.values()]
        bases = {name: self._models[name] for name in names if name in self._models}
        self._adapters = registered_model.list_adapters(bases, previous)
        for name in previous.keys() - self._adapters.keys():
            if name in unloaded_names:  # on purpose: it need not be waited for
                _logger.info("the adapter %r was unloaded by the last worker that had it", name)
                self._detach(previous[name])
                del self._base_by_adapter[name]
                if name not in self._models:  # alerts are for models that lost their workers
                    shown = self._metrics
                    for gauge in (shown.workers, shown.workers_down, shown.ready):
                        gauge.remove(name.lower())
            else:
                self._lose(previous[name])
        for name, model in self._adapters.items():
            self._base_by_adapter[name] = model.announced_name
            if name not in previous:
                _logger.info("serving %r, an adapter of %r", name, model.base and model.base.name)
            self._lost_names.discard(name)
            self._update_metrics(model)

    def _refresh_aliases(self) -> None:
        """Make the aliases agree with the cards; a name of a model is no alias, and the oldest card has an alias."""
        lost = {
            alias: name for alias, name in self._names_by_alias.items() if name in self._lost_names
        }
        living = {
            alias: record.card_json.display_name
            for record in reversed(self._records.values())
            for alias in record.card_json.aliases
        }
        names = {model.name for model in self._all_models()}
        self._names_by_alias = {
            alias: name for alias, name in (lost | living).items() if alias not in names
        }

    def _lose(self, model: RegisteredModel) -> None:
        _logger.warning("the model %r has lost its last worker", model.name)
        self._lost_names.add(model.name)
        self._detach(model)

    def _detach(self, model: RegisteredModel) -> None:
        for replicas in model.replicas.values():
            replicas.route.set_model_cards({})
        model.replicas = {}
        self._update_metrics(self._models.get(model.name, model))

    async def _load(self, records: list[model_card.CardRecord]) -> RegisteredModel:
        """Load the model of the oldest record; every worker with the same files may provide them."""
        card = records[0].card_json
        providers = [
            await self._find_provider(record)
            for record in records
            if _has_same_files(record.card_json, card)
        ]
        # A thread of its own, which ends: fastokens copies the words of a model (4 MB for 32,000 tokens, 16 MB for
        # 128,000) for each thread that encodes, and a thread of asyncio's pool would keep them for ever.
        thread = futures.ThreadPoolExecutor(1, "model loading")
        try:
            load = functools.partial(
                loading.load_preprocessor,
                await self._fetcher.fetch_files(
                    card, [provider for provider in providers if provider is not None]
                ),
                self._clock,
                tokenizer_options=self._tokenizer_options,
                cache_observer=self._metrics.for_model(card.display_name),
            )
            preparer = await asyncio.get_running_loop().run_in_executor(thread, load)
        except errors.ConfigError as error:
            former = self._models.get(card.display_name)
            if former is None or former.problem != str(error):
                _logger.error("cannot serve the model %r: %s", card.display_name, error)  # noqa: TRY400
            return RegisteredModel(card, None, str(error))
        finally:
            thread.shutdown(wait=False)
        return RegisteredModel(card, preparer, None)

    async def _find_provider(
        self, record: model_card.CardRecord
    ) -> file_fetcher.FileProvider | None:
        name = instances.EndpointName(record.namespace, record.component, record.endpoint)
        instance = (await self._connect_endpoint(name)).instances.get(record.instance_id)
        if instance is None:
            return None
        return file_fetcher.FileProvider.of(instance, self._fetcher.plane_name)

    async def _connect_replicas(
        self, model: RegisteredModel, records: list[model_card.CardRecord]
    ) -> Mapping[instances.EndpointName, EndpointInstances]:
        """Return the instances of the records, by endpoint.

        A route that the model has is kept until the oldest worker has KV blocks of another size.
        """
        cards_by_name: dict[instances.EndpointName, dict[int, model_card.ModelCard]] = {}
        for record in records:
            name = instances.EndpointName(record.namespace, record.component, record.endpoint)
            if not _has_same_files(record.card_json, model.card):
                _logger.warning(
                    "refused instance %x of %s: its files differ from those of the model %r that is served",
                    record.instance_id, name, model.name,
                )  # fmt: skip
                continue
            cards_by_name.setdefault(name, {})[record.instance_id] = record.card_json
        replicas_by_name: dict[instances.EndpointName, EndpointInstances] = {}
        for name, cards in cards_by_name.items():
            endpoint_client = await self._connect_endpoint(name)
            previous, oldest = model.replicas.get(name), next(iter(cards.values()))
            if previous and previous.block_size == oldest.kv_cache_block_size:
                route = previous.route
            else:
                if previous:  # two would show, and remove, the load of one worker
                    previous.route.set_model_cards({})
                route = self._make_route(endpoint_client, oldest)
            route.set_model_cards(cards)
            replicas_by_name[name] = EndpointInstances(endpoint_client, route, cards)
        return replicas_by_name

    async def _connect_endpoint(self, name: instances.EndpointName) -> client.EndpointClient:
        """Return a client that follows this endpoint and has waited for its first instance, a moment."""
        if name not in self._clients:
            following = self._follow_endpoint(name)
            self._clients[name] = self._tasks.start(f"connect to {name}", following)
        return await asyncio.shield(self._clients[name])

    async def _follow_endpoint(self, name: instances.EndpointName) -> client.EndpointClient:
        endpoint_client = self._connect(name)
        endpoint_client.on_change(self._update_all_metrics)
        try:
            await endpoint_client.wait_for_instances(SETTLE_S)
        except errors.NoWorkers as error:
            _logger.warning("a model card without an instance: %s", error)
        return endpoint_client

    def _update_all_metrics(self) -> None:
        for model in self._all_models():
            self._update_metrics(model)

    def _all_models(self) -> Iterator[RegisteredModel]:
        return itertools.chain(self._models.values(), self._adapters.values())

    def _update_metrics(self, model: RegisteredModel) -> None:
        self._metrics.update_model(
            model.card, len(model.instances), model.count_down, is_ready=model.is_ready
        )


def _has_same_files(card: model_card.ModelCard, second: model_card.ModelCard) -> bool:
    """Return whether both cards stand for the same tokens and the same template."""
    return card.checksums == second.checksums
