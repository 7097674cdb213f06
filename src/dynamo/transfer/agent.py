"""A worker's agent: it opens one pool to others, and finds the best way to theirs."""

import asyncio
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from dynamo.base import errors
from dynamo.transfer import api, choice, descriptors, host, memory, plan, routes
from dynamo.transfer.job import Job
from dynamo.transfer.limit import Limit
from dynamo.transfer.peer import ConnectedPeer, PreparedTransfer, check_message

NUM_CONNECTING = 8  # peers to which we connect at the same time


class Agent:
    """`api.Agent` over these backends. Belongs to the loop on which it is started."""

    def __init__(
        self,
        name: str,
        *,
        backends: Sequence[routes.Backend],
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
        self._connecting = ThreadPoolExecutor(NUM_CONNECTING, "transfer-connect")
        self._peer_by_epoch: dict[str, ConnectedPeer] = {}
        self._is_closed = False

    def allocate(self, num_bytes: int) -> memoryview:
        if self._shared is not None:
            raise errors.LocalProtocolError(f"{self.name} has allocated its memory already")
        if not memory.CAN_SHARE or "shm" not in self._backends:
            return memory.private(num_bytes)
        self._shared = memory.SharedMemory(num_bytes)
        return self._shared.memory

    def register(self, region: descriptors.Region) -> None:
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
        if self._region is None:
            raise errors.LocalProtocolError("start: there is no registered memory; register first")
        self._loop = asyncio.get_running_loop()
        exposed = routes.Exposed(
            name=self.name,
            epoch=self.epoch,
            region=self._region,
            shared=self._shared_region(),
            deliver=self._deliver,
        )
        addresses = {name: backend.listen(exposed) for name, backend in self._backends.items()}
        self._metadata = descriptors.Metadata(
            name=self.name,
            epoch=self.epoch,
            host=host.identify(),
            layout=self._region.layout,
            addresses={name: address for name, address in addresses.items() if address},
        )

    def export_metadata(self) -> bytes:
        return descriptors.encode(self._started())

    async def connect(self, metadata: bytes, *, deadline_s: float) -> ConnectedPeer:
        mine, theirs = self._started(), descriptors.decode(metadata)
        if known := self._peer_by_epoch.get(theirs.epoch):
            return known
        plan.check_fit(mine.layout, theirs.layout, theirs.name)
        backend = self._backends[choice.choose_backend(mine, theirs)]
        target = routes.Target(
            name=theirs.name,
            epoch=theirs.epoch,
            address=theirs.addresses[backend.name],
            num_bytes=theirs.layout.num_bytes,
        )
        job = Job(
            self._connecting,
            lambda limit: backend.connect(target, limit),
            deadline_s=deadline_s,
            discard=lambda route: route.close(),
        )
        return await self._keep(ConnectedPeer(theirs, backend, await job.result()))

    async def disconnect(self, peer: api.Peer) -> None:
        if self._peer_by_epoch.get(peer.epoch) is peer:
            await self._peer_by_epoch.pop(peer.epoch).close()

    def prepare(
        self,
        operation: api.Operation,
        peer: api.Peer,
        local_blocks: Sequence[int],
        remote_blocks: Sequence[int],
    ) -> PreparedTransfer:
        reached = self._reached(peer)
        can = reached.capabilities
        is_read = operation is api.Operation.READ
        if not (can.can_read if is_read else can.can_write):
            raise errors.TransferError(f"{operation} by {reached.backend} cannot be done")
        written = local_blocks if is_read else remote_blocks
        if len(set(written)) < len(written):
            raise errors.LocalProtocolError("expected to write each block once, got one twice")
        layout = self._started().layout
        return PreparedTransfer(
            operation, reached, plan.make(layout, reached.layout, local_blocks, remote_blocks)
        )

    async def notify(self, peer: api.Peer, message: bytes, *, deadline_s: float) -> None:
        reached = self._reached(peer)
        check_message(message)
        await reached.submit(
            lambda limit: reached.route.notify(message, limit), deadline_s=deadline_s
        ).outcome

    async def close(self) -> None:
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

    def _shared_region(self) -> memory.SharedMemory | None:
        """Ours, if that is what was registered."""
        assert self._region is not None
        is_ours = self._shared is not None and self._shared.memory is self._region.memory
        return self._shared if is_ours else None

    def _reached(self, peer: api.Peer) -> ConnectedPeer:
        reached = self._peer_by_epoch.get(peer.epoch)
        if reached is not peer:
            raise errors.TransferError(f"{peer.name} is not connected (any more)")
        return reached

    async def _keep(self, made: ConnectedPeer) -> ConnectedPeer:
        """This one, or that which another task has connected meanwhile."""
        if self._is_closed:
            await made.close()
            raise errors.TransferError(f"{self.name} was closed while it connected")
        kept = self._peer_by_epoch.setdefault(made.epoch, made)
        if kept is not made:
            await made.close()
        return kept

    def _deliver(self, sender: str, message: bytes, limit: Limit) -> None:
        """On a thread of a backend."""
        assert self._loop is not None
        if self._on_notification is None:
            raise errors.TransferError(f"{self.name} takes no notifications")
        heard = threading.Event()
        try:
            self._loop.call_soon_threadsafe(self._hear, sender, message, heard)
        except RuntimeError as error:  # its loop is closed
            raise errors.TransferError(f"{self.name} has ended") from error
        if not heard.wait(limit.remaining_s()):
            raise errors.TransferError(f"{self.name} is too busy to listen")

    def _hear(self, sender: str, message: bytes, heard: threading.Event) -> None:
        assert self._on_notification is not None
        try:
            self._on_notification(sender, message)
        finally:
            heard.set()
