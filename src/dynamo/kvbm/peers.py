"""The engines from which KV blocks are imported, and the connections to them.

After a failed copy the connection is made anew for the next one, so that one failure costs one prompt only. Where that
fails as well, the host is silent or gone, and all further copies fail at once until `connect` has succeeded, or for
`REST_S`.

An engine that leaves may still be computing prompts for us, and keeps their blocks until they are read. Its connection
is closed when it is idle, but its address is remembered for as long as the engine may hold a lease.
"""

import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.kvbm.local_agent import LocalAgent
from dynamo.transfer import agent as agents

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
        """Connect ahead of need. Return the engine's id. Raises TransferError."""
        agent = await self._agent.get_started()
        connection = await agent.connect(metadata, deadline_s=deadline_s)
        engine = self._engines.setdefault(connection.epoch, _PeerEngine(metadata, connection))
        engine.connection, engine.unreachable_until = connection, 0.0
        if engine.forget_timer is not None:
            engine.forget_timer.cancel()
            engine.forget_timer = None
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
