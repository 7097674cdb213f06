"""The request trace: a row for each request that has ended, with what it takes to play the same load again.

A row (schema `dynamo.request.trace.v1`) has no text: the prompt is told by the names of its blocks
(`protocols.blocks`), so prefixes that requests share can be seen, and Mooncake's format be made. Requests with several
prompts or answers are not told, because a replay could not ask them.
"""

from typing import Any

import msgspec

from dynamo.base import clock
from dynamo.frontend import metrics
from dynamo.observability import row_writer
from dynamo.protocols import blocks

SCHEMA = "dynamo.request.trace.v1"
_MILLISECONDS = 1000.0


class Ended(msgspec.Struct, frozen=True):
    """What the writer's thread makes a row of."""

    request: metrics.RequestMeter
    ended_ms: int  # since 1970


class RequestTrace:
    """Observes requests."""

    def __init__(self, writer: row_writer.RowWriter[Ended], time: clock.Clock) -> None:
        self._writer = writer
        self._clock = time

    def ended(self, request: metrics.RequestMeter) -> None:
        """It is over."""
        asked = request.request
        if asked is None or request.num_prompts > 1 or asked.sampling_options.n > 1:
            return
        row = Ended(request, int(self._clock.wall() * _MILLISECONDS))
        self._writer.put(row, len(asked.token_ids))

    def close(self) -> None:
        """Write what waits. Blocks."""
        self._writer.close()


def encode(row: Ended) -> bytes:
    """One line."""
    request = row.request
    total_ms = _since(request.arrived_at, request.ended_at) or 0.0
    told = {
        "request_id": request.arrival.told_id,
        "model": request.model.label,
        "request_received_ms": row.ended_ms - round(total_ms),
        "input_tokens": request.request.prompt_len if request.request else 0,
        "cached_tokens": request.num_cached,
        "output_tokens": request.num_tokens,
        "ttft_ms": _since(request.arrived_at, request.first_token_at),
        "total_time_ms": total_ms,
        "error_type": request.error_type or None,
        "replay": _replay(request),
    }
    return msgspec.json.encode(
        {
            "schema": SCHEMA,
            "event_type": "request_end",
            "event_time_unix_ms": row.ended_ms,
            "request": told,
        }
    )


def _replay(request: metrics.RequestMeter) -> dict[str, Any] | None:
    size = request.model.block_size
    if request.request is None or not size:
        return None
    seed = blocks.seed_of(request.request.lora_name)
    local = blocks.local_hashes(request.request.token_ids, size, seed)
    return {
        "trace_block_size": size,
        "input_length": request.request.prompt_len,
        "input_sequence_hashes": blocks.sequence_hashes(local),
    }


def _since(begin: float, end: float | None) -> float | None:
    return None if end is None else round((end - begin) * _MILLISECONDS, 3)
