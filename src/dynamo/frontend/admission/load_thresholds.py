"""The thresholds above which a worker counts as busy (`GET|POST /busy_threshold`), and the loads compared with them.

Thresholds can be changed for each model at run time. `LoadMonitor` receives the load of the workers of all models.
"""

import logging
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from dynamo.base import clock as clocks
from dynamo.frontend.admission import busy_workers
from dynamo.frontend.delivery import sse
from dynamo.frontend.model_registry import registry
from dynamo.protocols import load
from dynamo.runtime import events
from dynamo.runtime.http import exchange, json_body

REFRESH_INTERVAL_S = 0.25
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)] | msgspec.UnsetType | None
_Tokens = Annotated[int, msgspec.Meta(ge=0)] | msgspec.UnsetType | None
_Batches = Annotated[float, msgspec.Meta(ge=0)] | msgspec.UnsetType | None
_logger = logging.getLogger(__name__)


class ThresholdChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a change: a field that is left out keeps its value, and null removes the threshold."""

    model: str
    active_decode_blocks_threshold: _Share = msgspec.UNSET
    active_prefill_tokens_threshold: _Tokens = msgspec.UNSET
    active_prefill_tokens_threshold_frac: _Batches = msgspec.UNSET


_decode = json_body.RequestDecoder(ThresholdChange).decode


def decode_change(body: bytes) -> ThresholdChange:
    """Return the change in this body; unknown fields are refused. Raises InvalidRequest."""
    token = json_body.ignored_names.set(None)
    try:
        return _decode(body)
    finally:
        json_body.ignored_names.reset(token)


_decode_event = msgspec.msgpack.Decoder(load.LoadEvent).decode


class ThresholdRegistry:
    """The thresholds of each model: `initial` ones, until they are changed; `on_change` is called after a change."""

    def __init__(
        self,
        models: registry.ModelRegistry,
        initial: busy_workers.BusyThresholds,
        on_change: Callable[[], None],
    ) -> None:
        self._models = models
        self._initial = initial
        self._on_change = on_change
        self._by_model: dict[str, busy_workers.BusyThresholds] = {}

    def find(self, model: str) -> busy_workers.BusyThresholds:
        """Return the thresholds of a model's workers."""
        return self._by_model.get(model, self._initial)

    def show(self, client: exchange.Exchange) -> None:
        """Answer `GET`: the thresholds of all models."""
        rows = [self._row(model.name) for model in self._models.ready]
        client.respond(200, sse.encode({"thresholds": rows}))

    async def change(self, request: ThresholdChange) -> dict[str, Any]:
        """Answer `POST`: change thresholds of one model and return all of its thresholds. Raises RequestError."""
        name = self._models.find(request.model).name
        fields = {
            field: value
            for field in busy_workers.BusyThresholds.__struct_fields__
            if (value := getattr(request, field)) is not msgspec.UNSET
        }
        self._by_model[name] = msgspec.structs.replace(self.find(name), **fields)
        self._on_change()
        return self._row(name)

    def _row(self, model: str) -> dict[str, Any]:
        return {"model": model, **msgspec.structs.asdict(self.find(model))}


class LoadMonitor:
    """Receives the load of all workers into `loads`.

    `on_change` is called after each batch of reports, and every `REFRESH_INTERVAL_S`, because a report that stays out
    changes the load as well.
    """

    def __init__(
        self,
        event_plane: events.EventPlane,
        models: registry.ModelRegistry,
        loads: busy_workers.WorkerLoads,
        on_change: Callable[[], None],
        clock: clocks.Clock,
    ) -> None:
        self._event_plane = event_plane
        self._models = models
        self._loads = loads
        self._on_change = on_change
        self._clock = clock
        self._topics: set[str] = set()  # that are subscribed to

    async def watch(self) -> None:
        """Subscribe to the loads of all models' workers, also of later ones, until cancelled."""
        while True:
            topics = {
                f"{endpoint.namespace}/{endpoint.component}/kv_metrics"
                for model in self._models.ready
                for endpoint in model.replicas
            }
            for topic in topics - self._topics:
                self._topics.add(topic)
                await self._event_plane.subscribe(topic, self._receive)
            self._loads.drop_stale(self._clock.now())
            self._on_change()
            await self._clock.sleep(REFRESH_INTERVAL_S)

    def _receive(self, batch: list[events.Event]) -> None:
        now = self._clock.now()
        for event in batch:
            try:
                self._loads.update_load(_decode_event(event.payload), now)
            except msgspec.MsgspecError as error:
                _logger.warning("ignored the load reported by %x: %s", event.publisher, error)
        self._on_change()
