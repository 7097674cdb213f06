"""How an engine's blocks get to another one, and others' to it: the door to `lending` and `pulling`.

prefill   lending   blocks are held here until a reader has them
decode    pulling   blocks are copied from `sources`, the engines that hold them
"""

from collections.abc import Callable

from dynamo.base import errors
from dynamo.engine import api
from dynamo.engine.lending import Lender
from dynamo.engine.own_agent import MakeAgent, OwnAgent
from dynamo.engine.pulling import Puller
from dynamo.engine.pulls import Owner, PassOn, Pull
from dynamo.engine.sources import Sources
from dynamo.protocols import generate, kv_transfer
from dynamo.transfer import descriptors


class Remote:
    """Made before the engine starts, and used on the event loop only."""

    def __init__(
        self, make_agent: MakeAgent, *, pull_s: float, hold_s: float, pass_on: PassOn | None = None
    ) -> None:
        """`pull_s` bounds a copy, `hold_s` for how long blocks are kept for a reader.

        What `pass_on` waits, or raises, comes before each copy: the way of a simulated engine.
        """
        self._lender = Lender(hold_s=hold_s)
        self._agent = OwnAgent(make_agent, self._lender.notified)
        self._sources = Sources(self._agent, remember_s=hold_s)
        self._puller = Puller(self._agent, self._sources, pull_s=pull_s, pass_on=pass_on)
        self.open = self._agent.open
        self.on_pull = self._puller.on_pull
        self.connect = self._sources.connect
        self.disconnect = self._sources.leave
        self.unheard = self._lender.unheard
        self.until_read = self._lender.until_read
        self.aborted = self._puller.aborted
        self.unneeded = self._puller.unneeded

    async def begin(self, region: descriptors.Region | None, owner: Owner) -> None:
        """The engine has started. Raises ConfigError if its blocks cannot be opened."""
        self._lender.begin(owner)
        self._puller.begin(owner)
        await self._agent.begin(region)

    @property
    def allocate(self) -> Callable[[int], memoryview] | None:
        """Gives the KV cache's memory, if peers are to map it."""
        return self._agent.allocate

    @property
    def metadata(self) -> bytes | None:
        """Of our agent, if it runs."""
        return self._agent.metadata

    def submitted(self, request: generate.Request) -> kv_transfer.FirstToken | None:
        """Before the loop has it; gives the token that its answer begins with, if that is known.

        Raises RemoteProtocolError, or InvalidRequest if nobody could read its blocks.
        """
        if kv_transfer.wants_hold(request.kv_transfer_params) and self._agent.described is None:
            raise errors.InvalidRequest(
                "kv_transfer_params: this worker holds no blocks for others; start it with --is-prefill-worker"
            )
        remote = kv_transfer.read(request.kv_transfer_params)
        if remote is not None:
            self._puller.expect(request, remote)
        return kv_transfer.first_of(request, remote)

    def begin_pulls(self, pulls: list[Pull]) -> None:
        """Make these copies; the loop is told how each has ended."""
        self._puller.begin_pulls(pulls)

    def held(self, request: generate.Request, output: generate.Output) -> generate.Output:
        """The last output of a prompt that is held, with all that a reader must know; its time begins."""
        assert self._agent.described is not None
        return self._lender.held(request, output, self._agent.described)

    async def close(self) -> None:
        """End everything. Idempotent."""
        self._lender.close()
        await self._puller.close()
        self._sources.close()
        await self._agent.close()


class Lent:
    """An engine that is `api.RemotePrefill` and `api.BlockHolder` by way of its `_remote`."""

    _remote: Remote

    def open_blocks(self) -> None:
        """The memory of the blocks can be mapped by others on this host."""
        self._remote.open()

    @property
    def transfer_metadata(self) -> bytes | None:
        """Of the agent that moves our blocks."""
        return self._remote.metadata

    def on_pull(self, listener: Callable[[api.PullReport], None]) -> None:
        """After every copy."""
        self._remote.on_pull(listener)

    async def connect(self, metadata: bytes, *, deadline_s: float) -> str:
        """Ahead of need."""
        return await self._remote.connect(metadata, deadline_s=deadline_s)

    async def disconnect(self, engine_id: str) -> None:
        """What is being copied from there fails."""
        await self._remote.disconnect(engine_id)

    async def until_read(self) -> None:
        """See `api.BlockHolder`."""
        await self._remote.until_read()
