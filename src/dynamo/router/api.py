"""What the parts of the router say to each other: who a worker is, and how much of a prompt it holds.

An *index* answers what each worker holds; a *policy* chooses by that and by load. Both are plain objects. Indexes:
`prefix_index` (exact, from the workers' events) and `approx_index` (a guess from earlier choices).

The seam of a policy: what it sees of a prompt and of the workers, and what it answers.

A policy is a plain object: no clock (`now` is an argument), no chance of its own (`draw` is injected), no I/O. It sees
*live* loads, which `active.ActiveSequences` keeps up to date, so that a decision copies nothing. `selection.Selector`
joins index, loads, policy and queue; who asks for decisions talks to that alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

from dynamo.protocols import blocks
from dynamo.router.worker_load import Load


class Worker(NamedTuple):
    """One KV cache that a request can be sent to: an instance, and which of its data-parallel ranks."""

    instance_id: int
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class OverlapScores:
    """How many leading blocks of one prompt each worker holds; a worker that holds none is left out.

    `device` counts the unbroken run from the first block. `host` and `disk` count the blocks of those tiers that go on
    where the faster tiers end, so that no block is counted twice.
    """

    device: Mapping[Worker, int] = field(default_factory=dict)
    host: Mapping[Worker, int] = field(default_factory=dict)
    disk: Mapping[Worker, int] = field(default_factory=dict)


class Index(Protocol):
    """Who holds what."""

    def find(self, sequence_hashes: Sequence[int]) -> OverlapScores:
        """Of a prompt's blocks (`protocols.blocks.sequence_hashes`), what each worker holds.

        Sequence hashes, because equal names then mean equal prefixes; who counts active blocks needs them as well.
        """
        ...

    def remove_worker(self, worker: Worker) -> None:
        """It is gone, with all that it held. Returns fast, whatever it held."""
        ...


Draw = Callable[[], float]  # a number in [0, 1): random.Random(seed).random


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What may be known of a request when its worker is chosen. `sequence_hashes` name its full blocks."""

    num_tokens: int
    block_size: int
    sequence_hashes: Sequence[int]
    priority: float = 0.0  # above 0: sooner (see `queue`)
    deadline: float | None = None  # when its first token is wanted, on the clock of `now`
    pinned: Worker | None = None  # the caller has chosen already
    among: frozenset[int] | None = None  # instances that may be chosen; None: all
    is_bound: bool = False  # no other instance could answer it, whatever happens to those
    dp_rank: int | None = None  # the rank that the caller wants, of whichever worker; None: any
    is_prefilled: bool = False  # another worker has computed it: only room to decode is wanted

    @property
    def is_free(self) -> bool:
        """Whether every worker may be chosen."""
        return self.among is None and self.dp_rank is None

    def allows(self, worker: Worker) -> bool:
        """Whether this one may."""
        return (self.among is None or worker.instance_id in self.among) and (
            self.dp_rank is None or worker.dp_rank == self.dp_rank
        )

    @classmethod
    def from_tokens(
        cls,
        packed: bytes,
        block_size: int,
        *,
        seed: int = blocks.SEED,
        priority: float = 0.0,
        deadline: float | None = None,
        pinned: Worker | None = None,
    ) -> "Prompt":
        """The prompt of these tokens (`blocks.pack`); `seed` as `blocks.seed_of`."""
        return cls(
            num_tokens=blocks.count(packed),
            block_size=block_size,
            sequence_hashes=blocks.sequence_hashes(blocks.local_hashes(packed, block_size, seed)),
            priority=priority,
            deadline=deadline,
            pinned=pinned,
        )


@dataclass(frozen=True, slots=True)
class View:
    """The workers, as one prompt sees them. A worker that is left out of `cached` or `in_flight` has none.

    `cached` counts the prompt's blocks that need not be computed: 1 for a block in device memory, less for those of
    slower tiers. `in_flight` counts its leading blocks that belong to requests which run there now or wait there: by
    the time that this prompt is computed, they will be cached too.
    """

    loads: Mapping[Worker, Load]
    cached: Mapping[Worker, float]
    in_flight: Mapping[Worker, int]

    def overlap(self, worker: Worker) -> float:
        """Blocks of the prompt that this worker will not have to compute."""
        return max(self.cached.get(worker, 0), self.in_flight.get(worker, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadEstimate:
    """What a request would find at the worker that it would go to."""

    num_new: int  # tokens of its prompt that would have to be computed there
    num_ahead: float = 0.0  # tokens of other prompts that would be computed before
    num_steps_ahead: float = 0.0  # the same in full steps of that worker
    num_requests: int = 0
    share_in_use: float | None = (
        None  # of its blocks, with this prompt's; None: it does not say how many it has
    )
    tokens_per_s: float = 0.0  # at which prompts are computed there
    copies_per_s: float = (
        0.0  # tokens whose keys and values it fetches from elsewhere; 0: not known
    )


class Decision(NamedTuple):
    """Where a request goes, and how many blocks of its prompt are expected not to be computed there."""

    worker: Worker
    overlap_blocks: float


class Policy(Protocol):
    """How a worker is chosen."""

    looks: ClassVar[
        bool
    ]  # whether it wants to know what is cached; False: its view says nothing of it
    waits: ClassVar[
        bool
    ]  # whether a request waits for the chosen worker's room, or only while no worker has any

    def choose(self, prompt: Prompt, view: View, now: float) -> Decision:
        """One of `view.loads`, of which there is at least one."""
        ...
