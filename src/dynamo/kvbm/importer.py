"""The import of KV blocks: copies from engines that hold a prompt's blocks, for sequences that wait for them.

    an import that the scheduler requests ──▶ READ ──▶ the sequence goes on, and "release 7" ends the lease

Copied blocks may be used only if they were certainly still under lease when the copy ended. Our own clock decides: the
parameters say how long the lease lasts from when they arrive, and a copy that ends later counts as failed.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.kvbm.exporter import release_message
from dynamo.kvbm.local_agent import LocalAgent
from dynamo.kvbm.peers import CONNECT_S, PeerEngines
from dynamo.kvbm.sharing import BlockOwner, ImportReport, KvImport
from dynamo.protocols import generate, kv_transfer
from dynamo.transfer import api as transfer

NOTIFY_S = 2.0
BeforeCopy = Callable[[KvImport], Awaitable[None]]
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Expected:
    """A request that came with a lease, before its copy begins."""

    request: generate.Request
    remote: kv_transfer.RemoteBlocks
    lease_ends_at: float  # by the importer's clock


class KvImporter:
    """The imports of one engine. Used on the event loop only."""

    def __init__(
        self,
        agent: LocalAgent,
        peers: PeerEngines,
        clock: clocks.Clock,
        *,
        timeout_s: float,
        before_copy: BeforeCopy | None,
    ) -> None:
        """`timeout_s` bounds each copy. `before_copy` simulates a slow or failing network: it may wait, or raise."""
        self._agent, self._peers, self._timeout_s = agent, peers, timeout_s
        self._clock = clock
        self._before_copy = before_copy
        self._owner: BlockOwner | None = None
        self._expected: dict[str, _Expected] = {}  # by request id
        self._listeners: list[Callable[[ImportReport], None]] = []
        self._tasks = tasks.Tasks()
        self._is_closed = False

    def set_owner(self, owner: BlockOwner) -> None:
        """Set the engine that learns how each import has ended."""
        self._owner = owner

    def on_import(self, listener: Callable[[ImportReport], None]) -> None:
        """Call `listener` after every import."""
        self._listeners.append(listener)

    def forget_listeners(self) -> None:
        """Call no listener any more."""
        self._listeners.clear()

    def expect_import(self, request: generate.Request, remote: kv_transfer.RemoteBlocks) -> None:
        """Allow an import for this request; the time of its lease runs from now."""
        lease_ends_at = self._clock.now() + remote.remote_hold_s
        self._expected[request.id] = _Expected(request, remote, lease_ends_at)

    def abort_import(self, request_id: str) -> None:
        """Release the lease of an aborted request; a copy that has begun ends by itself."""
        expected = self._expected.pop(request_id, None)
        if expected is not None:
            self._tasks.start("release remote blocks", self._release_lease(expected.remote))

    def skip_import(self, request_id: str) -> None:
        """Release the lease of a request that was answered without a copy, and report that as success."""
        expected = self._expected[request_id]
        self.abort_import(request_id)
        self._report(request_id, expected.remote)

    def begin_imports(self, imports: list[KvImport]) -> None:
        """Start these copies; the owner learns how each has ended."""
        for kv_import in imports if not self._is_closed else ():
            self._tasks.start("import KV blocks", self._run_import(kv_import))

    async def close(self) -> None:
        """End all copies. Idempotent."""
        self._is_closed = True
        await self._tasks.close()

    async def _run_import(self, kv_import: KvImport) -> None:
        began_at = self._clock.now()
        error: errors.DynamoError | None = errors.Cancelled("the engine stops")
        try:
            await self._copy_in_time(kv_import)
            error = None
        except errors.DynamoError as failure:
            error = failure
        finally:
            assert self._owner is not None
            self._owner.end_import(kv_import.import_id, is_copied=error is None)
        duration_s = self._clock.now() - began_at
        self._finish_import(kv_import, error, duration_s)
        if not isinstance(error, errors.Cancelled):
            await self._release_lease(kv_import.remote)

    async def _copy_in_time(self, kv_import: KvImport) -> None:
        """Raises DynamoError if the blocks were not copied, or were perhaps given to others meanwhile."""
        request = kv_import.request
        _logger.debug(
            "update_state_after_alloc(%s): num_external_tokens=%d, kv_transfer_params=%s",
            request.id, kv_import.num_tokens, kv_transfer.to_log(request.kv_transfer_params),
        )  # fmt: skip
        expected = self._expected.get(request.id)
        if expected is None or expected.request is not request:
            raise errors.Cancelled("the request was aborted before its blocks were copied")
        del self._expected[request.id]
        self._check_lease(expected.lease_ends_at)
        if not kv_import.local_blocks:
            return
        limit_s = min(self._timeout_s, kv_import.limit_s)
        connect_s = min(CONNECT_S, kv_import.limit_s)
        async with self._peers.use_connection(
            kv_import.remote.remote_engine_id, connect_s=connect_s
        ) as peer:
            if self._before_copy is not None:
                await self._before_copy(kv_import)
            agent = await self._agent.get_started()
            copy = agent.prepare(
                transfer.TransferOperation.READ,
                peer,
                kv_import.local_blocks,
                kv_import.remote_blocks,
            )
            try:
                await copy.post(deadline_s=limit_s)
            except errors.TransferError:
                await self._peers.discard_connection(peer)
                raise
            finally:
                await copy.release()
        self._check_lease(expected.lease_ends_at)

    async def _release_lease(self, remote: kv_transfer.RemoteBlocks) -> None:
        """Notify the exporting engine; if that fails, its own time limit frees the blocks."""
        try:
            async with self._peers.use_connection(remote.remote_engine_id) as peer:
                agent = await self._agent.get_started()
                await agent.notify(peer, release_message(remote), deadline_s=NOTIFY_S)
        except errors.DynamoError as error:
            _logger.debug("could not release remote blocks, their time will end it: %s", error)

    def _finish_import(
        self, kv_import: KvImport, error: errors.DynamoError | None, duration_s: float
    ) -> None:
        """Log and report the outcome; an abort is no outcome."""
        if isinstance(error, errors.Cancelled):
            return
        request = kv_import.request
        if error is not None:
            _logger.warning("%s: its prompt is computed here: %s", request.id, error)
        else:
            params = kv_transfer.to_log(request.kv_transfer_params) or {}
            _logger.debug(
                "update_state_after_alloc(%s): num_external_tokens=0, kv_transfer_params=%s (%.1f ms)",
                request.id, params | {"do_remote_prefill": False}, duration_s * 1000,
            )  # fmt: skip
        num_blocks = len(kv_import.local_blocks)
        self._report(request.id, kv_import.remote, num_blocks, duration_s=duration_s, error=error)

    def _report(
        self,
        request_id: str,
        remote: kv_transfer.RemoteBlocks,
        num_blocks: int = 0,
        *,
        duration_s: float = 0.0,
        error: errors.DynamoError | None = None,
    ) -> None:
        report = ImportReport(
            request_id=request_id,
            engine_id=remote.remote_engine_id,
            num_blocks=num_blocks,
            duration_s=duration_s,
            error=error,
            is_prefix=remote.is_prefix,
        )
        for listener in self._listeners:
            listener(report)

    def _check_lease(self, lease_ends_at: float) -> None:
        if self._clock.now() > lease_ends_at:
            raise errors.TransferError("it took so long that the blocks may be held no more")
