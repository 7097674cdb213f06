"""Which models can be served: follows the cards that workers put into discovery.

A model appears with the first card of its name and vanishes with the last, and with it its LoRA adapters
(`lora_adapters`). The oldest card says what the model is; one of the same name that differs in its files is refused,
because its tokens would mean something else. A refused card stays known, so that it counts once the others are gone.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Protocol

import msgspec

from dynamo.base import clock, errors
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
    """What is needed of discovery."""

    def watch(self, prefix: str) -> AsyncIterator[discovery.Change]: ...


class ModelRegistry:
    """All models by name."""

    def __init__(
        self,
        registry: CardSource,
        connect: Callable[[instances.EndpointName], client.EndpointClient],
        make_route: RouteFactory,
        counted: metrics.FrontendMetrics,
        time: clock.Clock,
        fetch: file_fetcher.FileFetcher,
        *,
        namespace: str = "",
        tokenizer_cache_bytes: int = tokenize.CACHE_BYTES,
    ) -> None:
        self._registry = registry
        self._connect = connect
        self._make_route = make_route
        self._metrics = counted
        self._clock = time
        self._fetch = fetch
        self._namespace = namespace
        self._tokenizer_cache_bytes = tokenizer_cache_bytes
        self._records: dict[str, model_card.CardRecord] = {}  # by key, oldest first
        self._prefill: dict[str, model_card.CardRecord] = {}  # the same of who answers no client
        self._models: dict[str, RegisteredModel] = {}
        self._adapters: Mapping[str, RegisteredModel] = {}  # of these
        self._clients: dict[instances.EndpointName, client.EndpointClient] = {}
        self._lost: set[str] = set()  # names that were served once
        self._unloaded: set[str] = set()  # adapters that the last card to change has no more
        self._pools: prefill_pools.PrefillPools | None = None

    def prefill_by(self, make: prefill_pools.PrefillRouterFactory) -> None:
        """Have prefill workers stand before those who answer, from the beginning on; else nobody here asks them."""
        self._pools = prefill_pools.PrefillPools(self._client, make)

    @property
    def ready(self) -> list[RegisteredModel]:
        """Those that can answer now, by name."""
        return sorted((m for m in self._all() if m.is_ready), key=lambda m: m.name)

    @property
    def ready_bases(self) -> list[RegisteredModel]:
        """The same without LoRA adapters: every worker serves one of these, and no more."""
        return [model for model in self.ready if model.base is None]

    @property
    def prefill_workers(self) -> list[model_card.CardRecord]:
        """Those who compute prompts for workers that answer, whoever asks them."""
        return list(self._prefill.values())

    def find(self, name: str) -> RegisteredModel:
        """Raises ModelNotFound, or NoWorkers if it is known but nobody serves it now."""
        model = self._models.get(name) or self._adapters.get(name)
        if model is not None:
            return model
        if name in self._lost:
            raise errors.NoWorkers(
                f"the model {name!r} has lost its last worker: start one, or try again shortly"
            )
        served = ", ".join(repr(model.name) for model in self.ready)
        if not served and not self._models:
            raise errors.NoWorkers(
                f"no worker has registered yet, so the model {name[:100]!r} cannot be served: start one "
                "with the same discovery settings, or try again shortly"
            )
        raise model_errors.ModelNotFound(
            f"The model {name[:100]!r} does not exist. Served here: {served or 'none'}.",
            param="model",
        )

    async def watch(self) -> None:
        """Follow discovery until cancelled."""
        async for change in self._registry.watch(instances.CARDS):
            record = self._read(change)
            if record is not None:
                await self._refresh(record.card_json.display_name)
                self._refresh_adapters()

    def _read(self, change: discovery.Change) -> model_card.CardRecord | None:
        """Note the change; gives the record that came or went, if it matters to us."""
        self._unloaded = set()
        if isinstance(change, discovery.Delete):
            self._prefill.pop(change.key, None)
            gone = self._pools.remove(change.key) if self._pools is not None else None
            return gone or self._records.pop(change.key, None)
        try:
            record = _decode_record(change.value)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            _logger.warning("ignored the model card %s: %s", change.key, error)
            return None
        if self._namespace not in ("", record.namespace):
            return None
        if record.card_json.worker_type is model_card.WorkerType.PREFILL:
            return self._read_prefill(change.key, record)
        before = self._records.get(change.key)
        if before is not None:
            self._unloaded = {*before.card_json.lora_names} - {*record.card_json.lora_names}
        self._records[change.key] = record
        return record

    def _read_prefill(
        self, key: str, record: model_card.CardRecord
    ) -> model_card.CardRecord | None:
        """It answers no client; where nobody here asks it, decode workers do."""
        self._prefill[key] = record
        if self._pools is None:
            return None
        self._pools.add(key, record)
        return record

    async def _refresh(self, name: str) -> None:
        """Make the model of this name what the records say."""
        records = [one for one in self._records.values() if one.card_json.display_name == name]
        if not records:
            self._vanish(name)
            return
        model = self._models.get(name)
        is_known = any(model and _same_files(one.card_json, model.card) for one in records)
        if model is None or not is_known or not model.is_loaded:
            model = await self._load(records)
        model.replicas = await self._replicas(model, records)
        if self._pools is not None:
            await self._pools.stand_before(model)
        if name not in self._models and model.is_ready:
            _logger.info("serving the model %r", name)
        self._models[name] = model
        self._lost.discard(name)
        self._show(model)

    def _refresh_adapters(self) -> None:
        """Make them what the models' workers say."""
        before = self._adapters
        self._adapters = registered_model.list_adapters(self._models, before)
        for name in before.keys() - self._adapters.keys():
            if name in self._unloaded:  # nobody need wait for it to come back
                _logger.info("the adapter %r was unloaded by the last worker that had it", name)
                self._take_away(before[name])
            else:
                self._lose(before[name])
        for name, model in self._adapters.items():
            if name not in before:
                _logger.info("serving %r, an adapter of %r", name, model.base and model.base.name)
            self._lost.discard(name)
            self._show(model)

    def _vanish(self, name: str) -> None:
        model = self._models.pop(name, None)
        if model is not None:
            self._lose(model)

    def _lose(self, model: RegisteredModel) -> None:
        _logger.warning("the model %r has lost its last worker", model.name)
        self._lost.add(model.name)
        self._take_away(model)

    def _take_away(self, model: RegisteredModel) -> None:
        for replicas in model.replicas.values():
            replicas.route.set_model_cards({})
        model.replicas = {}
        self._show(self._models.get(model.name, model))

    async def _load(self, records: list[model_card.CardRecord]) -> RegisteredModel:
        """As the oldest record says; any that has the same files may give them."""
        card = records[0].card_json
        givers = [await self._giver(one) for one in records if _same_files(one.card_json, card)]
        try:
            made = await asyncio.to_thread(
                loading.load_preprocessor,
                await self._fetch.bring(card, [one for one in givers if one is not None]),
                self._clock,
                cache_bytes=self._tokenizer_cache_bytes,
                counted=self._metrics.of_model(card.display_name),
            )
        except errors.ConfigError as error:
            _logger.error("cannot serve the model %r: %s", card.display_name, error)  # noqa: TRY400
            return RegisteredModel(card, None, str(error))
        return RegisteredModel(card, made, None)

    async def _giver(self, record: model_card.CardRecord) -> file_fetcher.FileProvider | None:
        name = instances.EndpointName(record.namespace, record.component, record.endpoint)
        instance = (await self._client(name)).instances.get(record.instance_id)
        return file_fetcher.FileProvider.of(instance, self._fetch.plane_name) if instance else None

    async def _replicas(
        self, model: RegisteredModel, records: list[model_card.CardRecord]
    ) -> Mapping[instances.EndpointName, EndpointInstances]:
        found: dict[instances.EndpointName, EndpointInstances] = {}
        for record in records:
            name = instances.EndpointName(record.namespace, record.component, record.endpoint)
            if not _same_files(record.card_json, model.card):
                _logger.warning(
                    "refused instance %x of %s: its files differ from those of the model %r that is served",
                    record.instance_id, name, model.name,
                )  # fmt: skip
                continue
            if name not in found:
                found[name] = await self._reach(model, name)
            found[name].cards[record.instance_id] = record.card_json
        for replicas in found.values():
            replicas.route.set_model_cards(replicas.cards)
        return found

    async def _reach(
        self, model: RegisteredModel, name: instances.EndpointName
    ) -> EndpointInstances:
        """The endpoint, as the model had it before: its route remembers what runs where."""
        asked = await self._client(name)
        known = model.replicas.get(name)
        return EndpointInstances(
            asked, known.route if known else self._make_route(asked, model.card)
        )

    async def _client(self, name: instances.EndpointName) -> client.EndpointClient:
        """Follow this endpoint, and wait a moment for its first instance."""
        known = self._clients.get(name)
        if known is None:
            known = self._clients[name] = self._connect(name)
            known.on_change(self._show_all)
            try:
                await known.wait_for_instances(SETTLE_S)
            except errors.NoWorkers as error:
                _logger.warning("a model card without an instance: %s", error)
        return known

    def _show_all(self) -> None:
        for model in self._all():
            self._show(model)

    def _all(self) -> Iterator[RegisteredModel]:
        return itertools.chain(self._models.values(), self._adapters.values())

    def _show(self, model: RegisteredModel) -> None:
        self._metrics.show_model(model.card, len(model.instances), is_ready=model.is_ready)


def _same_files(card: model_card.ModelCard, other: model_card.ModelCard) -> bool:
    """Do both stand for the same tokens and the same template?"""
    return card.checksums == other.checksums
