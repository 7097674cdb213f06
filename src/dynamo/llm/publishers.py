"""What a user's engine tells routers of its KV blocks, by two classes with the names of NVIDIA Dynamo's bindings.

    events = KvEventPublisher(endpoint, kv_block_size=16)
    events.publish_stored(token_ids, [16, 16], block_hashes=[7, 8])  # parents before their children
    events.publish_removed([8])

    metrics = WorkerMetricsPublisher()
    await metrics.create_endpoint(endpoint)
    metrics.publish(kv_used_blocks=120)

A router with `--router-mode kv` finds by the events which prefixes the engine holds; one that starts late is told all
blocks that are held then. Objects are made on the event loop of the process, and their methods may be called by any
thread. The engine names its blocks as it likes, by a different number for each.
"""

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

from dynamo.base import errors, ids
from dynamo.engine.adapters import kv_events as engine_events
from dynamo.engine.adapters import kv_subscriber
from dynamo.llm import models
from dynamo.protocols import instances, kv_events, load, model_card
from dynamo.runtime import component, naming
from dynamo.worker import kv_event_publisher, kv_event_replays

_logger = logging.getLogger(__name__)


class ComponentReports:
    """What one component of this process publishes, from its first event or figure on: KV events, load, and replays."""

    def __init__(self, runtime: component.DistributedRuntime, endpoint: naming.Endpoint) -> None:
        """`endpoint` is that of which the open requests are counted."""
        self.num_blocks_by_rank: dict[int, int] = {}  # in use
        self.has_arrival = asyncio.Event()  # of a figure
        self._runtime = runtime
        self._endpoint = endpoint.name
        self._publisher = kv_event_publisher.KvEventPublisher(
            runtime.events,
            namespace=endpoint.name.namespace,
            component=endpoint.name.component,
            worker_id=runtime.instance_id,
            epoch=ids.new_instance_id(),
        )
        self._has_checked_size = False  # of blocks, against the model's
        runtime.tasks.start(f"publish KV events of {endpoint.name}", self._publish())

    def publish_kv_events(
        self, events: Sequence[kv_events.KvEvent], dp_rank: int, block_size: int
    ) -> None:
        """Publish the events of blocks of so many tokens; the log says once if the model has other ones."""
        self._publisher.publish_kv_events(events, dp_rank)
        card = self._card
        if card is None or self._has_checked_size:
            return
        self._has_checked_size = True
        if card.kv_cache_block_size != block_size:
            _logger.warning(
                "routers find no block of this engine: its publisher says blocks of %d tokens (kv_block_size), and its"
                " model %d (kv_cache_block_size of register_model)",
                block_size,
                card.kv_cache_block_size,
            )

    @property
    def _card(self) -> model_card.ModelCard | None:
        adapter = self._runtime.served.adapters.get(self._endpoint)
        return adapter.card if isinstance(adapter, models.ModelAdapter) else None

    def __len__(self) -> int:
        return self._runtime.served.num_open(self._endpoint)

    async def _publish(self) -> None:
        runtime = self._runtime
        await self._publisher.advertise()
        name = instances.EndpointName(
            self._endpoint.namespace, self._endpoint.component, instances.KV_EVENTS_REPLAY
        )
        answer = kv_event_replays.replay_handler(self._publisher, runtime.tasks)
        await runtime.register(name, answer)
        is_draining = runtime.stop_requested.is_set
        await self._publisher.publish_heartbeats(self._measure, runtime.clock, self, is_draining)

    def _measure(self) -> Sequence[load.ForwardPassMetrics]:
        """Return the load of each rank that has a figure; all requests are counted at the first."""
        card = self._card
        engine = model_card.ModelRuntimeConfig() if card is None else card.runtime_config
        return tuple(
            load.ForwardPassMetrics(
                worker_stats=load.WorkerStats(
                    request_active_slots=0 if index else len(self),
                    request_total_slots=engine.max_num_seqs,
                    num_requests_waiting=0,
                    data_parallel_rank=rank,
                ),
                kv_stats=load.KvStats(
                    kv_active_blocks=num_active, kv_total_blocks=engine.total_kv_blocks
                ),
            )
            for index, (rank, num_active) in enumerate(sorted(self.num_blocks_by_rank.items()))
        )


class EngineEventPublisher:
    """Publishes which KV blocks one data-parallel rank of an engine holds."""

    def __init__(
        self,
        endpoint: naming.Endpoint,
        worker_id: int | None = None,
        kv_block_size: int = 0,
        dp_rank: int = 0,
        enable_local_indexer: bool = True,
        zmq_endpoint: str | None = None,
        zmq_topic: str | None = None,
        **unsupported: Any,
    ) -> None:
        """Publish for the component of `endpoint`; blocks of `kv_block_size` tokens, as the model's card has them.

        With `zmq_endpoint`, where the engine has bound its publisher (vLLM's and SGLang's `--kv-events-config`), its
        events are relayed; without it the methods publish. `worker_id` is that of this process, and events can always
        be asked for again (`enable_local_indexer`). Raises ConfigError.
        """
        if names := [name for name, value in unsupported.items() if value]:
            raise errors.ConfigError(f"KvEventPublisher: {', '.join(names)} is not supported here")
        if worker_id not in (None, 0, endpoint.connection_id()):
            raise errors.ConfigError(
                f"KvEventPublisher: expected worker_id {endpoint.connection_id()} of this process or none,"
                f" got {worker_id!r}"
            )
        if kv_block_size < 1:
            raise errors.ConfigError(
                f"KvEventPublisher: expected a kv_block_size of at least 1 token, got {kv_block_size!r}"
            )
        del enable_local_indexer
        self._block_size, self._dp_rank = kv_block_size, dp_rank
        self._reports = _reports_of(endpoint)
        self._translator = engine_events.EventTranslator(kv_block_size)
        self._loop = asyncio.get_running_loop()
        self._relay: asyncio.Task[None] | None = None
        if zmq_endpoint is not None:
            endpoints = kv_subscriber.PublisherEndpoints(
                endpoint=zmq_endpoint, topic=zmq_topic or ""
            )
            subscriber = kv_subscriber.ZmqKvSubscriber(endpoints, 1, is_bound=True)
            self._relay = models.runtime_of(endpoint).tasks.start(
                f"relay KV events of {zmq_endpoint}", self._relay_until_closed(subscriber)
            )

    def publish_stored(
        self,
        token_ids: Sequence[int],
        num_block_tokens: Sequence[int],
        block_hashes: Sequence[int],
        parent_hash: int | None = None,
        block_mm_infos: Sequence[Mapping[str, Any] | None] | None = None,
        lora_name: str | None = None,
        is_eagle: bool | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """Publish consecutive blocks that can now be reused; the first follows `parent_hash`, or begins a prompt.

        `token_ids` are those of all blocks, `num_block_tokens` how many each has. Blocks from the first on that is not
        full, or that has a part of an image, are left out, and so are those behind a parent that was never published.
        `cache_salt` is that of a prompt's first block. Raises ConfigError.
        """
        self.publish_batch(
            [
                {
                    "type": "stored",
                    "token_ids": token_ids,
                    "num_block_tokens": num_block_tokens,
                    "block_hashes": block_hashes,
                    "parent_hash": parent_hash,
                    "block_mm_infos": block_mm_infos,
                    "lora_name": lora_name,
                    "is_eagle": is_eagle,
                    "cache_salt": cache_salt,
                }
            ]
        )

    def publish_removed(self, block_hashes: Sequence[int]) -> None:
        """Publish that blocks were evicted."""
        removed = engine_events.BlockRemoved(block_hashes=list(block_hashes))
        self._loop.call_soon_threadsafe(self._publish, [removed])

    def publish_batch(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Publish several events in order: the arguments of the two methods above, with a `type` stored or removed.

        Raises ConfigError, and then publishes none of them.
        """
        batch: list[engine_events.EngineEvent] = []
        for event in events:
            match event:
                case {"type": "stored", "token_ids": _, "num_block_tokens": _, "block_hashes": _}:
                    batch.append(self._stored(event))
                case {"type": "removed", "block_hashes": block_hashes}:
                    batch.append(engine_events.BlockRemoved(block_hashes=list(block_hashes)))
                case _:
                    raise errors.ConfigError(
                        f"publish_batch: expected events of type stored or removed with their fields, got {event!r:.80}"
                    )
        self._loop.call_soon_threadsafe(self._publish, batch)

    def shutdown(self) -> None:
        """End the relay from the engine's own publisher."""
        if self._relay is not None:
            self._loop.call_soon_threadsafe(self._relay.cancel)

    def _stored(self, event: Mapping[str, Any]) -> engine_events.BlockStored:
        token_ids, num_block_tokens = event["token_ids"], event["num_block_tokens"]
        block_hashes, parent_hash = event["block_hashes"], event.get("parent_hash")
        lora_name, cache_salt = event.get("lora_name"), event.get("cache_salt")
        images = event.get("block_mm_infos") or ()
        if event.get("is_eagle"):
            raise errors.ConfigError("publish_stored: is_eagle is not supported here")
        if len(num_block_tokens) != len(block_hashes) or sum(num_block_tokens) != len(token_ids):
            raise errors.ConfigError(
                f"publish_stored: expected num_block_tokens of {len(block_hashes)} block_hashes that sum up to"
                f" {len(token_ids)} token_ids, got {list(num_block_tokens)!r:.80}"
            )
        is_full = self._block_size.__eq__
        num_full = len(list(itertools.takewhile(is_full, num_block_tokens)))
        adapter = [] if lora_name is None else [lora_name]
        keys: list[list[Any] | None] = [[*adapter, image] if image else None for image in images]
        if cache_salt is not None and parent_hash is None:
            keys[:1] = [[*adapter, cache_salt, *filter(None, images[:1])]]
        return engine_events.BlockStored(
            block_hashes=list(block_hashes[:num_full]),
            parent_block_hash=parent_hash,
            token_ids=list(token_ids[: num_full * self._block_size]),
            block_size=self._block_size,
            lora_name=lora_name,
            extra_keys=keys or None,
        )

    def _publish(self, events: Sequence[engine_events.EngineEvent]) -> None:
        num_dropped = self._translator.num_dropped
        if translated := self._translator.translate(events):
            self._reports.publish_kv_events(translated, self._dp_rank, self._block_size)
        if self._translator.num_dropped and not num_dropped:
            _logger.warning(
                "a stored block is left out, as others may be: its parent was not published, or it has an image"
            )

    async def _relay_until_closed(self, subscriber: kv_subscriber.ZmqKvSubscriber) -> None:
        def publish(events: Sequence[kv_events.KvEvent], _rank: int) -> None:
            self._reports.publish_kv_events(events, self._dp_rank, self._block_size)

        try:
            subscriber.start(self._block_size, publish)
            await asyncio.Event().wait()
        finally:
            await subscriber.close()


class EngineLoadPublisher:
    """Publishes how many KV blocks of an engine requests use; `runtime_config` of the model's card says of how many."""

    def __init__(self) -> None:
        self._reports: ComponentReports | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def create_endpoint(self, endpoint: naming.Endpoint) -> None:
        """Begin to publish for the component of an endpoint."""
        self._reports, self._loop = _reports_of(endpoint), asyncio.get_running_loop()

    def publish(
        self,
        dp_rank: int | None = None,
        active_decode_blocks: int | None = None,
        kv_used_blocks: int | None = None,
    ) -> None:
        """Publish a rank's blocks in use: `kv_used_blocks`, or else `active_decode_blocks`.

        Raises ConfigError without either, or before `create_endpoint`.
        """
        num_blocks = active_decode_blocks if kv_used_blocks is None else kv_used_blocks
        if num_blocks is None:
            raise errors.ConfigError("publish: expected active_decode_blocks or kv_used_blocks")
        if self._reports is None or self._loop is None:
            raise errors.ConfigError(
                "publish: expected `await create_endpoint(endpoint)` before it"
            )
        self._loop.call_soon_threadsafe(_set_blocks, self._reports, dp_rank or 0, num_blocks)


def _set_blocks(reports: ComponentReports, dp_rank: int, num_blocks: int) -> None:
    reports.num_blocks_by_rank[dp_rank] = num_blocks
    reports.has_arrival.set()


def _reports_of(endpoint: naming.Endpoint) -> ComponentReports:
    """Return what this process publishes for the component of an endpoint; all its ranks together."""
    runtime = models.runtime_of(endpoint)
    key = f"reports of {endpoint.name.namespace}.{endpoint.name.component}"
    if key not in runtime.attached:
        runtime.attached[key] = ComponentReports(runtime, endpoint)
    return cast("ComponentReports", runtime.attached[key])


# the names of NVIDIA Dynamo, by which users import them
KvEventPublisher, WorkerMetricsPublisher = EngineEventPublisher, EngineLoadPublisher
