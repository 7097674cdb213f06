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

A `Job` is such work in a thread as a future of the event loop. Its time limit holds while it waits for a thread as
well, and any other thread can end it earlier.
"""

import asyncio
import contextlib
import enum
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from dynamo.base import errors, tasks
from dynamo.transfer.descriptors import Region
from dynamo.transfer.plan import Pattern

MAX_DEADLINE_S = 600.0
T = TypeVar("T")


class TimeLimit:
    """The time limit of an operation. The working thread calls `remaining_s` often; any other may `cancel`."""

    def __init__(self, deadline_s: float) -> None:
        """Raises LocalProtocolError unless 0 < deadline_s <= MAX_DEADLINE_S."""
        if not 0 < deadline_s <= MAX_DEADLINE_S:
            raise errors.LocalProtocolError(
                f"deadline_s is {deadline_s}, expected at most {MAX_DEADLINE_S}, and more than 0"
            )
        self.deadline_s = deadline_s
        self._until = time.monotonic() + deadline_s
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._interrupt: Callable[[], None] | None = None

    def remaining_s(self) -> float:
        """Return the seconds left, more than 0. Raises TransferError when none are left, or after `cancel`."""
        if self._is_cancelled:
            raise errors.TransferError("cancelled")
        remaining_s = self._until - time.monotonic()
        if remaining_s <= 0:
            raise errors.TransferError(f"not complete within {self.deadline_s:g} s")
        return remaining_s

    def cancel(self) -> None:
        """End the work at its next `remaining_s`, and interrupt its wait."""
        with self._lock:
            self._is_cancelled = True
            if self._interrupt is not None:
                self._interrupt()

    @contextlib.contextmanager
    def interruptible(self, interrupt: Callable[[], None]) -> Iterator[None]:
        """Let `cancel` call `interrupt` within this context, to end a wait that does not call `remaining_s`."""
        with self._lock:
            self._interrupt = interrupt
        try:
            self.remaining_s()
            yield
        finally:
            with self._lock:
                self._interrupt = None


class BlockCopier(Protocol):
    """Copies blocks between an engine's own memory and host memory in which blocks follow one another.

    Used by several threads.
    """

    def move(
        self,
        operation: "TransferOperation",
        device_blocks: Sequence[int],
        host_blocks: Sequence[int],
        limit: TimeLimit,
    ) -> None:
        """WRITE copies blocks to host memory, READ from there. Raises TransferError at the time limit."""


class DeviceMemory(Protocol):
    """The blocks of an engine in its own memory: a GPU's, or host memory in which the layers lie apart."""

    def attach(self, host: memoryview) -> BlockCopier:
        """Return the copies from and to this host memory, whose length is that of whole blocks."""


class ThreadJob(Generic[T]):
    """A job that starts with its construction, on a running loop. Cancelling `outcome` stops the work soon."""

    def __init__(
        self,
        threads: ThreadPoolExecutor,
        work: Callable[[TimeLimit], T],
        *,
        deadline_s: float,
        discard: Callable[[T], None] = lambda _: None,
    ) -> None:
        """`discard` is called with a result that came too late. Raises LocalProtocolError for an invalid deadline, or
        TransferError if no thread can be started.
        """
        self._loop = asyncio.get_running_loop()
        self._limit, self._discard = TimeLimit(deadline_s), discard
        self._quiet = asyncio.Event()
        self.outcome: asyncio.Future[T] = self._loop.create_future()
        self.outcome.add_done_callback(self._on_outcome)
        try:
            with tasks.map_missing_thread():
                self._running = threads.submit(work, self._limit)
        except OSError as error:
            self._limit.cancel()  # the pool keeps the work for its next thread
            raise errors.TransferError(f"not begun: {error}") from error
        self._running.add_done_callback(self._on_thread)
        self._timer = self._loop.call_later(deadline_s, self._running.cancel)

    @property
    def is_running(self) -> bool:
        """True while a thread may still be at work."""
        return not self._quiet.is_set()

    async def result(self) -> T:
        """Return the outcome; it is discarded if it comes at the moment at which the caller is cancelled."""
        try:
            return await self.outcome
        except asyncio.CancelledError:
            if self.outcome.done() and not self.outcome.cancelled():
                self._drop(self.outcome)
            raise

    async def stop(self) -> None:
        """Stop the job, and return when no thread works on it any more; `outcome` is done then."""
        self._stop()
        await self._quiet.wait()
        if not self.outcome.cancelled():
            self.outcome.exception()  # so that asyncio does not warn of a failure that nothing awaits

    def _on_outcome(self, outcome: "asyncio.Future[T]") -> None:
        if outcome.cancelled():
            self._stop()

    def _stop(self) -> None:
        if not self._running.cancel():
            self._limit.cancel()

    def _on_thread(self, running: "Future[T]") -> None:
        try:
            self._loop.call_soon_threadsafe(self._finish, running)
        except RuntimeError:  # the loop has ended
            self._drop(running)

    def _finish(self, running: "Future[T]") -> None:
        self._timer.cancel()
        self._quiet.set()
        if self.outcome.done():
            self._drop(running)
        elif running.cancelled():
            self.outcome.set_exception(
                errors.TransferError(
                    f"not begun within {self._limit.deadline_s:g} s: other jobs were ahead of it"
                )
            )
        elif error := running.exception():
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(running.result())

    def _drop(self, running: "Future[T] | asyncio.Future[T]") -> None:
        if not running.cancelled() and running.exception() is None:
            self._discard(running.result())


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

    def probe(self, num_bytes: int, limit: TimeLimit) -> None:
        """Copy so many bytes of the peer's memory and drop them; nothing where bytes cross no network.

        Raises TransferError.
        """

    def notify(self, message: bytes, limit: TimeLimit) -> None:
        """Send a notification, and return when the peer's agent has handled it. Raises TransferError."""

    def close(self) -> None:
        """Close the connection, after the last `move` has returned. Idempotent."""


class Backend(Protocol):
    """A way to reach other agents; one object per agent."""

    @property
    def name(self) -> str:
        """The key of the agent's address in its metadata."""

    @property
    def is_same_host(self) -> bool:
        """Return whether bytes are copied once, by the posting side, without the peer's CPU."""

    def listen(self, exposed: Exposed) -> str | None:
        """Open the memory to peers; return the address, None if they cannot reach it this way. Raises ConfigError."""

    def connect(self, target: PeerTarget, limit: TimeLimit) -> TransferRoute:
        """Connect to a peer, after `listen`. Raises TransferError."""

    def close(self) -> None:
        """Stop listening; operations of peers fail. The owner of a route closes it."""
