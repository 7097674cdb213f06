"""The rows of requests that the console shows: how long each stage took, where the request was computed and why.

A row has no text: neither prompt nor answer is kept.
"""  # decider

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

MAX_PAGE = 200
State = Literal["preparing", "routing", "prefill", "streaming", "done", "failed"]


class RequestRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request, in flight or ended. Durations are in milliseconds; None: that stage was not reached."""

    id: str
    model: str
    endpoint: str
    request_type: str  # stream or unary
    state: State
    arrived_at: float  # seconds since 1970
    key: str = ""  # name of the API key
    error: str = ""
    prepare_ms: float | None = None  # tokens known, and admitted
    route_ms: float | None = None  # until a worker had it
    prefill_ms: float | None = None  # from there until the first token
    decode_ms: float | None = None  # from the first token to the last
    ttft_ms: float | None = None  # from arrival to the first token
    total_ms: float = 0.0  # until its end, or now
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tier_tokens: Mapping[str, int] = {}  # of the cached tokens, those of slower tiers
    output_tokens: int = 0
    worker: str = ""  # instance id, hexadecimal
    prefill_worker: str = ""  # the instance that computed the prompt, if it was another one
    num_migrations: int = 0
    decisions: Sequence[Any] = ()  # of the router, with the candidates' costs


class RequestQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which requests to list."""

    model: str = ""
    state: Literal["", "open", "done", "failed"] = ""
    offset: Annotated[int, msgspec.Meta(ge=0)] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_PAGE)] = 50

    @property
    def places(self) -> slice:
        """Return the places of the page among all that match."""
        return slice(self.offset, self.offset + self.limit)

    def matches(self, model: str, state: Literal["open", "done", "failed"]) -> bool:
        """Return whether a request of this state is listed, and of this model, by its label in lower case."""
        return self.model.lower() in ("", model) and self.state in ("", state)


class RequestPage(msgspec.Struct, frozen=True, kw_only=True):
    """Some of the requests, the latest first, and the number of all that match."""

    total: int
    num_open: int
    rows: Sequence[RequestRow]


class Stages(msgspec.Struct, frozen=True, kw_only=True):
    """When each stage of a request ended, on one steady clock; None: not yet, or never."""

    arrived_at: float
    prepared_at: float | None
    opened_at: float | None
    first_token_at: float | None
    ended_at: float | None


def state_of(stages: Stages, error: str) -> State:
    if stages.ended_at is not None:
        return "failed" if error else "done"
    if stages.first_token_at is not None:
        return "streaming"
    if stages.opened_at is not None:
        return "prefill"
    return "preparing" if stages.prepared_at is None else "routing"


def durations_ms(stages: Stages, now: float) -> dict[str, float | None]:
    """Return the duration of each stage by the name of its field; a stage that still runs lasts until `now`."""
    until = now if stages.ended_at is None else stages.ended_at
    first_at = stages.first_token_at
    return {
        "prepare_ms": _elapsed_ms(stages.arrived_at, stages.prepared_at or until),
        "route_ms": _elapsed_ms(stages.prepared_at, stages.opened_at or until),
        "prefill_ms": _elapsed_ms(stages.opened_at, first_at or until),
        "decode_ms": _elapsed_ms(first_at, until),
        "ttft_ms": None if first_at is None else _elapsed_ms(stages.arrived_at, first_at),
    }


def _elapsed_ms(begin: float | None, end: float) -> float | None:
    return None if begin is None else round(max(0.0, end - begin) * 1000, 3)
