"""The factory of routes for one process; it owns what they share.

The routes to one component of workers share an index, the subscriber that fills it, and the sync with router replicas.
"""

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from dynamo.base import clock as clocks
from dynamo.base import tasks
from dynamo.observability import metrics as observed
from dynamo.protocols import instances, kv_events, load, model_card
from dynamo.router import (
    api,
    config,
    kv_event_subscriber,
    kv_router,
    kv_scheduler,
    metrics,
    prefix_copies,
    prefix_index,
    replica_sync,
    route,
)
from dynamo.runtime import client, component

_logger = logging.getLogger(__name__)


class RouteFactory:
    """Makes the routes of one process according to its settings."""

    def __init__(
        self,
        settings: config.RoutingConfig,
        runtime: component.DistributedRuntime,
        clock: clocks.Clock,
        registry: observed.Registry,
    ) -> None:
        self._settings = settings
        self._runtime = runtime
        self._clock = clock
        self._registry = registry
        self._metrics: metrics.RouterMetrics | None = None  # made with the first KV router
        self._counts: dict[str, metrics.RouteMetrics] = {}  # by model
        self._components: dict[tuple[str, str], _ComponentState] = {}
        # a model that comes back, as after a restart of its only worker, has the router that it had
        self._routers: dict[tuple[object, ...], kv_router.KvRouter] = {}
        self._tasks = tasks.Tasks()
        config.make_policy(settings.policy_config, random.random)  # a wrong one is refused now
        for note in settings.policy_config.find_notes():
            _logger.warning("%s", note)

    async def start(self) -> None:
        """Listen for the routers of other frontends, if they are to be synchronized. Raises ConfigError."""
        if self._settings.router_replica_sync:
            await self._runtime.requests.listen()
            await self._runtime.events.listen()

    def make_route(
        self, endpoint_client: client.EndpointClient, card: model_card.ModelCard
    ) -> route.Route:
        """Make the route to the instances of an endpoint that serve the model of the card."""
        mode = config.PUSH_MODES.get(self._settings.router_mode)
        if card.embedding is not None:  # such workers cache nothing and publish no load
            return route.PushRouter(endpoint_client, mode or "round-robin")
        if mode is not None:
            return route.PushRouter(endpoint_client, mode)
        return self.make_kv_router(endpoint_client, card)

    def make_kv_router(
        self, endpoint_client: client.EndpointClient, card: model_card.ModelCard
    ) -> kv_router.KvRouter:
        """Make the route of the modes that know load, once; also for prefill workers, in any mode."""
        settings, name = self._settings, endpoint_client.name
        if self._metrics is None:
            router_id = f"{self._runtime.instance_id:x}"
            self._metrics = metrics.RouterMetrics(self._registry, router_id)
        is_prefill = card.worker_type is model_card.WorkerType.PREFILL
        state = self._component(name.namespace, name.component, self._metrics)
        model = card.display_name
        if model not in self._counts:
            self._counts[model] = metrics.RouteMetrics(self._metrics, model)
        counts = self._counts[model]
        block_size = card.kv_cache_block_size or settings.kv_cache_block_size or 1
        files = tuple(sorted(card.checksums.items()))
        key = endpoint_client, model, block_size, is_prefill, files, card.weights
        if (former := self._routers.get(key)) is not None:
            return former
        if settings.kv_cache_block_size not in (None, block_size):
            _logger.warning(
                "--kv-cache-block-size %d: the workers of %r have KV blocks of %d tokens, which are used instead:"
                " with another size no prompt would match a cached one",
                settings.kv_cache_block_size,
                model,
                block_size,
            )
        selector = config.make_selector(
            settings.policy_config,
            _RouteIndex(state, self._clock, counts.observe_index_lookup),
            block_size=block_size,
            draw=random.random,
            counts_blocks=not is_prefill,
        )
        ttl_s = settings.router_session_affinity_ttl_secs
        scheduler = kv_scheduler.KvScheduler(
            selector,
            block_size=block_size,
            counts=counts,
            clock=self._clock,
            queue_timeout_s=settings.router_queue_timeout_secs,
            worker_type="prefill" if is_prefill else "decode",
            sessions=None if ttl_s is None else kv_scheduler.SessionAffinity(ttl_s),
            listener=state,
        )
        state.schedulers.append(scheduler)
        copies = prefix_copies.PrefixCopies(
            endpoint_client, selector, counts, self._clock, self._tasks.start
        )
        router = kv_router.KvRouter(endpoint_client, scheduler, copies, self._clock)
        self._routers[key] = router
        return router

    def cached_runs(
        self, name: instances.EndpointName
    ) -> Iterator[tuple[api.Worker, kv_events.Tier, Sequence[int]]]:
        """Yield the content of the index of this endpoint's component; nothing if it is only guessed."""
        state = self._components.get((name.namespace, name.component))
        if state is not None and isinstance(state.index, prefix_index.PrefixIndex):
            yield from state.index.cached_runs()

    def find_matches(self, sequence_hashes: Sequence[int]) -> dict[str, dict[str, int]]:
        """Return how many leading blocks of a prompt each worker has, by tier and by instance id, hexadecimal.

        Of a worker with several ranks, it is what the rank with the most of them has.
        """
        matches: dict[str, dict[str, int]] = {}
        for state in self._components.values():
            for tier, by_worker in state.index.find_matches(sequence_hashes).by_tier.items():
                for worker, num_blocks in by_worker.items():
                    row, name = matches.setdefault(tier, {}), f"{worker.instance_id:x}"
                    row[name] = max(num_blocks, row.get(name, 0))
        return matches

    def tiers_by_worker(self) -> dict[int, list[kv_events.Tier]]:
        """Return the tiers in which exact indexes know blocks of each worker, by instance id."""
        tiers: dict[int, list[kv_events.Tier]] = {}
        for state in self._components.values():
            if isinstance(state.index, prefix_index.PrefixIndex):
                tiers |= state.index.tiers_by_worker()
        return tiers

    async def close(self) -> None:
        """Close all subscribers and syncs."""
        await self._tasks.close()
        for state in self._components.values():
            if state.subscriber is not None:
                await state.subscriber.close()
            if state.sync is not None:
                await state.sync.close()

    def _component(
        self, namespace: str, component_name: str, families: metrics.RouterMetrics
    ) -> "_ComponentState":
        name = namespace, component_name
        if name not in self._components:
            state = self._components[name] = self._make_index(*name, families)
            if self._settings.router_replica_sync:
                state.sync = replica_sync.ReplicaSync(
                    self._runtime,
                    namespace=namespace,
                    component_name=component_name,
                    apply=state.apply,
                )
                self._tasks.start(f"meet routers of {component_name}", state.sync.start())
        return self._components[name]

    def _make_index(
        self, namespace: str, component_name: str, families: metrics.RouterMetrics
    ) -> "_ComponentState":
        settings = self._settings
        if settings.uses_kv_events:
            index = prefix_index.PrefixIndex()
            subscriber = kv_event_subscriber.KvEventSubscriber(
                self._runtime,
                index,
                namespace=namespace,
                component_name=component_name,
                clock=self._clock,
                on_age=families.set_event_age,
                count_event=families.count_event,
            )
            self._tasks.start(f"hear KV events of {component_name}", subscriber.start())
            return _ComponentState(index, self._clock, subscriber=subscriber)
        guesses = prefix_index.ApproxIndex(
            policy=settings.router_approximate_cache_policy,
            ttl_s=settings.router_ttl_secs,
            max_guesses=settings.router_max_tree_size,
            prune_ratio=settings.router_prune_target_ratio,
        )
        return _ComponentState(_ExpiringIndex(guesses, self._clock), self._clock, guesses=guesses)


@dataclass(slots=True)
class _ComponentState(kv_scheduler.SequenceListener):
    """What the routes to one component of workers share; each route reports its requests to it."""

    index: api.Index
    clock: clocks.Clock
    subscriber: kv_event_subscriber.KvEventSubscriber | None = None
    guesses: prefix_index.ApproxIndex | None = None
    sync: replica_sync.ReplicaSync | None = None
    schedulers: list[kv_scheduler.KvScheduler] = field(default_factory=list)

    def add_sequence(self, key: str, decision: api.Decision, prompt: api.Prompt) -> None:
        self._record_guess(decision.worker, prompt.sequence_hashes)
        if self.sync is not None:
            self.sync.publish_add(key, decision, prompt)

    def mark_prefill_completed(self, key: str) -> None:
        if self.sync is not None:
            self.sync.publish_prefill_completed(key)

    def free_sequence(self, key: str) -> None:
        if self.sync is not None:
            self.sync.publish_free(key)

    def refresh_peers(self) -> None:
        if self.sync is not None:
            self.sync.request_snapshots()

    def apply(self, event: load.ActiveSequenceEvent) -> None:
        """Apply a change that another router published."""
        for scheduler in self.schedulers:  # all but one do not know the worker, and ignore it
            scheduler.apply_peer_change(event)
        if isinstance(event.data, load.AddRequest):
            worker = api.Worker(event.worker_id, event.dp_rank)
            self._record_guess(worker, event.data.token_sequence)

    def _record_guess(self, worker: api.Worker, sequence_hashes: Sequence[int]) -> None:
        if self.guesses is not None:
            self.guesses.record(worker, sequence_hashes, self.clock.now())


class _ExpiringIndex:
    """An approximate index that drops expired guesses before each look-up."""

    def __init__(self, guesses: prefix_index.ApproxIndex, clock: clocks.Clock) -> None:
        self._guesses = guesses
        self._clock = clock
        self.remove_worker = guesses.remove_worker

    def find_matches(self, sequence_hashes: Sequence[int]) -> api.OverlapScores:
        self._guesses.expire(self._clock.now())
        return self._guesses.find_matches(sequence_hashes)


class _RouteIndex:
    """The index of a component as one of its routes sees it; it reports the duration of each look-up, in seconds.

    A worker that leaves a route may go on in another one, as in that of another block size, and its blocks with it. So
    an exact index forgets a worker when discovery does, which its subscriber hears; only guesses end with the route.
    """

    def __init__(
        self, state: _ComponentState, clock: clocks.Clock, observe: Callable[[float], None]
    ) -> None:
        self._state = state
        self._clock = clock
        self._observe = observe

    def remove_worker(self, worker: api.Worker) -> None:
        if self._state.subscriber is None:
            self._state.index.remove_worker(worker)

    def find_matches(self, sequence_hashes: Sequence[int]) -> api.OverlapScores:
        began_at = self._clock.now()
        overlaps = self._state.index.find_matches(sequence_hashes)
        self._observe(self._clock.now() - began_at)
        return overlaps
