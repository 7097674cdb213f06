"""How busy vLLM is, from what it tells its stat loggers: the documented way to hear of it."""

from collections.abc import Sequence
from typing import Any

from dynamo.engine import api
from dynamo.engine.adapters.vllm import versions
from dynamo.protocols import load


class _Rank(versions.StatLoggerBase):  # type: ignore[misc]
    """What one data-parallel rank said last. vLLM makes it."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.number = engine_index
        self.num_running = self.num_waiting = 0
        self.cache_usage = 0.0  # 0..1
        self._num_asked = self._num_hit = 0  # prompt tokens, since the start

    @property
    def hit_rate(self) -> float:
        return self._num_hit / self._num_asked if self._num_asked else 0.0

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is None:
            return
        self.num_running = scheduler_stats.num_running_reqs
        self.num_waiting = (
            scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        )
        self.cache_usage = scheduler_stats.kv_cache_usage
        self._num_asked += scheduler_stats.prefix_cache_stats.queries
        self._num_hit += scheduler_stats.prefix_cache_stats.hits

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


class Load:
    """Of all ranks."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []

    def make_logger(self, vllm_config: Any, engine_index: int) -> versions.StatLoggerBase:
        """For vLLM: one per rank."""
        self._ranks.append(_Rank(vllm_config, engine_index))
        return self._ranks[-1]

    def now(
        self, facts: api.EngineFacts, *, num_prefill_tokens: int, is_idle: bool
    ) -> Sequence[load.ForwardPassMetrics]:
        """As of the last step. vLLM says nothing when its last request is aborted: who knows better says `is_idle`."""
        share = num_prefill_tokens // len(self._ranks) if self._ranks else 0
        return [_metrics(rank, facts, share, is_idle=is_idle) for rank in self._ranks]


def _metrics(
    rank: _Rank, facts: api.EngineFacts, num_prefill_tokens: int, *, is_idle: bool
) -> load.ForwardPassMetrics:
    return load.ForwardPassMetrics(
        worker_stats=load.WorkerStats(
            request_active_slots=0 if is_idle else rank.num_running,
            request_total_slots=facts.max_num_seqs,
            num_requests_waiting=0 if is_idle else rank.num_waiting,
            active_prefill_tokens=num_prefill_tokens,
            data_parallel_rank=rank.number,
        ),
        kv_stats=load.KvStats(
            kv_active_blocks=0 if is_idle else round(rank.cache_usage * facts.total_kv_blocks),
            kv_total_blocks=facts.total_kv_blocks,
            gpu_prefix_cache_hit_rate=rank.hit_rate,
        ),
    )
