"""Listens to what the workers of all models tell of their load, and looks at the gates when something changed."""

import logging
from collections.abc import Callable

import msgspec

from dynamo.base import clock as clocks
from dynamo.frontend.admission import busy
from dynamo.frontend.catalog import models
from dynamo.protocols import load
from dynamo.runtime import events

LOOK_INTERVAL_S = 0.25
_logger = logging.getLogger(__name__)
_decode = msgspec.msgpack.Decoder(load.LoadEvent).decode


class LoadWatch:
    """`changed` is called after each batch of news, and from time to time, because silence is news too."""

    def __init__(
        self,
        plane: events.EventPlane,
        known: models.Models,
        loads: busy.Loads,
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
            await self._clock.sleep(LOOK_INTERVAL_S)

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
                self._loads.hear(_decode(event.payload), now)
            except msgspec.MsgspecError as error:
                _logger.warning("ignored the load told by %x: %s", event.publisher, error)
        self._changed()
