"""The host of an embedder: it makes one a worker, as `host` does for an engine.

It is the shorter of the two because an embedder keeps nothing between two batches: there are no KV events to publish
and no cache to clear, and a batch that fails does not take the worker with it.
"""

import asyncio
import logging
from collections.abc import Callable

from dynamo.base import clock as clocks
from dynamo.base import tasks
from dynamo.engine import api
from dynamo.protocols import instances, model_card
from dynamo.runtime import component
from dynamo.worker import embedding_calls, file_sharing, metrics, system

_logger = logging.getLogger(__name__)
MakeCard = Callable[[api.EmbedderFacts], model_card.ModelCard]


class EmbeddingHost:
    """Serves one embedder at one endpoint."""

    def __init__(
        self,
        embedder: api.Embedder,
        runtime: component.DistributedRuntime,
        endpoint: instances.EndpointName,
        *,
        make_card: MakeCard,
        request_limit: int,
        clock: clocks.Clock,
    ) -> None:
        self._embedder = embedder
        self._runtime = runtime
        self._endpoint = endpoint
        self._make_card = make_card
        self._request_limit = request_limit
        self._clock = clock
        self._counts = metrics.WorkerMetrics(endpoint, clock)
        self._files = file_sharing.FileSharing(runtime, clock)
        self._running = tasks.Tasks()
        self._system: system.SystemPort | None = None
        self._is_ready = False

    async def start(self) -> model_card.ModelCard:
        """Load and serve; gives the card under which it is known. Raises ConfigError, EngineFailed."""
        facts = await self._embedder.start()
        card = await self._files.share(self._make_card(facts), self._endpoint)
        calls = embedding_calls.EmbeddingCalls(
            self._embedder,
            facts,
            limit=self._request_limit,
            counts=self._counts,
            clock=self._clock,
        )
        self._running.start("embed", calls.run())
        await self._runtime.register(self._endpoint, calls.take, card)
        self._is_ready = True
        _logger.info("serving embeddings of %s at %s", card.display_name, self._endpoint)
        return card

    async def open_system_port(self, host: str, port: int) -> int:
        """Serve health and metrics; before `start`, so that a worker that still loads can be asked."""
        self._system = system.SystemPort(
            endpoints=(self._endpoint.endpoint,),
            is_ready=lambda: self._is_ready,
            uptime_s=lambda: self._counts.uptime_s,
            render=lambda: self._counts.render(()),
        )
        return await self._system.start(host, port)

    async def run_until(self, stop: asyncio.Event) -> None:
        """Serve until told to stop. Raises what a task died of."""
        await self._running.run_until(stop)

    async def stop(self, timeout_s: float, grace_s: float = 0.0) -> None:
        """As `Host.stop`."""
        self._is_ready = False
        if not await self._runtime.drain(timeout_s, grace_s):
            _logger.warning("some requests did not finish within %g s", timeout_s)
        await self._files.close()
        await self._running.close()
        await self._embedder.stop()
        if self._system is not None:
            await self._system.close()
        _logger.info("stopped")
