"""The prefill workers of each model: they answer no client, but stand before those who do (`disagg.prefill_first`).

Follows their cards, and tells the routes of the model as soon as there is one, and when the last is gone. A prefill
worker works for those of its namespace that serve the same files.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping

from dynamo.disagg import prefill_first
from dynamo.frontend.model_registry.registered_model import RegisteredModel
from dynamo.protocols import instances, model_card
from dynamo.router import kv_router
from dynamo.runtime import client

_logger = logging.getLogger(__name__)
Connect = Callable[[instances.EndpointName], Awaitable[client.EndpointClient]]
PrefillRouterFactory = Callable[[client.EndpointClient, model_card.ModelCard], kv_router.KvRouter]
_Cards = Mapping[int, model_card.ModelCard]


class PrefillPools:
    """By model and endpoint."""

    def __init__(self, connect: Connect, make: PrefillRouterFactory) -> None:
        self._connect = connect
        self._make = make
        self._records: dict[str, model_card.CardRecord] = {}  # by key, oldest first
        self._routes: dict[tuple[str, instances.EndpointName], kv_router.KvRouter] = {}
        self._active: set[tuple[str, str]] = set()  # models and namespaces that have some

    def add(self, key: str, record: model_card.CardRecord) -> None:
        """A prefill worker registers."""
        self._records[key] = record

    def remove(self, key: str) -> model_card.CardRecord | None:
        """It is gone; None: it was none."""
        return self._records.pop(key, None)

    async def stand_before(self, model: RegisteredModel) -> None:
        """Tell its routes who there is now."""
        for name, replicas in model.replicas.items():
            if isinstance(replicas.route, prefill_first.PrefillFirst):
                replicas.route.prefill_by(await self._route(model, name.namespace))

    async def _route(self, model: RegisteredModel, namespace: str) -> kv_router.KvRouter | None:
        endpoint, cards = self._pool(model, namespace)
        self._tell(model.name, namespace, len(cards))
        if endpoint is None:
            return None
        key = model.name, endpoint
        if key not in self._routes:
            asked = await self._connect(endpoint)
            self._routes[key] = self._make(asked, next(iter(cards.values())))
        self._routes[key].set_model_cards(cards)
        return self._routes[key]

    def _pool(
        self, model: RegisteredModel, namespace: str
    ) -> tuple[instances.EndpointName | None, _Cards]:
        """The endpoint of the oldest prefill worker, and who else serves there."""
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

    def _tell(self, model: str, namespace: str, num_workers: int) -> None:
        key = model, namespace
        if num_workers and key not in self._active:
            _logger.info("prompts of %r go by prefill workers of %s", model, namespace)
            self._active.add(key)
        elif not num_workers and key in self._active:
            _logger.info("%r has lost its last prefill worker in %s", model, namespace)
            self._active.discard(key)
