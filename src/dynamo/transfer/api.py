"""The seam of KV transfer: agents, peers and transfers, in NIXL's life cycle (prepare, post, release).

    memory = agent.allocate(layout.num_bytes)                 # the pool itself, so that others can reach it
    agent.register(Region(memory=memory, layout=layout))      # torch.frombuffer(memory, ...) is the KV cache
    hello = agent.export_metadata()                           # bytes; travels on the request plane or in discovery
    peer = await agent.connect(hello_of_peer, deadline_s=5)   # once per peer, ahead of need
    transfer = agent.prepare(TransferOperation.READ, peer, local_blocks, remote_blocks)
    try:
        await transfer.post(deadline_s=5, notification=b"pulled 7")
    finally:
        await transfer.release()

Promises:

- Nothing blocks the event loop: threads move the bytes, except for copies that take less time than a change of thread
  would. All callbacks come on the event loop's thread.
- Every wait has a deadline. A peer that dies, stalls, restarts or sends garbage is a TransferError within it.
- Blocks belong to the transfer from `post` until it is done. After success they hold the peer's bytes. After a
  failure the local blocks of a READ are *undefined*, to be computed anew, but they are quiet: when `post` has raised
  TransferError or `release` has returned, nothing writes to them any more. The remote blocks of a failed WRITE are
  undefined, and late bytes may reach them until the connection has ended: prefer READ.
- A notification is given to the peer after the bytes, never before, and never if they failed. When `post` or `notify`
  returns, the peer has heard it; if it fails, it may have.

The seam does *not* promise that the remote blocks still hold what the caller means. Their owner keeps them until the
reader's notification, or until a time limit that must be longer than the reader's deadline.

`agent.TransferAgent` keeps these promises over backends (`local`, `shm`, `nixl`, `tcp`), and selects the best one of
both sides when they connect. A `Backend` reaches other agents in one way, a `TransferRoute` is a connection to one of
them; their methods block, under a time limit, and are called by threads. Backends do not import each other.
`tests/contract/test_transfer.py` runs one suite over all of them, between real processes.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dynamo.transfer.descriptors import Region
from dynamo.transfer.job import TimeLimit
from dynamo.transfer.plan import Pattern


class TransferOperation(enum.StrEnum):
    """READ copies remote blocks into local ones, WRITE local blocks into remote ones, seen from the posting side."""

    READ = "read"
    WRITE = "write"


OnNotification = Callable[[str, bytes], None]
"""Called with the name that the sender gave itself, and its message."""


Deliver = Callable[[str, bytes, TimeLimit], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposed:
    """The memory and the callback that an agent opens to its peers."""

    name: str
    epoch: str
    region: Region
    descriptor: int | None
    """The file descriptor of the memory, if other processes can map it."""
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

    def move(self, operation: TransferOperation, pattern: Pattern, limit: TimeLimit) -> None:
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
    def is_same_host(self) -> bool:
        """Return whether bytes are copied once, by the posting side, without the peer's CPU."""
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
