"""How busy vLLM is, by what it says after each step."""

from collections.abc import Sequence
from typing import Any

from dynamo.engine import api
from dynamo.protocols import load


class _Rank:
    """What one data-parallel rank said last."""

    def __init__(self) -> None:
        self.num_running = self.num_waiting = 0
        self.cache_usage = 0.0  # 0..1
        self._num_asked = self._num_hit = 0  # prompt tokens, since the start

    @property
    def hit_rate(self) -> float:
        return self._num_hit / self._num_asked if self._num_asked else 0.0

    def record(self, stats: Any) -> None:
        self.num_running = stats.num_running_reqs
        self.num_waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        self.cache_usage = stats.kv_cache_usage
        self._num_asked += stats.prefix_cache_stats.queries
        self._num_hit += stats.prefix_cache_stats.hits


class Load:
    """Of all ranks."""

    def __init__(self, num_ranks: int) -> None:
        self._ranks = [_Rank() for _ in range(num_ranks)]

    def record(self, rank: int, stats: Any) -> None:
        """From vLLM: the SchedulerStats of a step of this rank."""
        self._ranks[rank].record(stats)

    def now(
        self, facts: api.EngineFacts, *, num_prefill_tokens: int, is_idle: bool
    ) -> Sequence[load.ForwardPassMetrics]:
        """As of the last step. vLLM says nothing when its last request is aborted: who knows better says `is_idle`."""
        share = num_prefill_tokens // len(self._ranks)
        return [
            _metrics(number, rank, facts, share, is_idle=is_idle)
            for number, rank in enumerate(self._ranks)
        ]


def _metrics(
    number: int, rank: _Rank, facts: api.EngineFacts, num_prefill_tokens: int, *, is_idle: bool
) -> load.ForwardPassMetrics:
    return load.ForwardPassMetrics(
        worker_stats=load.WorkerStats(
            request_active_slots=0 if is_idle else rank.num_running,
            request_total_slots=facts.max_num_seqs,
            num_requests_waiting=0 if is_idle else rank.num_waiting,
            active_prefill_tokens=num_prefill_tokens,
            data_parallel_rank=number,
        ),
        kv_stats=load.KvStats(
            kv_active_blocks=0 if is_idle else round(rank.cache_usage * facts.total_kv_blocks),
            kv_total_blocks=facts.total_kv_blocks,
            gpu_prefix_cache_hit_rate=rank.hit_rate,
        ),
    )
