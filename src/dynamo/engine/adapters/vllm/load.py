"""How busy vLLM is, by what it says after each step."""

from collections.abc import Sequence
from typing import Any

from dynamo.engine import api
from dynamo.engine.adapters import rank_load
from dynamo.protocols import load


class _Rank:
    """What one data-parallel rank said last."""

    def __init__(self) -> None:
        self._num_running = self._num_waiting = 0
        self._cache_usage = 0.0  # 0..1
        self._num_asked = self._num_hit = 0  # prompt tokens, since the start

    def record(self, stats: Any) -> None:
        self._num_running = stats.num_running_reqs
        self._num_waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        self._cache_usage = stats.kv_cache_usage
        self._num_asked += stats.prefix_cache_stats.queries
        self._num_hit += stats.prefix_cache_stats.hits

    def now(self, total_kv_blocks: int) -> rank_load.RankLoad:
        return rank_load.RankLoad(
            num_running=self._num_running,
            num_waiting=self._num_waiting,
            num_blocks=round(self._cache_usage * total_kv_blocks),
            hit_rate=self._num_hit / self._num_asked if self._num_asked else 0.0,
        )


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
            rank.now(facts.total_kv_blocks).metrics(
                facts, number, num_prefill_tokens=share, is_idle=is_idle
            )
            for number, rank in enumerate(self._ranks)
        ]
