"""The engines from which blocks are copied, and the ways to them.

A peer whose copy failed is connected anew for the next one, so that a hiccup costs one prompt and not all that follow.

One that leaves may still be computing prompts for us, and holds them until they are read: the way to it is closed when
nobody is on it, but how to find it is remembered for as long as it may hold something.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from dynamo.base import errors
from dynamo.engine.own_agent import OwnAgent
from dynamo.transfer import api as transfer

CONNECT_S = 5.0
_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Source:
    """An engine to copy from; `peer` is None while there is no way to it."""

    metadata: bytes
    peer: transfer.Peer | None
    num_copies: int = 0  # that run
    forgetting: asyncio.TimerHandle | None = None  # it has left


class Sources:
    """By engine id. Used on the event loop only."""

    def __init__(self, agent: OwnAgent, *, remember_s: float) -> None:
        """`remember_s`: for how long an engine that has left may be asked for what it holds."""
        self._agent = agent
        self._remember_s = remember_s
        self._sources: dict[str, _Source] = {}

    async def connect(self, metadata: bytes, *, deadline_s: float) -> str:
        """Ahead of need; gives the engine's id. Raises TransferError."""
        agent = await self._agent.started()
        peer = await agent.connect(metadata, deadline_s=deadline_s)
        known = self._sources.setdefault(peer.epoch, _Source(metadata, peer))
        known.peer = peer
        if known.forgetting is not None:
            known.forgetting.cancel()
            known.forgetting = None
        _logger.debug("connected to %s (%s) by %s", peer.name, peer.epoch, peer.backend)
        return peer.epoch

    async def leave(self, engine_id: str) -> None:
        """Nothing new is asked of it."""
        source = self._sources.get(engine_id)
        if source is None or source.forgetting is not None:
            return
        loop = asyncio.get_running_loop()
        source.forgetting = loop.call_later(self._remember_s, self._sources.pop, engine_id, None)
        await self._close_if_idle(source)

    @contextlib.asynccontextmanager
    async def reached(self, engine_id: str) -> AsyncIterator[transfer.Peer]:
        """A way to it, for a copy or a word. Raises TransferError."""
        source = self._sources.get(engine_id)
        if source is None:
            raise errors.TransferError(f"the engine {engine_id} is not connected")
        source.num_copies += 1
        try:
            yield await self._peer_of(source)
        finally:
            source.num_copies -= 1
            await self._close_if_idle(source)

    async def distrust(self, peer: transfer.Peer) -> None:
        """A copy by this way has failed: what else goes on there fails too, and the next looks for a new one."""
        source = self._sources.get(peer.epoch)
        if source is not None:
            await self._break(source, peer)

    def close(self) -> None:
        """Forget all; the agent closes its ways itself."""
        for source in self._sources.values():
            if source.forgetting is not None:
                source.forgetting.cancel()
        self._sources.clear()

    async def _peer_of(self, source: _Source) -> transfer.Peer:
        if source.peer is None:
            agent = await self._agent.started()
            source.peer = await agent.connect(source.metadata, deadline_s=CONNECT_S)
        return source.peer

    async def _close_if_idle(self, source: _Source) -> None:
        if source.forgetting is not None and not source.num_copies and source.peer is not None:
            await self._break(source, source.peer)

    async def _break(self, source: _Source, peer: transfer.Peer) -> None:
        if source.peer is peer:
            source.peer = None
            agent = await self._agent.started()
            await agent.disconnect(peer)
