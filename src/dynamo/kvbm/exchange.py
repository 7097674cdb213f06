"""The exchange of KV blocks between one engine and others, and the one object for it that an engine's event loop uses.

prefill   `KvExporter`   blocks stay under a lease until another engine has read them
decode    `KvImporter`   blocks are copied from the engines that hold them (`agents`)

The export: blocks computed for another engine, leased until it has read them or a time limit passes.

    last output of the prompt ──▶ the KV transfer parameters say where the blocks are; the time limit begins
    "release 7" from the importing engine, or the time limit ──▶ the blocks of lease 7 are free

The first token of the answer, drawn with the prompt, travels with the same parameters if the other engine can use it.

The import: copies from engines that hold a prompt's blocks, for sequences that wait for them.

    an import that the scheduler requests ──▶ READ ──▶ the sequence goes on, and "release 7" ends the lease

Copied blocks may be used only if they were certainly still under lease when the copy ended. Our own clock decides: the
parameters say how long the lease lasts from when they arrive, and a copy that ends later counts as failed.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from dynamo.base import addresses, errors, tasks
from dynamo.base import clock as clocks
from dynamo.kvbm.agents import CONNECT_S, LocalAgent, MakeAgent, PeerEngines
from dynamo.kvbm.sharing import BlockLease, BlockOwner, ImportReport, KvImport, usable_first_token
from dynamo.protocols import generate, kv_transfer
from dynamo.transfer import api as transfer
from dynamo.transfer import descriptors

PREFIX_LEASE_S = 8.0  # at most, for a prefix: its reader waits no longer than computing takes
_RELEASE = "release "
_logger = logging.getLogger(__name__)


class KvExporter:
    """The leases of one engine. Used on the event loop only."""

    def __init__(self, clock: clocks.Clock, *, lease_s: float) -> None:
        """`lease_s`: seconds that blocks are kept for the importing engine."""
        self._clock = clock
        self._lease_s = lease_s
        self._owner: BlockOwner | None = None
        self._timers: dict[int, clocks.Timer] = {}  # by lease id
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def set_owner(self, owner: BlockOwner) -> None:
        self._owner = owner

    def publish_lease(
        self,
        request: generate.Request,
        output: generate.Output,
        lease: BlockLease,
        me: descriptors.Metadata,
    ) -> generate.Output:
        """Add to the last output of an exported prompt all that its reader needs, and start the time limit."""
        first_token = None
        params = request.kv_transfer_params
        if params is not None and params.do_first_token:
            logprobs = output.logprobs[0] if output.logprobs else None
            first_token = kv_transfer.FirstToken(
                output.token_ids[0], logprobs, output.cached_tokens
            )
        lease_s = min(self._lease_s, PREFIX_LEASE_S) if lease.is_prefix else self._lease_s
        host, port = addresses.split(me.addresses["tcp"]) if "tcp" in me.addresses else ("", 0)
        remote = kv_transfer.RemoteBlocks(
            remote_block_ids=lease.block_ids,
            remote_hold_id=lease.lease_id,
            is_prefix=lease.is_prefix,
            remote_engine_id=me.epoch,
            remote_host=host,
            remote_port=port,
            remote_hold_s=lease_s,
            tp_size=me.layout.tp_size,
            first_token=first_token,
        )
        _logger.debug(
            "request_finished(%s), request_status=FINISHED_LENGTH_CAPPED, kv_transfer_params=%s",
            request.id, kv_transfer.to_log(request.kv_transfer_params),
        )  # fmt: skip
        self._timers[lease.lease_id] = self._clock.call_later(lease_s, self._expire, lease.lease_id)
        self._is_idle.clear()
        params = kv_transfer.KvTransferParams(do_remote_prefill=True, remote=remote)
        return msgspec.structs.replace(output, kv_transfer_params=params)

    def cancel_lease(self, lease: BlockLease) -> None:
        """Free the blocks of an output that has no receiver any more, so that no engine will read them."""
        self._release(lease.lease_id)

    def handle_notification(self, sender: str, message: bytes) -> None:
        """Release a lease at the word of the engine that has read the blocks."""
        verb, _, lease_id = message.decode("ascii", "replace").partition(" ")
        if verb == _RELEASE.strip() and lease_id.isdecimal():
            self._release(int(lease_id))
        else:
            _logger.warning("%s said %r, expected %r and a number", sender, message[:40], _RELEASE)

    async def wait_until_released(self) -> None:
        """Return when no lease is left: all were released, or their time limits have passed."""
        await self._is_idle.wait()

    def close(self) -> None:
        """Cancel all time limits."""
        for timer in self._timers.values():
            timer.cancel()

    def _expire(self, lease_id: int) -> None:
        _logger.warning("no engine read the blocks of lease %d in time: freeing them", lease_id)
        self._release(lease_id)

    def _release(self, lease_id: int) -> None:
        timer = self._timers.pop(lease_id, None)
        if timer is not None:
            timer.cancel()
        if self._owner is not None:
            self._owner.release_lease(lease_id)
        if not self._timers:
            self._is_idle.set()


def release_message(remote: kv_transfer.RemoteBlocks) -> bytes:
    """Return the notification by which the importing engine releases the lease."""
    return f"{_RELEASE}{remote.remote_hold_id}".encode()


NOTIFY_S = 2.0
BeforeCopy = Callable[[KvImport, float], Awaitable[None]]  # with the time limit in s


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
        patience_s: float,
        before_copy: BeforeCopy | None,
    ) -> None:
        """`timeout_s` bounds each copy, `patience_s` one that takes longer than computing the prompt.

        `before_copy` simulates a slow or failing network: it may wait, or raise.
        """
        self._agent, self._peers = agent, peers
        self._timeout_s, self._patience_s = min(timeout_s, transfer.MAX_DEADLINE_S), patience_s
        self._clock = clock
        self._before_copy = before_copy
        self._owner: BlockOwner | None = None
        self._from_host: transfer.BlockCopier | None = None
        self._expected: dict[str, _Expected] = {}  # by request id
        self._listeners: list[Callable[[ImportReport], None]] = []
        self._tasks = tasks.Tasks()
        self._is_closed = False

    def set_owner(self, owner: BlockOwner, from_host: transfer.BlockCopier | None) -> None:
        """Set the engine that learns how each import has ended, and what copies blocks on to its GPU."""
        self._owner, self._from_host = owner, from_host

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

    def release_remote(self, params: kv_transfer.KvTransferParams | None) -> None:
        """Release the lease of a request that was refused."""
        if params is not None and params.remote is not None:
            self._tasks.start("release remote blocks", self._release_lease(params.remote))

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
        engine_id = kv_import.remote.remote_engine_id
        self._peers.check_link(engine_id)
        limit_s = min(self._timeout_s, kv_import.limit_s(self._patience_s))
        connect_s = min(CONNECT_S, limit_s)
        async with self._peers.use_connection(engine_id, connect_s=connect_s) as peer:
            if self._before_copy is not None:
                await self._before_copy(kv_import, limit_s)
            agent = await self._agent.get_started()
            copy = agent.prepare(
                transfer.TransferOperation.READ,
                peer,
                kv_import.local_blocks,
                kv_import.remote_blocks,
            )
            try:
                await copy.post(deadline_s=limit_s)
                self._peers.note_copy(engine_id)
            except errors.TransferError:
                # a prefix would have to be copied more quickly than it is computed
                if not kv_import.remote.is_prefix:
                    self._peers.note_failed_copy(engine_id, copy.num_bytes, limit_s)
                await self._peers.discard_connection(peer)
                raise
            finally:
                await copy.release()
        self._check_lease(expected.lease_ends_at)
        if self._from_host is not None:
            blocks, limit = kv_import.local_blocks, transfer.TimeLimit(limit_s)
            await asyncio.to_thread(
                self._from_host.move, transfer.TransferOperation.READ, blocks, blocks, limit
            )

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


class KvExchange:
    """Made before the engine starts. Used on the event loop only."""

    def __init__(
        self,
        make_agent: MakeAgent,
        clock: clocks.Clock,
        *,
        timeout_s: float,
        patience_s: float,
        lease_s: float,
        before_copy: BeforeCopy | None = None,
    ) -> None:
        """`timeout_s` bounds each copy, `patience_s` one that takes longer than computing the prompt.

        `lease_s` is how long blocks are kept for another engine.
        `before_copy` simulates a slow or failing network: it may wait, or raise TransferError.
        """
        self._exporter = KvExporter(clock, lease_s=lease_s)
        self._agent = LocalAgent(make_agent, self._exporter.handle_notification)
        self._peers = PeerEngines(self._agent, clock, remember_s=lease_s)
        self._importer = KvImporter(
            self._agent,
            self._peers,
            clock,
            timeout_s=timeout_s,
            patience_s=patience_s,
            before_copy=before_copy,
        )
        self.enable_export = self._agent.enable_export
        self.on_import = self._importer.on_import
        self.forget_listeners = self._importer.forget_listeners
        self.connect_peer = self._peers.connect
        self.disconnect_peer = self._peers.disconnect
        self.cancel_lease = self._exporter.cancel_lease
        self.wait_until_released = self._exporter.wait_until_released
        self.begin_imports = self._importer.begin_imports
        self.abort_import = self._importer.abort_import
        self.skip_import = self._importer.skip_import
        self.release_remote = self._importer.release_remote

    async def start(
        self,
        region: descriptors.Region | None,
        owner: BlockOwner,
        from_host: transfer.BlockCopier | None = None,
    ) -> None:
        """Register the memory of a started engine. Raises ConfigError if its blocks cannot be exported.

        If the engine computes in a GPU's memory, `from_host` copies imported blocks there from the region.
        """
        self._exporter.set_owner(owner)
        self._importer.set_owner(owner, from_host)
        await self._agent.set_region(region)

    @property
    def allocate(self) -> Callable[[int], memoryview] | None:
        """The allocator of the KV cache's memory, if other engines are to map it."""
        return self._agent.allocate

    @property
    def metadata(self) -> bytes | None:
        """The local agent's metadata, while it runs."""
        return self._agent.metadata

    def accept_request(self, request: generate.Request) -> kv_transfer.FirstToken | None:
        """Prepare the export or import of a request's prompt, before the engine's loop has the request.

        Return the token with which the answer begins, if the prompt came with one.
        Raises RemoteProtocolError for unusable parameters, InvalidRequest if no engine could read the blocks.
        """
        params = request.kv_transfer_params
        if kv_transfer.is_prefill_only(params) and self._agent.description is None:
            raise errors.InvalidRequest(
                "kv_transfer_params: this worker holds no blocks for others; start it with --is-prefill-worker"
            )
        remote = kv_transfer.remote_blocks(params)
        if remote is not None:
            self._importer.expect_import(request, remote)
        return usable_first_token(request, remote)

    def publish_lease(
        self, request: generate.Request, output: generate.Output, lease: BlockLease
    ) -> generate.Output:
        """Complete the last output of an exported prompt; the time limit of its lease begins."""
        assert self._agent.description is not None
        return self._exporter.publish_lease(request, output, lease, self._agent.description)

    async def close(self) -> None:
        """Cancel all leases and imports, and close the agent. Idempotent."""
        self._exporter.close()
        await self._importer.close()
        self._peers.close()
        await self._agent.close()


class ExchangesKv:
    """Mixin of an engine that is `api.KvTransferPeer` and `api.KvExportDrain` by way of its `_exchange`."""

    _exchange: KvExchange

    def enable_export(self) -> None:
        """Let engines on this host map the memory of the blocks."""
        self._exchange.enable_export()

    @property
    def transfer_metadata(self) -> bytes | None:
        """The metadata of the agent that moves the engine's blocks."""
        return self._exchange.metadata

    def on_import(self, listener: Callable[[ImportReport], None]) -> None:
        """Call `listener` after every import."""
        self._exchange.on_import(listener)

    def leave_role(self) -> None:
        """Call no listener any more: the worker changes its role."""
        self._exchange.forget_listeners()

    async def connect_peer(self, metadata: bytes, *, deadline_s: float) -> str:
        """Connect to an engine ahead of need. Return its id. Raises TransferError."""
        return await self._exchange.connect_peer(metadata, deadline_s=deadline_s)

    async def disconnect_peer(self, engine_id: str) -> None:
        """Disconnect from an engine when its running copies have ended."""
        await self._exchange.disconnect_peer(engine_id)

    def release_remote(self, params: kv_transfer.KvTransferParams | None) -> None:
        """Let another engine free the blocks of a request that was refused here."""
        self._exchange.release_remote(params)

    async def wait_until_released(self) -> None:
        """Return when no other engine reads blocks here any more."""
        await self._exchange.wait_until_released()
