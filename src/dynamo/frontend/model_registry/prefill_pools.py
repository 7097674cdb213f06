"""The pools of prefill workers to which the routes of a model send its prompts."""

import logging
from collections.abc import Awaitable, Callable, Mapping

import msgspec

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

    def __init__(
        self,
        connect: Connect,
        make_router: PrefillRouterFactory,
        records: Mapping[str, model_card.CardRecord],
    ) -> None:
        """`records` are those of all prefill workers, by key, oldest first: a live view."""
        self._connect = connect
        self._make_router = make_router
        self._records = records
        self._routers: dict[tuple[str, str], kv_router.KvRouter] = {}  # by model and namespace
        self._active: set[tuple[str, str]] = set()  # models and namespaces with prefill workers

    async def update_routes(self, model: RegisteredModel) -> None:
        """Give the routes of a model the prefill workers that there are now."""
        for name, replicas in model.replicas.items():
            if isinstance(replicas.route, prefill_route.PrefillRoute):
                router = await self._find_router(model, name.namespace)
                replicas.route.set_prefill_router(router)
                self._log_change(model.name, name.namespace, has_workers=router is not None)

    async def _find_router(
        self, model: RegisteredModel, namespace: str
    ) -> kv_router.KvRouter | None:
        endpoint, cards = self._find_pool(model, namespace)
        if endpoint is None:
            return None
        router = self._make_router(await self._connect(endpoint), next(iter(cards.values())))
        key = model.name, namespace
        if (former := self._routers.get(key, router)) is not router:
            former.set_model_cards({})
        self._routers[key] = router
        router.set_model_cards(cards)
        return router

    def _find_pool(
        self, model: RegisteredModel, namespace: str
    ) -> tuple[instances.EndpointName | None, _CardsByInstance]:
        """Return the endpoint of the model's oldest prefill worker, and the cards of all workers at it."""
        endpoint, cards = None, {}
        of_any_weights = msgspec.structs.replace(model.card, weights="")  # which the route compares
        for record in self._records.values():
            name = instances.EndpointName(record.namespace, record.component, record.endpoint)
            card = record.card_json
            if card.display_name != model.name or record.namespace != namespace:
                continue
            difference = card.find_difference(of_any_weights)
            if difference is not None or name != (endpoint or name):
                reason = "another endpoint" if difference is None else f"{difference} differs"
                _logger.warning(
                    "ignored the prefill worker %x of %s: %s", record.instance_id, name, reason
                )
                continue
            endpoint = name
            cards[record.instance_id] = card
        return endpoint, cards

    def _log_change(self, model: str, namespace: str, *, has_workers: bool) -> None:
        key = model, namespace
        if has_workers and key not in self._active:
            _logger.info("prompts of %r go by prefill workers of %s", model, namespace)
            self._active.add(key)
        elif not has_workers and key in self._active:
            _logger.info("%r has lost its last prefill worker in %s", model, namespace)
            self._active.discard(key)
