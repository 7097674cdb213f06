"""Messages about load: what a worker publishes of its engine, and what routers tell one another of their requests.

A worker publishes a `LoadEvent` from time to time and serves the same figures as metrics. Routers with
`--router-replica-sync` publish an `ActiveSequenceEvent` for each request that they route, on the subject
`active_sequences_events`, so that each router knows the load that the others cause. A router ignores its own events;
one that starts late asks another for the `AddRequest` of each request that is in flight.
"""

import msgspec

ACTIVE_SEQUENCES_SUBJECT = "active_sequences_events"


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of requests: running (`request_active_slots`), and waiting for a slot or for blocks."""

    request_active_slots: int
    request_total_slots: int
    num_requests_waiting: int
    active_prefill_tokens: int = 0  # prompt tokens of accepted requests that are not computed yet
    data_parallel_rank: int = 0


class KvStats(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of KV blocks. Running requests use the active ones; the others are free or hold reusable prefixes."""

    kv_active_blocks: int
    kv_total_blocks: int
    gpu_prefix_cache_hit_rate: float = 0.0  # cached prompt tokens / prompt tokens, since the start


class ForwardPass(msgspec.Struct, frozen=True, kw_only=True):
    """What one forward pass (a step) of an engine computed, and how long it took."""

    num_prompt_tokens: int
    num_kv_tokens: int  # in the KV cache, of the answers that it continued; 0: it continued none
    wall_s: float


def keep_latest(passes: tuple[ForwardPass, ...], latest: ForwardPass) -> tuple[ForwardPass, ...]:
    """Return the last pass that computed prompts and the last that computed none, after the latest pass."""
    has_prompt = latest.num_prompt_tokens > 0
    return (*(each for each in passes if (each.num_prompt_tokens > 0) != has_prompt), latest)


class ForwardPassMetrics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The load of one engine, or of one of its data-parallel ranks, after a step."""

    worker_stats: WorkerStats
    kv_stats: KvStats
    # see `keep_latest`; empty: the engine does not tell, or has made none
    last_passes: tuple[ForwardPass, ...] = ()


class LoadEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The load of the worker with this instance id; one that drains finishes its requests, and takes no others."""

    worker_id: int
    data: ForwardPassMetrics
    is_draining: bool = False


class AddRequest(msgspec.Struct, frozen=True, tag="add_request", kw_only=True, omit_defaults=True):
    """A router sent a request to a worker. `overlap` is the number of prompt blocks that need no computation."""

    token_sequence: tuple[int, ...]  # sequence hashes of the full blocks of the prompt
    isl: int  # input sequence length: prompt tokens
    overlap: float = 0.0
    is_prefill_completed: bool = False  # by a prefill worker, or before this event was sent


class MarkPrefillCompleted(msgspec.Struct, frozen=True, tag="mark_prefill_completed"):
    """The first output of the request arrived."""


class Free(msgspec.Struct, frozen=True, tag="free"):
    """The request ended."""


class ActiveSequenceEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A change of one request at one worker, published by the router that sent the request there."""

    request_id: str
    worker_id: int
    data: AddRequest | MarkPrefillCompleted | Free
    router_id: str
    dp_rank: int = 0
