"""The prefill workers of each model: they answer no client, but compute prompts for decode workers.

Follows their model cards, and gives the routes of a model (`disagg.prefill_route`) a router to its prefill workers as
soon as there is one, and none when the last is gone. A prefill worker works for the decode workers of its namespace
that serve the same files.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping

from dynamo.disagg import prefill_route
from dynamo.frontend.model_registry.registered_model import RegisteredModel
from dynamo.protocols import instances, model_card
from dynamo.router import kv_router
from dynamo.runtime import client

_logger = logging.getLogger(__name__)
Connect = Callable[[instances.EndpointName], Awaitable[client.EndpointClient]]
PrefillRouterFactory = Callable[[client.EndpointClient, model_card.ModelCard], kv_router.KvRouter]
_CardsByInstance = Mapping[int, model_card.ModelCard]


class PrefillPools:
    """The pools of prefill workers, by model and endpoint."""

    def __init__(self, connect: Connect, make_router: PrefillRouterFactory) -> None:
        self._connect = connect
        self._make_router = make_router
        self._records: dict[str, model_card.CardRecord] = {}  # by key, oldest first
        self._routers: dict[tuple[str, instances.EndpointName], kv_router.KvRouter] = {}
        self._active: set[tuple[str, str]] = set()  # models and namespaces with prefill workers

    def add_worker(self, key: str, record: model_card.CardRecord) -> None:
        """Add or replace the record of a prefill worker."""
        self._records[key] = record

    def remove_worker(self, key: str) -> model_card.CardRecord | None:
        """Remove and return the record of a prefill worker; None if the key is not one's."""
        return self._records.pop(key, None)

    async def update_routes(self, model: RegisteredModel) -> None:
        """Give the routes of a model the prefill workers that there are now."""
        for name, replicas in model.replicas.items():
            if isinstance(replicas.route, prefill_route.PrefillRoute):
                replicas.route.set_prefill_router(await self._find_router(model, name.namespace))

    async def _find_router(
        self, model: RegisteredModel, namespace: str
    ) -> kv_router.KvRouter | None:
        endpoint, cards = self._find_pool(model, namespace)
        self._log_change(model.name, namespace, len(cards))
        if endpoint is None:
            return None
        key = model.name, endpoint
        if key not in self._routers:
            endpoint_client = await self._connect(endpoint)
            self._routers[key] = self._make_router(endpoint_client, next(iter(cards.values())))
        self._routers[key].set_model_cards(cards)
        return self._routers[key]

    def _find_pool(
        self, model: RegisteredModel, namespace: str
    ) -> tuple[instances.EndpointName | None, _CardsByInstance]:
        """Return the endpoint of the model's oldest prefill worker, and the cards of all workers at it."""
        endpoint, cards = None, {}
        for record in self._records.values():
            name = instances.EndpointName(record.namespace, record.component, record.endpoint)
            card = record.card_json
            if card.display_name != model.name or record.namespace != namespace:
                continue
            if card.checksums != model.card.checksums or name != (endpoint or name):
                _logger.warning("ignored the prefill worker %x of %s", record.instance_id, name)
                continue
            endpoint = name
            cards[record.instance_id] = card
        return endpoint, cards

    def _log_change(self, model: str, namespace: str, num_workers: int) -> None:
        key = model, namespace
        if num_workers and key not in self._active:
            _logger.info("prompts of %r go by prefill workers of %s", model, namespace)
            self._active.add(key)
        elif not num_workers and key in self._active:
            _logger.info("%r has lost its last prefill worker in %s", model, namespace)
            self._active.discard(key)
