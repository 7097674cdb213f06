"""Who can prefill for us: follows the cards of prefill workers, and connects to each before it is needed.

A worker counts only while its engine is connected: the first request does not pay for the handshake, and one whose
blocks could not be reached is not asked to compute them. Workers join and leave while all goes on; one that began anew
under the same name is another instance, with other metadata.
"""

import asyncio
import base64
import logging
from collections.abc import Callable

import msgspec

from dynamo.base import errors, tasks
from dynamo.engine import api
from dynamo.protocols import instances, kv_transfer, model_card
from dynamo.runtime import discovery

CONNECT_S = 5.0
RETRY_S = 2.0
_logger = logging.getLogger(__name__)
_decode_record = msgspec.json.Decoder(model_card.CardRecord).decode


class PrefillWorkers:
    """By instance id. `start` begins to follow, `close` ends it."""

    def __init__(
        self,
        endpoint: instances.EndpointName,
        registry: discovery.Discovery,
        engine: api.KvTransferPeer,
        *,
        is_ours: Callable[[model_card.ModelCard], bool],
    ) -> None:
        """`is_ours` tells the model that we serve from others."""
        self._prefix = f"{instances.CARDS}{endpoint.path}/"
        self._registry = registry
        self._engine = engine
        self._is_ours = is_ours
        self._metadata: dict[int, bytes] = {}
        self._lora_names: dict[int, tuple[str, ...]] = {}
        self._connecting: dict[int, asyncio.Task[None]] = {}
        self._engine_ids: dict[int, str] = {}
        self._tasks = tasks.Tasks()

    @property
    def connected(self) -> list[int]:
        """Whom we can ask now."""
        return list(self._engine_ids)

    def all_have(self, lora_name: str) -> bool:
        """Can whoever is asked compute with this adapter? Nobody chooses among them by that."""
        return all(lora_name in names for names in self._lora_names.values())

    def instance_of(self, engine_id: str) -> int | None:
        """Whose engine that is; None: of nobody who is connected."""
        known = self._engine_ids.items()
        return next((one for one, engine in known if engine == engine_id), None)

    def start(self) -> None:
        """Follow them."""
        self._tasks.start("watch prefill workers", self._watch())

    def distrust(self, engine_id: str) -> None:
        """A copy from there has failed: ask it for nothing before it could be connected anew."""
        for instance_id, known in list(self._engine_ids.items()):
            if known == engine_id:
                del self._engine_ids[instance_id]
                self._begin(instance_id, RETRY_S)

    async def close(self) -> None:
        """Follow them no more."""
        await self._tasks.close()

    async def _watch(self) -> None:
        async for change in self._registry.watch(self._prefix):
            try:
                instance_id = int(change.key.removeprefix(self._prefix), 16)
                await self._apply(instance_id, change)
            except (
                ValueError,
                errors.TransferError,
            ) as error:  # msgspec's errors and those of base64 are some too
                _logger.warning("ignored the prefill worker %s: %s", change.key, error)

    async def _apply(self, instance_id: int, change: discovery.Change) -> None:
        if isinstance(change, discovery.Delete):
            await self._forget(instance_id)
        else:
            await self._read(instance_id, _decode_record(change.value).card_json)
        _logger.debug("Current Prefill Workers: %d", len(self._metadata))

    async def _read(self, instance_id: int, card: model_card.ModelCard) -> None:
        """One that has other adapters than before stays connected."""
        metadata, is_ours = _metadata(card), self._is_ours(card)
        if not is_ours or self._metadata.get(instance_id) != metadata:
            await self._forget(instance_id)
            if is_ours:
                self._metadata[instance_id] = metadata
                self._begin(instance_id, 0)
        if is_ours:
            self._lora_names[instance_id] = card.lora_names

    def _begin(self, instance_id: int, pause_s: float) -> None:
        connecting = self._connect(instance_id, self._metadata[instance_id], pause_s)
        self._connecting[instance_id] = self._tasks.start("connect to a prefill worker", connecting)

    async def _connect(self, instance_id: int, metadata: bytes, pause_s: float) -> None:
        """Until it succeeds, or the worker is gone."""
        await asyncio.sleep(pause_s)
        while True:
            try:
                engine_id = await self._engine.connect_peer(metadata, deadline_s=CONNECT_S)
            except errors.TransferError as error:
                _logger.warning("prefill worker %x cannot be used: %s", instance_id, error)
                await asyncio.sleep(RETRY_S)
            else:
                self._engine_ids[instance_id] = engine_id
                _logger.info("prefill worker %x is connected", instance_id)
                return

    async def _forget(self, instance_id: int) -> None:
        self._metadata.pop(instance_id, None)
        self._lora_names.pop(instance_id, None)
        connecting = self._connecting.pop(instance_id, None)
        if connecting is not None:
            connecting.cancel()
        engine_id = self._engine_ids.pop(instance_id, None)
        if engine_id is not None:
            await self._engine.disconnect_peer(engine_id)
            _logger.info("prefill worker %x is gone", instance_id)


def _metadata(card: model_card.ModelCard) -> bytes:
    """Of its engine's agent. Raises TransferError, or ValueError for what is no base64."""
    said = card.runtime_config.runtime_data.get(kv_transfer.METADATA_KEY)
    if not isinstance(said, str):
        raise errors.TransferError(
            f"expected {kv_transfer.METADATA_KEY} in its card's runtime data"
        )
    return base64.b64decode(said, validate=True)
