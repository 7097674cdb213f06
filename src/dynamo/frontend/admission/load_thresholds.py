"""`GET|POST /busy_threshold`: from when on a worker counts as busy, for each model, at run time."""

import logging
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from dynamo.base import clock as clocks
from dynamo.frontend.admission import busy_workers
from dynamo.frontend.answer import sse
from dynamo.frontend.model_registry import registry
from dynamo.protocols import load, openai_decode
from dynamo.runtime import events
from dynamo.runtime.http import exchange

_Share = Annotated[float, msgspec.Meta(ge=0, le=1)] | msgspec.UnsetType | None
_Tokens = Annotated[int, msgspec.Meta(ge=0)] | msgspec.UnsetType | None
_Batches = Annotated[float, msgspec.Meta(ge=0)] | msgspec.UnsetType | None


class ThresholdChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a caller wants; what it leaves out stays, and null is no threshold."""

    model: str
    active_decode_blocks_threshold: _Share = msgspec.UNSET
    active_prefill_tokens_threshold: _Tokens = msgspec.UNSET
    active_prefill_tokens_threshold_frac: _Batches = msgspec.UNSET


_decode_change = openai_decode.RequestDecoder(ThresholdChange).decode


class ThresholdRegistry:
    """The thresholds of each model: those of the start, until somebody changes them."""

    def __init__(
        self, known: registry.ModelRegistry, at_start: busy_workers.BusyThresholds
    ) -> None:
        self._models = known
        self._at_start = at_start
        self.on_change: Callable[[], None] = lambda: None
        self._by_model: dict[str, busy_workers.BusyThresholds] = {}

    def of(self, model: str) -> busy_workers.BusyThresholds:
        """From when on its workers are busy."""
        return self._by_model.get(model, self._at_start)

    def show(self, caller: exchange.Exchange) -> None:
        """`GET`: those of all models."""
        rows = [self._row(model.name) for model in self._models.ready]
        caller.respond(200, sse.encode({"thresholds": rows}))

    async def change(self, body: bytes) -> dict[str, Any]:
        """`POST`: some of one model; gives all that it has then. Raises RequestError."""
        wanted = _decode_change(body)
        name = self._models.find(wanted.model).name
        fields = {
            field: value
            for field in busy_workers.BusyThresholds.__struct_fields__
            if (value := getattr(wanted, field)) is not msgspec.UNSET
        }
        self._by_model[name] = msgspec.structs.replace(self.of(name), **fields)
        self.on_change()
        return self._row(name)

    def _row(self, model: str) -> dict[str, Any]:
        return {"model": model, **msgspec.structs.asdict(self.of(model))}


REFRESH_INTERVAL_S = 0.25
_logger = logging.getLogger(__name__)
_decode_event = msgspec.msgpack.Decoder(load.LoadEvent).decode


class LoadMonitor:
    """`changed` is called after each batch of news, and from time to time, because silence is news too."""

    def __init__(
        self,
        plane: events.EventPlane,
        known: registry.ModelRegistry,
        loads: busy_workers.WorkerLoads,
        changed: Callable[[], None],
        clock: clocks.Clock,
    ) -> None:
        self._plane = plane
        self._models = known
        self._loads = loads
        self._changed = changed
        self._clock = clock
        self._topics: set[str] = set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            for topic in self._wanted() - self._topics:
                self._topics.add(topic)
                await self._plane.subscribe(topic, self._hear)
            self._loads.forget_stale(self._clock.now())
            self._changed()
            await self._clock.sleep(REFRESH_INTERVAL_S)

    def _wanted(self) -> set[str]:
        return {
            f"{name.namespace}/{name.component}/kv_metrics"
            for model in self._models.ready
            for name in model.replicas
        }

    def _hear(self, batch: list[events.Event]) -> None:
        now = self._clock.now()
        for event in batch:
            try:
                self._loads.hear(_decode_event(event.payload), now)
            except msgspec.MsgspecError as error:
                _logger.warning("ignored the load told by %x: %s", event.publisher, error)
        self._changed()
