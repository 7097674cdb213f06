"""What a router can be told, and the policy and queue that come of it. Names are the original's where it has them."""

from dataclasses import dataclass
from typing import Literal

from dynamo.base import config
from dynamo.router import (
    active,
    api,
    baselines,
    by_formula,
    cost,
    estimated_ttft,
    policy,
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


def make_policy(settings: RouterConfig, draw: policy.Draw) -> policy.Policy:
    """The policy of that name. `draw` gives numbers in [0, 1)."""
    temperature = settings.router_temperature
    match settings.router_policy:
        case "estimated-ttft":
            return estimated_ttft.EstimatedTtft(locality=settings.router_locality)
        case "dynamo":
            return by_formula.Dynamo(
                draw=draw, overlap_weight=settings.kv_overlap_score_weight, temperature=temperature
            )
        case "lmetric":
            return by_formula.LMetric(draw=draw, temperature=temperature)
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


def make_credits(settings: RouterConfig) -> cost.Credits:
    """What cached blocks save, by tier."""
    return cost.Credits(
        device=settings.router_device_credit,
        host=settings.router_host_credit,
        disk=settings.router_disk_credit,
    )


def make_selector(
    settings: RouterConfig,
    index: api.Index,
    *,
    block_size: int,
    draw: policy.Draw,
    counts_blocks: bool = True,
) -> selection.Selector:
    """All of it, put together. `counts_blocks` False: workers that only compute prompts."""
    return selection.Selector(
        make_policy(settings, draw),
        index,
        active.ActiveSequences(
            block_size,
            stride=max(1, _COUNTED_TOKENS // block_size),
            counts_blocks=counts_blocks,
        ),
        queue=make_queue(settings),
        max_backlog=max_backlog(settings),
        credits_=make_credits(settings),
    )
