"""The thresholds above which a worker counts as busy (`GET|POST /busy_threshold`), and the loads compared with them.

Thresholds can be changed for each model at run time.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.frontend.admission import busy_workers
from dynamo.frontend.delivery import sse
from dynamo.frontend.model_registry import registry
from dynamo.frontend.model_registry.registered_model import RegisteredModel
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


_decode_changed = msgspec.json.Decoder(dict[str, busy_workers.BusyThresholds]).decode
_decode_event = msgspec.msgpack.Decoder(load.LoadEvent).decode


class BusyWorkers:
    """The workers that should get no request now: the loads that they report, compared with the thresholds of models.

    A model has the `initial` thresholds until they are changed. Loads are received, in a task of `running`, from the
    first threshold on.
    """

    def __init__(
        self,
        models: registry.ModelRegistry,
        initial: busy_workers.BusyThresholds,
        event_plane: events.EventPlane,
        clock: clocks.Clock,
        running: tasks.Tasks,
    ) -> None:
        self._models = models
        self._initial = initial
        self._event_plane = event_plane
        self._clock = clock
        self._running = running
        self._by_model: dict[str, busy_workers.BusyThresholds] = {}
        self._listeners: list[Callable[[], None]] = []
        self._topics: set[str] = set()  # that are subscribed to
        self.loads = busy_workers.WorkerLoads()
        self.is_active = initial.are_set  # or have been since

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever other workers may be busy than before.

        This is after each batch of reports, and every `REFRESH_INTERVAL_S`, because a report that stays out changes the
        load as well.
        """
        self._listeners.append(listener)

    def start(self) -> None:
        """Begin to receive loads if a threshold is set."""
        if self.is_active:
            self._running.start("watch the workers' load", self._watch_loads())

    def of_model(self, model: RegisteredModel) -> frozenset[int]:
        """Return the ids of the model's instances that are busy."""
        if not self.is_active:
            return frozenset()
        thresholds = self.thresholds_of(model.name)
        if not thresholds.are_set:
            return frozenset()
        return self.loads.select_busy(
            [instance.instance_id for instance in model.instances],
            thresholds,
            model.card.runtime_config.max_num_batched_tokens,
            self._clock.now(),
        )

    def num_free(self, name: str) -> int | None:
        """Count the model's workers that are not busy; None if no threshold is set or the model is gone."""
        if not self.thresholds_of(name).are_set:
            return None
        try:
            model = self._models.find(name)
        except errors.DynamoError:
            return None
        return len(model.instances) - len(self.of_model(model))

    def thresholds_of(self, model: str) -> busy_workers.BusyThresholds:
        return self._by_model.get(model, self._initial)

    def show_thresholds(self, client: exchange.Exchange, models: Sequence[RegisteredModel]) -> None:
        """Answer `GET`: the thresholds of these models."""
        rows = [self._row(model.name) for model in models]
        client.respond(200, sse.encode({"thresholds": rows}))

    async def change_thresholds(self, request: ThresholdChange) -> dict[str, Any]:
        """Answer `POST`: change thresholds of one model and return all of its thresholds. Raises RequestError."""
        name = self._models.find(request.model).name
        fields = {
            field: value
            for field in busy_workers.BusyThresholds.__struct_fields__
            if (value := getattr(request, field)) is not msgspec.UNSET
        }
        self._by_model[name] = msgspec.structs.replace(self.thresholds_of(name), **fields)
        self._activate()
        return self._row(name)

    def show_changed(self, client: exchange.Exchange) -> None:
        """Answer a sibling that starts: the thresholds that were changed, by model."""
        client.respond(200, sse.encode(self._by_model))

    def take_over(self, answers: Iterable[bytes]) -> None:
        """Take over what siblings answered, except where a change has come here meanwhile."""
        for answer in answers:
            self._by_model = _decode_changed(answer) | self._by_model
        if self._by_model:
            self._activate()

    def _activate(self) -> None:
        if not self.is_active:
            self.is_active = True
            self.start()
        self._announce()

    def _row(self, model: str) -> dict[str, Any]:
        return {"model": model, **msgspec.structs.asdict(self.thresholds_of(model))}

    async def _watch_loads(self) -> None:
        """Subscribe to the loads of all models' workers, also of later ones, until cancelled."""
        while True:
            topics = {
                f"{endpoint.namespace}/{endpoint.component}/kv_metrics"
                for model in self._models.ready
                for endpoint in model.replicas
            }
            for topic in topics - self._topics:
                with contextlib.suppress(errors.Unavailable):  # the next turn tries again
                    await self._event_plane.subscribe(topic, self._receive)
                    self._topics.add(topic)
            self.loads.drop_stale(self._clock.now())
            self._announce()
            await self._clock.sleep(REFRESH_INTERVAL_S)

    def _receive(self, batch: list[events.Event]) -> None:
        now = self._clock.now()
        for event in batch:
            try:
                self.loads.update_load(_decode_event(event.payload), now)
            except msgspec.MsgspecError as error:
                _logger.warning("ignored the load reported by %x: %s", event.publisher, error)
        self._announce()

    def _announce(self) -> None:
        for listener in self._listeners:
            listener()
