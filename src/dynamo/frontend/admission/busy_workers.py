"""The workers that are busy, by the load that they reported last.

The load of a worker that has not reported for `STALE_S` seconds (it reports at least every second) is unknown, and such
a worker is not busy: an event plane that is down must not refuse every request. Each data-parallel rank of a worker
reports its own load; the worker is busy when all ranks that reported are.
"""  # decider

from collections.abc import Iterable

import msgspec

from dynamo.protocols import load

STALE_S = 5.0
_RankLoad = tuple[load.ForwardPassMetrics, float]  # the load, and when it was reported


class BusyThresholds(msgspec.Struct, frozen=True, kw_only=True):
    """A worker above any of these is busy; None: not compared. The names are the original's."""

    active_decode_blocks_threshold: float | None = None  # of active blocks, as a share of all
    active_prefill_tokens_threshold: int | None = None  # of prompt tokens still to be computed
    active_prefill_tokens_threshold_frac: float | None = None  # the same, in batches

    @property
    def are_set(self) -> bool:
        """Return whether any threshold is set, so that a worker can be busy."""
        return self != _NO_THRESHOLDS


_NO_THRESHOLDS = BusyThresholds()


def is_busy(
    metrics: load.ForwardPassMetrics, thresholds: BusyThresholds, max_num_batched_tokens: int
) -> bool:
    """Compare a load with the thresholds that can be measured: 0 blocks in all, or tokens of a batch, are unknown."""
    blocks, num_waiting_tokens = metrics.kv_stats, metrics.worker_stats.active_prefill_tokens
    max_share, num_blocks = thresholds.active_decode_blocks_threshold, blocks.kv_total_blocks
    if max_share is not None and num_blocks and blocks.kv_active_blocks > max_share * num_blocks:
        return True
    max_tokens = thresholds.active_prefill_tokens_threshold
    if max_tokens is not None and num_waiting_tokens > max_tokens:
        return True
    max_batches = thresholds.active_prefill_tokens_threshold_frac
    if max_batches is None or not max_num_batched_tokens:
        return False
    return num_waiting_tokens > max_batches * max_num_batched_tokens


class WorkerLoads:
    """The loads that workers reported, with the time of each report."""

    def __init__(self) -> None:
        self._loads: dict[int, dict[int, _RankLoad]] = {}  # by worker, and by rank

    def __len__(self) -> int:
        return len(self._loads)

    def update_load(self, event: load.LoadEvent, now: float) -> None:
        """Record the load of one rank of a worker."""
        ranks = self._loads.setdefault(event.worker_id, {})
        ranks[event.data.worker_stats.data_parallel_rank] = (event.data, now)

    def drop_stale(self, now: float) -> None:
        """Remove reports that are older than `STALE_S`, and workers without a newer one."""
        self._loads = {
            worker: fresh for worker, ranks in self._loads.items() if (fresh := _fresh(ranks, now))
        }

    def select_busy(
        self,
        workers: Iterable[int],
        thresholds: BusyThresholds,
        max_num_batched_tokens: int,
        now: float,
    ) -> frozenset[int]:
        """Return those of `workers` that are busy."""
        fresh_loads = {worker: _fresh(self._loads.get(worker, {}), now) for worker in workers}
        return frozenset(
            worker
            for worker, ranks in fresh_loads.items()
            if ranks
            and all(is_busy(data, thresholds, max_num_batched_tokens) for data, _ in ranks.values())
        )


def _fresh(ranks: dict[int, _RankLoad], now: float) -> dict[int, _RankLoad]:
    return {rank: report for rank, report in ranks.items() if now - report[1] <= STALE_S}
