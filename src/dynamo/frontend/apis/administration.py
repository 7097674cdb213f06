"""Operators' routes: clear the KV caches of all workers, and read or change the busy thresholds."""

from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo.frontend.admission import load_thresholds
from dynamo.frontend.apis.operation import (
    ACCESS_ERRORS,
    READ_ERRORS,
    ApiContext,
    Operation,
    add_request_id,
)
from dynamo.frontend.delivery import sse

_THRESHOLD_PATH = "/busy_threshold"


class ClearedWorker(msgspec.Struct, kw_only=True):
    """The reply of one worker."""

    name: str
    endpoint: str
    status: str
    response: dict[str, Any] | None


class ClearedCaches(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The replies of all workers; only a message if there are no workers."""

    cleared_workers: list[ClearedWorker] = []
    failed_workers: list[ClearedWorker] = []
    message: str = ""


class ModelThresholds(msgspec.Struct, kw_only=True):
    """The load from which a worker of this model counts as busy; null disables a threshold."""

    model: str
    active_decode_blocks_threshold: float | None
    active_prefill_tokens_threshold: int | None
    active_prefill_tokens_threshold_frac: float | None


class AllThresholds(msgspec.Struct, kw_only=True):
    """The thresholds of all models."""

    thresholds: list[ModelThresholds]


def operations(context: ApiContext) -> Sequence[Operation]:
    """Return the operations of this API."""

    async def change_thresholds(request: load_thresholds.ThresholdChange) -> dict[str, Any]:
        """Change them in this process and, if that succeeds, in the siblings at this port."""
        changed = await context.admission.thresholds.change(request)
        await context.peers.ask_all("POST", _THRESHOLD_PATH, sse.encode(request))
        return changed

    return (
        Operation(
            method="POST",
            path="/clear_kv_blocks",
            handler=add_request_id(context.cache_clearer.handle),
            summary="Clear the KV caches of all workers",
            tag="Operation",
            answer=ClearedCaches,
            errors=(*ACCESS_ERRORS, 408, 413),
        ),
        Operation(
            method="GET",
            path=_THRESHOLD_PATH,
            handler=add_request_id(context.admission.thresholds.show),
            summary="The load from which workers count as busy",
            tag="Operation",
            answer=AllThresholds,
            errors=ACCESS_ERRORS,
        ),
        Operation(
            method="POST",
            path=_THRESHOLD_PATH,
            handler=context.compute(load_thresholds.decode_change, change_thresholds),
            summary="Change it for one model; what is left out stays, and null is no threshold",
            tag="Operation",
            request=load_thresholds.ThresholdChange,
            answer=ModelThresholds,
            errors=READ_ERRORS,
            example={"active_decode_blocks_threshold": 0.9},
        ),
    )
