"""A foreign engine behind our seam: a stream for each choice, gathered to one batch per turn of the event loop.

What libraries have in common is here: requests that are open, their choices, who aborted what, and when all is lost.
What differs is a `Library`, one for each of them. Libraries wake all streams of a step together; the first to bring
something asks the loop to send what all bring. Choices are named anew for the library, as an id may be in use again
before the library has heard that its first use was aborted. No name begins with another one: a library may abort by
the beginning of a name.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dynamo.base import errors, tasks
from dynamo.engine import api, refusal
from dynamo.protocols import generate, kv_events, load

WATCH_S = 0.25  # how often the library is asked whether it lives
Tell = Callable[[Sequence[kv_events.KvEvent], int], None]  # what a rank stored and removed


class Library(Protocol):
    """What we ask of a library, in its words where they are passed on only (`Any`)."""

    name: str

    async def start(self, tell: Tell) -> api.EngineFacts:
        """Load. Raises ConfigError or EngineFailed."""
        ...

    @property
    def vocab_size(self) -> int:
        """Known once it has started."""
        ...

    def plan(self, request: generate.Request, index: int) -> Any:
        """How it is to make choice `index`. Raises InvalidRequest for what it cannot honour."""
        ...

    def stream(self, request: generate.Request, plan: Any, name: str) -> AsyncIterator[Any]:
        """What it says of a choice that it is to call by this name."""
        ...

    def translate(
        self, said: Any, index: int, request: generate.Request, *, is_first: bool
    ) -> generate.Output:
        """In our words; `is_first` of all that is said of a request. Raises DynamoError if it gave the request up."""
        ...

    def explain(self, error: Exception) -> errors.DynamoError | None:
        """What a stream raised, in our words; None if the library is beyond use."""
        ...

    def death(self) -> BaseException | None:
        """What it died of, if it is dead; cheap."""
        ...

    async def abort(self, names: Sequence[str]) -> None:
        """Stop these; one that is over, or that never began, is no error."""
        ...

    def load(
        self, facts: api.EngineFacts, *, num_prefill_tokens: int, is_idle: bool
    ) -> Sequence[load.ForwardPassMetrics]:
        """How busy each rank is, as far as it says; `is_idle`: nothing of ours runs."""
        ...

    async def clear(self) -> None:
        """Forget reusable prefixes."""
        ...

    async def stop(self) -> None:
        """End its processes. It may not have started."""
        ...


@dataclass(slots=True, eq=False)
class _Open:
    """A request that has not ended, and what the library calls those of its choices that have not."""

    request: generate.Request
    names: dict[int, str]
    has_begun: bool = False


class _Gathered(NamedTuple):
    opened: _Open
    output: generate.Output


class StreamingEngine:
    """An `api.Engine` of a library. `start` comes first."""

    def __init__(
        self,
        library: Library,
        sleeper: api.SleepController | None = None,
        loras: api.LoraAdapterStore | None = None,
    ) -> None:
        """`sleeper` and `loras` are the library's; without `loras` there are no adapters."""
        self._library = library
        self._sleeper = sleeper
        self._loras = loras
        self._unloaded: set[str] = set()  # names of adapters, whose blocks may be here still
        self._tasks = tasks.Tasks()
        self._open: dict[str, _Open] = {}  # by request id
        self._gathered: list[_Gathered] = []
        self._num_named = 0
        self._num_prefill_tokens = 0
        self._death: errors.EngineFailed | None = None
        self._is_silent = False

    @property
    def capabilities(self) -> api.EngineCapabilities:
        """Return what the library can do as it is configured."""
        return api.EngineCapabilities(
            sleep=self._sleeper, lora_adapters=self if self._loras is not None else None
        )

    async def start(self, sink: api.EngineSink) -> api.EngineFacts:
        """Load, in processes of the library's."""
        self._sink = sink
        self._facts = await self._library.start(self._tell)
        self._tasks.start(f"watch {self._library.name}", self._watch())
        return self._facts

    def submit(self, request: generate.Request) -> None:
        """Check it here, begin it there; what only the library can refuse it refuses through the sink."""
        if self._death is not None:
            raise self._death
        refusal.check(request, self._facts, vocab_size=self._library.vocab_size)
        if request.id in self._open:
            raise errors.InvalidRequest(f"a request with the id {request.id!r} runs already")
        choices = range(request.sampling_options.n)
        plans = [self._library.plan(request, index) for index in choices]
        self._num_named += 1
        opened = _Open(
            request, {index: f"{self._num_named}-{index}-{request.id}" for index in choices}
        )
        self._open[request.id] = opened
        self._num_prefill_tokens += request.prompt_len
        for index in choices:
            self._tasks.start("answer", self._answer(opened, index, plans[index]))

    def abort(self, request_id: str) -> None:
        """Silent from now on."""
        opened = self._open.get(request_id)
        if opened is not None:
            self._drop(opened, *opened.names)

    def abort_choice(self, request_id: str, index: int) -> None:
        """The same of one choice."""
        opened = self._open.get(request_id)
        if opened is not None and index in opened.names:
            self._drop(opened, index)

    def load(self) -> Sequence[load.ForwardPassMetrics]:
        """As of the library's last step."""
        return self._library.load(
            self._facts, num_prefill_tokens=self._num_prefill_tokens, is_idle=not self._open
        )

    async def clear_kv_blocks(self) -> None:
        """Forget all reusable prefixes. Raises EngineFailed."""
        if self._death is not None:
            return
        try:
            await self._library.clear()
        except Exception as error:
            raise errors.EngineFailed(
                f"{self._library.name} did not forget its prefixes: {error}"
            ) from error
        for rank in range(
            self._facts.data_parallel_size
        ):  # libraries tell it with their next step, if ever
            self._sink.kv_events((kv_events.Cleared(),), rank)

    @property
    def lora_names(self) -> tuple[str, ...]:
        """See `api.LoraAdapterStore`."""
        return self._loras.lora_names if self._loras is not None else ()

    async def load_lora(self, name: str, directory: Path) -> None:
        """Load an adapter, after dropping the KV blocks of an unloaded adapter of the same name."""
        assert self._loras is not None
        if name in self._unloaded:
            if any(opened.request.lora_name == name for opened in self._open.values()):
                raise errors.Conflict(
                    f"requests for the adapter that was called {name!r} before still run: try again"
                )
            await self.clear_kv_blocks()
        await self._loras.load_lora(name, directory)
        self._facts = dataclasses.replace(self._facts, lora_names=self.lora_names)

    async def unload_lora(self, name: str) -> None:
        """See `api.LoraAdapterStore`."""
        assert self._loras is not None
        names = tuple(one for one in self.lora_names if one != name)
        self._facts = dataclasses.replace(self._facts, lora_names=names)
        self._unloaded.add(name)
        await self._loras.unload_lora(name)

    async def stop(self) -> None:
        """End the library's processes."""
        self._is_silent = True
        self._open.clear()
        await self._tasks.close()
        await self._library.stop()

    async def _answer(self, opened: _Open, index: int, plan: Any) -> None:
        """The life of one choice."""
        if index not in opened.names:
            return  # aborted before it began
        try:
            async for said in self._library.stream(opened.request, plan, opened.names[index]):
                self._heard(opened, index, said)
        except errors.DynamoError as error:
            self._failed(opened, error)
        except Exception as error:  # noqa: BLE001 - whatever a library raises is told to who asked
            explained = self._library.explain(error)
            if explained is None:
                self._die(error)
            else:
                self._failed(opened, explained)

    def _heard(self, opened: _Open, index: int, said: Any) -> None:
        if index not in opened.names:
            return
        is_first = not opened.has_begun
        output = self._library.translate(said, index, opened.request, is_first=is_first)
        if is_first:
            opened.has_begun = True
            self._num_prefill_tokens -= opened.request.prompt_len
        if not self._gathered:
            asyncio.get_running_loop().call_soon(self._send)
        self._gathered.append(_Gathered(opened, output))

    def _send(self) -> None:
        """What this turn brought, without what is not wanted any more."""
        gathered, self._gathered = self._gathered, []
        batch = [
            api.EngineOutput(opened.request.id, output)
            for opened, output in gathered
            if output.index in opened.names
        ]
        for opened, output in gathered:
            if output.finish_reason is not None:
                self._close(opened, output.index)
        if batch and not self._is_silent:
            self._sink.outputs(batch)

    def _drop(self, opened: _Open, *indices: int) -> None:
        names = [name for index in indices if (name := self._close(opened, index))]
        if self._death is None:
            self._tasks.start("abort", self._library.abort(names))

    def _close(self, opened: _Open, index: int) -> str | None:
        """This choice is over; what the library calls it."""
        name = opened.names.pop(index, None)
        if not opened.names and self._open.get(opened.request.id) is opened:
            del self._open[opened.request.id]
            if not opened.has_begun:
                self._num_prefill_tokens -= opened.request.prompt_len
        return name

    def _failed(self, opened: _Open, error: errors.DynamoError) -> None:
        """One choice of a request failed: all of it does."""
        if not opened.names or self._is_silent:
            return
        self._drop(opened, *opened.names)
        self._sink.failed(opened.request.id, error)

    def _tell(self, events: Sequence[kv_events.KvEvent], dp_rank: int) -> None:
        if not self._is_silent:
            self._sink.kv_events(events, dp_rank)

    async def _watch(self) -> None:
        """A library that dies while nobody asks it anything shall be missed too."""
        while (cause := self._library.death()) is None:  # noqa: ASYNC110 (none has an event for it)
            await asyncio.sleep(WATCH_S)
        self._die(cause)

    def _die(self, cause: BaseException) -> None:
        if self._death is not None or self._is_silent:
            return
        self._death = errors.EngineFailed(
            f"{self._library.name}'s engine process died; its log says why"
        )
        self._death.__cause__ = cause
        self._sink.died(self._death)
