"""The agent that moves an engine's blocks: made before the engine if others are to read them, else when needed.

Peers on this host map the KV cache's memory, so an engine whose blocks are open takes it from its agent. One that only
reads has an agent from its first connection on.
"""

import asyncio
from collections.abc import Callable

from dynamo.base import errors
from dynamo.transfer import api as transfer
from dynamo.transfer import descriptors

MakeAgent = Callable[[transfer.OnNotification], transfer.Agent]


class OwnAgent:
    """Used on the event loop only."""

    def __init__(self, make: MakeAgent, on_notification: transfer.OnNotification) -> None:
        self._make, self._on_notification = make, on_notification
        self._agent: transfer.Agent | None = None
        self._is_started = asyncio.Lock()
        self._region: descriptors.Region | None = None
        self.described: descriptors.Metadata | None = None  # while it runs

    def open(self) -> None:
        """Peers on this host will map our memory: it has to come from `allocate`."""
        self._agent = self._make(self._on_notification)

    @property
    def allocate(self) -> Callable[[int], memoryview] | None:
        """Gives the KV cache's memory, if peers are to map it."""
        return self._agent.allocate if self._agent is not None else None

    @property
    def metadata(self) -> bytes | None:
        """For others, if it runs."""
        return self._agent.export_metadata() if self._agent is not None and self.described else None

    async def begin(self, region: descriptors.Region | None) -> None:
        """This is the engine's memory. Raises ConfigError if its blocks are to be open and cannot be."""
        self._region = region
        if self._agent is not None:
            await self._start(self._agent)

    async def started(self) -> transfer.Agent:
        """Raises ConfigError for memory that cannot be copied."""
        async with self._is_started:
            if self._agent is None:
                agent = self._make(self._on_notification)
                await self._start(agent)
                self._agent = agent
            return self._agent

    async def close(self) -> None:
        """Idempotent."""
        agent, self._agent, self.described = self._agent, None, None
        if agent is not None:
            await agent.close()

    async def _start(self, agent: transfer.Agent) -> None:
        if self._region is None:
            raise errors.ConfigError(
                "blocks in a device's memory cannot be copied between workers yet: expected --device cpu"
            )
        agent.register(self._region)
        await agent.start()
        self.described = descriptors.decode(agent.export_metadata())
