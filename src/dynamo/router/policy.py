"""The seam between who decides and who asks: what a policy sees of a prompt and of each worker, and what it returns.

A policy is a plain object: no clock (`now` is an argument), no chance of its own (`draw` is injected), no I/O. It sees
*live* loads: `active.ActiveSequences` keeps one `Load` per worker up to date, so that a decision copies nothing.

`selection.Selector` joins the index, the loads, a policy and the queue; the doers (the frontend's router, the standalone
router, the simulator) talk to that alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from dynamo.router import api

Draw = Callable[[], float]  # a number in [0, 1), as random.Random(seed).random gives it


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What may be known of a request when its worker is chosen.

    `sequence_hashes` name the full blocks with all before them (`protocols.blocks.sequence_hashes`).
    """

    num_tokens: int
    block_size: int
    local_hashes: Sequence[int]
    sequence_hashes: Sequence[int]
    expected_output_tokens: int = 0  # 0: unknown
    priority: float = 0.0  # seconds by which it may pass others in the queue
    deadline: float | None = None  # on the clock of `now`: when its first token is wanted
    pinned: api.Worker | None = None  # the caller has chosen already


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a worker said of itself in its model card; 0: unknown."""

    total_blocks: int = 0
    max_num_batched_tokens: int = 8192


@dataclass(slots=True)
class Load:
    """What the router believes a worker is doing: predicted from what was sent there and what came back."""

    capacity: Capacity = field(default_factory=Capacity)
    num_requests: int = 0
    active_blocks: int = 0  # distinct blocks of the requests in flight
    prefill_tokens: int = 0  # prompt tokens to compute of requests that have not answered yet


class Shares(NamedTuple):
    """How much of one prompt a worker has, or will have, when the prompt is computed there.

    `credit` is in blocks: a block in device memory counts 1, in host memory 0.75, on disk 0.25; so does a block that an
    earlier request in flight will have computed by then. `new_active` blocks would become active besides.
    """

    credit: Mapping[api.Worker, float]
    new_active: Mapping[api.Worker, int]


class Policy(Protocol):
    """How a worker is chosen."""

    def choose(
        self,
        prompt: Prompt,
        overlaps: api.Overlaps,
        loads: Mapping[api.Worker, Load],
        now: float,
    ) -> api.Worker:
        """One of `loads`, which is not empty."""
        ...
