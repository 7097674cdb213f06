"""Makes the routes that a process needs, and owns what they share: one feed of KV events, one exchange with replicas per
component of workers.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dynamo.base import clock as clocks
from dynamo.base import tasks
from dynamo.observability import metrics as observed
from dynamo.protocols import active_sequences, model_card
from dynamo.router import (
    active,
    affinity,
    api,
    approx_index,
    baselines,
    by_formula,
    cost,
    estimated_ttft,
    feed,
    kv_router,
    metrics,
    plain_route,
    policy,
    prefix_index,
    queue,
    replica_sync,
    selection,
    settings,
)
from dynamo.runtime import client, component

_PLAIN: dict[str, client.Mode] = {"round-robin": "round-robin", "random": "random"}


@dataclass(frozen=True, slots=True)
class _Shared:
    """What the routes to one component of workers share."""

    index: api.Index
    feed: feed.KvFeed | None
    sync: replica_sync.ReplicaSync | None
    selectors: list[selection.Selector]


class Routes:
    """One process's routes, as its settings want them."""

    def __init__(
        self,
        wanted: settings.RouterConfig,
        runtime: component.DistributedRuntime,
        clock: clocks.Clock,
        registry: observed.Registry,
    ) -> None:
        self._settings = wanted
        self._runtime = runtime
        self._clock = clock
        self._registry = registry
        self._metrics: metrics.RouterMetrics | None = None
        self._shared: dict[tuple[str, str], _Shared] = {}
        self._draw = random.random
        self._tasks = tasks.Tasks()

    def make(self, asked: client.EndpointClient, card: model_card.ModelCard) -> api.Route:
        """The way to those who serve this model at the endpoint that `asked` follows."""
        mode = _PLAIN.get(self._settings.router_mode)
        if mode is not None:
            return plain_route.PlainRoute(asked, mode)
        return self.make_kv(asked, card)

    def make_kv(
        self, asked: client.EndpointClient, card: model_card.ModelCard
    ) -> kv_router.KvRouter:
        """The same, by load at least, whatever the mode."""
        if self._metrics is None:
            self._metrics = metrics.RouterMetrics(
                self._registry, f"{self._runtime.instance_id:x}"
            )
        shared = self._join(asked)
        wanted = self._settings
        block_size = wanted.kv_cache_block_size or card.kv_cache_block_size
        counts = metrics.RouteMetrics(self._metrics, card.display_name)
        selector = selection.Selector(
            make_policy(wanted, self._draw),
            _Timed(shared.index, counts.found),
            active.ActiveSequences(block_size),
            queue=queue.WaitingQueue(
                wanted.router_queue_policy, max_size=wanted.router_queue_limit
            ),
            max_backlog=wanted.router_queue_threshold,
            credits_=cost.Credits(
                host=wanted.router_host_cache_hit_weight, disk=wanted.router_disk_cache_hit_weight
            ),
        )
        shared.selectors.append(selector)
        ttl_s = wanted.router_session_affinity_ttl_secs
        return kv_router.KvRouter(
            asked,
            selector,
            router_id=f"{self._runtime.instance_id:x}",
            block_size=block_size,
            counts=counts,
            clock=self._clock,
            queue_timeout_s=wanted.router_queue_timeout_secs,
            sessions=None if ttl_s is None else affinity.SessionAffinity(ttl_s),
            sharing=shared.sync,
        )

    async def close(self) -> None:
        """End what they share."""
        for shared in self._shared.values():
            if shared.feed is not None:
                await shared.feed.close()
            if shared.sync is not None:
                await shared.sync.close()
        await self._tasks.close()

    def _join(self, asked: client.EndpointClient) -> _Shared:
        """What is shared by the routes to this component."""
        name = asked.name.namespace, asked.name.component
        if name not in self._shared:
            self._shared[name] = self._share(*name)
        return self._shared[name]

    def _share(self, namespace: str, component_name: str) -> _Shared:
        selectors: list[selection.Selector] = []
        ...
