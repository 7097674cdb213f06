"""What a router that runs is told, besides how its policy chooses; frontends and the standalone router share it."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from dynamo.base import config
from dynamo.router import settings


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig(settings.RouterConfig):
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
    def choosing(self) -> settings.RouterConfig:
        """The same, where a mode that is a policy by itself is the policy."""
        if self.router_mode == "kv":
            return self
        return dataclasses.replace(self, router_policy=self.router_mode)

    @property
    def hears_kv_events(self) -> bool:
        """Whether what the workers' caches hold is of interest, and told."""
        return self.kv_events and self.router_mode == "kv"
