"""The transfer agents of one engine: its own (how it is configured, made and started), and those of its peers.

The agent is made before the engine starts if other engines are to read its blocks, else at the first import. Peers on
this host map the memory of the KV cache, so an engine that exports blocks takes that memory from its agent.

Peers are the engines from which KV blocks are imported. After a failed copy the connection is made anew. Where that
fails as well, the host is silent or gone, and all further copies fail at once until `connect` has succeeded, or for
`REST_S`. After a failed copy of a whole prompt `connect` copies something as a probe, because a slow link, or one that
loses long packets, connects well: until that is quick enough, prompts are computed elsewhere.

An engine that leaves may still be computing prompts for us, and keeps their blocks until they are read. Its connection
is closed when it is idle, but its address is remembered for as long as the engine may hold a lease.
"""

import asyncio
import contextlib
import importlib
import logging
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from dynamo.base import addresses, config, distribution, errors, membership
from dynamo.base import clock as clocks
from dynamo.kvbm import sharing
from dynamo.runtime import listening
from dynamo.transfer import agent as agents
from dynamo.transfer import api, descriptors
from dynamo.transfer.backends import local, shm, tcp

MakeAgent = Callable[[api.OnNotification], agents.TransferAgent]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig(membership.ClusterConfig):
    """Options of KV transfer, which the configuration of each engine inherits."""

    kv_transfer_backends: tuple[str, ...] = config.option(
        ("shm", "tcp"),
        help="ways to copy KV blocks between workers (shm, tcp, nixl), best first; the first that both have is used",
    )
    kv_transfer_host: str | None = config.setting(
        None,
        help="address on which this worker listens for workers that copy its KV blocks (default: --tcp-rpc-host)",
    )
    kv_transfer_port: addresses.PortRange = config.setting(  # noqa: RUF009 (a declaration)
        addresses.ANY_PORT,
        help="port at which workers on other hosts reach this worker's KV blocks, or a range of which the first free"
        " one is used; 0: any free one",
    )
    kv_transfer_advertise: str | None = config.setting(
        None,
        help="address or address:port at which others reach the KV blocks, if they reach it at another than it listens"
        " on, as behind a NAT (default: the host of --tcp-rpc-advertise, unless there is a --kv-transfer-host)",
    )
    kv_transfer_timeout_s: float = config.option(
        5.0,
        help="seconds that copying a prompt's KV blocks may take; after that the prompt is computed locally",
        least=0.01,
    )
    kv_transfer_patience_s: float = config.option(
        1.0,
        help="seconds after which a copy of a prompt's KV blocks is given up if computing the prompt takes less time;"
        " set it higher where a local prefill harms more than a late answer",
        least=0.01,
    )
    kv_hold_s: float = config.option(
        60.0,
        help="seconds that a prefill worker keeps a prompt's KV blocks for the decode worker;"
        " set it higher than the longest prefill",
        least=0.01,
    )


def make_agent(
    name: str,
    settings: TransferConfig,
    room: local.Room | None,
    on_notification: api.OnNotification,
) -> agents.TransferAgent:
    """Make an agent that is not started yet. Agents of one process that share a `room` copy directly.

    Raises ConfigError for an unknown backend or an unusable address.
    """
    listen_address = listening.choose_address(
        settings,
        settings.kv_transfer_host,
        settings.kv_transfer_port,
        settings.kv_transfer_advertise,
        setting="DYN_KV_TRANSFER_",
    )
    credentials = membership.read(settings, os.environ)
    backend_makers: dict[str, Callable[[], api.Backend]] = {
        "shm": lambda: shm.ShmBackend(credentials=credentials),
        "tcp": lambda: tcp.TcpBackend(listen_address=listen_address, credentials=credentials),
        "nixl": lambda: _make_nixl(listen_address.host, is_insecure=credentials.is_insecure),
    }
    names = settings.kv_transfer_backends
    if unknown := [each for each in names if each not in backend_makers]:
        raise errors.ConfigError(
            f"--kv-transfer-backends: expected some of {', '.join(backend_makers)}, got {unknown[0]!r}"
        )
    backends = [backend_makers[each]() for each in names]
    if room is not None:
        backends.append(local.LocalBackend(room))
    return agents.TransferAgent(name, backends=backends, on_notification=on_notification)


class LocalAgent:
    """The agent of one engine, started when it is first needed. Used on the event loop only."""

    def __init__(self, make: MakeAgent, on_notification: api.OnNotification) -> None:
        self._make, self._on_notification = make, on_notification
        self._agent: agents.TransferAgent | None = None
        self._start_lock = asyncio.Lock()
        self._region: descriptors.Region | None = None
        self.description: descriptors.Metadata | None = None  # while the agent runs

    def enable_export(self) -> None:
        """Make the agent now: peers on this host will map the memory, so it has to come from `allocate`. Idempotent."""
        self._agent = self._agent or self._make(self._on_notification)

    @property
    def allocate(self) -> Callable[[int], memoryview] | None:
        """The allocator of the KV cache's memory, if other engines are to map it."""
        return self._agent.allocate if self._agent is not None else None

    @property
    def metadata(self) -> bytes | None:
        """The running agent's metadata, for the `connect` of another engine."""
        if self._agent is None or self.description is None:
            return None
        return self._agent.export_metadata()

    async def set_region(self, region: descriptors.Region | None) -> None:
        """Register the engine's memory; None if it cannot be copied.

        Raises ConfigError if blocks are to be exported and cannot be.
        """
        self._region = region
        if self._agent is not None:
            await self._start(self._agent)

    async def get_started(self) -> agents.TransferAgent:
        """Return the agent, started. Raises ConfigError for memory that cannot be copied."""
        async with self._start_lock:
            if self._agent is None:
                agent = self._make(self._on_notification)
                try:
                    await self._start(agent)
                except errors.ConfigError:
                    await agent.close()  # some of its backends may listen already
                    raise
                self._agent = agent
            return self._agent

    async def close(self) -> None:
        """Close the agent. Idempotent."""
        agent, self._agent, self.description = self._agent, None, None
        if agent is not None:
            await agent.close()

    async def _start(self, agent: agents.TransferAgent) -> None:
        if self._region is None:
            raise errors.ConfigError(
                "the KV blocks of this engine cannot be copied between workers"
            )
        agent.register(self._region)
        try:
            await agent.start()
        except OSError as error:  # as where no file is left
            raise errors.ConfigError(
                f"the KV blocks cannot be opened to other workers: {error}"
            ) from error
        self.description = descriptors.decode(agent.export_metadata())


def _make_nixl(host: str, *, is_insecure: bool) -> api.Backend:
    try:
        module = importlib.import_module("dynamo.transfer.backends.nixl")  # an extra
    except ImportError as error:
        raise errors.ConfigError(
            "--kv-transfer-backends: nixl is not installed: "
            f"{distribution.install_command('nixl')}, or leave nixl out"
        ) from error
    backend: api.Backend = module.NixlBackend(host=host, is_insecure=is_insecure)
    return backend


CONNECT_S = 5.0
REST_S = 10.0
_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _PeerEngine:
    """An engine to import from; `connection` is None while there is none."""

    metadata: bytes
    connection: agents.ConnectedPeer | None
    unreachable_until: float = 0.0
    num_users: int = 0  # copies and notifications that run
    link: sharing.LinkRecord = field(default_factory=sharing.LinkRecord)
    forget_timer: clocks.Timer | None = None  # the engine has left


class PeerEngines:
    """The exporting engines, by engine id. Used on the event loop only."""

    def __init__(self, agent: LocalAgent, clock: clocks.Clock, *, remember_s: float) -> None:
        """`remember_s`: seconds during which blocks can still be imported from an engine that has left."""
        self._agent = agent
        self._clock = clock
        self._remember_s = remember_s
        self._engines: dict[str, _PeerEngine] = {}

    async def connect(self, metadata: bytes, *, deadline_s: float) -> str:
        """Connect ahead of need. Return the engine's id.

        Raises TransferError, also if a copy has failed and the link is still too slow for its like.
        """
        agent = await self._agent.get_started()
        connection = await agent.connect(metadata, deadline_s=deadline_s)
        engine = self._engines.setdefault(connection.epoch, _PeerEngine(metadata, connection))
        engine.connection, engine.unreachable_until = connection, 0.0
        if engine.forget_timer is not None:
            engine.forget_timer.cancel()
            engine.forget_timer = None
        await self._probe_link(engine, connection)
        _logger.debug(
            "connected to %s (%s) by %s", connection.name, connection.epoch, connection.backend
        )
        return connection.epoch

    async def disconnect(self, engine_id: str) -> None:
        """Begin to forget an engine that leaves. An unknown id is no error."""
        engine = self._engines.get(engine_id)
        if engine is None or engine.forget_timer is not None:
            return
        engine.forget_timer = self._clock.call_later(
            self._remember_s, self._engines.pop, engine_id, None
        )
        await self._close_if_idle(engine)

    async def _probe_link(self, engine: _PeerEngine, connection: agents.ConnectedPeer) -> None:
        if (probe := engine.link.due_probe) is None:
            return
        agent = await self._agent.get_started()
        try:
            await agent.probe(connection, probe.num_bytes, deadline_s=probe.limit_s)
        except errors.TransferError as error:
            await self._close_connection(engine, connection)
            raise errors.TransferError(f"its link is too slow to copy prompts: {error}") from error
        engine.link.note_passed_probe()

    def check_link(self, engine_id: str) -> None:
        """Raise TransferError if a copy from this engine has failed, and no probe has passed since."""
        engine = self._engines.get(engine_id)
        if engine is not None and engine.link.due_probe is not None:
            raise errors.TransferError("a copy from its engine has failed a moment ago")

    def note_copy(self, engine_id: str) -> None:
        """Take note that a copy from this engine has succeeded."""
        if (engine := self._engines.get(engine_id)) is not None:
            engine.link.note_copy()

    def note_failed_copy(self, engine_id: str, num_bytes: int, limit_s: float) -> None:
        """Allow no copy from this engine before `connect` has found that its link is quick enough."""
        if (engine := self._engines.get(engine_id)) is not None:
            engine.link.note_failed_copy(num_bytes, limit_s)

    @contextlib.asynccontextmanager
    async def use_connection(
        self, engine_id: str, *, connect_s: float = CONNECT_S
    ) -> AsyncIterator[agents.ConnectedPeer]:
        """Provide a connection for one copy or notification; connect if there is none. Raises TransferError."""
        engine = self._engines.get(engine_id)
        if engine is None:
            raise errors.TransferError(f"the engine {engine_id} is not connected")
        engine.num_users += 1
        try:
            if engine.connection is None:
                engine.connection = await self._connect_again(engine, connect_s)
            yield engine.connection
        finally:
            engine.num_users -= 1
            await self._close_if_idle(engine)

    async def _connect_again(self, engine: _PeerEngine, deadline_s: float) -> agents.ConnectedPeer:
        if self._clock.now() < engine.unreachable_until:
            raise errors.TransferError("its engine could not be reached a moment ago")
        agent = await self._agent.get_started()
        try:
            return await agent.connect(engine.metadata, deadline_s=deadline_s)
        except errors.TransferError:
            engine.unreachable_until = self._clock.now() + REST_S
            raise

    async def discard_connection(self, connection: agents.ConnectedPeer) -> None:
        """Close a connection after a failed copy, with all that runs on it; the next user connects anew."""
        engine = self._engines.get(connection.epoch)
        if engine is not None:
            await self._close_connection(engine, connection)

    def close(self) -> None:
        """Forget all engines; the agent closes the connections."""
        for engine in self._engines.values():
            if engine.forget_timer is not None:
                engine.forget_timer.cancel()
        self._engines.clear()

    async def _close_if_idle(self, engine: _PeerEngine) -> None:
        is_leaving = engine.forget_timer is not None
        if is_leaving and not engine.num_users and engine.connection is not None:
            await self._close_connection(engine, engine.connection)

    async def _close_connection(
        self, engine: _PeerEngine, connection: agents.ConnectedPeer
    ) -> None:
        if engine.connection is connection:
            engine.connection = None
            agent = await self._agent.get_started()
            await agent.disconnect(connection)
