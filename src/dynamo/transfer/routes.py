"""The seam behind the agent: a backend is a way to reach other agents, a route is that way to one of them.

Everything here blocks, under a limit, and is called by threads; `agent` keeps it off the event loop. Implementations
are in `backends`, and are strangers to each other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dynamo.transfer import api, memory
from dynamo.transfer.descriptors import Region
from dynamo.transfer.limit import Limit
from dynamo.transfer.plan import Pattern

Deliver = Callable[[str, bytes, Limit], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposed:
    """What an agent opens to its peers."""

    name: str
    epoch: str
    region: Region
    shared: memory.SharedMemory | None
    """Where the region's memory lies, if others can map it."""
    deliver: Deliver
    """Takes a notification (sender, message); returns when it has been heard. Raises TransferError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Whom to connect to."""

    name: str
    epoch: str
    address: str
    num_bytes: int
    """Of its pool."""


class Route(Protocol):
    """To one peer. Several threads may use it at once."""

    def move(self, operation: api.Operation, pattern: Pattern, limit: Limit) -> None:
        """Copy all its pieces. Raises TransferError; then nothing is being copied any more."""
        ...

    def notify(self, message: bytes, limit: Limit) -> None:
        """Returns when the peer's agent has it. Raises TransferError."""
        ...

    def close(self) -> None:
        """After the last `move` has returned. Idempotent."""
        ...


class Backend(Protocol):
    """One per agent."""

    @property
    def name(self) -> str:
        """The key of our address in the metadata."""
        ...

    @property
    def capabilities(self) -> api.Capabilities:
        """Of all its routes."""
        ...

    def listen(self, exposed: Exposed) -> str | None:
        """Let peers reach this; gives our address, None if it cannot be reached this way. Raises ConfigError."""
        ...

    def connect(self, target: Target, limit: Limit) -> Route:
        """After `listen`. Raises TransferError."""
        ...

    def close(self) -> None:
        """Be unreachable; what peers are doing with us fails. Routes are closed by who has them."""
        ...
