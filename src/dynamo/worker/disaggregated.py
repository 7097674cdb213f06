"""The role of a worker in a deployment with prefill workers: prefill, decode, or both in one (aggregated).

Prefill and decode need an engine that moves KV blocks (`api.KvTransferPeer`); any other engine serves aggregated.
"""

import base64
import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.disagg import (
    config,
    metrics,
    peer_prefixes,
    policy,
    prefill_queue,
    prefill_workers,
    remote_prefill,
    shared_queue,
)
from dynamo.engine import api
from dynamo.observability import metrics as registries
from dynamo.protocols import instances, kv_transfer, model_card, wire
from dynamo.runtime import client, component, discovery
from dynamo.worker import card, host, settings

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerRole:
    """The engine as it is to be hosted, and the hooks that live as long as its host."""

    engine: api.Engine
    hooks: Sequence[host.LifecycleHook] = ()


def prepare_role(
    engine: api.Engine,
    worker: settings.WorkerConfig,
    runtime: component.DistributedRuntime,
    registry: registries.Registry,
    clock: clocks.Clock,
    *,
    model: str,
    directory: Path,
) -> WorkerRole:
    """Prepare an engine, before it starts, for the worker's role. Raises ConfigError if it cannot have that role."""
    transfer = engine.capabilities.kv_transfer
    is_split = worker.is_prefill or worker.is_decode
    if transfer is None:
        if is_split:
            raise errors.ConfigError(
                "this engine moves no KV blocks between workers: start it without --disaggregation-mode and"
                " --is-prefill-worker, or, with vLLM, with nixl among the names of --connector"
            )
        if worker.kv_peer_prefixes:
            raise errors.ConfigError(
                "--kv-peer-prefixes: this engine moves no KV blocks: leave it out"
            )
        return WorkerRole(engine)
    if is_split or worker.kv_peer_prefixes:
        transfer.enable_export()
    if worker.kv_peer_prefixes:
        engine = _with_peer_prefixes(engine, runtime, registry, clock)
    if worker.disaggregation_mode == "agg":
        return WorkerRole(engine)
    files = card.describe_files(directory, worker.custom_jinja_template)
    weights = card.fingerprint_weights(directory)
    own = model_card.ModelCard(
        display_name=model,
        source_path=str(directory),
        context_length=0,
        kv_cache_block_size=0,
        files=files,
        weights=weights,
    )
    name = shared_queue.queue_name(
        worker.prefill_endpoint_name, model, own.checksums | {"weights": weights}
    )
    join = functools.partial(runtime.services.work_queue, name, shared_queue.BOUNDS)
    if not worker.is_prefill:
        is_usable = _prefill_worker_filter(worker, own)
        workers = prefill_workers.PrefillWorkers(
            worker.prefill_endpoint_name,
            runtime.discovery,
            transfer,
            clock,
            is_usable=is_usable,
            publish=functools.partial(publish_unreachable, runtime, worker.endpoint_name),
        )
        return _decode_role(engine, workers, worker, runtime, registry, clock, join, model=model)
    decoders = DecodeWorkerCheck(worker.endpoint_for("generate"), runtime.discovery, own)
    if worker.prefill_queue == "direct":
        return WorkerRole(engine, (decoders,))
    counters = metrics.PrefillJobMetrics(registry)
    consumer = shared_queue.PrefillJobConsumer(
        join, runtime.requests, runtime.instance_id, counters, clock
    )
    return WorkerRole(engine, (consumer, decoders))


def require_aggregated(worker: settings.WorkerConfig) -> settings.WorkerConfig:
    """Return the options for several workers in one process. Raises ConfigError for any role but aggregated."""
    if worker.is_prefill or worker.is_decode:
        raise errors.ConfigError(
            "--num-workers: expected 1 with --disaggregation-mode prefill or decode, or agg for several"
        )
    return dataclasses.replace(worker, disaggregation_mode="agg")


def add_role(
    model: model_card.ModelCard, worker: settings.WorkerConfig, engine: api.Engine
) -> model_card.ModelCard:
    """Return the model card with the worker's role, and the metadata of its started engine for decode workers."""
    transfer = engine.capabilities.kv_transfer
    if transfer is None:
        return model
    data = {**model.runtime_config.runtime_data}
    if worker.kv_peer_prefixes and transfer.transfer_metadata is not None:
        data[kv_transfer.PREFIXES_KEY] = True
        data[kv_transfer.METADATA_KEY] = base64.b64encode(transfer.transfer_metadata).decode()
    if worker.max_local_prefill_length is not None and worker.disaggregation_mode != "agg":
        data[kv_transfer.LOCAL_LENGTH_KEY] = worker.max_local_prefill_length
    kind = model.worker_type
    if worker.is_prefill and transfer.transfer_metadata is not None:
        kind = model_card.WorkerType.PREFILL
        data[kv_transfer.METADATA_KEY] = base64.b64encode(transfer.transfer_metadata).decode()
        data[shared_queue.TAKES_JOBS] = worker.prefill_queue == "queue"
    elif worker.is_decode:
        kind = model_card.WorkerType.DECODE
    elif not worker.is_prefill and worker.disaggregation_mode != "agg":
        data[kv_transfer.IMPORTS_KEY] = True
    if not engine.capabilities.imports_choices:
        data[kv_transfer.CHOICES_KEY] = False
    runtime = msgspec.structs.replace(model.runtime_config, runtime_data=data)
    return msgspec.structs.replace(model, worker_type=kind, runtime_config=runtime)


async def publish_unreachable(
    runtime: component.DistributedRuntime,
    endpoint: instances.EndpointName,
    instance_ids: frozenset[int],
) -> None:
    """Put the prefill workers from which this worker cannot copy on its model card. Raises Conflict without a card."""

    def change(card: model_card.ModelCard) -> model_card.ModelCard:
        config = card.runtime_config
        data = config.runtime_data | {kv_transfer.UNREACHABLE_KEY: sorted(instance_ids)}
        config = msgspec.structs.replace(config, runtime_data=data)
        return msgspec.structs.replace(card, runtime_config=config)

    key = f"{instances.CARDS}{endpoint.path}/{runtime.instance_id:x}"
    await runtime.records.change(key, lambda value: model_card.change_card(value, change))


def _with_peer_prefixes(
    engine: api.Engine,
    runtime: component.DistributedRuntime,
    registry: registries.Registry,
    clock: clocks.Clock,
) -> api.Engine:
    """Return the engine behind one that copies prefixes from other workers. Raises ConfigError if it cannot."""
    if not engine.capabilities.exports_prefixes:
        raise errors.ConfigError(
            "--kv-peer-prefixes: this engine exports no cached prefixes; leave it out, or use native or mocker"
        )

    def open_client(path: str) -> client.EndpointClient:
        return runtime.client(instances.EndpointName(*path.split("/")))

    counters = metrics.PeerPrefixMetrics(registry)
    return peer_prefixes.PeerPrefixEngine(engine, open_client, counters, clock)


def _decode_role(
    engine: api.Engine,
    workers: prefill_workers.PrefillWorkers,
    worker: settings.WorkerConfig,
    runtime: component.DistributedRuntime,
    registry: registries.Registry,
    clock: clocks.Clock,
    join: shared_queue.JoinQueue,
    *,
    model: str,
) -> WorkerRole:
    counters = metrics.DisaggMetrics(registry)
    prefill_client = runtime.client(worker.prefill_endpoint_name)
    queue: prefill_queue.PrefillQueue
    hooks: tuple[host.LifecycleHook, ...] = ()
    if worker.prefill_queue == "queue":
        own = worker.endpoint_name
        leases = instances.EndpointName(own.namespace, own.component, shared_queue.LEASE_ENDPOINT)
        queue = shared_queue.SharedQueue(
            join,
            lambda: workers.connected,
            prefill_client,
            runtime.requests,
            leases.path,
            counters,
            clock,
        )
        hooks = (queue,)
    else:
        queue = prefill_queue.DirectQueue(
            lambda: workers.connected,
            prefill_client,
            clock,
            counters.retries.inc,
            own_id=runtime.instance_id,
        )
    remote = remote_prefill.RemotePrefillEngine(
        engine,
        queue,
        workers,
        counters,
        follow_limits=functools.partial(config.follow_limits, runtime.discovery, model),
        prefill_policy=_prefill_policy(worker),
        prefill_timeout_s=worker.prefill_timeout_s,
        clock=clock,
    )
    if worker.kv_peer_prefixes:
        remote.offer_prefixes(worker.endpoint_name.path, runtime.instance_id)
    return WorkerRole(remote, hooks)


def _prefill_policy(worker: settings.WorkerConfig) -> policy.PrefillPolicy:
    if worker.disagg_policy == "estimated":
        return policy.EstimatePolicy()
    longest = worker.max_local_prefill_length
    return policy.LengthPolicy(
        policy.LocalPrefillLimits(
            max_local_prefill_length=policy.MAX_LOCAL_PREFILL_LENGTH
            if longest is None
            else longest,
            max_prefill_queue_size=worker.max_prefill_queue_size,
        )
    )


def _prefill_worker_filter(
    worker: settings.WorkerConfig, own: model_card.ModelCard
) -> Callable[[model_card.ModelCard], bool]:
    """Return a predicate for cards of our model, with its files and weights, and of a worker that our queue reaches."""

    def is_usable(candidate: model_card.ModelCard) -> bool:
        if candidate.display_name != own.display_name:
            return False
        if not _can_pair(own, candidate, f"a prefill worker of {own.display_name!r} is not used"):
            return False
        takes_jobs = candidate.runtime_config.runtime_data.get(shared_queue.TAKES_JOBS) is True
        return takes_jobs or worker.prefill_queue == "direct"

    return is_usable


class DecodeWorkerCheck:
    """A lifecycle hook of a prefill worker: a line in its log names each decode worker that will not use it."""

    def __init__(
        self,
        endpoint: instances.EndpointName,
        registry: discovery.Discovery,
        own: model_card.ModelCard,
    ) -> None:
        """`endpoint` is that of the decode workers; `own` has this worker's model, files and weights."""
        self._prefix = f"{instances.CARDS}{endpoint.path}/"
        self._registry, self._own = registry, own
        self._tasks = tasks.Tasks()

    async def start(self) -> None:
        """Begin to follow discovery."""
        self._tasks.start("compare decode workers", self._watch())

    async def leave(self) -> None:
        """Do nothing: it takes no requests."""

    async def close(self) -> None:
        """End."""
        await self._tasks.close()

    async def _watch(self) -> None:
        async for change in self._registry.watch(self._prefix):
            if isinstance(change, discovery.Put):
                with contextlib.suppress(*wire.DECODE_ERRORS):  # its frontend names it
                    record = msgspec.json.decode(change.value, type=model_card.CardRecord)
                    if record.card_json.display_name == self._own.display_name:
                        _can_pair(self._own, record.card_json, "a decode worker does not use us")


def _can_pair(own: model_card.ModelCard, other: model_card.ModelCard, complaint: str) -> bool:
    """Return whether two workers can compute parts of one answer; log the complaint, with the reason, if not."""
    difference = own.find_difference(other)
    if difference is not None:
        paths = other.source_path, own.source_path
        _logger.warning("%s: %s in %s differs from ours in %s", complaint, difference, *paths)
    return difference is None
