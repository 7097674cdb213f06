"""The settings of a router, and the policy, queue and selector that they describe, with Dynamo's names.

`RouterConfig` describes the decisions alone, which the simulator makes too; `RoutingConfig` adds what a running router
needs, and is shared by frontend and standalone router.
"""

import dataclasses
import importlib
import logging
from dataclasses import dataclass
from typing import Literal, get_args

from dynamo.base import config, errors
from dynamo.protocols import kv_events
from dynamo.router import active_sequences, api, policies, selection

_logger = logging.getLogger(__name__)
_STRIDE_TOKENS = 64  # resolution of shared blocks in flight; finer costs more than it brings


PolicyName = Literal[
    "estimated-ttft",
    "dynamo",
    "lmetric",
    "round-robin",
    "random",
    "least-loaded",
    "power-of-two",
    "consistent-hash",
    "direct",
]
RouterMode = Literal[
    "round-robin",
    "random",
    "kv",
    "least-loaded",
    "power-of-two",
    "consistent-hash",
    "direct",
]
MODE_HELP = (
    "how a worker is selected; kv: by its cached prefixes and its load (see --router-policy)"
)
_TEMPERED = ("dynamo", "lmetric")  # the policies that use --router-temperature
PUSH_MODES: dict[str, Literal["round-robin", "random"]] = {  # that know neither load nor sessions
    "round-robin": "round-robin",
    "random": "random",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """How a KV router compares workers, and queues requests."""

    router_policy: str | None = config.setting(
        None,
        help="policy by which router mode kv selects a worker (default: estimated-ttft; with --kv-overlap-score-weight"
        f" or --router-temperature dynamo): {', '.join(get_args(PolicyName))}, or a class of your own, as module:Class",
    )
    kv_overlap_score_weight: float | None = config.option(
        None,
        env="DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT",
        aliases=("--router-kv-overlap-score-weight", "--router-prefill-load-scale"),
        help="policy dynamo: weight of a block to compute, relative to a block in use; higher favours cached prefixes"
        " (default: 1)",
        least=0,
    )
    router_temperature: float | None = config.setting(
        None,
        help="policies dynamo and lmetric: 0 takes the worker with the lowest cost; higher values draw one by cost"
        " (default: 0)",
        least=0,
    )
    router_locality: float = config.setting(
        8.0,
        help="policy estimated-ttft: tokens of queue that a prompt accepts, when all workers are busy, to save"
        " computing one token; lower it for an even load, raise it for more cache hits",
        least=1,
    )
    router_queue_threshold: float | None = config.setting(
        None,
        help="requests wait in the router while their worker (other policies: every one) has more than this number"
        " of steps to compute (of max_num_batched_tokens), or no room; 0: never; default: 1 for estimated-ttft, else 0",
        least=0,
    )
    router_queue_policy: Literal["fcfs", "wspt", "deadline", "lcfs"] = config.setting(
        "wspt", help="order of the requests that wait in the router"
    )
    router_queue_size: int = config.setting(
        4096, help="requests that may wait in the router; more are refused", least=1
    )
    router_device_credit: float = config.option(
        1.0,
        flag="--router-kv-overlap-score-credit",
        env="DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",
        help="share of computing a block that a cached copy in device memory saves",
        least=0,
        most=1,
    )
    router_host_credit: float = config.option(
        0.75,
        flag="--router-host-cache-hit-weight",
        env="DYN_ROUTER_HOST_CACHE_HIT_WEIGHT",
        help="share of computing a block that a cached copy in host memory saves",
        least=0,
        most=1,
    )
    router_disk_credit: float = config.option(
        0.25,
        flag="--router-disk-cache-hit-weight",
        env="DYN_ROUTER_DISK_CACHE_HIT_WEIGHT",
        help="share of computing a block that a cached copy on disk, or in a slower tier, saves",
        least=0,
        most=1,
    )

    @property
    def policy_name(self) -> str:
        """Return the policy: the one that is named, or else the one that uses the options that are given."""
        if self.router_policy is not None:
            return self.router_policy
        is_tempered = self.router_temperature is not None
        return (
            "dynamo"
            if is_tempered or self.kv_overlap_score_weight is not None
            else "estimated-ttft"
        )

    def find_notes(self) -> list[str]:
        """Return what an operator should know of these options: which policy they choose, or that it ignores them."""
        name = self.policy_name
        users = {
            "--kv-overlap-score-weight": (self.kv_overlap_score_weight, ("dynamo",)),
            "--router-temperature": (self.router_temperature, _TEMPERED),
        }
        set_flags = [flag for flag, (value, _) in users.items() if value is not None]
        if set_flags and self.router_policy is None:
            return [
                f"{', '.join(set_flags)}: workers are selected by --router-policy dynamo, which uses it;"
                " the default, estimated-ttft, would not"
            ]
        return [
            f"{flag} has no effect: the policy {name} does not use it"
            for flag in set_flags
            if name not in users[flag][1]
        ]


def make_policy(settings: RouterConfig, draw: api.Draw) -> api.RoutingPolicy:
    """Make the policy that the settings name. `draw` returns random numbers in [0, 1). Raises ConfigError."""
    temperature = settings.router_temperature or 0.0
    weight = settings.kv_overlap_score_weight
    match settings.policy_name:
        case "estimated-ttft":
            return policies.EstimatedTtft(locality=settings.router_locality)
        case "dynamo":
            return policies.Dynamo(
                draw=draw, overlap_weight=1.0 if weight is None else weight, temperature=temperature
            )
        case "lmetric":
            return policies.LMetric(draw=draw, temperature=temperature)
        case "random":
            return policies.Random(draw)
        case "power-of-two":
            return policies.PowerOfTwo(draw)
        case "least-loaded":
            return policies.LeastLoaded()
        case "consistent-hash":
            return policies.ConsistentHash()
        case "direct":
            return policies.Direct()
        case "round-robin":
            return policies.RoundRobin()
        case name:
            return _make_own_policy(name)


def _make_own_policy(name: str) -> api.RoutingPolicy:
    """Import `module:Class` and return an instance of the class."""
    module, _, class_name = name.partition(":")
    try:
        policy: api.RoutingPolicy = getattr(importlib.import_module(module), class_name)()
        policy.select_worker, policy.uses_cache, policy.waits_for_worker  # noqa: B018 (they must be there)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise errors.ConfigError(
            f"--router-policy {name}: expected a policy ({', '.join(get_args(PolicyName))}), or module:Class with the"
            f" members of router.api.RoutingPolicy: {error}"
        ) from error
    return policy


def guard_policy(policy: api.RoutingPolicy, name: str) -> api.SelectWorker:
    """Return a user's way to select a worker, with that of the default policy where it fails; the log says so once."""
    default, has_failed = policies.EstimatedTtft(), False

    def select_worker(prompt: api.Prompt, candidates: api.Candidates, now: float) -> api.Decision:
        nonlocal has_failed
        try:
            decision = policy.select_worker(prompt, candidates, now)
            if isinstance(decision, api.Decision) and decision.worker in candidates.loads:
                return decision
            reason = f"expected a Decision for one of the candidates, got {decision!r:.200}"
        except Exception as error:  # noqa: BLE001 (the supervisor of a user's class)
            reason = f"{type(error).__name__}: {error}"
        if not has_failed:
            has_failed = True
            _logger.warning(
                "--router-policy %s failed: %s; estimated-ttft selects in its place, whenever it fails",
                name,
                reason,
            )
        return default.select_worker(prompt, candidates, now)

    return select_worker


def make_override(settings: RouterConfig, draw: api.Draw) -> api.PolicyOverride:
    """Make the policy of one request with settings of its own. Raises ConfigError."""
    return api.PolicyOverride(make_policy(settings, draw).select_worker, _tier_weights(settings))


def _tier_weights(settings: RouterConfig) -> policies.TierWeights:
    return {
        kv_events.DEVICE: settings.router_device_credit,
        kv_events.HOST: settings.router_host_credit,
        kv_events.DISK: settings.router_disk_credit,
    }


def make_selector(
    settings: RouterConfig,
    index: api.Index,
    *,
    block_size: int,
    draw: api.Draw,
    counts_blocks: bool = True,
) -> selection.Selector:
    """Make the selector of a router. `counts_blocks` is False for prefill workers."""
    max_backlog = settings.router_queue_threshold
    if max_backlog is None:
        max_backlog = 1.0 if settings.policy_name == "estimated-ttft" else 0.0
    queue = selection.RequestQueue(
        settings.router_queue_policy, max_size=settings.router_queue_size
    )
    policy, name = make_policy(settings, draw), settings.policy_name
    is_own = name not in get_args(PolicyName)
    can_wait = max_backlog > 0 and name != "direct"  # which refuses all that could
    return selection.Selector(
        policy,
        index,
        active_sequences.ActiveSequences(
            block_size,
            stride=max(1, _STRIDE_TOKENS // block_size),
            counts_blocks=counts_blocks,
        ),
        queue=queue if can_wait else None,
        max_backlog=max_backlog,
        tier_weights=_tier_weights(settings),
        select_worker=guard_policy(policy, name) if is_own else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig(RouterConfig):
    """How the router of a process selects workers."""

    router_mode: RouterMode = config.setting("round-robin", help=MODE_HELP)  # noqa: RUF009 (a declaration)
    kv_events: bool = config.option(
        True,
        env="DYN_ROUTER_USE_KV_EVENTS",
        aliases=("--router-kv-events",),
        help="follow the KV events of the workers; with --no-kv-events, guess from earlier decisions what is cached",
    )
    router_ttl_secs: float = config.setting(
        120.0,
        aliases=("--router-ttl",),
        help="with --no-kv-events, seconds for which a prompt counts as cached",
        least=0,
    )
    router_max_tree_size: int = config.setting(
        2**20, help="with --no-kv-events, blocks that the router remembers at most", least=1
    )
    router_prune_target_ratio: float = config.setting(
        0.8,
        help="with --no-kv-events, share of --router-max-tree-size that remains after pruning",
        least=0,
        most=1,
    )
    router_approximate_cache_policy: Literal["ttl", "lru"] = config.setting(
        "ttl",
        help="with --no-kv-events, forget blocks after a time (ttl) or only when room ends (lru)",
    )
    kv_cache_block_size: int | None = config.setting(
        None,
        aliases=("--router-block-size",),
        help="tokens per KV block of workers whose model card does not say it; otherwise that of the card is used",
        least=1,
    )
    router_replica_sync: bool = config.setting(
        False,
        help="share requests in flight with the other routers of this namespace; for several routers or frontends",
    )
    router_queue_timeout_secs: float = config.setting(
        60.0,
        help="seconds after which a request that waits in the router is refused as overload",
        least=0,
    )
    router_session_affinity_ttl_secs: float | None = config.setting(
        None,
        help="send the requests of one X-Dynamo-Session-ID to one worker, until none came for these seconds",
        least=0,
    )

    @property
    def policy_config(self) -> RouterConfig:
        """Return these settings with the router mode as policy, if the mode is one."""
        if self.router_mode == "kv":
            return self
        return dataclasses.replace(self, router_policy=self.router_mode)

    def find_mode_notes(self) -> list[str]:
        """Return which of the options that are set this router mode ignores, for an operator."""
        is_push, has_ttl = self.router_mode in PUSH_MODES, self.router_session_affinity_ttl_secs
        ignored = {
            "--router-policy": self.router_policy is not None and self.router_mode != "kv",
            "--router-session-affinity-ttl-secs": is_push and has_ttl is not None,
            "--router-replica-sync": is_push and self.router_replica_sync,
        }
        reason = f"has no effect in the router mode {self.router_mode}: expected --router-mode kv"
        return [f"{flag} {reason}" for flag, is_ignored in ignored.items() if is_ignored]

    @property
    def uses_kv_events(self) -> bool:
        """Return True if the router follows the workers' KV events."""
        return self.kv_events and self.router_mode == "kv"
