"""What a worker is in a deployment that computes prompts apart: prefill, decode, or all in one.

The engine must be able to lend blocks (`api.RemotePrefill`); one that is not serves alone, whatever others do.
"""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from dynamo.base import errors
from dynamo.disagg import estimated, handoff, metrics, policy, prefill_queue, prefill_workers
from dynamo.engine import api
from dynamo.observability import metrics as registries
from dynamo.protocols import kv_transfer, model_card
from dynamo.runtime import component
from dynamo.worker import card, settings


def prepare(
    engine: api.Engine,
    worker: settings.WorkerConfig,
    runtime: component.DistributedRuntime,
    registry: registries.Registry,
    *,
    model: str,
    directory: Path,
) -> api.Engine:
    """The engine in its role. Raises ConfigError if it cannot have it."""
    if not isinstance(engine, api.RemotePrefill):
        if worker.is_prefill or worker.disaggregation_mode == "decode":
            raise errors.ConfigError(
                "this engine moves no KV blocks between workers: start it without --disaggregation-mode"
            )
        return engine
    if worker.is_prefill or worker.disaggregation_mode == "decode":
        engine.open_blocks()
    if worker.is_prefill or worker.disaggregation_mode == "agg":
        return engine
    is_ours = _recognizer(model, directory)
    return _decode(engine, worker, runtime, registry, model=model, is_ours=is_ours)


def marked(
    made: model_card.ModelCard, worker: settings.WorkerConfig, engine: api.Engine
) -> model_card.ModelCard:
    """Its card with its role, and with what decode workers must know of it; the engine has started."""
    metadata = engine.transfer_metadata if isinstance(engine, api.RemotePrefill) else None
    if worker.is_prefill and metadata is not None:
        data = {kv_transfer.METADATA: base64.b64encode(metadata).decode()}
        runtime = msgspec.structs.replace(made.runtime_config, runtime_data=data)
        kind = model_card.WorkerType.PREFILL
        return msgspec.structs.replace(made, worker_type=kind, runtime_config=runtime)
    if worker.disaggregation_mode == "decode":
        return msgspec.structs.replace(made, worker_type=model_card.WorkerType.DECODE)
    return made


def _decode(
    engine: Any,
    worker: settings.WorkerConfig,
    runtime: component.DistributedRuntime,
    registry: registries.Registry,
    *,
    model: str,
    is_ours: Callable[[model_card.ModelCard], bool],
) -> api.Engine:
    endpoint = worker.prefill_endpoint_name
    counts = metrics.DisaggMetrics(registry)
    workers = prefill_workers.PrefillWorkers(endpoint, runtime.discovery, engine, is_ours=is_ours)
    queue = prefill_queue.DirectQueue(
        lambda: workers.connected, runtime.client(endpoint), counts.retries.inc
    )
    return handoff.Handoff(
        engine,
        queue,
        workers,
        counts,
        registry=runtime.discovery,
        model=model,
        decider=_policy(worker),
        prefill_timeout_s=worker.prefill_timeout_s,
    )


def _policy(worker: settings.WorkerConfig) -> policy.Policy:
    if worker.disagg_policy == "estimated":
        return estimated.Estimated()
    return policy.Lengths(
        policy.Limits(
            max_local_prefill_length=worker.max_local_prefill_length,
            max_prefill_queue_size=worker.max_prefill_queue_size,
        )
    )


def _recognizer(model: str, directory: Path) -> Callable[[model_card.ModelCard], bool]:
    """Tells whether a card is of our model: equal by name, and by its files."""
    ours = _checksums(card.describe_files(directory))
    return lambda other: other.display_name == model and _checksums(other.files) == ours


def _checksums(files: dict[str, model_card.ModelFile]) -> dict[str, str]:
    return {name: file.checksum for name, file in files.items()}
