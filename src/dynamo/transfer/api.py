"""The seam of KV transfer: agents, peers and transfers, in NIXL's life cycle (prepare, post, poll, release).

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

`agent.TransferAgent` implements it over backends (`local`, `shm`, `nixl`, `tcp`), and selects the best one of both
sides when they connect. `tests/contract/test_transfer.py` runs one suite over all of them, between real processes.
"""

import asyncio
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dynamo.transfer.descriptors import Layout, Region


class TransferOperation(enum.StrEnum):
    """READ copies remote blocks into local ones, WRITE local blocks into remote ones, seen from the posting side."""

    READ = "read"
    WRITE = "write"


class State(enum.StrEnum):
    """The state of a transfer."""

    PREPARED = "prepared"  # never posted
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can do, declared, so that a caller need not find out by failing."""

    can_read: bool
    can_write: bool
    can_notify: bool
    is_same_host: bool
    """Whether bytes are copied once, by the reader, without the peer's CPU."""


OnNotification = Callable[[str, bytes], None]
"""Called with the name that the sender gave itself, and its message."""


class Peer(Protocol):
    """Another agent, connected."""

    @property
    def name(self) -> str:
        """The name that the peer gave itself; not unique, and no proof of anything."""
        ...

    @property
    def epoch(self) -> str:
        """A random id, new with each start of the peer: two peers of one name differ in it."""
        ...

    @property
    def layout(self) -> Layout:
        """The layout of the peer's pool."""
        ...

    @property
    def backend(self) -> str:
        """The name of the backend that reaches the peer: local, shm, nixl or tcp."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the backend that reaches this peer."""
        ...


class Transfer(Protocol):
    """A prepared copy. It may be posted again when it is done, but runs once at a time."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the transfer moves."""
        ...

    @property
    def num_pieces(self) -> int:
        """Contiguous copies that the transfer makes, after neighbours were merged."""
        ...

    def post(self, *, deadline_s: float, notification: bytes | None = None) -> asyncio.Future[None]:
        """Begin the transfer. Await the future, or add a done callback.

        It fails with TransferError. Cancelling it stops the copy soon; `release` waits until it has.
        """
        ...

    def poll(self) -> State:
        """Return the transfer's state, without waiting."""
        ...

    async def release(self) -> None:
        """Stop a running transfer, and wait until nothing touches the blocks. Idempotent; it cannot be posted again."""
        ...


class Agent(Protocol):
    """The transfer agent of one pool. Its name is for people to read, and need not be unique."""

    @property
    def name(self) -> str:
        """The agent's name, as it was given."""
        ...

    def allocate(self, num_bytes: int) -> memoryview:
        """Return zeroed memory that peers on this host can map; its pages are provided as they are first written.

        At most once per agent. Raises ConfigError if there is too little memory.
        """
        ...

    def register(self, region: Region) -> None:
        """Open this memory to peers, once. Memory that did not come from `allocate` is not served by shm.

        Raises ConfigError if it is shorter than its layout.
        """
        ...

    async def start(self) -> None:
        """Listen for peers and their notifications. After `register`. Raises ConfigError if an address is taken."""
        ...

    def export_metadata(self) -> bytes:
        """Return the metadata for a peer's `connect`, at most `descriptors.MAX_METADATA_BYTES`. After `start`."""
        ...

    async def connect(self, metadata: bytes, *, deadline_s: float) -> Peer:
        """Import a peer's metadata and connect by the best backend. To be called ahead of need.

        A peer of the same epoch that is connected already is returned again, without any message to it.

        Raises TransferError: not metadata, a layout that does not fit (both are named), no common backend, no answer,
        the wrong cluster token, or an agent that has restarted since it exported this.
        """
        ...

    async def disconnect(self, peer: Peer) -> None:
        """Close what `connect` opened; transfers that run with this peer fail. Idempotent."""
        ...

    def prepare(
        self,
        operation: TransferOperation,
        peer: Peer,
        local_blocks: Sequence[int],
        remote_blocks: Sequence[int],
    ) -> Transfer:
        """Plan the copy of each block to or from the one at the same place in the other list, neighbours merged.

        With unequal tensor-parallel sizes only the heads that both ranks hold are moved. Raises LocalProtocolError
        if the lists differ in length, a block is outside its pool, or written twice; TransferError if the peer has no
        heads of ours, or its backend cannot do this operation.
        """
        ...

    async def notify(self, peer: Peer, message: bytes, *, deadline_s: float) -> None:
        """Pass a message to the peer's `on_notification`, and return when its agent has it. Raises TransferError."""
        ...

    async def close(self) -> None:
        """End everything and free descriptors and mappings. Memory from `allocate` lives while it is referenced."""
        ...
