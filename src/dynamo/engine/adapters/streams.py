"""An engine of another project behind the engine seam: one asynchronous stream per choice, batched per loop turn.

What libraries have in common is here: open requests and their choices, aborts, and the death of the engine. Each
library implements `Library`. A library wakes all streams of a step together; the first stream to bring an output
schedules a callback on the event loop, which sends the outputs of all streams as one batch.

Every choice gets a name of its own for the library, because a request id may be in use again before the library has
processed the abort of its first use. No name is a prefix of another: a library may abort by prefix.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.engine import api, refusal
from dynamo.protocols import generate, kv_events, load

HEALTH_CHECK_S = 0.25  # seconds between two checks whether the library is alive
Plan = TypeVar("Plan")  # the parameters of one choice, in the library's types
Result = TypeVar("Result")
OnKvEvents = Callable[[Sequence[kv_events.KvEvent], int], None]  # events, data-parallel rank


class Library(Protocol[Plan, Result]):
    """The interface to a library; values that are only passed on keep the library's types."""

    name: str

    async def start(self, on_kv_events: OnKvEvents) -> api.EngineFacts:
        """Load the model, and call `on_kv_events` on the event loop from now on. Raises ConfigError or EngineFailed."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the model; known once the library has started."""

    def plan(self, request: generate.Request, index: int) -> Plan:
        """Return the library's parameters for choice `index`. Raises InvalidRequest for options it cannot honour."""

    def stream(self, request: generate.Request, plan: Plan, name: str) -> AsyncIterator[Result]:
        """Start a choice under this name, and return the stream of its results."""

    def translate(
        self, result: Result, index: int, request: generate.Request, *, is_first: bool
    ) -> generate.Output:
        """Convert a result; `is_first` marks a request's first one. Raises DynamoError if the request was given up."""

    def explain(self, error: Exception) -> errors.DynamoError | None:
        """Convert an error that a stream raised; None if the whole library has failed."""

    def death(self) -> BaseException | None:
        """Return why the library has died, or None while it is alive; cheap."""

    async def abort(self, names: Sequence[str]) -> None:
        """Abort these choices; one that has ended or never began is no error."""

    def load(
        self, facts: api.EngineFacts, *, num_prefill_tokens: int, is_idle: bool
    ) -> Sequence[load.ForwardPassMetrics]:
        """Return the load of each rank as last reported; `is_idle`: no request is open."""

    async def clear(self) -> None:
        """Clear the prefix cache."""

    async def stop(self) -> None:
        """End the library's processes. It may not have started."""


class LoraLibrary(api.LoraAdapterStore, Protocol):
    """A library's adapter store, with what `StreamingEngine.load_lora` asks of it besides."""

    async def clear_adapters(self) -> None:
        """Let no request find the blocks of adapters that were unloaded; other blocks of shared tiers stay."""


@dataclass(slots=True, eq=False)
class _OpenRequest:
    """A request that has not ended, with the library's names of the choices that have not."""

    request: generate.Request
    names: dict[int, str]
    has_begun: bool = False


class _PendingOutput(NamedTuple):
    opened: _OpenRequest
    output: generate.Output


class StreamingEngine(Generic[Plan, Result]):
    """An `api.Engine` over a `Library`; the methods other than `start` need a started engine."""

    def __init__(
        self,
        library: Library[Plan, Result],
        *,
        sleep: api.SleepController | None = None,
        lora_adapters: LoraLibrary | None = None,
        kv_tiers: api.KvTierReporter | None = None,
        clock: clocks.Clock | None = None,
    ) -> None:
        """`sleep`, `lora_adapters` and `kv_tiers` are the library's own, None if it was started without them."""
        self._library = library
        self._kv_tiers = kv_tiers
        self._sleep = sleep
        self._lora_adapters = lora_adapters
        self._clock = clock or clocks.SystemClock()
        self._unloaded: set[str] = set()  # LoRA adapters that may still have cached KV blocks
        self._tasks = tasks.Tasks()
        self._open: dict[str, _OpenRequest] = {}  # by request id
        self._pending: list[_PendingOutput] = []
        self._num_named = 0
        self._num_prefill_tokens = 0
        self._death: errors.EngineFailed | None = None
        self._is_stopped = False

    @property
    def capabilities(self) -> api.EngineCapabilities:
        """Return sleep, LoRA adapters and tiers as far as the library was started with them."""
        return api.EngineCapabilities(
            sleep=self._sleep,
            lora_adapters=self if self._lora_adapters is not None else None,
            kv_tiers=self._kv_tiers,
        )

    async def start(self, sink: api.EngineSink) -> api.EngineFacts:
        """Load the model, in processes of the library. Raises ConfigError or EngineFailed."""
        self._sink = sink
        self._facts = await self._library.start(self._forward_kv_events)
        self._tasks.start(f"watch {self._library.name}", self._watch_health())
        return self._facts

    def submit(self, request: generate.Request) -> None:
        """Check a request and start its choices; an error that only the library can find goes to the sink."""
        if self._death is not None:
            raise self._death
        is_id_open, vocab_size = request.id in self._open, self._library.vocab_size
        refusal.check(request, self._facts, vocab_size=vocab_size, is_id_open=is_id_open)
        choices = range(request.sampling_options.n)
        plans = [self._library.plan(request, index) for index in choices]
        self._num_named += 1
        names = {index: f"{self._num_named}-{index}-{request.id}" for index in choices}
        opened = self._open[request.id] = _OpenRequest(request, names)
        self._num_prefill_tokens += request.prompt_len
        for index in choices:
            self._tasks.start("answer", self._run_choice(opened, index, plans[index]))

    def abort(self, request_id: str) -> None:
        """Abort a request; nothing more is sent for it."""
        opened = self._open.get(request_id)
        if opened is not None:
            self._abort_choices(opened, *opened.names)

    def abort_choice(self, request_id: str, index: int) -> None:
        opened = self._open.get(request_id)
        if opened is not None and index in opened.names:
            self._abort_choices(opened, index)

    def load(self) -> Sequence[load.ForwardPassMetrics]:
        """Return the load of each rank as of the library's last step."""
        return self._library.load(
            self._facts, num_prefill_tokens=self._num_prefill_tokens, is_idle=not self._open
        )

    async def clear_kv_blocks(self) -> None:
        """Clear the prefix cache. Raises EngineFailed."""
        await self._clear(self._library.clear)

    async def _clear(self, clear: Callable[[], Awaitable[None]]) -> None:
        if self._death is not None:
            return
        try:
            await clear()
        except Exception as error:
            raise errors.EngineFailed(
                f"{self._library.name} did not clear its prefix cache: {error}"
            ) from error
        # Libraries publish this event with their next step, if at all.
        for rank in range(self._facts.data_parallel_size):
            self._sink.kv_events((kv_events.Cleared(),), rank)

    @property
    def lora_names(self) -> tuple[str, ...]:
        """Return the names of the loaded LoRA adapters."""
        return self._lora_adapters.lora_names if self._lora_adapters is not None else ()

    async def load_lora(self, name: str, directory: Path) -> None:
        """Load an adapter, after dropping the KV blocks of an unloaded adapter of the same name."""
        assert self._lora_adapters is not None
        if name in self._unloaded:
            if any(opened.request.lora_name == name for opened in self._open.values()):
                raise errors.Conflict(
                    f"requests for the former adapter {name!r} are still running: try again"
                )
            await self._clear(self._lora_adapters.clear_adapters)
        await self._lora_adapters.load_lora(name, directory)
        self._facts = dataclasses.replace(self._facts, lora_names=self.lora_names)

    async def unload_lora(self, name: str) -> None:
        assert self._lora_adapters is not None
        names = tuple(loaded for loaded in self.lora_names if loaded != name)
        self._facts = dataclasses.replace(self._facts, lora_names=names)
        self._unloaded.add(name)
        await self._lora_adapters.unload_lora(name)

    async def stop(self) -> None:
        """End the library's processes; open requests are dropped without an error."""
        self._is_stopped = True
        self._open.clear()
        await self._tasks.close()
        await self._library.stop()

    async def _run_choice(self, opened: _OpenRequest, index: int, plan: Plan) -> None:
        if index not in opened.names:
            return  # aborted before it began
        has_ended = False
        try:
            async for result in self._library.stream(opened.request, plan, opened.names[index]):
                has_ended |= self._add_result(opened, index, result)
            if not has_ended and index in opened.names:  # or the request would wait for ever
                name = self._library.name
                self._fail(opened, errors.EngineFailed(f"{name} ended an answer without a reason"))
        except errors.DynamoError as error:
            self._fail(opened, error)
        except Exception as error:  # noqa: BLE001 - whatever a library raises fails the request or the engine
            request_error = self._library.explain(error)
            if request_error is None:
                self._die(error)
            else:
                self._fail(opened, request_error)

    def _add_result(self, opened: _OpenRequest, index: int, result: Result) -> bool:
        """Send a result of a choice; return whether the choice has ended."""
        if index not in opened.names:
            return True
        is_first = not opened.has_begun
        output = self._library.translate(result, index, opened.request, is_first=is_first)
        if is_first:
            opened.has_begun = True
            self._num_prefill_tokens -= opened.request.prompt_len
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._send_pending)
        self._pending.append(_PendingOutput(opened, output))
        return output.finish_reason is not None

    def _send_pending(self) -> None:
        """Send the outputs of this turn of the event loop, without those of choices that were aborted meanwhile."""
        pending, self._pending = self._pending, []
        batch = [
            api.EngineOutput(opened.request.id, output)
            for opened, output in pending
            if output.index in opened.names
        ]
        for opened, output in pending:
            if output.finish_reason is not None:
                self._close_choice(opened, output.index)
        if batch and not self._is_stopped:
            self._sink.outputs(batch)

    def _abort_choices(self, opened: _OpenRequest, *indices: int) -> None:
        names = [name for index in indices if (name := self._close_choice(opened, index))]
        if self._death is None:
            self._tasks.start("abort", self._library.abort(names))

    def _close_choice(self, opened: _OpenRequest, index: int) -> str | None:
        """End a choice, and its request with the last one; return the library's name of the choice."""
        name = opened.names.pop(index, None)
        if not opened.names and self._open.get(opened.request.id) is opened:
            del self._open[opened.request.id]
            if not opened.has_begun:
                self._num_prefill_tokens -= opened.request.prompt_len
        return name

    def _fail(self, opened: _OpenRequest, error: errors.DynamoError) -> None:
        """Fail a whole request because one of its choices failed."""
        if not opened.names or self._is_stopped:
            return
        self._abort_choices(opened, *opened.names)
        self._sink.failed(opened.request.id, error)

    def _forward_kv_events(self, events: Sequence[kv_events.KvEvent], dp_rank: int) -> None:
        if not self._is_stopped:
            self._sink.kv_events(events, dp_rank)

    async def _watch_health(self) -> None:
        """Detect the death of a library to which no request is open. No library has an event for it."""
        while (cause := self._library.death()) is None:
            await self._clock.sleep(HEALTH_CHECK_S)
        self._die(cause)

    def _die(self, cause: BaseException) -> None:
        if self._death is not None or self._is_stopped:
            return
        self._death = errors.EngineFailed(
            f"{self._library.name}'s engine process died; its log says why"
        )
        self._death.__cause__ = cause
        self._sink.died(self._death)
