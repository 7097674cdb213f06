"""The seam of a simulated worker: it is given requests, and says what it did, in virtual time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dynamo.simulate.workload import Arrival


@dataclass(slots=True)
class Progress:
    """What a worker did at one moment."""

    first_outputs: list[tuple[str, int]] = field(default_factory=list)  # id, cached prompt tokens
    ended: list[str] = field(default_factory=list)
    stored: list[Sequence[int]] = field(default_factory=list)  # chains, from their first block on
    removed: list[int] = field(default_factory=list)


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
