"""The observation of one interval: the traffic of a model, the load of its pools, and the workers that there are.

A reading is one of three things. `Fresh` holds what was measured, and zero requests is such a measurement. `Missing`
means that nothing could be read, `Stale` that the last good reading is too old. Only a fresh reading may change the
number of workers. Times are seconds of the planner's clock.
"""  # decider

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from dynamo.protocols import load

T = TypeVar("T")
_PARTS_OF_BUCKET = 4


@dataclass(frozen=True, slots=True)
class Fresh(Generic[T]):
    """A measurement of this interval."""

    value: T


@dataclass(frozen=True, slots=True)
class Missing:
    """No measurement; `reason` says what could not be read."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stale:
    """The last measurement is `age_s` seconds old, more than the planner trusts."""

    age_s: float
    reason: str = ""


class Replicas(NamedTuple):
    """Numbers of workers. In aggregated mode all workers are in the decode pool."""

    prefill: int
    decode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The requests of one interval. Means are None where no request could tell them."""

    num_requests: float  # that arrived
    isl: float | None = None  # input sequence length: mean prompt tokens
    osl: float | None = None  # output sequence length: mean tokens of an answer
    ttft_s: float | None = None
    itl_s: float | None = None
    duration_s: float | None = None
    hit_rate: float = 0.0  # cached prompt tokens over prompt tokens
    prompt_lens: Mapping[float, float] = field(default_factory=dict)  # requests by prompt tokens


def spread_buckets(counts: Mapping[float, float]) -> dict[float, float]:
    """Return numbers of requests by length from those of a histogram's buckets, by upper edge; each spread evenly."""
    lens: dict[float, float] = {}
    lower = 0.0
    for upper in sorted(edge for edge in counts if edge < math.inf):
        step = (upper - lower) / _PARTS_OF_BUCKET
        for part in range(_PARTS_OF_BUCKET):
            if counts[upper]:
                lens[lower + (part + 0.5) * step] = counts[upper] / _PARTS_OF_BUCKET
        lower = upper
    if counts.get(math.inf):
        lens[max(lower, 1.0)] = lens.get(max(lower, 1.0), 0.0) + counts[math.inf]
    return lens


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedLoad:
    """The load of one worker, or of one of its data-parallel ranks."""

    waiting_tokens: int = 0  # prompt tokens that are still to be computed
    passes: tuple[load.ForwardPass, ...] = ()  # some of the interval, the newest last


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """The load of a pool of workers at the end of the interval."""

    kv_usage: float = 0.0  # active KV blocks over all, mean of the workers
    num_running: int = 0
    num_waiting: int = 0  # requests without their first token that no step has computed yet
    waiting_tokens: int = 0  # prompt tokens that are still to be computed
    workers: tuple[ReportedLoad, ...] = ()  # of these; a queue before them is no part of it
    is_reported: bool = True  # False: no worker has reported lately, so all of this is unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """The workers of a pool, as the connector knows them."""

    num_ready: int = 0
    starting_since: tuple[float, ...] = ()  # when each start was ordered, the oldest first
    num_draining: int = 0
    startup_s: float | None = None  # measured, from the order to readiness
    num_failed: int = 0  # starts that ended without serving, since the last observation
    failure: str = ""  # why the last start failed, if the connector knows
    role_change_s: float | None = None  # for a worker of the other pool to come; None: it cannot

    @property
    def num_starting(self) -> int:
        """Return the number of workers that were ordered and are not ready."""
        return len(self.starting_since)

    @property
    def num_ordered(self) -> int:
        """Return the number of workers that are ready or will be."""
        return self.num_ready + self.num_starting

    @property
    def num_billed(self) -> int:
        """Return the number of workers that hold GPUs, those that drain included."""
        return self.num_ordered + self.num_draining


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """All that a policy may look at."""

    at: float
    interval_s: float
    traffic: Fresh[Traffic] | Missing | Stale
    prefill: PoolState = field(default_factory=PoolState)
    decode: PoolState = field(default_factory=PoolState)
    prefill_load: PoolLoad = field(default_factory=PoolLoad)
    decode_load: PoolLoad = field(default_factory=PoolLoad)
    num_open: int = 0  # requests in the frontends, between arrival and end

    @property
    def num_ordered(self) -> Replicas:
        """Return the workers of both pools that are ready or will be."""
        return Replicas(self.prefill.num_ordered, self.decode.num_ordered)
