"""What the parts of the router say to each other: who a worker is, and how much of a prompt it holds.

An *index* answers what each worker holds; a *policy* chooses by that and by load. Both are plain objects. Indexes:
`prefix_index` (exact, from the workers' events) and `approx_index` (a guess from earlier choices).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


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
