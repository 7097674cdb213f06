"""How busy one data-parallel rank is, as a library said last; and what of it the routers hear."""

from dataclasses import dataclass

from dynamo.engine import api
from dynamo.protocols import load


@dataclass(slots=True, kw_only=True)
class RankLoad:
    """Of one rank."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0  # that running requests hold
    hit_rate: float = 0.0  # cached prompt tokens / prompt tokens, since the start

    def metrics(
        self, facts: api.EngineFacts, rank: int, *, num_prefill_tokens: int, is_idle: bool
    ) -> load.ForwardPassMetrics:
        """A library says nothing when its last request is aborted: who knows better says `is_idle`."""
        return load.ForwardPassMetrics(
            worker_stats=load.WorkerStats(
                request_active_slots=0 if is_idle else self.num_running,
                request_total_slots=facts.max_num_seqs,
                num_requests_waiting=0 if is_idle else self.num_waiting,
                active_prefill_tokens=num_prefill_tokens,
                data_parallel_rank=rank,
            ),
            kv_stats=load.KvStats(
                kv_active_blocks=0 if is_idle else self.num_blocks,
                kv_total_blocks=facts.total_kv_blocks,
                gpu_prefix_cache_hit_rate=self.hit_rate,
            ),
        )
