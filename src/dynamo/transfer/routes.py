"""The seam behind the agent: a backend reaches other agents in one way, a route is a connection to one of them.

All methods block, under a time limit, and are called by threads; `agent` keeps them off the event loop. The
implementations are in `backends`, and do not import each other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dynamo.transfer import api, memory
from dynamo.transfer.descriptors import Region
from dynamo.transfer.job import TimeLimit
from dynamo.transfer.plan import Pattern

Deliver = Callable[[str, bytes, TimeLimit], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposed:
    """The memory and the callback that an agent opens to its peers."""

    name: str
    epoch: str
    region: Region
    shared: memory.SharedMemory | None
    """The memory file of the region, if other processes can map it."""
    deliver: Deliver
    """Handles a notification (sender, message), and returns when that is done. Raises TransferError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTarget:
    """The agent to connect to."""

    name: str
    epoch: str
    address: str
    num_bytes: int
    """The size of its pool."""


class TransferRoute(Protocol):
    """A connection to one peer. Several threads may use it at once."""

    def move(self, operation: api.TransferOperation, pattern: Pattern, limit: TimeLimit) -> None:
        """Copy all pieces of the pattern. Raises TransferError; then nothing is being copied any more."""
        ...

    def notify(self, message: bytes, limit: TimeLimit) -> None:
        """Send a notification, and return when the peer's agent has handled it. Raises TransferError."""
        ...

    def close(self) -> None:
        """Close the connection, after the last `move` has returned. Idempotent."""
        ...


class Backend(Protocol):
    """A way to reach other agents; one object per agent."""

    @property
    def name(self) -> str:
        """The key of the agent's address in its metadata."""
        ...

    @property
    def capabilities(self) -> api.Capabilities:
        """The capabilities of all routes of this backend."""
        ...

    def listen(self, exposed: Exposed) -> str | None:
        """Open the memory to peers; return the address, None if they cannot reach it this way. Raises ConfigError."""
        ...

    def connect(self, target: PeerTarget, limit: TimeLimit) -> TransferRoute:
        """Connect to a peer, after `listen`. Raises TransferError."""
        ...

    def close(self) -> None:
        """Stop listening; operations of peers fail. The owner of a route closes it."""
        ...
