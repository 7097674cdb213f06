"""Which workers are busy, by what they last told of themselves.

A worker that was not heard of for `STALE_S` (it tells its load at least every second) is unknown, and unknown is not
busy: an event plane that is down must not refuse every request. Of a worker with several data-parallel ranks each tells
its own load, and it is busy when all that were heard are.
"""

from collections.abc import Iterable

import msgspec

from dynamo.protocols import load

STALE_S = 5.0
_Told = tuple[load.ForwardPassMetrics, float]  # a state, and when it was heard


class BusyThresholds(msgspec.Struct, frozen=True, kw_only=True):
    """A worker above any of these is busy; None: not looked at. The names are the original's."""

    active_decode_blocks_threshold: float | None = None  # of active blocks, as a share of all
    active_prefill_tokens_threshold: int | None = None  # of prompt tokens still to be computed
    active_prefill_tokens_threshold_frac: float | None = None  # the same, in batches

    @property
    def are_set(self) -> bool:
        """Can anybody be busy?"""
        return self != _NONE


_NONE = BusyThresholds()


def is_busy(
    state: load.ForwardPassMetrics, thresholds: BusyThresholds, max_num_batched_tokens: int
) -> bool:
    """`max_num_batched_tokens` is a batch; 0: not known, and then nothing is measured by it."""
    blocks, waiting = state.kv_stats, state.worker_stats.active_prefill_tokens
    share = thresholds.active_decode_blocks_threshold
    if share is not None and blocks.kv_active_blocks > share * blocks.kv_total_blocks:
        return True
    most = thresholds.active_prefill_tokens_threshold
    if most is not None and waiting > most:
        return True
    batches = thresholds.active_prefill_tokens_threshold_frac
    if batches is None or not max_num_batched_tokens:
        return False
    return waiting > batches * max_num_batched_tokens


class WorkerLoads:
    """What workers told, and when it came."""

    def __init__(self) -> None:
        self._heard: dict[int, dict[int, _Told]] = {}  # by worker, and by rank

    def __len__(self) -> int:
        return len(self._heard)

    def hear(self, event: load.LoadEvent, now: float) -> None:
        """A worker tells the load of one of its ranks."""
        ranks = self._heard.setdefault(event.worker_id, {})
        ranks[event.data.worker_stats.data_parallel_rank] = (event.data, now)

    def forget_stale(self, now: float) -> None:
        """Those that are gone leave nothing behind."""
        self._heard = {
            worker: fresh for worker, ranks in self._heard.items() if (fresh := _fresh(ranks, now))
        }

    def busy_among(
        self, workers: Iterable[int], thresholds: BusyThresholds, batch: int, now: float
    ) -> frozenset[int]:
        """Those of `workers` that are busy; `batch` is their max_num_batched_tokens."""
        return frozenset(
            worker for worker in workers if self._is_busy(worker, thresholds, batch, now)
        )

    def _is_busy(self, worker: int, thresholds: BusyThresholds, batch: int, now: float) -> bool:
        fresh = _fresh(self._heard.get(worker, {}), now)
        return bool(fresh) and all(is_busy(told[0], thresholds, batch) for told in fresh.values())


def _fresh(ranks: dict[int, _Told], now: float) -> dict[int, _Told]:
    return {rank: told for rank, told in ranks.items() if now - told[1] <= STALE_S}
