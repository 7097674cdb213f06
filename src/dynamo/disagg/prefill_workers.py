"""The prefill workers of a decode worker: it follows their model cards, and connects to each ahead of need.

A prefill worker is used only while the engines are connected: the first request does not pay for the handshake, and no
worker computes a prompt if its blocks could not be reached. Workers join and leave at any time; one that restarts under
the same name is another instance, with other metadata.

Workers to which a connection has failed, or whose link is too slow (`kvbm.agents`), are published until it succeeds,
because a frontend may choose the prefill worker instead. Those that are being connected for the first time are not.
"""

import asyncio
import base64
import logging
from collections.abc import Awaitable, Callable

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.engine import api
from dynamo.protocols import instances, kv_transfer, model_card
from dynamo.runtime import authentication, discovery

CONNECT_S = 5.0
RETRY_S = 0.5  # short, so that a path that is back is found within two seconds
CHECK_S = 5.0  # between two lines of the log that say how many prefill workers there are
PUBLISH_S = 0.25  # between two publications of the workers that cannot be reached
_logger = logging.getLogger(__name__)
_decode_record = msgspec.json.Decoder(model_card.CardRecord).decode


class PrefillWorkers:
    """The prefill workers by instance id, from `start` to `close`."""

    def __init__(
        self,
        endpoint: instances.EndpointName,
        registry: discovery.Discovery,
        engine: api.KvTransferPeer,
        clock: clocks.Clock,
        *,
        is_usable: Callable[[model_card.ModelCard], bool],
        publish: Callable[[frozenset[int]], Awaitable[None]],
    ) -> None:
        """`is_usable` returns whether a worker with this card computes prompts for our model.

        `publish` tells frontends which of them cannot be reached; it may raise DynamoError, and is called again then.
        """
        self._prefix = f"{instances.CARDS}{endpoint.path}/"
        self._registry = registry
        self._engine = engine
        self._clock = clock
        self._is_usable = is_usable
        self._publish = publish
        self._unreachable: frozenset[int] = frozenset()
        self._reachability_changed = asyncio.Event()
        self._metadata: dict[int, bytes] = {}
        self._lora_names: dict[int, tuple[str, ...]] = {}
        self._connecting: dict[int, asyncio.Task[None]] = {}
        self._engine_ids: dict[int, str] = {}  # of connected workers
        self._known_engine_ids: dict[int, str] = {}  # and of those that are connected to anew
        self._log = authentication.RefusalLog(_logger, clock.now)
        self._tasks = tasks.Tasks()

    @property
    def connected(self) -> list[int]:
        """The instance ids of connected workers."""
        return list(self._engine_ids)

    def all_have_adapter(self, lora_name: str) -> bool:
        """Return whether every prefill worker has this adapter, because the queues do not choose among them by it."""
        return all(lora_name in names for names in self._lora_names.values())

    def instance_of(self, engine_id: str) -> int | None:
        """Return the worker of an engine; None if it is not connected."""
        items = self._engine_ids.items()
        return next((instance_id for instance_id, name in items if name == engine_id), None)

    def start(self) -> None:
        """Begin to follow discovery."""
        self._tasks.start("watch prefill workers", self._watch())
        self._tasks.start("log the number of prefill workers", self._log_number())
        self._tasks.start("publish unreachable prefill workers", self._publish_changes())

    def reconnect(self, engine_id: str) -> None:
        """Connect to an engine anew after a copy from it has failed; its worker is not used until that succeeds."""
        instance_id = self.instance_of(engine_id)
        if instance_id is not None:
            del self._engine_ids[instance_id]
            self._start_connecting(instance_id)

    async def close(self) -> None:
        """Stop following discovery, and disconnect from all workers."""
        await self._tasks.close()
        for instance_id in list(self._known_engine_ids):
            await self._forget_worker(instance_id)

    async def _log_number(self) -> None:
        """Log the number of prefill workers as long as there are some, in the words of Dynamo's worker."""
        while True:
            await self._clock.sleep(CHECK_S)
            if self._metadata:
                _logger.debug("Current Prefill Workers: %d", len(self._metadata))

    async def _publish_changes(self) -> None:
        published: frozenset[int] = frozenset()
        while True:
            await self._reachability_changed.wait()
            self._reachability_changed.clear()
            while (unreachable := self._unreachable) != published:
                try:
                    await self._publish(unreachable)
                    published = unreachable
                except errors.DynamoError as error:  # perhaps this worker is not registered now
                    _logger.debug("cannot publish unreachable prefill workers: %s", error)
                await self._clock.sleep(PUBLISH_S)

    def _set_unreachable(self, unreachable: frozenset[int]) -> None:
        self._unreachable = unreachable
        self._reachability_changed.set()

    async def _watch(self) -> None:
        async for change in self._registry.watch(self._prefix):
            try:
                instance_id = int(change.key.removeprefix(self._prefix), 16)
                if isinstance(change, discovery.Delete):
                    await self._forget_worker(instance_id)
                else:
                    await self._read_card(instance_id, _decode_record(change.value).card_json)
            except (ValueError, RecursionError, errors.TransferError) as error:  # msgspec's, too
                _logger.warning("ignored the prefill worker %s: %s", change.key, error)

    async def _read_card(self, instance_id: int, card: model_card.ModelCard) -> None:
        """Connect to a new or restarted worker; a worker with other adapters than before stays connected."""
        metadata, is_usable = _transfer_metadata(card), self._is_usable(card)
        if not is_usable or self._metadata.get(instance_id) != metadata:
            await self._forget_worker(instance_id)
            if is_usable:
                self._metadata[instance_id] = metadata
                self._start_connecting(instance_id)
        if is_usable:
            self._lora_names[instance_id] = card.lora_names

    def _start_connecting(self, instance_id: int) -> None:
        connecting = self._connect(instance_id, self._metadata[instance_id])
        self._connecting[instance_id] = self._tasks.start("connect to a prefill worker", connecting)

    async def _connect(self, instance_id: int, metadata: bytes) -> None:
        """Try until it succeeds; the task is cancelled when the worker is gone."""
        while True:
            try:
                engine_id = await self._engine.connect_peer(metadata, deadline_s=CONNECT_S)
            except errors.DynamoError as error:  # of the link, or of our own agent, as a taken port
                worker = f"{instance_id:x}"
                self._log.warning(worker, "prefill worker %s cannot be used: %s", worker, error)
                self._set_unreachable(self._unreachable | {instance_id})
                await self._clock.sleep(RETRY_S)
            else:
                self._engine_ids[instance_id] = self._known_engine_ids[instance_id] = engine_id
                self._set_unreachable(self._unreachable - {instance_id})
                _logger.info("prefill worker %x is connected", instance_id)
                return

    async def _forget_worker(self, instance_id: int) -> None:
        self._metadata.pop(instance_id, None)
        self._lora_names.pop(instance_id, None)
        connecting = self._connecting.pop(instance_id, None)
        if connecting is not None:
            connecting.cancel()
        self._set_unreachable(self._unreachable - {instance_id})
        self._engine_ids.pop(instance_id, None)
        engine_id = self._known_engine_ids.pop(instance_id, None)
        if engine_id is not None:
            await self._engine.disconnect_peer(engine_id)
            _logger.info("prefill worker %x is gone", instance_id)


def _transfer_metadata(card: model_card.ModelCard) -> bytes:
    """Return the metadata of a worker's engine. Raises TransferError, or ValueError for invalid base64."""
    encoded = card.runtime_config.runtime_data.get(kv_transfer.METADATA_KEY)
    if not isinstance(encoded, str):
        raise errors.TransferError(
            f"expected {kv_transfer.METADATA_KEY} in its card's runtime data"
        )
    return base64.b64decode(encoded, validate=True)
