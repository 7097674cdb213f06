"""The native engine as the worker sees it: its methods run on the event loop, its work in a thread of its own.

What goes to the thread are commands, and what comes back is one call per step (`loop`). When a request is aborted,
outputs of it may be on their way; they are dropped here, where it is known who still waits.
"""

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo.base import errors
from dynamo.engine import agents, api, refusal, remote
from dynamo.engine.native import scheduler
from dynamo.engine.native.assemble import Assembly, assemble
from dynamo.engine.native.guidance import grammars
from dynamo.engine.native.loop import EngineLoop
from dynamo.engine.native.settings import NativeConfig
from dynamo.protocols import generate, load
from dynamo.transfer.backends import local

Post = Callable[..., None]  # call this function with these arguments on the event loop


class NativeEngine:
    """An `api.Engine`. `start` comes first."""

    def __init__(
        self, model_path: Path, settings: NativeConfig, room: local.Room | None = None
    ) -> None:
        self._model_path = model_path
        self._settings = settings
        self._remote = remote.Remote(
            functools.partial(agents.make, "native", settings, room),
            pull_s=settings.kv_transfer_timeout_s,
            hold_s=settings.kv_hold_s,
        )
        self._ended = asyncio.Event()
        self._running: _Running | None = None

    async def start(self, sink: api.EngineSink) -> api.EngineFacts:
        """Load, in the thread that will compute."""
        event_loop = asyncio.get_running_loop()
        started: asyncio.Future[_Running] = event_loop.create_future()
        post = functools.partial(_post, event_loop)
        thread = threading.Thread(
            target=self._work, args=(sink, post, started), name="engine", daemon=True
        )
        thread.start()
        self._running = await started
        try:
            await self._remote.begin(self._running.region, self._running.loop)
        except errors.ConfigError:
            await self.stop()
            raise
        return self._running.facts

    def open_blocks(self) -> None:
        """The KV cache will lie in memory that others on this host can map."""
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
            await self._remote.close()
            await self._ended.wait()

    @property
    def _started(self) -> "_Running":
        assert self._running is not None, "the engine is used before start() has returned"
        return self._running

    def _work(self, sink: api.EngineSink, post: Post, started: "asyncio.Future[_Running]") -> None:
        """The thread's life: load, run, end."""
        try:
            assembly = assemble(self._model_path, self._settings, self._remote.allocate)
            running = _Running(assembly, self._remote, sink, post)
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


@dataclass(slots=True)
class _Open:
    """A request that has not ended, and which of its choices have not."""

    request: generate.Request
    choices: set[int]


class _Running:
    """An engine that has loaded: who waits for it, and its loop. Used on the event loop only."""

    def __init__(
        self, assembly: Assembly, lent: remote.Remote, sink: api.EngineSink, post: Post
    ) -> None:
        self.facts, self.region = assembly.facts, assembly.region
        self.post = post
        self.loop = EngineLoop(
            assembly.scheduler,
            assembly.runner,
            functools.partial(post, self._deliver),
            functools.partial(post, lent.begin_pulls),
        )
        self._remote = lent
        self._vocab_size = assembly.vocab_size
        self._grammars = assembly.grammars
        self._sink = sink
        self._open: dict[str, _Open] = {}  # by request id
        self._is_silent = False
        self._death: errors.DynamoError | None = None

    def submit(self, request: generate.Request) -> None:
        if self._death is not None:
            raise self._death
        refusal.check(request, self.facts, vocab_size=self._vocab_size)
        if request.id in self._open:
            raise errors.InvalidRequest(f"a request with the id {request.id!r} runs already")
        if request.kv_transfer_params is not None:
            self._remote.submitted(request)
        guided = request.sampling_options.guided_decoding
        if guided is None:
            self.loop.submit(request)
        else:
            made = functools.partial(self.post, self._made, request)
            self._grammars.make(guided, request.eos_token_ids, made)
        self._open[request.id] = _Open(request, set(range(request.sampling_options.n)))

    def abort(self, request_id: str) -> None:
        if self._open.pop(request_id, None):
            self._remote.aborted(request_id)
            self.loop.abort(request_id)

    def abort_choice(self, request_id: str, index: int) -> None:
        found = self._open.get(request_id)
        if found is None or index not in found.choices:
            return
        self.loop.abort_choice(request_id, index)
        self._close(found, index)

    def stop(self) -> None:
        self._is_silent = True
        self._grammars.stop()
        self.loop.stop()

    def died(self, death: errors.EngineFailed) -> None:
        self._death = death
        if not self._is_silent:
            self._sink.died(death)

    def _made(
        self, request: generate.Request, grammar: grammars.Grammar | errors.DynamoError
    ) -> None:
        """Its grammar is there, or why there is none."""
        if self._is_silent or self._death is not None or self._find(request) is None:
            return
        if isinstance(grammar, errors.DynamoError):
            del self._open[request.id]
            self._sink.failed(request.id, grammar)
        else:
            self.loop.submit(request, grammar)

    def _deliver(self, result: scheduler.StepResult) -> None:
        if self._is_silent:
            return
        if result.holds_blocks:
            result.outputs = [self._placed(*item) for item in result.outputs]
        batch = [
            api.EngineOutput(request.id, output)
            for request, output in result.outputs
            if self._is_awaited(request, output)
        ]
        if batch:
            self._sink.outputs(batch)
        for request, error in result.failed:
            if self._find(request):
                del self._open[request.id]
                self._sink.failed(request.id, error)
        if result.stored_and_removed:
            self._sink.kv_events(result.stored_and_removed)

    def _placed(
        self, request: generate.Request, output: generate.Output
    ) -> scheduler.RequestOutput:
        """If blocks are held with this output: told where they are, or freed if nobody waits for it."""
        if output.kv_transfer_params is not None:
            found = self._find(request)
            if found is not None and output.index in found.choices:
                output = self._remote.held(request, output)
            else:
                self._remote.unheard(output)
        return scheduler.RequestOutput(request, output)

    def _is_awaited(self, request: generate.Request, output: generate.Output) -> bool:
        """Whether somebody waits for this output; the last one of a request closes it."""
        found = self._find(request)
        if found is None or output.index not in found.choices:
            return False
        if output.finish_reason is not None:
            self._close(found, output.index)
        return True

    def _close(self, found: _Open, index: int) -> None:
        found.choices.discard(index)
        if not found.choices:
            del self._open[found.request.id]

    def _find(self, request: generate.Request) -> "_Open | None":
        """None if it was aborted, even if its id is in use again."""
        found = self._open.get(request.id)
        return found if found is not None and found.request is request else None


def _post(
    event_loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *arguments: Any
) -> None:
    """Call it on the event loop; if that is closed, nobody is there to hear it."""
    with contextlib.suppress(RuntimeError):
        event_loop.call_soon_threadsafe(function, *arguments)


def _begin(started: "asyncio.Future[_Running]", running: _Running) -> None:
    if started.cancelled():  # whoever called start() has gone away
        running.stop()
    else:
        started.set_result(running)


def _fail(started: "asyncio.Future[_Running]", error: errors.DynamoError) -> None:
    if not started.cancelled():
        started.set_exception(error)


def _failure(what: str, error: Exception) -> errors.EngineFailed:
    failure = errors.EngineFailed(f"{what}: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
