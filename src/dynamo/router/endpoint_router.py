"""The KV router of one endpoint, for processes without a registry of models: it follows the workers by itself.

`service` serves its decisions to other processes, and `dynamo.llm` gives it to services of users. It routes requests
(`open_stream`), or selects workers for callers that send their requests themselves (`select_worker`). Such a caller
promises to report the end of each request that it lets count. Callers die: a request of which nothing is said for
`COUNTED_S` has ended, or workers would seem busy forever.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.protocols import blocks, generate, instances, kv_events, model_card
from dynamo.router import api, kv_router, route, route_factory
from dynamo.runtime import component, requests

COUNTED_S = 300.0  # longer than nearly all answers; of a longer one only its load is forgotten
_logger = logging.getLogger(__name__)
_decode_record = msgspec.json.Decoder(model_card.CardRecord).decode


class EndpointRouter:
    """Routes to the workers of one endpoint that have a model card; `start` and `close` it."""

    def __init__(
        self,
        runtime: component.DistributedRuntime,
        target: instances.EndpointName,
        factory: route_factory.RouteFactory,
        clock: clocks.Clock,
    ) -> None:
        self._runtime = runtime
        self._target = target
        self._factory = factory
        self._clock = clock
        self._ends: dict[str, clocks.Timer] = {}  # of the requests that callers let count
        self._client = runtime.client(target)
        self._client.on_change(self._wake)
        self._cards: dict[int, model_card.ModelCard] = {}
        self._router: kv_router.KvRouter | None = None
        self._block_size = 0  # of the oldest worker, for which the router was made
        self._changed = asyncio.Event()
        self._tasks = tasks.Tasks()

    async def start(self) -> None:
        """Begin to follow the workers. Raises ConfigError."""
        await self._factory.start()
        self._tasks.start("watch model cards", self._watch_cards())

    async def run(self, stop: asyncio.Event) -> None:
        """Wait for `stop`. Raises the error of a failed task."""
        await self._tasks.run_until(stop)

    async def close(self) -> None:
        """Stop following the workers and close the routes."""
        for request_id in list(self._ends):
            self._ends.pop(request_id).cancel()
        await self._tasks.close()
        await self._client.close()
        await self._factory.close()

    @property
    def present_instances(self) -> Mapping[int, instances.Instance]:
        """The present instances of the endpoint, by id."""
        return self._client.instances

    @property
    def router(self) -> kv_router.KvRouter:
        """Return the router to the present workers. Raises NoWorkers before the first one."""
        if self._router is None:
            raise errors.NoWorkers(f"no worker serves {self._target}: start one")
        return self._router

    async def wait_for_workers(self, timeout_s: float) -> None:
        """Wait until there is a worker. Raises NoWorkers if there is none within `timeout_s`."""
        try:
            async with self._clock.timeout(timeout_s):
                while self._router is None or not self._router.instance_ids:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise errors.NoWorkers(f"no worker serves {self._target}: start one") from None

    async def open_stream(
        self,
        request: generate.Request,
        receiver: requests.Receiver,
        *,
        headers: Mapping[str, str],
        instance_id: int | None = None,
        override: api.PolicyOverride | None = None,
    ) -> requests.Stream:
        """Route a request, to the workers with its LoRA adapter, or to one by name. Raises as `route.Route`."""
        router = self.router
        options = route.RoutingOptions(
            headers=headers,
            instance_id=instance_id,
            policy_override=override,
            allowed_instances=router.instances_with_lora(request.lora_name),
        )
        return await router.open_stream(request, receiver, options)

    def select_worker(
        self,
        packed_tokens: bytes,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        request_id: str | None = None,
        override: api.PolicyOverride | None = None,
    ) -> api.Decision:
        """Select a worker for a prompt that the caller sends itself (`blocks.pack`ed tokens).

        With a `request_id` it counts as in flight until `free_request`. Raises NoWorkers or Overloaded.
        """
        router, seed = self.router, blocks.seed_of(lora_name, cache_salt)
        allowed = router.instances_with_lora(lora_name)
        usable = self._client.usable(allowed)  # without those that could not be reached lately
        if len(usable) < len(self._client.instances):
            allowed = frozenset(usable)
        decision = router.scheduler.select_worker(
            packed_tokens, request_id, seed, allowed, override
        )
        if request_id is not None:
            self._count(request_id)
        return decision

    def mark_prefill_completed(self, request_id: str) -> None:
        """Record that the prompt of a request which counts is computed. Raises NoWorkers."""
        self.router.scheduler.mark_prefill_completed(request_id)
        if request_id in self._ends:
            self._count(request_id)

    def free_request(self, request_id: str) -> None:
        """Record that a request which counts has ended. Raises NoWorkers."""
        self.router.scheduler.free_request(request_id)
        self._stop_counting(request_id)

    def cached_runs(self) -> Iterator[tuple[api.Worker, kv_events.Tier, Sequence[int]]]:
        """Yield the content of the index: a worker, a tier and consecutive blocks; nothing if it is only guessed."""
        return self._factory.cached_runs(self._target)

    async def _watch_cards(self) -> None:
        prefix = f"{instances.CARDS}{self._target.path}/"
        async for change in self._runtime.discovery.watch(prefix):
            try:
                instance_id = int(change.key.removeprefix(prefix), 16)
                value = getattr(change, "value", None)
                card = None if value is None else _decode_record(value).card_json
            except (ValueError, RecursionError) as error:  # those of msgspec included
                _logger.warning("ignored the model card %s: %s", change.key, error)
                continue
            self._update_card(instance_id, card)

    def _update_card(self, instance_id: int, card: model_card.ModelCard | None) -> None:
        if card is None:
            self._cards.pop(instance_id, None)
        else:
            self._cards[instance_id] = card
        oldest = next(iter(self._cards.values()), None)
        if oldest is not None and (
            self._router is None or oldest.kv_cache_block_size != self._block_size
        ):
            if self._router is not None:  # two would show, and remove, the load of one worker
                self._router.set_model_cards({})
            self._block_size = oldest.kv_cache_block_size
            self._router = self._factory.make_kv_router(self._client, oldest)
        if self._router is not None:
            self._router.set_model_cards(self._cards)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()

    def _count(self, request_id: str) -> None:
        self._stop_counting(request_id)
        self._ends[request_id] = self._clock.call_later(COUNTED_S, self._give_up, request_id)

    def _stop_counting(self, request_id: str) -> None:
        if timer := self._ends.pop(request_id, None):
            timer.cancel()

    def _give_up(self, request_id: str) -> None:
        _logger.warning(
            "no caller has freed the request %s within %g s: it counts as ended",
            request_id,
            COUNTED_S,
        )
        self.free_request(request_id)
