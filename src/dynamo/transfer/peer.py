"""Another agent as we hold it, and the transfers that are prepared with it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from dynamo.base import errors
from dynamo.transfer import api, descriptors, messages, plan, routes
from dynamo.transfer.job import Job
from dynamo.transfer.limit import Limit

NUM_THREADS = 4  # transfers with one peer that run at the same time, and so its connections
# A copy on this host up to here takes less time than to ask a thread for it and to be told (0.05 ms; 0.1 to 0.2 ms).
QUICK_BYTES = 2 * 2**20
QUICK_PIECES = 128


class ConnectedPeer:
    """`api.Peer`. Its threads are its own, started when they are first needed: one that stalls holds up nobody else."""

    def __init__(
        self, metadata: descriptors.Metadata, backend: routes.Backend, route: routes.Route
    ) -> None:
        self.name, self.epoch, self.layout = metadata.name, metadata.epoch, metadata.layout
        self.backend, self.capabilities = backend.name, backend.capabilities
        self.route = route
        self._threads = ThreadPoolExecutor(NUM_THREADS, f"transfer-{metadata.name}")
        self._jobs: list[Job[None]] = []
        self.is_closed = False

    def submit(self, work: Callable[[Limit], None], *, deadline_s: float) -> Job[None]:
        """Run this in one of its threads. Raises TransferError when it is closed."""
        if self.is_closed:
            raise errors.TransferError(f"{self.name} is not connected any more")
        job = Job(self._threads, work, deadline_s=deadline_s)
        self._jobs = [job, *(other for other in self._jobs if other.is_running)]
        return job

    async def close(self) -> None:
        """Stop what runs, then let go of its memory and connections."""
        self.is_closed = True
        for job in self._jobs:
            await job.stop()
        self._threads.shutdown(wait=False)
        self.route.close()


class PreparedTransfer:
    """`api.Transfer`."""

    def __init__(self, operation: api.Operation, peer: ConnectedPeer, copies: plan.Plan) -> None:
        self._operation, self._peer, self._plan = operation, peer, copies
        self._job: Job[None] | None = None
        self._outcome: asyncio.Future[None] | None = None
        self._is_released = False
        self._quick_pattern = copies.pattern() if self._is_quick else None

    @property
    def num_bytes(self) -> int:
        return self._plan.num_bytes

    @property
    def num_pieces(self) -> int:
        return self._plan.num_pieces

    def post(self, *, deadline_s: float, notification: bytes | None = None) -> asyncio.Future[None]:
        if self._is_released or self.poll() is api.State.RUNNING:
            is_what = "released" if self._is_released else "running"
            raise errors.LocalProtocolError(f"cannot post a transfer that is {is_what}")
        check_message(notification or b"")
        quick = self._quick_pattern
        if quick is not None and notification is None and not self._peer.is_closed:
            self._job, self._outcome = None, self._move_now(quick, Limit(deadline_s))
        else:
            self._job = self._peer.submit(self._work(notification), deadline_s=deadline_s)
            self._outcome = self._job.outcome
        return self._outcome

    def poll(self) -> api.State:
        if self._outcome is None:
            return api.State.PREPARED
        if self._job is not None and self._job.is_running:
            return api.State.RUNNING
        is_done = self._outcome.done() and not self._outcome.cancelled()
        return api.State.DONE if is_done and not self._outcome.exception() else api.State.FAILED

    async def release(self) -> None:
        self._is_released = True
        if self._job is not None:
            await self._job.stop()

    @property
    def _is_quick(self) -> bool:
        return (
            self._peer.capabilities.is_same_host
            and self.num_bytes <= QUICK_BYTES
            and self.num_pieces <= QUICK_PIECES
        )

    def _move_now(self, pattern: plan.Pattern, limit: Limit) -> asyncio.Future[None]:
        outcome = asyncio.get_running_loop().create_future()
        try:
            self._peer.route.move(self._operation, pattern, limit)
        except errors.TransferError as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(None)
        return outcome

    def _work(self, notification: bytes | None) -> Callable[[Limit], None]:
        route, operation, copies = self._peer.route, self._operation, self._plan

        def work(limit: Limit) -> None:
            route.move(operation, copies.pattern(), limit)
            if notification is not None:
                route.notify(notification, limit)

        return work


def check_message(message: bytes) -> None:
    """Raises LocalProtocolError for a notification that no peer would take."""
    if len(message) > messages.MAX_NOTIFICATION_BYTES:
        raise errors.LocalProtocolError(
            f"expected a notification of at most {messages.MAX_NOTIFICATION_BYTES} bytes, got {len(message)}"
        )
