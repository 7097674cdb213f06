"""What the parts of the router say to each other: who a worker is, and how much of a prompt it holds.

An *index* answers what each worker holds; a *policy* chooses by that and by load. Both are plain objects. Indexes:
`prefix_index` (exact, from the workers' events) and `approx_index` (a guess from earlier choices).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from dynamo.protocols import generate, model_card
from dynamo.runtime import requests


class Worker(NamedTuple):
    """One KV cache that a request can be sent to: an instance, and which of its data-parallel ranks."""

    instance_id: int
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class Overlaps:
    """How many leading blocks of one prompt each worker holds; a worker that holds none is left out.

    `device` counts the unbroken run from the first block. `host` and `disk` count the blocks of those tiers that go on
    where the faster tiers end, so that no block is counted twice.
    """

    device: Mapping[Worker, int] = field(default_factory=dict)
    host: Mapping[Worker, int] = field(default_factory=dict)
    disk: Mapping[Worker, int] = field(default_factory=dict)


class Index(Protocol):
    """Who holds what."""

    def find(self, sequence_hashes: Sequence[int]) -> Overlaps:
        """Of a prompt's blocks (`protocols.blocks.sequence_hashes`), what each worker holds.

        Sequence hashes, because equal names then mean equal prefixes; who counts active blocks needs them as well.
        """
        ...

    def remove_worker(self, worker: Worker) -> None:
        """It is gone, with all that it held. Returns fast, whatever it held."""
        ...


class Route(Protocol):
    """Gets the requests for one model to the instances of one endpoint."""

    def serve_by(self, cards: Mapping[int, model_card.ModelCard]) -> None:
        """These instances serve it from now on, as their cards say; told whenever that changes."""
        ...

    async def open(
        self,
        request: generate.Request,
        receiver: requests.Receiver,
        *,
        instance_id: int | None = None,
        among: Collection[int] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> requests.Stream:
        """Begin an answer at `instance_id`, or at one of our choice (`among` these, if given).

        Raises NoWorkers; Overloaded if all are too busy; WorkerLost if `instance_id` is given and cannot be reached.
        """
        ...
