"""Makes the routes of a frontend in router mode kv: each can go by a prefill worker, once there is one.

Without a prefill worker nothing here runs. While a model has some, the limits of its local prefill are followed in
discovery.
"""

import asyncio

from dynamo.base import clock as clocks
from dynamo.base import tasks
from dynamo.disagg import estimated, limits, metrics, policy, prefill_first, settings
from dynamo.observability import metrics as registries
from dynamo.protocols import model_card
from dynamo.router import kv_router, route, route_factory
from dynamo.runtime import client, discovery


class PrefillRoutes:
    """Those of one process. Raises ConfigError."""

    def __init__(
        self,
        made: route_factory.RouteFactory,
        wanted: settings.PrefillRoutingConfig,
        registry: discovery.Discovery,
        counted: registries.Registry,
        clock: clocks.Clock,
        queue_threshold: float | None = None,
    ) -> None:
        self._routes = made
        self._wanted = wanted
        self._conditional = wanted.conditional(queue_threshold)
        self._registry = registry
        self._counted = metrics.RoutedMetrics(counted)
        self._clock = clock
        self._following: dict[str, asyncio.Task[None]] = {}  # by model
        self._lengths: dict[str, policy.Lengths] = {}
        self._tasks = tasks.Tasks()

    def make(self, asked: client.EndpointClient, card: model_card.ModelCard) -> route.Route:
        """The way to those who answer at this endpoint (`route_factory.RouteFactory.make_route`)."""
        plain = self._routes.make_route(asked, card)
        if not isinstance(plain, kv_router.KvRouter):
            return plain
        return prefill_first.PrefillFirst(
            plain,
            self._policy_of(card.display_name),
            prefill_first.Rules(
                prefill_timeout_s=self._wanted.prefill_timeout_s,
                is_enforced=self._wanted.is_enforced,
            ),
            metrics.ModelRoutedMetrics(self._counted, card.display_name),
            self._clock,
        )

    def make_prefill(
        self, asked: client.EndpointClient, card: model_card.ModelCard
    ) -> kv_router.KvRouter:
        """The way to the prefill workers of this endpoint."""
        if isinstance(self._policy_of(card.display_name), policy.Lengths):
            self._follow_limits(card.display_name)
        return self._routes.make_kv_router(asked, card)

    async def close(self) -> None:
        """Follow discovery no more."""
        await self._tasks.close()

    def _policy_of(self, model: str) -> policy.Policy:
        if self._conditional is not None:
            return self._conditional
        if self._wanted.disagg_policy == "estimated":
            return estimated.Estimated()
        return self._lengths_of(model)

    def _lengths_of(self, model: str) -> policy.Lengths:
        return self._lengths.setdefault(model, policy.Lengths(self._wanted.limits))

    def _follow_limits(self, model: str) -> None:
        if model in self._following:
            return
        lengths = self._lengths_of(model)
        following = limits.follow(self._registry, model, lengths)
        self._following[model] = self._tasks.start("watch limits of local prefill", following)
