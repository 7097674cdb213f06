"""What routers tell each other, so that each knows the load that the others make (`--router-replica-sync`).

    subject   active_sequences_events

A router ignores its own events; one that joins late asks for the `AddRequest`s of what is in flight.
"""

import msgspec

SUBJECT = "active_sequences_events"


class AddRequest(msgspec.Struct, frozen=True, tag="add_request", kw_only=True, omit_defaults=True):
    """A request was sent to a worker. `overlap` counts the blocks of its prompt that need not be computed."""

    token_sequence: tuple[int, ...]  # sequence hashes of its full blocks
    isl: int  # prompt tokens
    overlap: float = 0.0
    is_prefill_completed: bool = False  # elsewhere, or before this was told


class MarkPrefillCompleted(msgspec.Struct, frozen=True, tag="mark_prefill_completed"):
    """Its first output came."""


class Free(msgspec.Struct, frozen=True, tag="free"):
    """It ended."""


class ActiveSequenceEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What happened to which request, and who says it."""

    request_id: str
    worker_id: int
    data: AddRequest | MarkPrefillCompleted | Free
    router_id: str
    dp_rank: int = 0
