"""The exchange of KV blocks between one engine and others: the one object that an engine's event-loop side uses.

prefill   `exporter`   blocks stay under a lease until another engine has read them
decode    `importer`   blocks are copied from `peers`, the engines that hold them
"""

from collections.abc import Callable

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.kvbm.exporter import KvExporter
from dynamo.kvbm.importer import BeforeCopy, KvImporter
from dynamo.kvbm.local_agent import LocalAgent, MakeAgent
from dynamo.kvbm.peers import PeerEngines
from dynamo.kvbm.sharing import BlockOwner, ImportReport, usable_first_token
from dynamo.protocols import generate, kv_transfer
from dynamo.transfer import descriptors


class KvExchange:
    """Made before the engine starts. Used on the event loop only."""

    def __init__(
        self,
        make_agent: MakeAgent,
        clock: clocks.Clock,
        *,
        timeout_s: float,
        lease_s: float,
        before_copy: BeforeCopy | None = None,
    ) -> None:
        """`timeout_s` bounds each copy; `lease_s` is how long blocks are kept for another engine.

        `before_copy` simulates a slow or failing network: it may wait, or raise TransferError.
        """
        self._exporter = KvExporter(clock, lease_s=lease_s)
        self._agent = LocalAgent(make_agent, self._exporter.handle_notification)
        self._peers = PeerEngines(self._agent, clock, remember_s=lease_s)
        self._importer = KvImporter(
            self._agent, self._peers, clock, timeout_s=timeout_s, before_copy=before_copy
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

    async def start(self, region: descriptors.Region | None, owner: BlockOwner) -> None:
        """Register the memory of a started engine. Raises ConfigError if its blocks cannot be exported."""
        self._exporter.set_owner(owner)
        self._importer.set_owner(owner)
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

    def publish_lease(self, request: generate.Request, output: generate.Output) -> generate.Output:
        """Complete the last output of an exported prompt; the time limit of its lease begins."""
        assert self._agent.description is not None
        return self._exporter.publish_lease(request, output, self._agent.description)

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

    async def wait_until_released(self) -> None:
        """Return when no other engine reads blocks here any more."""
        await self._exchange.wait_until_released()
