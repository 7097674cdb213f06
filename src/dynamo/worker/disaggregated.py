"""What a worker is in a deployment that computes prompts apart: prefill, decode, or all in one.

The engine must be able to lend blocks (`api.KvTransferPeer`); one that is not serves alone, whatever others do.
"""

import base64
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from dynamo.base import errors
from dynamo.disagg import (
    estimated,
    handoff,
    metrics,
    policy,
    prefill_queue,
    prefill_workers,
    ticket_queue,
    ticket_taker,
    tickets,
)
from dynamo.engine import api
from dynamo.observability import metrics as registries
from dynamo.protocols import instances, kv_transfer, model_card
from dynamo.runtime import component
from dynamo.worker import card, host, settings


@dataclasses.dataclass(frozen=True, slots=True)
class Role:
    """The engine as it is to be hosted, and what lives beside it."""

    engine: api.Engine
    beside: Sequence[host.LifecycleHook] = ()


def prepare(
    engine: api.Engine,
    worker: settings.WorkerConfig,
    runtime: component.DistributedRuntime,
    registry: registries.Registry,
    *,
    model: str,
    directory: Path,
) -> Role:
    """The engine in its role. Raises ConfigError if it cannot have it."""
    transfer = engine.capabilities.kv_transfer
    if transfer is None:
        if worker.is_prefill or worker.disaggregation_mode == "decode":
            raise errors.ConfigError(
                "this engine moves no KV blocks between workers: start it without --disaggregation-mode"
            )
        return Role(engine)
    if worker.is_prefill or worker.disaggregation_mode == "decode":
        transfer.enable_export()
    if worker.disaggregation_mode == "agg":
        return Role(engine)
    checksums = _checksums(card.describe_files(directory))
    join = _join_queue(worker, runtime, model, checksums)
    if worker.is_prefill:
        return Role(engine, _takers(worker, runtime, registry, join))
    is_ours = _recognizer(worker, model, checksums)
    return _decode(engine, transfer, worker, runtime, registry, join, model=model, is_ours=is_ours)


def together(worker: settings.WorkerConfig) -> settings.WorkerConfig:
    """For several workers in one process: they compute all by themselves. Raises ConfigError for another role."""
    if worker.is_prefill or worker.disaggregation_mode == "decode":
        raise errors.ConfigError(
            "--num-workers: expected 1 with --disaggregation-mode prefill or decode, or agg for several"
        )
    return dataclasses.replace(worker, disaggregation_mode="agg")


def marked(
    made: model_card.ModelCard, worker: settings.WorkerConfig, engine: api.Engine
) -> model_card.ModelCard:
    """Its card with its role, and with what decode workers must know of it; the engine has started."""
    transfer = engine.capabilities.kv_transfer
    metadata = transfer.transfer_metadata if transfer is not None else None
    if worker.is_prefill and metadata is not None:
        data = {
            kv_transfer.METADATA_KEY: base64.b64encode(metadata).decode(),
            tickets.FROM_QUEUE: worker.prefill_queue == "queue",
        }
        runtime = msgspec.structs.replace(made.runtime_config, runtime_data=data)
        kind = model_card.WorkerType.PREFILL
        return msgspec.structs.replace(made, worker_type=kind, runtime_config=runtime)
    if worker.disaggregation_mode == "decode":
        return msgspec.structs.replace(made, worker_type=model_card.WorkerType.DECODE)
    return made


def _takers(
    worker: settings.WorkerConfig,
    runtime: component.DistributedRuntime,
    registry: registries.Registry,
    join: ticket_queue.Join,
) -> Sequence[host.LifecycleHook]:
    if worker.prefill_queue == "direct":
        return ()
    counts = metrics.TakerMetrics(registry)
    return (ticket_taker.TicketTaker(join, runtime.requests, runtime.instance_id, counts),)


def _decode(
    engine: api.Engine,
    transfer: api.KvTransferPeer,
    worker: settings.WorkerConfig,
    runtime: component.DistributedRuntime,
    registry: registries.Registry,
    join: ticket_queue.Join,
    *,
    model: str,
    is_ours: Callable[[model_card.ModelCard], bool],
) -> Role:
    endpoint = worker.prefill_endpoint_name
    counts = metrics.DisaggMetrics(registry)
    workers = prefill_workers.PrefillWorkers(endpoint, runtime.discovery, transfer, is_ours=is_ours)
    asked = runtime.client(endpoint)
    queue: prefill_queue.PrefillQueue
    beside: tuple[host.LifecycleHook, ...] = ()
    if worker.prefill_queue == "queue":
        ours = worker.endpoint_name
        claims = instances.EndpointName(ours.namespace, ours.component, tickets.CLAIMS)
        queue = ticket_queue.TicketQueue(
            join, lambda: workers.connected, asked, runtime.requests, claims.path, counts
        )
        beside = (queue,)
    else:
        queue = prefill_queue.DirectQueue(lambda: workers.connected, asked, counts.retries.inc)
    made = handoff.Handoff(
        engine,
        queue,
        workers,
        counts,
        registry=runtime.discovery,
        model=model,
        decider=_policy(worker),
        prefill_timeout_s=worker.prefill_timeout_s,
    )
    return Role(made, beside)


def _policy(worker: settings.WorkerConfig) -> policy.Policy:
    if worker.disagg_policy == "estimated":
        return estimated.Estimated()
    longest = worker.max_local_prefill_length
    return policy.Lengths(
        policy.Limits(
            max_local_prefill_length=policy.MAX_LOCAL_PREFILL_LENGTH
            if longest is None
            else longest,
            max_prefill_queue_size=worker.max_prefill_queue_size,
        )
    )


def _join_queue(
    worker: settings.WorkerConfig,
    runtime: component.DistributedRuntime,
    model: str,
    checksums: dict[str, str],
) -> ticket_queue.Join:
    name = tickets.queue_name(worker.prefill_endpoint_name, model, checksums)
    return functools.partial(runtime.services.work_queue, name, tickets.BOUNDS)


def _recognizer(
    worker: settings.WorkerConfig, model: str, checksums: dict[str, str]
) -> Callable[[model_card.ModelCard], bool]:
    """Tells whether a card is of our model, equal by name and by its files, and of a worker that we can ask."""

    def is_ours(other: model_card.ModelCard) -> bool:
        takes = other.runtime_config.runtime_data.get(tickets.FROM_QUEUE) is True
        return (
            other.display_name == model
            and _checksums(other.files) == checksums
            and (takes or worker.prefill_queue == "direct")
        )

    return is_ours


def _checksums(files: dict[str, model_card.ModelFile]) -> dict[str, str]:
    return {name: file.checksum for name, file in files.items()}
