"""The load of the pools: from the load reports that workers publish on the event plane."""

import logging
from collections.abc import Mapping

import msgspec

from dynamo.base import clock as clocks
from dynamo.planner.observation import PoolLoad
from dynamo.protocols import load
from dynamo.runtime import events

_STALE_S = 20.0  # workers report every second or so
_decode = msgspec.msgpack.Decoder(load.LoadEvent).decode
_logger = logging.getLogger(__name__)


class LoadSource:
    """Keeps the last report of each data-parallel rank of the workers of one component."""

    def __init__(self, plane: events.EventPlane, topic: str, clock: clocks.Clock) -> None:
        self._plane, self._topic, self._clock = plane, topic, clock
        self._reports: dict[tuple[int, int], tuple[float, load.ForwardPassMetrics]] = {}

    async def start(self) -> None:
        """Subscribe to the reports of present and future workers."""
        await self._plane.subscribe(self._topic, self._receive)

    def read(self) -> PoolLoad:
        """Return the load of all workers that reported lately."""
        now = self._clock.now()
        self._reports = {key: row for key, row in self._reports.items() if row[0] > now - _STALE_S}
        return pool_load({key: row[1] for key, row in self._reports.items()})

    def _receive(self, batch: list[events.Event]) -> None:
        for event in batch:
            try:
                report = _decode(event.payload)
            except msgspec.MsgspecError as error:
                _logger.warning("ignored the load reported by %x: %s", event.publisher, error)
                continue
            key = (report.worker_id, report.data.worker_stats.data_parallel_rank)
            self._reports[key] = (self._clock.now(), report.data)


def pool_load(reports: Mapping[tuple[int, int], load.ForwardPassMetrics]) -> PoolLoad:
    """Return the load of a pool: the mean of the ranks' cache usage, the sums of their requests."""
    ranks = reports.values()
    num_blocks = sum(rank.kv_stats.kv_total_blocks for rank in ranks)
    num_active = sum(rank.kv_stats.kv_active_blocks for rank in ranks)
    return PoolLoad(
        kv_usage=num_active / num_blocks if num_blocks else 0.0,
        num_running=sum(rank.worker_stats.request_active_slots for rank in ranks),
        num_waiting=sum(rank.worker_stats.num_requests_waiting for rank in ranks),
        waiting_tokens=sum(rank.worker_stats.active_prefill_tokens for rank in ranks),
    )
