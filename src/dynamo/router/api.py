"""The seams of the router: what an index and a policy get and return.

An *index* says how many leading blocks of a prompt each worker has cached: `prefix_index` exactly, from the workers' KV
events; `prefix_index` as a guess from earlier decisions. A *policy* selects a worker by that and by load. Both are
plain objects: no clock (`now` is an argument), no randomness of their own (`draw` is injected), no I/O. A policy reads
*live* loads, which `active_sequences` keeps up to date, so that a decision copies nothing. `selection.Selector` joins
index, loads, policy and queue; it is the only object that callers use.
"""  # decider

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

from dynamo.protocols import blocks, kv_events
from dynamo.router.worker_load import WorkerLoad

Draw = Callable[[], float]  # a random number in [0, 1), as random.Random(seed).random


class Worker(NamedTuple):
    """One KV cache that a request can be sent to: an instance and one of its data-parallel ranks."""

    instance_id: int
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class OverlapScores:
    """The number of leading blocks of one prompt that each worker has cached, by tier, the fastest tier first.

    The device tier counts the unbroken run from the first block. Each slower tier counts the blocks that continue
    where the faster tiers of the same worker end, so that no block counts twice. Workers and tiers without blocks
    are left out.
    """

    by_tier: Mapping[kv_events.Tier, Mapping[Worker, int]] = field(default_factory=dict)


class Index(Protocol):
    """The blocks that workers have cached, from their events (prefix) or from what was sent to them (approximate)."""

    def find_matches(self, sequence_hashes: Sequence[int]) -> OverlapScores:
        """Return the overlap of a prompt, given by its sequence hashes, with each worker's cache."""
        ...

    def remove_worker(self, worker: Worker) -> None:
        """Forget a worker and its blocks, in a time that does not depend on their number."""
        ...


SelectWorker = Callable[["Prompt", "Candidates", float], "Decision"]


@dataclass(frozen=True, slots=True)
class PolicyOverride:
    """The policy of one request, and its weights of the tiers, in place of those of the router."""

    select_worker: SelectWorker
    tier_weights: Mapping[kv_events.Tier, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What is known of a request when its worker is selected. `sequence_hashes` name its full blocks."""

    num_tokens: int
    block_size: int
    sequence_hashes: Sequence[int]
    priority: float = 0.0  # seconds of earlier arrival in the router's queue
    deadline: float | None = None  # when its first token is due, on the clock of `now`
    pinned: Worker | None = None  # the worker that the caller or the session has selected
    allowed_instances: frozenset[int] | None = None  # None: all
    excluded_instances: frozenset[int] = frozenset()  # those that join later are allowed
    is_restricted: bool = False  # no instance outside `allowed_instances` can ever serve it
    dp_rank: int | None = None  # the rank that the caller asks for, of any instance; None: any
    is_prefilled: bool = False  # computed by a prefill worker: only room to decode matters
    override: PolicyOverride | None = None

    @property
    def is_unrestricted(self) -> bool:
        """Return True if every worker may be selected."""
        is_limited = self.allowed_instances is not None or self.excluded_instances
        return not is_limited and self.dp_rank is None

    def allows(self, worker: Worker) -> bool:
        """Return True if this worker may be selected."""
        return (
            (self.allowed_instances is None or worker.instance_id in self.allowed_instances)
            and worker.instance_id not in self.excluded_instances
            and (self.dp_rank is None or worker.dp_rank == self.dp_rank)
        )

    @classmethod
    def from_tokens(
        cls, packed_tokens: bytes, block_size: int, seed: int = blocks.SEED
    ) -> "Prompt":
        """Make the prompt of packed tokens (`blocks.pack`); `seed` as returned by `blocks.seed_of`."""
        local_hashes = blocks.local_hashes(packed_tokens, block_size, seed)
        return cls(
            num_tokens=blocks.count(packed_tokens),
            block_size=block_size,
            sequence_hashes=blocks.sequence_hashes(local_hashes),
        )


@dataclass(frozen=True, slots=True)
class Candidates:
    """The workers that may be selected for one prompt. A worker absent from `cached` or `in_flight` counts as 0.

    `cached` counts the prompt's blocks that need not be computed: 1 for a block in device memory, its tier's weight
    for one in a slower tier. `in_flight` counts its leading blocks that belong to requests which run or wait at the
    worker: by the time this prompt is computed, they will be cached too.
    """

    loads: Mapping[Worker, WorkerLoad]
    cached: Mapping[Worker, float]
    in_flight: Mapping[Worker, int]

    def overlap(self, worker: Worker) -> float:
        """Return the number of the prompt's blocks that the worker will not have to compute."""
        return max(self.cached.get(worker, 0), self.in_flight.get(worker, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadEstimate:
    """What a request would meet at the worker that it would be sent to."""

    num_new: int  # tokens of its prompt that the worker would have to compute
    block_size: int = 1  # tokens of a KV block
    num_ahead: float = 0.0  # tokens of other prompts that would be computed before
    num_steps_ahead: float = 0.0  # the same in full steps (max_num_batched_tokens) of the worker
    num_requests: int = 0  # in flight at the worker
    share_in_use: float | None = None  # of its blocks, with this prompt's; None: total is unknown
    tokens_per_s: float = 0.0  # speed of prefill
    copies_per_s: float = 0.0  # tokens of KV that it imports per second; 0: unknown


class PotentialLoad(NamedTuple):
    """The load that a worker would have with one more request, and the number of those that it has."""

    prefill_tokens: int
    decode_blocks: int
    num_requests: int


class Decision(NamedTuple):
    """The selected worker, and how many blocks of the prompt it is expected not to compute."""

    worker: Worker
    overlap_blocks: float


class RoutingPolicy(Protocol):
    """Selects the worker of each request by the overlap and load of the candidates. A decider, without I/O."""

    uses_cache: ClassVar[bool]  # False: `cached` and `in_flight` of its candidates are empty
    waits_for_worker: ClassVar[bool]  # True: a request waits until the selected worker has room

    def select_worker(self, prompt: Prompt, candidates: Candidates, now: float) -> Decision:
        """Select one of `candidates.loads`, which is not empty."""
        ...
