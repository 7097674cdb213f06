"""The seam of a simulated worker: it is given requests, and says what it did, in virtual time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from dynamo.simulate.workload import Arrival


class Change(NamedTuple):
    """Blocks that can be reused from now on, or no more; neighbours in a chain, in its order."""

    is_stored: bool
    names: Sequence[int]


@dataclass(slots=True)
class Progress:
    """What a worker did at one moment."""

    first_outputs: list[tuple[str, int]] = field(default_factory=list)  # id, cached prompt tokens
    ended: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)  # of its cache, in order


class SimulatedWorker(Protocol):
    """One engine. Times are seconds, and never go back."""

    def submit(self, request_id: str, arrival: Arrival, now: float) -> None:
        """Take a request."""
        ...

    @property
    def next_time(self) -> float:
        """When it will have done something; infinity: never, as things stand."""
        ...

    def advance(self, now: float) -> Progress:
        """`next_time` has come."""
        ...
