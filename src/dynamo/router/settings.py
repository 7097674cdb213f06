"""What a router can be told, by flag, environment or file; frontends and the standalone router share it.

Names are the original's where it has them.
"""

from dataclasses import dataclass
from typing import Literal

from dynamo.base import config


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """How a worker is chosen."""

    router_mode: Literal[
        "round-robin",
        "random",
        "kv",
        "least-loaded",
        "power-of-two",
        "consistent-hash",
        "direct",
    ] = config.option(
        "round-robin",
        env="DYN_ROUTER_MODE",
        help="how a worker is chosen; kv: by what its cache holds and how busy it is (--router-policy)",
    )
    router_policy: Literal["estimated-ttft", "dynamo", "lmetric"] = config.option(
        "estimated-ttft",
        env="DYN_ROUTER_POLICY",
        help="in kv mode, what counts: the time to first token that we expect, or the original's formulas",
    )
    kv_overlap_score_weight: float = config.option(
        1.0,
        env="DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT",
        aliases=("--router-kv-overlap-score-weight",),
        help="policy dynamo: what a block to compute weighs against one that is active",
        least=0,
    )
    router_temperature: float = config.option(
        0.0,
        env="DYN_ROUTER_TEMPERATURE",
        help="policy dynamo: 0 takes the best worker, more draws among the good ones",
        least=0,
    )
    router_host_cache_hit_weight: float = config.option(
        0.75,
        env="DYN_ROUTER_HOST_CACHE_HIT_WEIGHT",
        help="what a block in a worker's host memory is worth, against one on its device",
        least=0,
        most=1,
    )
    router_disk_cache_hit_weight: float = config.option(
        0.25,
        env="DYN_ROUTER_DISK_CACHE_HIT_WEIGHT",
        help="what a block on a worker's disk is worth",
        least=0,
        most=1,
    )
    kv_events: bool = config.option(
        True,
        env="DYN_ROUTER_USE_KV_EVENTS",
        aliases=("--router-kv-events",),
        help="hear from the workers what their caches hold; --no-kv-events: guess it from earlier choices",
    )
    router_ttl_secs: float = config.option(
        120.0,
        env="DYN_ROUTER_TTL_SECS",
        help="with --no-kv-events, for how long a prompt is believed to be cached",
        least=0,
    )
    router_max_tree_size: int = config.option(
        2**20,
        env="DYN_ROUTER_MAX_TREE_SIZE",
        help="with --no-kv-events, how many blocks are remembered",
        least=1,
    )
    router_prune_target_ratio: float = config.option(
        0.8,
        env="DYN_ROUTER_PRUNE_TARGET_RATIO",
        help="with --no-kv-events, how much of that is kept when it is full",
        least=0,
        most=1,
    )
    router_approximate_cache_policy: Literal["ttl", "lru"] = config.option(
        "ttl",
        env="DYN_ROUTER_APPROXIMATE_CACHE_POLICY",
        help="with --no-kv-events, whether belief ends with time or only with room",
    )
    kv_cache_block_size: int | None = config.option(
        None,
        env="DYN_KV_CACHE_BLOCK_SIZE",
        help="tokens per block (default: what the model's card says)",
        least=1,
    )
    router_replica_sync: bool = config.option(
        False,
        env="DYN_ROUTER_REPLICA_SYNC",
        help="tell the other routers of this namespace what is in flight, and hear from them",
    )
    router_queue_threshold: float | None = config.option(
        None,
        env="DYN_ROUTER_QUEUE_THRESHOLD",
        help="requests wait in the router while every worker has this many times its batched tokens to compute",
        least=0,
    )
    router_queue_policy: Literal["fcfs", "wspt", "lcfs", "deadline"] = config.option(
        "fcfs", env="DYN_ROUTER_QUEUE_POLICY", help="who of those that wait comes first"
    )
    router_queue_limit: int = config.option(
        1024, env="DYN_ROUTER_QUEUE_LIMIT", help="requests that may wait in the router", least=0
    )
    router_queue_timeout_secs: float = config.option(
        60.0,
        env="DYN_ROUTER_QUEUE_TIMEOUT_SECS",
        help="a request that has waited this long in the router is refused as overload",
        least=0,
    )
    router_session_affinity_ttl_secs: float | None = config.option(
        None,
        env="DYN_ROUTER_SESSION_AFFINITY_TTL_SECS",
        help="requests of one X-Dynamo-Session-ID go to one worker, until none came for this long",
        least=0,
    )
