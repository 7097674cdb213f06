"""Makes the routes that a process needs, and owns what they share.

Shared are, for each component of workers, one index with what feeds it, and one exchange with this router's replicas.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from dynamo.base import clock as clocks
from dynamo.base import tasks
from dynamo.observability import metrics as observed
from dynamo.protocols import instances, kv_events, load, model_card
from dynamo.router import (
    api,
    approx_index,
    config,
    kv_event_subscriber,
    kv_router,
    metrics,
    prefix_index,
    replica_sync,
    route,
    selection,
)
from dynamo.runtime import client, component

_PLAIN: dict[str, client.Mode] = {"round-robin": "round-robin", "random": "random"}


class RouteFactory:
    """One process's routes, as its settings want them."""

    def __init__(
        self,
        wanted: config.RoutingConfig,
        runtime: component.DistributedRuntime,
        clock: clocks.Clock,
        registry: observed.Registry,
    ) -> None:
        self._settings = wanted
        self._runtime = runtime
        self._clock = clock
        self._registry = registry
        self._metrics: metrics.RouterMetrics | None = None
        self._counts: dict[str, metrics.RouteMetrics] = {}  # by model
        self._shared: dict[tuple[str, str], _Shared] = {}
        self._tasks = tasks.Tasks()

    def make(self, asked: client.EndpointClient, card: model_card.ModelCard) -> route.Route:
        """The way to those who serve this model at the endpoint that `asked` follows."""
        mode = _PLAIN.get(self._settings.router_mode)
        if card.embedding is not None:  # nothing is cached, and load is not told
            return route.PushRouter(asked, mode or "round-robin")
        if mode is not None:
            return route.PushRouter(asked, mode)
        return self.make_kv_router(asked, card)

    def make_kv_router(
        self, asked: client.EndpointClient, card: model_card.ModelCard
    ) -> kv_router.KvRouter:
        """The same for the modes that know load, and for workers that only compute prompts."""
        wanted = self._settings
        shared = self._join(asked.name.namespace, asked.name.component)
        counts = self._counts_of(card.display_name)
        block_size = wanted.kv_cache_block_size or card.kv_cache_block_size
        known = _Timed(shared.index, counts.found)
        selector = config.make_selector(
            wanted.choosing,
            known,
            block_size=block_size,
            draw=random.random,
            counts_blocks=card.worker_type is not model_card.WorkerType.PREFILL,
        )
        shared.selectors.append(selector)
        ttl_s = wanted.router_session_affinity_ttl_secs
        return kv_router.KvRouter(
            asked,
            selector,
            block_size=block_size,
            counts=counts,
            clock=self._clock,
            queue_timeout_s=wanted.router_queue_timeout_secs,
            sessions=None if ttl_s is None else kv_router.SessionAffinity(ttl_s),
            sharing=shared,
        )

    def holdings(
        self, name: instances.EndpointName
    ) -> Iterator[tuple[api.Worker, kv_events.Tier, Sequence[int]]]:
        """What the index of this endpoint's component knows; nothing where it is only guessed."""
        shared = self._shared.get((name.namespace, name.component))
        if shared is not None and isinstance(shared.index, prefix_index.PrefixIndex):
            yield from shared.index.holdings()

    async def close(self) -> None:
        """End what they share."""
        await self._tasks.close()
        for shared in self._shared.values():
            if shared.kv_feed is not None:
                await shared.kv_feed.close()
            if shared.sync is not None:
                await shared.sync.close()

    def _counts_of(self, model: str) -> metrics.RouteMetrics:
        if self._metrics is None:
            self._metrics = metrics.RouterMetrics(self._registry, self._router_id)
        if model not in self._counts:
            self._counts[model] = metrics.RouteMetrics(self._metrics, model)
        return self._counts[model]

    @property
    def _router_id(self) -> str:
        return f"{self._runtime.instance_id:x}"

    def _join(self, namespace: str, component_name: str) -> "_Shared":
        """What the routes to this component share."""
        name = namespace, component_name
        if name not in self._shared:
            shared = self._shared[name] = self._know(namespace, component_name)
            if self._settings.router_replica_sync:
                shared.sync = replica_sync.ReplicaSync(
                    self._runtime,
                    namespace=namespace,
                    component_name=component_name,
                    apply=shared.apply,
                )
                self._tasks.start(f"meet routers of {component_name}", shared.sync.start())
        return self._shared[name]

    def _know(self, namespace: str, component_name: str) -> "_Shared":
        """The index, and what tells it."""
        wanted = self._settings
        if wanted.hears_kv_events:
            known = prefix_index.PrefixIndex()
            heard = kv_event_subscriber.KvEventSubscriber(
                self._runtime,
                known,
                namespace=namespace,
                component_name=component_name,
                clock=self._clock,
            )
            self._tasks.start(f"hear KV events of {component_name}", heard.start())
            return _Shared(known, self._clock, kv_feed=heard)
        guesses = approx_index.ApproxIndex(
            approx_index.ApproxSettings(
                policy=wanted.router_approximate_cache_policy,
                ttl_s=wanted.router_ttl_secs,
                max_guesses=wanted.router_max_tree_size,
                prune_ratio=wanted.router_prune_target_ratio,
            )
        )
        return _Shared(_Guessing(guesses, self._clock), self._clock, guesses=guesses)


@dataclass(slots=True)
class _Shared(kv_router.Sharing):
    """What the routes to one component of workers share, and whom they tell what they do."""

    index: api.Index
    clock: clocks.Clock
    kv_feed: kv_event_subscriber.KvEventSubscriber | None = None
    guesses: approx_index.ApproxIndex | None = None
    sync: replica_sync.ReplicaSync | None = None
    selectors: list[selection.Selector] = field(default_factory=list)

    def added(self, key: str, decision: api.Decision, prompt: api.Prompt) -> None:
        self._guess(decision.worker, prompt.sequence_hashes)
        if self.sync is not None:
            self.sync.added(key, decision, prompt)

    def prefill_completed(self, key: str) -> None:
        if self.sync is not None:
            self.sync.prefill_completed(key)

    def freed(self, key: str) -> None:
        if self.sync is not None:
            self.sync.freed(key)

    def catch_up(self) -> None:
        if self.sync is not None:
            self.sync.catch_up()

    def apply(self, event: load.ActiveSequenceEvent) -> None:
        """Another router did this."""
        now = self.clock.now()
        for selector in self.selectors:  # all but one do not know the worker
            selector.active.apply(event, now)
        if isinstance(event.data, load.AddRequest):
            worker = api.Worker(event.worker_id, event.dp_rank)
            self._guess(worker, event.data.token_sequence)

    def _guess(self, worker: api.Worker, sequence_hashes: Sequence[int]) -> None:
        """A prompt was sent there; where nobody tells what is cached, that is what we go by."""
        if self.guesses is not None:
            self.guesses.record(worker, sequence_hashes, self.clock.now())


class _Guessing:
    """An index that drops its oldest guesses before it answers."""

    def __init__(self, guesses: approx_index.ApproxIndex, clock: clocks.Clock) -> None:
        self._guesses = guesses
        self._clock = clock
        self.remove_worker = guesses.remove_worker

    def find(self, sequence_hashes: Sequence[int]) -> api.OverlapScores:
        self._guesses.expire(self._clock.now())
        return self._guesses.find(sequence_hashes)


class _Timed:
    """An index that tells how long its answers took, in seconds."""

    def __init__(self, index: api.Index, tell: Callable[[float], None]) -> None:
        self._index = index
        self._tell = tell
        self.remove_worker = index.remove_worker

    def find(self, sequence_hashes: Sequence[int]) -> api.OverlapScores:
        began_at = time.perf_counter()
        found = self._index.find(sequence_hashes)
        self._tell(time.perf_counter() - began_at)
        return found
