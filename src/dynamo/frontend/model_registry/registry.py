"""The model registry: follows the model cards that workers put into discovery.

A model appears with the first card of its name and vanishes with the last, and with it its LoRA adapters. The oldest
card defines the model; a card of the same name with other files is refused, because its tokens would mean something
else. A refused card stays recorded, so that it counts once the others are gone.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.frontend import metrics
from dynamo.frontend.model_registry import file_fetcher, prefill_pools, registered_model
from dynamo.frontend.model_registry.registered_model import EndpointInstances, RegisteredModel
from dynamo.preprocess import loading, tokenize
from dynamo.protocols import instances, model_card, model_errors
from dynamo.router import route
from dynamo.runtime import client, discovery

SETTLE_S = 1.0  # how long a card may be seen before its instance
_logger = logging.getLogger(__name__)
RouteFactory = Callable[[client.EndpointClient, model_card.ModelCard], route.Route]
_decode_record = msgspec.json.Decoder(model_card.CardRecord).decode


class CardSource(Protocol):
    """The part of discovery that the registry needs."""

    def watch(self, prefix: str) -> AsyncIterator[discovery.Change]: ...


class RouteFactories(NamedTuple):
    """How routes to workers are made; without `make_prefill_router`, prefill workers are recorded, but not asked."""

    make_route: RouteFactory
    make_prefill_router: prefill_pools.PrefillRouterFactory | None = None


class ModelRegistry:
    """All registered models, by name."""

    def __init__(
        self,
        cards: CardSource,
        connect: Callable[[instances.EndpointName], client.EndpointClient],
        factories: RouteFactories,
        frontend_metrics: metrics.FrontendMetrics,
        clock: clocks.Clock,
        fetcher: file_fetcher.FileFetcher,
        *,
        namespace: str = "",
        tokenizer_cache_bytes: int = tokenize.CACHE_BYTES,
    ) -> None:
        self._cards = cards
        self._connect = connect
        self._make_route = factories.make_route
        self._metrics = frontend_metrics
        self._clock = clock
        self._fetcher = fetcher
        self._namespace = namespace
        self._tokenizer_cache_bytes = tokenizer_cache_bytes
        self._records: dict[str, model_card.CardRecord] = {}  # by key, oldest first
        self._prefill_records: dict[str, model_card.CardRecord] = {}  # those of prefill workers
        self._models: dict[str, RegisteredModel] = {}
        self._adapters: Mapping[str, RegisteredModel] = {}  # of these models
        self._clients: dict[instances.EndpointName, client.EndpointClient] = {}
        self._lost_names: set[str] = set()  # of models that were served before
        self._unloaded_names: set[str] = set()  # of adapters that left with the last change
        self._pools = (
            prefill_pools.PrefillPools(self._connect_endpoint, factories.make_prefill_router)
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

    def find(self, name: str) -> RegisteredModel:
        """Return the model of this name. Raises ModelNotFound, or NoWorkers if it has lost its workers."""
        model = self._models.get(name) or self._adapters.get(name)
        if model is not None:
            return model
        if name in self._lost_names:
            raise errors.NoWorkers(
                f"the model {name!r} has lost its last worker: start one, or try again shortly"
            )
        ready_names = ", ".join(repr(model.name) for model in self.ready)
        if not ready_names and not self._models:
            raise errors.NoWorkers(
                f"no worker has registered yet, so the model {name[:100]!r} cannot be served: start one "
                "with the same discovery settings, or try again shortly"
            )
        raise model_errors.ModelNotFound(
            f"The model {name[:100]!r} does not exist. Served here: {ready_names or 'none'}.",
            param="model",
        )

    async def watch(self) -> None:
        """Follow the model cards in discovery until cancelled."""
        async for change in self._cards.watch(instances.CARDS):
            record = self._apply_change(change)
            if record is not None:
                await self._refresh(record.card_json.display_name)
                self._refresh_adapters()

    def _apply_change(self, change: discovery.Change) -> model_card.CardRecord | None:
        """Record a change; return the record that came or went, or None if no model here changes by it."""
        self._unloaded_names = set()
        if isinstance(change, discovery.Delete):
            self._prefill_records.pop(change.key, None)
            removed = self._pools.remove_worker(change.key) if self._pools is not None else None
            return removed or self._records.pop(change.key, None)
        try:
            record = _decode_record(change.value)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            _logger.warning("ignored the model card %s: %s", change.key, error)
            return None
        if self._namespace not in ("", record.namespace):
            return None
        if record.card_json.worker_type is model_card.WorkerType.PREFILL:
            self._prefill_records[change.key] = record
            if self._pools is None:  # decode workers ask it
                return None
            self._pools.add_worker(change.key, record)
            return record
        previous = self._records.get(change.key)
        if previous is not None:
            names = {*previous.card_json.lora_names}
            self._unloaded_names = names - {*record.card_json.lora_names}
        self._records[change.key] = record
        return record

    async def _refresh(self, name: str) -> None:
        """Make the model of this name agree with the records."""
        records = [
            record for record in self._records.values() if record.card_json.display_name == name
        ]
        if not records:
            model = self._models.pop(name, None)
            if model is not None:
                self._lose(model)
            return
        model = self._models.get(name)
        is_current = any(
            model and _has_same_files(record.card_json, model.card) for record in records
        )
        if model is None or not is_current or not model.is_loaded:
            model = await self._load(records)
        model.replicas = await self._connect_replicas(model, records)
        if self._pools is not None:
            await self._pools.update_routes(model)
        if name not in self._models and model.is_ready:
            _logger.info("serving the model %r", name)
        self._models[name] = model
        self._lost_names.discard(name)
        self._update_metrics(model)

    def _refresh_adapters(self) -> None:
        """Make the LoRA adapters agree with the cards of the base models."""
        previous = self._adapters
        self._adapters = registered_model.list_adapters(self._models, previous)
        for name in previous.keys() - self._adapters.keys():
            if name in self._unloaded_names:  # on purpose: it need not be waited for
                _logger.info("the adapter %r was unloaded by the last worker that had it", name)
                self._detach(previous[name])
            else:
                self._lose(previous[name])
        for name, model in self._adapters.items():
            if name not in previous:
                _logger.info("serving %r, an adapter of %r", name, model.base and model.base.name)
            self._lost_names.discard(name)
            self._update_metrics(model)

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
        try:
            preparer = await asyncio.to_thread(
                loading.load_preprocessor,
                await self._fetcher.fetch_files(
                    card, [provider for provider in providers if provider is not None]
                ),
                self._clock,
                cache_bytes=self._tokenizer_cache_bytes,
                cache_observer=self._metrics.for_model(card.display_name),
            )
        except errors.ConfigError as error:
            _logger.error("cannot serve the model %r: %s", card.display_name, error)  # noqa: TRY400
            return RegisteredModel(card, None, str(error))
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
        """Return the instances of the records, by endpoint; a route that the model has already is kept."""
        replicas_by_name: dict[instances.EndpointName, EndpointInstances] = {}
        for record in records:
            name = instances.EndpointName(record.namespace, record.component, record.endpoint)
            if not _has_same_files(record.card_json, model.card):
                _logger.warning(
                    "refused instance %x of %s: its files differ from those of the model %r that is served",
                    record.instance_id, name, model.name,
                )  # fmt: skip
                continue
            if name not in replicas_by_name:
                endpoint_client = await self._connect_endpoint(name)
                previous = model.replicas.get(name)
                replicas_by_name[name] = EndpointInstances(
                    endpoint_client,
                    previous.route if previous else self._make_route(endpoint_client, model.card),
                )
            replicas_by_name[name].cards[record.instance_id] = record.card_json
        for replicas in replicas_by_name.values():
            replicas.route.set_model_cards(replicas.cards)
        return replicas_by_name

    async def _connect_endpoint(self, name: instances.EndpointName) -> client.EndpointClient:
        """Return a client that follows this endpoint; a new one has waited for its first instance, a moment."""
        endpoint_client = self._clients.get(name)
        if endpoint_client is None:
            endpoint_client = self._clients[name] = self._connect(name)
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
        self._metrics.update_model(model.card, len(model.instances), is_ready=model.is_ready)


def _has_same_files(card: model_card.ModelCard, second: model_card.ModelCard) -> bool:
    """Return whether both cards stand for the same tokens and the same template."""
    return card.checksums == second.checksums
