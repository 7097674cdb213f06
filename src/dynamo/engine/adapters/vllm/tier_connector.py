"""`DynamoConnector`: the tiers of `kvbm` under vLLM, by its KV connector interface.

vLLM makes one object in the process of its scheduler and one in each worker process, and calls a different half of the
methods of each: `tier_scheduler` and `tier_worker` do the work, and this module only translates. Settings come from
`kv_connector_extra_config`, under the names of our options, and else from the environment (DYN_KVBM_*).

vLLM calls its interface experimental. So what we use of it is compared with what is there when this module is imported,
which vLLM does before it loads a model: a release that differs is refused by name.
"""

import contextlib
import dataclasses
import inspect
import logging
import os
import time
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import msgspec
import vllm
from vllm.distributed import kv_events as vllm_events
from vllm.distributed.kv_transfer.kv_connector import factory
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1 import metrics as connector_metrics
from vllm.v1.core import block_pool, kv_cache_utils

from dynamo.base import config, errors
from dynamo.engine.adapters.vllm import connectors, tier_scheduler, tier_worker
from dynamo.engine.adapters.vllm.tier_plan import TierPlan, TierResults
from dynamo.kvbm import tier_report, tier_setup
from dynamo.protocols import kv_events

_SEED = "PYTHONHASHSEED"
REPORT_S = 0.2  # between two reports while there is work
_MEDIUM = {kv_events.HOST: "CPU", kv_events.DISK: "DISK", kv_events.REMOTE: "REMOTE"}
_USED_METHODS: Mapping[type, Mapping[str, tuple[str, ...]]] = {  # parameters after self
    base.KVConnectorBase_V1: {
        "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
        "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
        "build_connector_meta": ("scheduler_output",),
        "request_finished": ("request", "block_ids"),
        "update_connector_output": ("connector_output",),
        "on_new_request": ("request",),
        "bind_gpu_block_pool": ("gpu_block_pool",),
        "take_events": (),
        "reset_cache": (),
        "register_kv_caches": ("kv_caches",),
        "start_load_kv": ("forward_context",),
        "wait_for_layer_load": ("layer_name",),
        "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata"),
        "wait_for_save": (),
        "get_finished": ("finished_req_ids",),
        "get_block_ids_with_load_errors": (),
        "build_connector_worker_meta": (),
    },
    base.SupportsHMA: {"request_finished_all_groups": ("request", "block_ids")},
    block_pool.BlockPool: {
        "get_cached_block": ("block_hash", "kv_cache_group_ids"),
        "touch": ("blocks",),
        "free_blocks": ("ordered_blocks",),
        "get_num_free_blocks": (),
    },
}
_logger = logging.getLogger("vllm.dynamo_connector")  # vLLM shows the loggers below its own


def find_interface_faults(
    used: Mapping[type, Mapping[str, tuple[str, ...]]], implementation: Iterable[str]
) -> list[str]:
    """Return how vLLM's interface differs from what we use; `implementation` are the names of our methods."""
    faults = []
    for cls, methods in used.items():
        for name, parameters in methods.items():
            method = getattr(cls, name, None)
            if method is None:
                faults.append(f"{cls.__name__} has no {name}")
                continue
            found = tuple(
                parameter.name
                for parameter in inspect.signature(method).parameters.values()
                if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
                and parameter.default is parameter.empty
            )[1:]
            if found != parameters:
                faults.append(
                    f"{cls.__name__}.{name} takes ({', '.join(found)}), expected ({', '.join(parameters)})"
                )
        abstract: frozenset[str] = getattr(cls, "__abstractmethods__", frozenset())
        faults += [
            f"{cls.__name__} demands {name}, which is not known here"
            for name in sorted(abstract.difference(implementation))
        ]
    return faults


@dataclass
class _Plan(base.KVConnectorMetadata):  # type: ignore[misc]
    plan: TierPlan


@dataclass
class _Results(base.KVConnectorWorkerMetadata):  # type: ignore[misc]
    results: TierResults

    def aggregate(self, other: "_Results") -> "_Results":
        return _Results(self.results.join(other.results))


class TierStats(connector_metrics.KVConnectorStats):  # type: ignore[misc]
    """A report on the tiers (`tier_report.TierReport`, as plain values) in vLLM's statistics."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: "TierStats") -> "TierStats":
        return other if other.data else self

    def reduce(self) -> dict[str, int | float]:
        """Return the numbers of vLLM's log line."""
        used = {f"{use['tier']}_blocks": use["used_blocks"] for use in self.data["tiers"]}
        rates = {
            f"{tier}_hit_rate": round(self.data[f"{tier}_hit_rate"], 3) for tier in ("host", "disk")
        }
        return {**used, **rates, "loaded_tokens": self.data["counts"]["matched_tokens"]}

    def is_empty(self) -> bool:
        return not self.data


class TierPromMetrics(connector_metrics.KVConnectorPromMetrics):  # type: ignore[misc]
    """No metrics: vLLM counts hits by source itself, and its MultiConnector demands an object for each report."""

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Do nothing."""


class DynamoConnector(base.KVConnectorBase_V1, base.SupportsHMA):  # type: ignore[misc]
    """Host memory and disk below vLLM's KV cache."""

    requires_kv_delivery = False  # a cache: a copy that is lost is computed again

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises ConfigError for a model or settings that cannot have tiers."""
        super().__init__(vllm_config, role, kv_cache_config)
        settings = read_settings(self._kv_transfer_config.kv_connector_extra_config)
        check_support(vllm_config, kv_cache_config, is_shared=settings.kvbm_sharing_workers > 1)
        events = vllm_config.kv_events_config
        self._has_events = events is not None and events.enable_kv_cache_events
        self._block_size = vllm_config.cache_config.block_size
        self._reported: tier_report.TierReport | None = None
        self._reported_at = 0.0
        self._scheduler: tier_scheduler.TierScheduler | None = None
        self._worker: tier_worker.TierWorker | None = None
        if role is base.KVConnectorRole.SCHEDULER:
            is_lasting = len(settings.storage_tiers) > 1 or settings.kvbm_sharing_workers > 1
            algorithm = vllm_config.cache_config.prefix_caching_hash_algo
            name_blocks_alike(algorithm, os.environ, is_lasting=is_lasting)
            self._scheduler = tier_scheduler.TierScheduler(
                settings,
                block_size=self._block_size,
                num_ranks=vllm_config.parallel_config.world_size,
                now=time.monotonic,
            )
        else:
            parallel = vllm_config.parallel_config
            dp_part = f"dp{parallel.data_parallel_rank}" if parallel.data_parallel_size > 1 else ""
            rank_part = f"rank{parallel.rank}" if parallel.world_size > 1 else ""
            self._worker = tier_worker.TierWorker(settings, dp_part + rank_part)

    # --- in the scheduler's process ---

    @property
    def _deciding(self) -> tier_scheduler.TierScheduler:
        assert self._scheduler is not None, "vLLM called a scheduler's method in a worker"
        return self._scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._deciding.bind(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        self._deciding.add(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        return self._deciding.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._deciding.allocate(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        from vllm.v1.metrics import cache_hit_source  # not in 0.28, nor this method

        sources = self._deciding.sources(request.request_id)
        kind = cache_hit_source.CacheHitSource
        others = {kv_events.REMOTE: kind.EXTERNAL_UNSPECIFIED}
        return {others.get(tier) or kind(str(tier)): n for tier, n in sources.items()}

    def build_connector_meta(self, scheduler_output: Any) -> base.KVConnectorMetadata:
        cached = scheduler_output.scheduled_cached_reqs
        computed = [
            *((new.req_id, new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs),
            *zip(cached.req_ids, cached.num_computed_tokens, strict=True),
        ]
        tokens = scheduler_output.num_scheduled_tokens
        scheduled = [(req_id, num + tokens.get(req_id, 0)) for req_id, num in computed]
        return _Plan(self._deciding.plan(scheduled, scheduler_output.total_num_scheduled_tokens))

    def update_connector_output(self, connector_output: Any) -> None:
        meta = getattr(connector_output, "kv_connector_worker_meta", None)
        if isinstance(meta, _Results):
            self._deciding.record(meta.results)

    def has_pending_push_work(self) -> bool:
        """Ask vLLM for steps without requests while copies run: only a step reports their ends."""
        return self._deciding.has_work

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        reads = self._deciding.reads(request.request_id)
        loaded = self._deciding.finish(request.request_id)
        fields = {connectors.TIER_TOKENS: loaded, connectors.TIER_READS: msgspec.to_builtins(reads)}
        return False, {name: value for name, value in fields.items() if value} or None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def take_events(self) -> Iterable[Any]:
        events = self._deciding.take_events()
        return [self._translate(event) for event in events] if self._has_events else ()

    def reset_cache(self) -> bool:
        self._deciding.clear()
        return True

    def get_kv_connector_stats(self) -> TierStats | None:
        """Return a report if it has changed; in a worker None."""
        if self._scheduler is None:
            return None
        report, now = self._scheduler.report(), time.monotonic()
        is_early = now - self._reported_at < REPORT_S and self._scheduler.has_work
        if report is None or report == self._reported or is_early:
            return None
        self._reported, self._reported_at = report, now
        return TierStats(data=msgspec.to_builtins(report))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TierStats:
        return TierStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TierPromMetrics:
        return TierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _translate(self, event: tier_scheduler.TierEvent) -> Any:
        medium, origin = _MEDIUM[event.tier], event.origin
        if origin is None:
            return vllm_events.BlockRemoved(block_hashes=[event.name], medium=medium)
        return vllm_events.BlockStored(
            block_hashes=[event.name],
            parent_block_hash=origin.parent,
            token_ids=list(origin.token_ids),
            block_size=self._block_size,
            lora_id=None,
            medium=medium,
            lora_name=origin.lora_name,
            extra_keys=[origin.extra_keys],
        )

    # --- in a worker's process ---

    @property
    def _copying(self) -> tier_worker.TierWorker:
        assert self._worker is not None, "vLLM called a worker's method in its scheduler"
        return self._worker

    @property
    def _plan(self) -> TierPlan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _Plan)
        return metadata.plan

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        model, cache = self._vllm_config.model_config, self._vllm_config.cache_config
        parallel, load = self._vllm_config.parallel_config, self._vllm_config.load_config
        self._copying.open(
            kv_caches,
            {
                "engine": f"vLLM {vllm.__version__}",
                "model": identify_model(model.model, model.revision, load.download_dir),
                "dtype": f"{model.dtype}, {model.quantization}, cache {cache.cache_dtype}",
                "overrides": str(model.hf_overrides or "none"),
                "block_size": str(self._block_size),
                "ranks": f"{parallel.rank} of {parallel.world_size}",
                "hashes": cache.prefix_caching_hash_algo,
            },
        )

    def bind_connector_metadata(self, connector_metadata: base.KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._copying.start_clock()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._copying.begin_copies(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a step begins when its loads have ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: blocks are copied whole, after the step."""

    def wait_for_save(self) -> None:
        self._copying.end_step(self._plan)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._copying.take_received() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._copying.take_failed_blocks()

    def build_connector_worker_meta(self) -> _Results:
        return _Results(self._copying.take_results())

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()


def check_support(vllm_config: Any, kv_cache_config: Any, *, is_shared: bool = False) -> None:
    """Raise ConfigError for what cannot have tiers, with the flag that serves it without."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    groups = kv_cache_config.kv_cache_groups if kv_cache_config is not None else ()
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    is_whole = all(
        "FullAttentionSpec" in [cls.__name__ for cls in type(group.kv_cache_spec).__mro__]
        for group in groups
    )
    if len(groups) > 1 or not is_whole:
        raise errors.ConfigError(connectors.explain_groups(vllm_config.model_config.model, kinds))
    fault = None
    if not cache.enable_prefix_caching:
        fault = "prefix caching is off (--no-enable-prefix-caching); it on"
    elif getattr(parallel, "decode_context_parallel_size", 1) > 1:
        fault = "--decode-context-parallel-size is more than 1; 1"
    elif parallel.world_size > 1 and is_shared:
        fault = "the tiers of several ranks are to be shared; --kvbm-sharing-workers 1"
    if fault:
        found, _, expected = fault.partition("; ")
        raise errors.ConfigError(
            f"DynamoConnector: expected {expected}, but {found}; serve it without tiers: --connector none, or no"
            " --kv-transfer-config"
        )


def name_blocks_alike(
    algorithm: str, environ: MutableMapping[str, str], *, is_lasting: bool
) -> None:
    """Have vLLM give a prompt's blocks the same names in every process, or others would find none of them.

    Names begin with a seed, and older releases (0.28) take a random one unless this variable is set, which they read
    after they have made the connector. With an algorithm that is not cryptographic, all releases take a random one, for
    else a tenant could make a block with the name of another's; `is_lasting` says whether that is worth a warning.
    """
    if _SEED in environ:
        return
    if not algorithm.startswith("sha256"):
        if is_lasting:
            _logger.warning(
                "with --prefix-caching-hash-algo %s blocks have other names in each process, so other workers and this"
                " one after a restart find none of them in their tiers: expected sha256, or %s with the same secret"
                " value for all",
                algorithm,
                _SEED,
            )
    elif not hasattr(kv_cache_utils, "resolve_none_hash_seed"):
        environ[_SEED] = "0"


def identify_model(name: str, revision: str | None, cache_dir: str | None) -> str:
    """Return a name of the content of a directory, or of a model of a hub: another one after each change of it."""
    directory = Path(name)
    if not directory.is_dir():
        found = huggingface_hub.try_to_load_from_cache(name, "config.json", cache_dir, revision)
        if not isinstance(found, str):  # it was loaded in another way
            return f"{name}@{revision}"
        directory = Path(found).parent
    return tier_setup.identify_model(directory)


def read_settings(extra: Mapping[str, Any]) -> tier_setup.TierConfig:
    """Return the settings of the tiers: from the environment, and over it those of vLLM's extra config.

    The latter are read as flags are, so a number may be one of JSON, too. Raises ConfigError for an option that is
    unknown or cannot be.
    """
    names = {each.name for each in dataclasses.fields(tier_setup.TierConfig)}
    unknown = sorted(name for name in extra if name.startswith("kvbm_") and name not in names)
    if unknown:
        raise errors.ConfigError(
            f"kv_connector_extra_config: unknown option {unknown[0]!r}; expected one of {', '.join(sorted(names))}"
        )
    flags = [
        f"--{name.replace('_', '-')}={','.join(value) if isinstance(value, list | tuple) else value}"
        for name, value in extra.items()
        if name in names and value not in (None, (), [])
    ]
    settings = config.load(tier_setup.TierConfig, prog="DynamoConnector", argv=flags)
    if not settings.storage_tiers:
        raise errors.ConfigError("--kvbm-storage-tiers: expected host_dram for --connector kvbm")
    if settings.kvbm_offload_ratio < 1:
        raise errors.ConfigError(
            "--kvbm-offload-ratio: expected 1 with vLLM, which does not say what it evicts"
        )
    return settings


if _faults := find_interface_faults(_USED_METHODS, dir(DynamoConnector)):
    raise errors.ConfigError(
        f"vLLM {vllm.__version__} has another KV connector interface than DynamoConnector knows: {'; '.join(_faults)};"
        " use a supported release, or serve without tiers: --connector none"
    )
# it is registered: vLLM finds a report's connector by its name
with contextlib.suppress(ValueError):
    factory.KVConnectorFactory.register_connector(
        DynamoConnector.__name__, __name__, DynamoConnector.__name__
    )
