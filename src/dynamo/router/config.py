"""What a router can be told, and the policy and queue that come of it. Names are the original's where it has them.

What a router that runs is told, besides how its policy chooses; frontends and the standalone router share it.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from dynamo.base import config
from dynamo.router import (
    active_sequences,
    api,
    baselines,
    cost_function,
    estimated_ttft,
    queue,
    selection,
)

_COUNTED_TOKENS = (
    64  # blocks in flight are told apart to so many tokens; finer costs more than it tells
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """How workers are weighed, and requests queued, in mode kv."""

    router_policy: Literal[
        "estimated-ttft",
        "dynamo",
        "lmetric",
        "round-robin",
        "random",
        "least-loaded",
        "power-of-two",
        "consistent-hash",
        "direct",
    ] = config.option(
        "estimated-ttft", env="DYN_ROUTER_POLICY", help="how a worker is chosen in router mode kv"
    )
    kv_overlap_score_weight: float = config.option(
        1.0,
        env="DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT",
        help="policy dynamo: what a block to compute weighs beside a block in use",
        least=0,
    )
    router_temperature: float = config.option(
        0.0,
        env="DYN_ROUTER_TEMPERATURE",
        help="policies dynamo and lmetric: 0 takes the lowest cost, more draws by it",
        least=0,
    )
    router_locality: float = config.option(
        8.0,
        env="DYN_ROUTER_LOCALITY",
        help="policy estimated-ttft: how many tokens of queue a prompt bears, when all are busy, to save computing one;"
        " less: even load, more: more found in caches",
        least=1,
    )
    router_queue_threshold: float | None = config.option(
        None,
        env="DYN_ROUTER_QUEUE_THRESHOLD",
        help="requests wait in the router while workers have more prompt tokens to compute than so many of"
        " their steps hold (max_num_batched_tokens); 0: never; by default 1 for estimated-ttft, never for others",
        least=0,
    )
    router_queue_policy: Literal["fcfs", "wspt", "deadline", "lcfs"] = config.option(
        "wspt", env="DYN_ROUTER_QUEUE_POLICY", help="who of the waiting goes first"
    )
    router_queue_size: int = config.option(
        4096, env="DYN_ROUTER_QUEUE_SIZE", help="more than so many waiting are refused", least=1
    )
    router_device_credit: float = config.option(
        1.0,
        flag="--router-kv-overlap-score-credit",
        env="DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",
        help="what a cached block in device memory saves of computing it",
        least=0,
        most=1,
    )
    router_host_credit: float = config.option(
        0.75,
        flag="--router-host-cache-hit-weight",
        env="DYN_ROUTER_HOST_CACHE_HIT_WEIGHT",
        help="the same, in host memory",
        least=0,
        most=1,
    )
    router_disk_credit: float = config.option(
        0.25,
        flag="--router-disk-cache-hit-weight",
        env="DYN_ROUTER_DISK_CACHE_HIT_WEIGHT",
        help="the same, on disk",
        least=0,
        most=1,
    )


def make_policy(settings: RouterConfig, draw: api.Draw) -> api.Policy:
    """The policy of that name. `draw` gives numbers in [0, 1)."""
    temperature = settings.router_temperature
    match settings.router_policy:
        case "estimated-ttft":
            return estimated_ttft.EstimatedTtft(locality=settings.router_locality)
        case "dynamo":
            return cost_function.Dynamo(
                draw=draw, overlap_weight=settings.kv_overlap_score_weight, temperature=temperature
            )
        case "lmetric":
            return cost_function.LMetric(draw=draw, temperature=temperature)
        case "random":
            return baselines.Random(draw)
        case "power-of-two":
            return baselines.PowerOfTwo(draw)
        case "least-loaded":
            return baselines.LeastLoaded()
        case "consistent-hash":
            return baselines.ConsistentHash()
        case "direct":
            return baselines.Direct()
        case "round-robin":
            return baselines.RoundRobin()


def make_queue(settings: RouterConfig) -> queue.WaitingQueue | None:
    """The router's queue; None: nobody waits in the router."""
    if not max_backlog(settings):
        return None
    return queue.WaitingQueue(settings.router_queue_policy, max_size=settings.router_queue_size)


def max_backlog(settings: RouterConfig) -> float:
    """Up to how many steps of prompt tokens a worker has room; 0: always."""
    if settings.router_queue_threshold is not None:
        return settings.router_queue_threshold
    return 1.0 if settings.router_policy == "estimated-ttft" else 0.0


def make_credits(settings: RouterConfig) -> cost_function.Credits:
    """What cached blocks save, by tier."""
    return cost_function.Credits(
        device=settings.router_device_credit,
        host=settings.router_host_credit,
        disk=settings.router_disk_credit,
    )


def make_selector(
    settings: RouterConfig,
    index: api.Index,
    *,
    block_size: int,
    draw: api.Draw,
    counts_blocks: bool = True,
) -> selection.Selector:
    """All of it, put together. `counts_blocks` False: workers that only compute prompts."""
    return selection.Selector(
        make_policy(settings, draw),
        index,
        active_sequences.ActiveSequences(
            block_size,
            stride=max(1, _COUNTED_TOKENS // block_size),
            counts_blocks=counts_blocks,
        ),
        queue=make_queue(settings),
        max_backlog=max_backlog(settings),
        credits_=make_credits(settings),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig(RouterConfig):
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

    @property
    def choosing(self) -> RouterConfig:
        """The same, where a mode that is a policy by itself is the policy."""
        if self.router_mode == "kv":
            return self
        return dataclasses.replace(self, router_policy=self.router_mode)

    @property
    def hears_kv_events(self) -> bool:
        """Whether what the workers' caches hold is of interest, and told."""
        return self.kv_events and self.router_mode == "kv"
