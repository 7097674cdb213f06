"""How busy a worker is: published from time to time, and served as metrics."""

import msgspec


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Requests: `request_active_slots` run now, `num_requests_waiting` wait for a slot or for blocks."""

    request_active_slots: int
    request_total_slots: int
    num_requests_waiting: int
    active_prefill_tokens: int = 0  # of prompts that were taken, and are still to be computed
    data_parallel_rank: int = 0


class KvStats(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks: active ones belong to running requests; the rest is free or holds reusable prefixes."""

    kv_active_blocks: int
    kv_total_blocks: int
    gpu_prefix_cache_hit_rate: float = 0.0  # cached prompt tokens / prompt tokens, since the start

    @property
    def gpu_cache_usage_perc(self) -> float:
        """Active blocks as a share of all, 0..1 (the name is the original's)."""
        return self.kv_active_blocks / self.kv_total_blocks if self.kv_total_blocks else 0.0


class ForwardPassMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one engine after a step."""

    worker_stats: WorkerStats
    kv_stats: KvStats


class LoadEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Whose state it is."""

    worker_id: int
    data: ForwardPassMetrics
