"""How an engine's blocks get to another one, and others' to it; what is held and awaited, its scheduler knows.

    prefill   the last output of a prompt that is held ──▶ where its blocks are; a time limit begins
              "release 7" from the reader, or the limit ──▶ the blocks are free
    decode    a copy that the scheduler asks for ──▶ READ, with "release 7" once it is done ──▶ the sequence goes on

The reader may use what it has read only if the blocks were certainly still held, which it knows by its own clock: the
parameters say for how long from when they came, and a copy that ends later counts as failed.

A peer whose copy failed is connected anew, so that a hiccup costs one prompt and not all that follow; and it is told,
if it can be, that nobody will come for those blocks.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from dynamo.base import errors, tasks
from dynamo.engine import api
from dynamo.engine.pulls import Owner, Pull
from dynamo.protocols import generate, kv_transfer
from dynamo.transfer import api as transfer
from dynamo.transfer import descriptors

CONNECT_S = 5.0
NOTIFY_S = 2.0
_RELEASE = "release "
_logger = logging.getLogger(__name__)
MakeAgent = Callable[[transfer.OnNotification], transfer.Agent]
PassOn = Callable[[Pull], Awaitable[None]]


@dataclass(slots=True)
class _Source:
    """An engine to copy from; `peer` is None while the way to it is broken."""

    metadata: bytes
    peer: transfer.Peer | None


@dataclass(frozen=True, slots=True)
class _Expected:
    """A request that brought the place of its prompt's blocks, of which no copy has begun."""

    request: generate.Request
    remote: kv_transfer.RemoteBlocks
    until: float


class Remote:
    """Made before the engine starts, and used on the event loop only."""

    def __init__(
        self, make_agent: MakeAgent, *, pull_s: float, hold_s: float, pass_on: PassOn | None = None
    ) -> None:
        """`pull_s` bounds a copy, `hold_s` for how long blocks are kept for a reader.

        What `pass_on` waits, or raises, comes before each copy: the way of a simulated engine.
        """
        self._make_agent = make_agent
        self._pass_on = pass_on
        self._pull_s, self._hold_s = pull_s, hold_s
        self._agent: transfer.Agent | None = None
        self._is_started = asyncio.Lock()
        self._me: descriptors.Metadata | None = None
        self._region: descriptors.Region | None = None
        self._owner: Owner | None = None
        self._sources: dict[str, _Source] = {}
        self._expected: dict[str, _Expected] = {}
        self._limits: dict[int, asyncio.TimerHandle] = {}  # by hold
        self._listeners: list[Callable[[api.PullReport], None]] = []
        self._tasks = tasks.Tasks()
        self._is_closed = False

    def open(self) -> None:
        """Peers on this host will map our memory: it has to come from `allocate`."""
        self._agent = self._make_agent(self._notified)

    @property
    def allocate(self) -> Callable[[int], memoryview] | None:
        """Gives the KV cache's memory, if peers are to map it."""
        return self._agent.allocate if self._agent is not None else None

    async def begin(self, region: descriptors.Region | None, owner: Owner) -> None:
        """The engine has started. Raises ConfigError if its blocks cannot be opened."""
        self._region, self._owner = region, owner
        if self._agent is not None:
            await self._start(self._agent)

    @property
    def metadata(self) -> bytes | None:
        """Of our agent, if it runs."""
        return self._agent.export_metadata() if self._agent is not None and self._me else None

    def on_pull(self, listener: Callable[[api.PullReport], None]) -> None:
        """Call this after every copy."""
        self._listeners.append(listener)

    async def connect(self, metadata: bytes, *, deadline_s: float) -> str:
        """See `api.RemotePrefill`."""
        agent = await self._started_agent()
        peer = await agent.connect(metadata, deadline_s=deadline_s)
        self._sources[peer.epoch] = _Source(metadata, peer)
        _logger.debug("connected to %s (%s) by %s", peer.name, peer.epoch, peer.backend)
        return peer.epoch

    async def disconnect(self, engine_id: str) -> None:
        """See `api.RemotePrefill`."""
        source = self._sources.pop(engine_id, None)
        if source is not None and source.peer is not None and self._agent is not None:
            await self._agent.disconnect(source.peer)

    def submitted(self, request: generate.Request) -> None:
        """Before the loop has it. Raises RemoteProtocolError, or InvalidRequest if nobody could read its blocks."""
        if kv_transfer.wants_hold(request.kv_transfer_params) and self._me is None:
            raise errors.InvalidRequest(
                "kv_transfer_params: this worker holds no blocks for others; start it with --is-prefill-worker"
            )
        remote = kv_transfer.read(request.kv_transfer_params)
        if remote is not None:
            until = asyncio.get_running_loop().time() + remote.remote_hold_s
            self._expected[request.id] = _Expected(request, remote, until)

    def aborted(self, request_id: str) -> None:
        """Whoever holds blocks for it need not any more; a copy that has begun ends by itself."""
        expected = self._expected.pop(request_id, None)
        if expected is not None:
            self._tasks.start("release remote blocks", self._let_go(expected.remote))

    def begin_pulls(self, pulls: list[Pull]) -> None:
        """Make these copies; the loop is told how each has ended."""
        for pull in pulls if not self._is_closed else ():
            self._tasks.start("pull KV blocks", self._pull(pull))

    def held(self, request: generate.Request, output: generate.Output) -> generate.Output:
        """The last output of a prompt that is held, with all that a reader must know; its time begins."""
        assert self._me is not None
        assert output.kv_transfer_params is not None
        host, _, port = self._me.addresses.get("tcp", ":0").rpartition(":")
        remote = kv_transfer.RemoteBlocks(
            **output.kv_transfer_params,
            remote_engine_id=self._me.epoch,
            remote_host=host,
            remote_port=int(port),
            remote_hold_s=self._hold_s,
            tp_size=self._me.layout.tp_size,
        )
        _logger.debug(
            "request_finished(%s), request_status=FINISHED_LENGTH_CAPPED, kv_transfer_params=%s",
            request.id, request.kv_transfer_params,
        )  # fmt: skip
        event_loop = asyncio.get_running_loop()
        number = remote.remote_hold_id
        self._limits[number] = event_loop.call_later(self._hold_s, self._expired, number)
        return msgspec.structs.replace(output, kv_transfer_params=remote.as_params())

    def unheard(self, output: generate.Output) -> None:
        """Nobody waits for this output any more, so nobody will read the blocks that are held with it."""
        if output.kv_transfer_params is not None:
            self._release(output.kv_transfer_params["remote_hold_id"])

    async def close(self) -> None:
        """End everything. Idempotent."""
        self._is_closed = True
        for limit in self._limits.values():
            limit.cancel()
        await self._tasks.close()
        agent, self._agent, self._me = self._agent, None, None
        if agent is not None:
            await agent.close()

    async def _started_agent(self) -> transfer.Agent:
        async with self._is_started:
            if self._agent is None:
                agent = self._make_agent(self._notified)
                await self._start(agent)
                self._agent = agent
            return self._agent

    async def _start(self, agent: transfer.Agent) -> None:
        if self._region is None:
            raise errors.ConfigError(
                "blocks in a device's memory cannot be copied between workers yet: expected --device cpu"
            )
        agent.register(self._region)
        await agent.start()
        self._me = descriptors.decode(agent.export_metadata())

    async def _pull(self, pull: Pull) -> None:
        began_at = asyncio.get_running_loop().time()
        error: errors.DynamoError | None = errors.Cancelled("the engine stops")
        try:
            await self._copy(pull)
            error = None
        except errors.TransferError as failure:
            error = failure
            self._tasks.start("release remote blocks", self._let_go(pull.remote))
        except errors.DynamoError as failure:
            error = failure
        finally:
            assert self._owner is not None
            self._owner.end_pull(pull.number, is_copied=error is None)
        took_s = asyncio.get_running_loop().time() - began_at
        self._tell(pull, error, took_s)

    async def _copy(self, pull: Pull) -> None:
        """Raises DynamoError if the blocks were not copied, or perhaps not those that were meant."""
        _logger.debug(
            "update_state_after_alloc(%s): num_external_tokens=%d, kv_transfer_params=%s",
            pull.request.id, pull.num_tokens, pull.request.kv_transfer_params,
        )  # fmt: skip
        until = self._begun(pull)
        peer = await self._reach(pull.remote.remote_engine_id)
        agent = await self._started_agent()
        release = _message(pull.remote)
        if not pull.local_blocks:
            await agent.notify(peer, release, deadline_s=NOTIFY_S)
            return
        copying = agent.prepare(
            transfer.Operation.READ, peer, pull.local_blocks, pull.remote_blocks
        )
        try:
            if self._pass_on is not None:
                await self._pass_on(pull)
            await copying.post(deadline_s=self._pull_s, notification=release)
        except errors.TransferError:
            await self._break(pull.remote.remote_engine_id, peer)
            raise
        finally:
            await copying.release()
        _check_time(until)

    def _begun(self, pull: Pull) -> float:
        """Until when its blocks are certainly held."""
        expected = self._expected.get(pull.request.id)
        if expected is None or expected.request is not pull.request:
            raise errors.Cancelled("the request was aborted before its blocks were copied")
        del self._expected[pull.request.id]
        _check_time(expected.until)
        return expected.until

    async def _reach(self, engine_id: str) -> transfer.Peer:
        source = self._sources.get(engine_id)
        if source is None:
            raise errors.TransferError(f"the engine {engine_id} is not connected")
        if source.peer is None:
            await self.connect(source.metadata, deadline_s=CONNECT_S)
            return await self._reach(engine_id)
        return source.peer

    async def _break(self, engine_id: str, peer: transfer.Peer) -> None:
        source = self._sources.get(engine_id)
        if source is not None and source.peer is peer and self._agent is not None:
            source.peer = None
            await self._agent.disconnect(peer)

    async def _let_go(self, remote: kv_transfer.RemoteBlocks) -> None:
        try:
            peer = await self._reach(remote.remote_engine_id)
            agent = await self._started_agent()
            await agent.notify(peer, _message(remote), deadline_s=NOTIFY_S)
        except errors.DynamoError as error:
            _logger.debug("%s keeps blocks to its limit: %s", remote.remote_engine_id, error)

    def _tell(self, pull: Pull, error: errors.DynamoError | None, took_s: float) -> None:
        if isinstance(error, errors.Cancelled):
            return
        if error is not None:
            _logger.warning("%s: its prompt is computed here: %s", pull.request.id, error)
        else:
            done = (pull.request.kv_transfer_params or {}) | {"do_remote_prefill": False}
            _logger.debug(
                "update_state_after_alloc(%s): num_external_tokens=0, kv_transfer_params=%s (%.1f ms)",
                pull.request.id, done, took_s * 1000,
            )  # fmt: skip
        report = api.PullReport(
            request_id=pull.request.id,
            engine_id=pull.remote.remote_engine_id,
            num_blocks=len(pull.local_blocks),
            duration_s=took_s,
            error=error,
        )
        for listener in self._listeners:
            listener(report)

    def _notified(self, sender: str, message: bytes) -> None:
        verb, _, number = message.decode("ascii", "replace").partition(" ")
        if verb == _RELEASE.strip() and number.isdecimal():
            self._release(int(number))
        else:
            _logger.warning("%s said %r, expected %s and a number", sender, message[:40], verb)

    def _expired(self, number: int) -> None:
        _logger.warning("nobody came for the blocks held as %d: freeing them", number)
        self._release(number)

    def _release(self, number: int) -> None:
        limit = self._limits.pop(number, None)
        if limit is not None:
            limit.cancel()
        if self._owner is not None:
            self._owner.release_held(number)


def _message(remote: kv_transfer.RemoteBlocks) -> bytes:
    return f"{_RELEASE}{remote.remote_hold_id}".encode()


def _check_time(until: float) -> None:
    if asyncio.get_running_loop().time() > until:
        raise errors.TransferError("it took so long that the blocks may be held no more")
