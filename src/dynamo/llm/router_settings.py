"""The settings of a `KvRouter`: those of NVIDIA Dynamo's `KvRouterConfig`, as those of our own router."""

import dataclasses
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from dynamo.base import config, errors
from dynamo.router import api
from dynamo.router import config as router_config

# our name of a setting, and Dynamo's
_NAMES = {
    "router_host_credit": "host_cache_hit_weight",
    "router_disk_credit": "disk_cache_hit_weight",
    "router_device_credit": "overlap_score_credit",
    "router_temperature": "router_temperature",
    "router_ttl_secs": "router_ttl_secs",
    "router_queue_threshold": "router_queue_threshold",
    "kv_overlap_score_weight": "overlap_score_weight or prefill_load_scale",
    "kv_cache_block_size": "block_size",
    "router_session_affinity_ttl_secs": "session_affinity_ttl_secs",
}
_USED = {*_NAMES.values(), "overlap_score_weight", "prefill_load_scale", "use_kv_events"} | {
    "router_replica_sync",
    "router_approximate_cache_policy",
    "router_queue_policy",
    "router_event_threads",
}


@dataclass
class KvRouterSettings:
    """The settings of a `KvRouter`, with the names, order and defaults of Dynamo's.

    `router_event_threads` has no effect: one thread does it here. Raises ConfigError for others without effect here.
    """

    overlap_score_weight: float | None = None  # former name of prefill_load_scale
    host_cache_hit_weight: float = 0.75
    disk_cache_hit_weight: float = 0.25
    router_temperature: float = 0.0
    use_kv_events: bool = True
    _: dataclasses.KW_ONLY
    router_replica_sync: bool = False
    router_track_active_blocks: bool = True
    router_track_output_blocks: bool = False
    router_assume_kv_reuse: bool = True
    router_track_prefill_tokens: bool = True
    router_prefill_load_model: str = "none"
    router_ttl_secs: float = 120.0
    router_approximate_cache_policy: str = "ttl"
    router_queue_threshold: float | None = None  # None: no request waits in the router
    router_event_threads: int = 4
    router_queue_policy: str = "fcfs"
    use_remote_indexer: bool = False
    serve_indexer: bool = False
    enable_session_prefix_index: bool = False
    shared_cache_multiplier: float | None = None
    shared_cache_type: str = "none"
    router_predicted_ttl_secs: float | None = None
    conditional_disagg_enabled: bool = False
    conditional_disagg_policy: str = "isl_bounding"
    conditional_disagg_eff_isl_threshold: int = 2048
    conditional_disagg_eff_isl_ratio_threshold: float = 0.7
    conditional_disagg_prefill_busy_threshold: float | None = None
    conditional_disagg_decode_busy_threshold: float | None = None
    overlap_score_credit: float = 1.0
    overlap_score_credit_decay: float = 0.0
    prefill_load_scale: float = 1.0
    decode_active_request_weight: float = 0.0
    router_policy_config: str | None = None
    router_prefill_policy: str | None = None
    router_decode_policy: str | None = None
    router_tracking_hash: str = "public-xxh3-v1"
    router_tracking_key_file: Any = None
    router_tracking_key_id: str | None = None

    def __post_init__(self) -> None:
        self.routing_config()

    @classmethod
    def from_json(cls, config_json: str) -> Self:
        """Read the settings from a JSON object of these names. Raises ConfigError."""
        try:
            return cls(**json.loads(config_json))
        except (ValueError, TypeError) as error:
            raise errors.ConfigError(f"KvRouterConfig.from_json: {error}") from error

    def copy(self) -> Self:
        """Return equal settings that change for themselves."""
        return dataclasses.replace(self)

    def with_overrides(self, overlap_score_weight: float | None = None, **weights: Any) -> Self:
        """Return a copy with other weights; those that are None stay."""
        changed = {"overlap_score_weight": overlap_score_weight} | weights
        present = {name: value for name, value in changed.items() if value is not None}
        return dataclasses.replace(self, **present)

    def routing_config(self, **further: Any) -> router_config.RoutingConfig:
        """Return these settings as those of a frontend's router, with `further` ones of its. Raises ConfigError."""
        refuse(
            "KvRouterConfig",
            {
                field.name: True
                for field in dataclasses.fields(self)
                if field.name not in _USED and getattr(self, field.name) != field.default
            },
        )
        weight, credit = self.overlap_score_weight, self.overlap_score_credit
        if weight is None and self.prefill_load_scale != 1.0:
            weight = self.prefill_load_scale
        fields = {
            "router_mode": "kv",
            "kv_overlap_score_weight": weight,
            "router_temperature": self.router_temperature or None,
            "router_device_credit": 0.0 if self.overlap_score_weight == 0 else credit,
            "router_host_credit": self.host_cache_hit_weight,
            "router_disk_credit": self.disk_cache_hit_weight,
            "kv_events": self.use_kv_events,
            "router_replica_sync": self.router_replica_sync,
            "router_ttl_secs": self.router_ttl_secs,
            "router_queue_threshold": self.router_queue_threshold or 0.0,
            "router_queue_policy": self.router_queue_policy,
            "router_approximate_cache_policy": self.router_approximate_cache_policy,
        } | further
        for name, choices in (
            ("router_queue_policy", ("fcfs", "lcfs", "wspt")),
            ("router_approximate_cache_policy", ("ttl", "lru")),
        ):
            if fields[name] not in choices:
                words = f"expected {' or '.join(choices)}, got {fields[name]!r}"
                raise errors.ConfigError(f"KvRouterConfig, {name}: {words}")
        for field in dataclasses.fields(router_config.RoutingConfig):
            value = fields.get(field.name)
            if field.name in _NAMES and value is not None:
                config.check_range(field, value, f"KvRouter, {_NAMES[field.name]}")
        return router_config.RoutingConfig(**fields)


_OVERRIDES = (
    "overlap_score_weight",
    "overlap_score_credit",
    "prefill_load_scale",
    "router_temperature",
)


def read_override(
    settings: KvRouterSettings, weights: Mapping[str, Any] | None
) -> api.PolicyOverride | None:
    """Return the policy of a request with these weights in place of the router's. Raises ConfigError."""
    present = {name: value for name, value in (weights or {}).items() if value is not None}
    if not present:
        return None
    refuse("router_config_override", dict.fromkeys(present.keys() - set(_OVERRIDES), True))
    changed = dataclasses.replace(settings, **present)
    return router_config.make_override(changed.routing_config(), random.random)


def refuse(call: str, unsupported: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments without effect that have a value."""
    if names := [name for name, value in unsupported.items() if value]:
        raise errors.ConfigError(f"{call}: {', '.join(names)} is not supported here")
