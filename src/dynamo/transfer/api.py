"""The seam between who needs KV blocks of another worker and how they get there, in NIXL's life cycle.

    memory = agent.allocate(layout.num_bytes)                 # the pool itself, so that others can reach it
    agent.register(Region(memory=memory, layout=layout))      # torch.frombuffer(memory, ...) is the KV cache
    hello = agent.export_metadata()                           # bytes; travels on the request plane or in discovery
    peer = await agent.connect(hello_of_peer, deadline_s=5)   # once per peer, ahead of need
    transfer = agent.prepare(Operation.READ, peer, local_blocks, remote_blocks)
    try:
        await transfer.post(deadline_s=5, notification=b"pulled 7")
    finally:
        await transfer.release()

Promises:

- Nothing blocks the event loop: bytes are moved by threads, except for copies that take less time than asking one
  would. All callbacks come on the event loop's thread.
- Every wait has a deadline. A peer that dies, stalls, restarts or sends garbage is a TransferError within it.
- Blocks belong to the transfer from `post` until it is done. After success they hold the peer's bytes. After a
  failure the local blocks of a READ are *undefined*, to be computed anew, but they are quiet: when `post` has raised
  TransferError or `release` has returned, nothing writes to them any more. The remote blocks of a failed WRITE are
  undefined, and late bytes may reach them until the connection has ended: prefer READ.
- A notification is given to the peer after the bytes, never before, and never if they failed. When `post` or `notify`
  returns, the peer has heard it; if it fails, it may have.

What the seam does *not* promise: that the remote blocks still hold what the caller means. Their owner keeps them
until the reader's notification, or until a time limit that must be longer than the reader's deadline.

`agent.Agent` implements it over backends (`local`, `shm`, `nixl`, `tcp`), of which the best that both sides have is
taken when they connect. `tests/contract/test_transfer.py` runs one suite over all of them, between real processes.
"""

import asyncio
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dynamo.transfer.descriptors import Layout, Region


class Operation(enum.StrEnum):
    """Seen from who posts: READ pulls remote blocks into local ones, WRITE pushes."""

    READ = "read"
    WRITE = "write"


class State(enum.StrEnum):
    """Of a transfer."""

    PREPARED = "prepared"  # never posted
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a way to a peer can do; declared, so that nobody has to find out by failing."""

    can_read: bool
    can_write: bool
    can_notify: bool
    is_same_host: bool
    """Bytes are copied once, by the reader, and the peer's CPU takes no part."""


OnNotification = Callable[[str, bytes], None]
"""Called with the name that the sender gave itself, and what it said."""


class Peer(Protocol):
    """Another agent, connected."""

    @property
    def name(self) -> str:
        """What it calls itself; not unique, and not proof of anything."""
        ...

    @property
    def epoch(self) -> str:
        """Random, new with each start of the peer: two peers of one name differ in it."""
        ...

    @property
    def layout(self) -> Layout:
        """Of its pool."""
        ...

    @property
    def backend(self) -> str:
        """Which way was chosen: local, shm, nixl, tcp."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """Of this way."""
        ...


class Transfer(Protocol):
    """A prepared copy. It may be posted again when it is done, but runs once at a time."""

    @property
    def num_bytes(self) -> int:
        """To be moved."""
        ...

    @property
    def num_pieces(self) -> int:
        """Contiguous copies, after neighbours were merged."""
        ...

    def post(self, *, deadline_s: float, notification: bytes | None = None) -> asyncio.Future[None]:
        """Begin. Await it, or add a done callback.

        It fails with TransferError. Cancelling it stops the copy soon; `release` waits until it has.
        """
        ...

    def poll(self) -> State:
        """Where it is. Never waits."""
        ...

    async def release(self) -> None:
        """Stop if it runs, and wait until nothing touches the blocks. Idempotent; it cannot be posted again."""
        ...


class Agent(Protocol):
    """One per pool. Made with a name for people to read; it need not be unique."""

    @property
    def name(self) -> str:
        """As given."""
        ...

    def allocate(self, num_bytes: int) -> memoryview:
        """Zeroed memory that peers on this host can map; its pages are provided as they are first written.

        At most once per agent. Raises ConfigError if there is not so much.
        """
        ...

    def register(self, region: Region) -> None:
        """Open this memory to peers, once. Memory that did not come from `allocate` is not served by shm.

        Raises ConfigError if it is shorter than its layout.
        """
        ...

    async def start(self) -> None:
        """Be reachable, and hear notifications. After `register`. Raises ConfigError if an address is taken."""
        ...

    def export_metadata(self) -> bytes:
        """For a peer's `connect`; at most `descriptors.MAX_METADATA_BYTES`. After `start`."""
        ...

    async def connect(self, metadata: bytes, *, deadline_s: float) -> Peer:
        """Import a peer's metadata and open the best way to it. To be called ahead of need.

        A peer that is connected already, which its epoch tells, is given again; nothing is asked of it.

        Raises TransferError: not metadata, a layout that does not fit (both are named), no way in common, nobody there,
        the wrong cluster token, or an agent that has restarted since it exported this.
        """
        ...

    async def disconnect(self, peer: Peer) -> None:
        """Close what `connect` opened; transfers that run with this peer fail. Idempotent."""
        ...

    def prepare(
        self,
        operation: Operation,
        peer: Peer,
        local_blocks: Sequence[int],
        remote_blocks: Sequence[int],
    ) -> Transfer:
        """Plan the copy of each block to or from the one at the same place in the other list, neighbours merged.

        With unequal tensor-parallel sizes only the heads that both ranks hold are moved. Raises LocalProtocolError
        if the lists differ in length, a block is outside its pool, or written twice; TransferError if the peer has no
        heads of ours, or its way cannot do this operation.
        """
        ...

    async def notify(self, peer: Peer, message: bytes, *, deadline_s: float) -> None:
        """Give the peer's `on_notification` this message; returns when its agent has it. Raises TransferError."""
        ...

    async def close(self) -> None:
        """End everything and free descriptors and mappings. Memory from `allocate` lives on while somebody uses it."""
        ...
