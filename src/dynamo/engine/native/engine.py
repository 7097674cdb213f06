"""The native engine as the worker sees it: its methods run on the event loop, its work in a thread of its own.

What goes to the thread are commands, and what comes back is one call per step (`loop`); who waits for what is known to
`running`.
"""

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dynamo.base import errors
from dynamo.engine import api
from dynamo.engine.native.assemble import assemble
from dynamo.engine.native.running import Post, Running
from dynamo.engine.native.settings import NativeConfig
from dynamo.kvbm import exchange, local_agent
from dynamo.protocols import generate, load
from dynamo.transfer.backends import local


class NativeEngine(exchange.ExchangesKv):
    """An `api.Engine`. `start` comes first."""

    def __init__(
        self, model_path: Path, settings: NativeConfig, room: local.Room | None = None
    ) -> None:
        self._model_path = model_path
        self._settings = settings
        self._exchange = exchange.KvExchange(
            functools.partial(local_agent.make_agent, "native", settings, room),
            timeout_s=settings.kv_transfer_timeout_s,
            lease_s=settings.kv_hold_s,
        )
        self._ended = asyncio.Event()
        self._running: Running | None = None

    @property
    def capabilities(self) -> api.EngineCapabilities:
        """Return what it can do: exchange KV blocks with other engines."""
        return api.EngineCapabilities(kv_transfer=self, kv_exports=self)

    async def start(self, sink: api.EngineSink) -> api.EngineFacts:
        """Load, in the thread that will compute."""
        event_loop = asyncio.get_running_loop()
        started: asyncio.Future[Running] = event_loop.create_future()
        post = functools.partial(_post, event_loop)
        thread = threading.Thread(
            target=self._work, args=(sink, post, started), name="engine", daemon=True
        )
        thread.start()
        self._running = await started
        try:
            await self._exchange.start(self._running.region, self._running.loop)
        except errors.ConfigError:
            await self.stop()
            raise
        return self._running.facts

    def submit(self, request: generate.Request) -> None:
        """Check it here, begin it there."""
        self._started.submit(request)

    def abort(self, request_id: str) -> None:
        """Silent from now on; its blocks are free before the next step."""
        self._started.abort(request_id)

    def abort_choice(self, request_id: str, index: int) -> None:
        """The same of one choice."""
        self._started.abort_choice(request_id, index)

    def load(self) -> Sequence[load.ForwardPassMetrics]:
        """As of the last step; it has one rank."""
        return (self._started.loop.load,)

    async def clear_kv_blocks(self) -> None:
        """Returns when the thread has done it."""
        done = asyncio.Event()
        running = self._started
        running.loop.clear(functools.partial(running.post, done.set))
        waits = [asyncio.ensure_future(event.wait()) for event in (done, self._ended)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    async def stop(self) -> None:
        """Returns when the thread has left its loop."""
        if self._running is not None:
            self._running.stop()
            await self._exchange.close()
            await self._ended.wait()

    @property
    def _started(self) -> Running:
        assert self._running is not None, "the engine is used before start() has returned"
        return self._running

    def _work(self, sink: api.EngineSink, post: Post, started: "asyncio.Future[Running]") -> None:
        """The thread's life: load, run, end."""
        try:
            assembly = assemble(self._model_path, self._settings, self._exchange.allocate)
            running = Running(assembly, self._exchange, sink, post)
        except errors.ConfigError as error:
            post(_fail, started, error)
            return
        except Exception as error:  # noqa: BLE001 - supervises the thread: start() raises it
            post(_fail, started, _failure("the model could not be loaded", error))
            return
        post(_begin, started, running)
        try:
            running.loop.run()
        except Exception as error:  # noqa: BLE001 - supervises the thread: the sink is told
            post(running.died, _failure("the engine's loop died", error))
        post(self._ended.set)


def _post(
    event_loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *arguments: Any
) -> None:
    """Call it on the event loop; if that is closed, nobody is there to hear it."""
    with contextlib.suppress(RuntimeError):
        event_loop.call_soon_threadsafe(function, *arguments)


def _begin(started: "asyncio.Future[Running]", running: Running) -> None:
    if started.cancelled():  # whoever called start() has gone away
        running.stop()
    else:
        started.set_result(running)


def _fail(started: "asyncio.Future[Running]", error: errors.DynamoError) -> None:
    if not started.cancelled():
        started.set_exception(error)


def _failure(what: str, error: Exception) -> errors.EngineFailed:
    failure = errors.EngineFailed(f"{what}: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
