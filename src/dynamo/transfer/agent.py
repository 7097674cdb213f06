"""A worker's transfer agent: it opens one pool to other agents, and connects to theirs by the best backend.

Each connected peer has threads of its own, so that one that stalls holds up no other; small copies on one host are made
at once, on the event loop.
"""

import asyncio
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from dynamo.base import errors
from dynamo.transfer import api, descriptors, memory, messages, plan
from dynamo.transfer.api import ThreadJob, TimeLimit

NUM_CONNECTING = 8  # peers to which we connect at the same time
NUM_THREADS = 4  # transfers with one peer that run at the same time, and so its connections
# A copy on this host up to this size takes less time (0.05 ms) than to hand it to a thread and back (0.1 to 0.2 ms).
QUICK_BYTES = 2 * 2**20
QUICK_PIECES = 128


class ConnectedPeer:
    """Another agent, connected. Its threads are started when they are first needed.

    `name` is the name that the peer gave itself: not unique, and no proof of anything. `epoch` is new with each start
    of the peer, so two peers of one name differ in it. `backend` is the name of the backend that reaches the peer.
    """

    def __init__(
        self, metadata: descriptors.Metadata, backend: api.Backend, route: api.TransferRoute
    ) -> None:
        self.name, self.epoch, self.layout = metadata.name, metadata.epoch, metadata.layout
        self.backend, self.is_same_host = backend.name, backend.is_same_host
        self.route = route
        self._threads = ThreadPoolExecutor(NUM_THREADS, f"transfer-{metadata.name}")
        self._jobs: list[ThreadJob[None]] = []
        self.is_closed = False

    def submit(self, work: Callable[[TimeLimit], None], *, deadline_s: float) -> ThreadJob[None]:
        """Run `work` in one of the peer's threads. Raises TransferError when the peer is closed."""
        if self.is_closed:
            raise errors.TransferError(f"{self.name} is not connected any more")
        job = ThreadJob(self._threads, work, deadline_s=deadline_s)
        self._jobs = [job, *(each for each in self._jobs if each.is_running)]
        return job

    async def close(self) -> None:
        """Stop the running jobs, then close the route, with its memory and connections."""
        self.is_closed = True
        for job in self._jobs:
            await job.stop()
        self._threads.shutdown(wait=False)
        self.route.close()


class PreparedTransfer:
    """A prepared copy. It may be posted again when it is done, but runs once at a time."""

    def __init__(
        self, operation: api.TransferOperation, peer: ConnectedPeer, copies: plan.Plan
    ) -> None:
        self._operation, self._peer, self._plan = operation, peer, copies
        self._job: ThreadJob[None] | None = None
        self._is_released = False
        self._quick_pattern = copies.pattern() if self._is_quick else None

    @property
    def num_bytes(self) -> int:
        """Bytes that the transfer moves."""
        return self._plan.num_bytes

    @property
    def num_pieces(self) -> int:
        """Contiguous copies that the transfer makes, after neighbours were merged."""
        return self._plan.num_pieces

    def post(self, *, deadline_s: float, notification: bytes | None = None) -> asyncio.Future[None]:
        """Begin the transfer. Await the future, or add a done callback.

        It fails with TransferError. Cancelling it stops the copy soon; `release` waits until it has.
        """
        if self._is_released or self.is_running:
            state = "released" if self._is_released else "running"
            raise errors.LocalProtocolError(f"cannot post a transfer that is {state}")
        check_message(notification or b"")
        quick = self._quick_pattern
        if quick is not None and notification is None and not self._peer.is_closed:
            self._job = None
            return self._move_now(quick, TimeLimit(deadline_s))
        self._job = self._peer.submit(self._work(notification), deadline_s=deadline_s)
        return self._job.outcome

    @property
    def is_running(self) -> bool:
        """True while the blocks belong to the transfer."""
        return self._job is not None and self._job.is_running

    async def release(self) -> None:
        """Stop a running transfer, and wait until nothing touches the blocks. Idempotent; it cannot be posted again."""
        self._is_released = True
        if self._job is not None:
            await self._job.stop()

    @property
    def _is_quick(self) -> bool:
        return (
            self._peer.is_same_host
            and self.num_bytes <= QUICK_BYTES
            and self.num_pieces <= QUICK_PIECES
        )

    def _move_now(self, pattern: plan.Pattern, limit: TimeLimit) -> asyncio.Future[None]:
        outcome = asyncio.get_running_loop().create_future()
        try:
            self._peer.route.move(self._operation, pattern, limit)
        except errors.TransferError as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(None)
        return outcome

    def _work(self, notification: bytes | None) -> Callable[[TimeLimit], None]:
        route, operation, copies = self._peer.route, self._operation, self._plan

        def work(limit: TimeLimit) -> None:
            route.move(operation, copies.pattern(), limit)
            if notification is not None:
                route.notify(notification, limit)

        return work


def check_message(message: bytes) -> None:
    """Check the length of a notification. Raises LocalProtocolError if no peer would accept it."""
    if len(message) > messages.MAX_NOTIFICATION_BYTES:
        raise errors.LocalProtocolError(
            f"expected a notification of at most {messages.MAX_NOTIFICATION_BYTES} bytes, got {len(message)}"
        )


class TransferAgent:
    """The transfer agent of one pool. Belongs to the event loop on which it is started.

    Its name is for people to read, and need not be unique.
    """

    def __init__(
        self,
        name: str,
        *,
        backends: Sequence[api.Backend],
        on_notification: api.OnNotification | None = None,
    ) -> None:
        self.name = name
        self.epoch = secrets.token_hex(16)
        self._backends = {backend.name: backend for backend in backends}
        self._on_notification = on_notification
        self._shared: memory.SharedMemory | None = None
        self._region: descriptors.Region | None = None
        self._metadata: descriptors.Metadata | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connecting, self._num_connecting = _connecting_threads(), 0
        self._peer_by_epoch: dict[str, ConnectedPeer] = {}
        self._is_closed = False

    def allocate(self, num_bytes: int) -> memoryview:
        """Return zeroed memory that peers on this host can map; its pages are provided as they are first written.

        At most once per agent. Raises ConfigError if there is too little memory.
        """
        if self._shared is not None:
            raise errors.LocalProtocolError(f"{self.name} has allocated its memory already")
        if not memory.CAN_SHARE or "shm" not in self._backends:
            return memory.private(num_bytes)
        self._shared = memory.SharedMemory(num_bytes)
        return self._shared.memory

    def register(self, region: descriptors.Region) -> None:
        """Open this memory to peers, once. Memory that did not come from `allocate` is not served by shm.

        Raises ConfigError if it is shorter than its layout.
        """
        if self._region is not None:
            raise errors.LocalProtocolError(f"{self.name} has registered its memory already")
        if fault := descriptors.find_fault(region.layout):
            raise errors.ConfigError(f"the KV cache has an impossible layout: {fault}")
        if region.memory.nbytes < region.layout.num_bytes or region.memory.readonly:
            raise errors.ConfigError(
                f"expected {region.layout.num_bytes} writable bytes to register, got {region.memory.nbytes}"
                f"{', read-only' if region.memory.readonly else ''}"
            )
        self._region = region

    async def start(self) -> None:
        """Listen for peers and their notifications. After `register`. Raises ConfigError if an address is taken."""
        if self._region is None:
            raise errors.LocalProtocolError("start: there is no registered memory; register first")
        self._loop = asyncio.get_running_loop()
        shared = self._shared
        exposed = api.Exposed(
            name=self.name,
            epoch=self.epoch,
            region=self._region,
            descriptor=shared.fd if shared and shared.memory is self._region.memory else None,
            deliver=self._deliver,
        )
        addresses = {name: backend.listen(exposed) for name, backend in self._backends.items()}
        self._metadata = descriptors.Metadata(
            name=self.name,
            epoch=self.epoch,
            host=memory.identify_host(),
            layout=self._region.layout,
            addresses={name: address for name, address in addresses.items() if address},
        )

    def export_metadata(self) -> bytes:
        """Return the metadata for a peer's `connect`, at most `descriptors.MAX_METADATA_BYTES`. After `start`."""
        return descriptors.encode(self._started())

    async def connect(self, metadata: bytes, *, deadline_s: float) -> ConnectedPeer:
        """Import a peer's metadata and connect by the best backend. To be called ahead of need.

        A peer of the same epoch that is connected already is returned again, without any message to it.

        Raises TransferError: not metadata, a layout that does not fit (both are named), no common backend, no answer,
        the wrong cluster token, or an agent that has restarted since it exported this.
        """
        local, remote = self._started(), descriptors.decode(metadata)
        if peer := self._peer_by_epoch.get(remote.epoch):
            return peer
        plan.check_fit(local.layout, remote.layout, remote.name)
        backend = self._backends[descriptors.choose_backend(local, remote)]
        target = api.PeerTarget(
            name=remote.name,
            epoch=remote.epoch,
            address=remote.addresses[backend.name],
            num_bytes=remote.layout.num_bytes,
        )
        self._num_connecting += 1
        try:
            job = ThreadJob(
                self._connecting,
                lambda limit: backend.connect(target, limit),
                deadline_s=deadline_s,
                discard=lambda route: route.close(),
            )
            new = ConnectedPeer(remote, backend, await job.result())
        finally:
            self._num_connecting -= 1
            if not self._num_connecting:  # the threads end; a pool would keep all that it ever had
                self._connecting.shutdown(wait=False)
                self._connecting = _connecting_threads()
        if self._is_closed:
            await new.close()
            raise errors.TransferError(f"{self.name} was closed while it connected")
        peer = self._peer_by_epoch.setdefault(new.epoch, new)
        if peer is not new:  # another task has connected meanwhile
            await new.close()
        return peer

    async def disconnect(self, peer: ConnectedPeer) -> None:
        """Close what `connect` opened; transfers that run with this peer fail. Idempotent."""
        if self._peer_by_epoch.get(peer.epoch) is peer:
            await self._peer_by_epoch.pop(peer.epoch).close()

    def prepare(
        self,
        operation: api.TransferOperation,
        peer: ConnectedPeer,
        local_blocks: Sequence[int],
        remote_blocks: Sequence[int],
    ) -> PreparedTransfer:
        """Plan the copy of each block to or from the one at the same place in the other list, neighbours merged.

        With unequal tensor-parallel sizes only the heads that both ranks hold are moved. Raises LocalProtocolError
        if the lists differ in length, a block is outside its pool, or written twice; TransferError if the peer has no
        heads of ours.
        """
        self._check_connected(peer)
        written = local_blocks if operation is api.TransferOperation.READ else remote_blocks
        if len(set(written)) < len(written):
            raise errors.LocalProtocolError("expected to write each block once, got one twice")
        layout = self._started().layout
        return PreparedTransfer(
            operation, peer, plan.make(layout, peer.layout, local_blocks, remote_blocks)
        )

    async def probe(self, peer: ConnectedPeer, num_bytes: int, *, deadline_s: float) -> None:
        """Copy that much of the peer's memory, at most all of it, and drop it. Raises TransferError if it is late."""
        self._check_connected(peer)
        num_bytes = min(num_bytes, peer.layout.num_bytes)
        job = peer.submit(lambda limit: peer.route.probe(num_bytes, limit), deadline_s=deadline_s)
        await job.outcome

    async def notify(self, peer: ConnectedPeer, message: bytes, *, deadline_s: float) -> None:
        """Pass a message to the peer's `on_notification`, and return when its agent has it. Raises TransferError."""
        self._check_connected(peer)
        check_message(message)
        job = peer.submit(lambda limit: peer.route.notify(message, limit), deadline_s=deadline_s)
        await job.outcome

    async def close(self) -> None:
        """End everything and free descriptors and mappings. Memory from `allocate` lives while it is referenced."""
        self._is_closed = True
        for peer in list(self._peer_by_epoch.values()):
            await self.disconnect(peer)
        for backend in self._backends.values():
            await asyncio.to_thread(backend.close)
        self._connecting.shutdown(wait=False, cancel_futures=True)
        if self._shared is not None:
            self._shared.close()

    def _started(self) -> descriptors.Metadata:
        if self._metadata is None:
            raise errors.LocalProtocolError(f"{self.name} is not started; await start() first")
        return self._metadata

    def _check_connected(self, peer: ConnectedPeer) -> None:
        if self._peer_by_epoch.get(peer.epoch) is not peer:
            raise errors.TransferError(f"{peer.name} is not connected (any more)")

    def _deliver(self, sender: str, message: bytes, limit: TimeLimit) -> None:
        """Pass a notification to the event loop and wait until it was handled. Called on a thread of a backend."""
        assert self._loop is not None
        if self._on_notification is None:
            raise errors.TransferError(f"{self.name} takes no notifications")
        was_handled = threading.Event()
        try:
            self._loop.call_soon_threadsafe(self._handle, sender, message, was_handled)
        except RuntimeError as error:  # its loop is closed
            raise errors.TransferError(f"{self.name} has ended") from error
        if not was_handled.wait(limit.remaining_s()):
            raise errors.TransferError(f"{self.name} is too busy to listen")

    def _handle(self, sender: str, message: bytes, was_handled: threading.Event) -> None:
        assert self._on_notification is not None
        try:
            self._on_notification(sender, message)
        finally:
            was_handled.set()


def _connecting_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(NUM_CONNECTING, "transfer-connect")
