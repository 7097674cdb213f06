"""The native engine as the worker sees it: its methods run on the event loop, its steps in a thread of its own.

Commands go to the thread, and one delivery per step comes back (`loop`). `LoadedEngine` knows, on the event loop, which
requests are open: when a request is aborted, outputs of it may be on their way, and they are dropped there.
"""

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.engine import api, refusal
from dynamo.engine.native import guided_decoding, scheduler
from dynamo.engine.native.assemble import Assembly, assemble
from dynamo.engine.native.loop import EngineLoop
from dynamo.engine.native.settings import NativeConfig
from dynamo.kvbm import agents, sharing, tier_report
from dynamo.kvbm import exchange as exchanges
from dynamo.protocols import generate, kv_transfer, load
from dynamo.transfer import api as transfer
from dynamo.transfer.backends import local

Post = Callable[..., None]  # call a function with arguments on the event loop


@dataclass(slots=True)
class _OpenRequest:
    """A request that has not ended, with the indices of its choices that have not."""

    request: generate.Request
    choices: set[int]
    compilation: asyncio.Task[None] | None = None  # of its grammar


class LoadedEngine:
    """A loaded engine: its loop and its open requests. Used on the event loop only."""

    def __init__(
        self, assembly: Assembly, exchange: exchanges.KvExchange, sink: api.EngineSink, post: Post
    ) -> None:
        self.facts = assembly.facts
        self.region, self.mirror = assembly.region, assembly.mirror
        self.post = post
        self.loop = EngineLoop(
            assembly.scheduler,
            assembly.runner,
            self._post_result,
            functools.partial(post, exchange.begin_imports),
            assembly.copies,
        )
        self._exchange = exchange
        self._vocab_size = assembly.vocab_size
        self._grammars = assembly.grammars
        self._tasks = tasks.Tasks()
        self._sink = sink
        self._open: dict[str, _OpenRequest] = {}  # by request id
        self._is_stopped = False
        self._death: errors.DynamoError | None = None

    def submit(self, request: generate.Request) -> None:
        """Check a request and pass it to the loop, when its grammar is compiled."""
        if self._death is not None:
            raise self._death
        is_id_open = request.id in self._open
        refusal.check(request, self.facts, vocab_size=self._vocab_size, is_id_open=is_id_open)
        if request.sampling_options.guided_decoding is not None:
            guided_decoding.check_backend(request.sampling_options.guided_decoding)
        first_token = None
        if request.kv_transfer_params is not None:
            first_token = self._accept_transfer(request)
        self._open[request.id] = _OpenRequest(request, set(range(request.sampling_options.n)))
        if first_token is None:
            self._begin(request)
        else:
            self.post(self._begin_after, request, first_token)

    def abort(self, request_id: str) -> None:
        """Drop a request and its outputs."""
        opened = self._open.get(request_id)
        if opened is not None:
            self._close(opened)
            self._exchange.abort_import(request_id)
            self.loop.abort(request_id)

    def abort_choice(self, request_id: str, index: int) -> None:
        """Drop one choice of a request, and the request with its last choice."""
        opened = self._open.get(request_id)
        if opened is None or index not in opened.choices:
            return
        self.loop.abort_choice(request_id, index)
        self._close_choice(opened, index)
        if not opened.choices:
            self._exchange.abort_import(request_id)

    def stop(self) -> None:
        """Drop all requests, and end the loop before its next step."""
        self._is_stopped = True
        self.loop.stop()

    async def close_grammars(self) -> None:
        """End all compilations of grammars."""
        await self._tasks.close()
        await self._grammars.close()

    def die(self, death: errors.EngineFailed) -> None:
        """Report that the loop has failed, and refuse further requests."""
        self._death = death
        if not self._is_stopped:
            self._sink.died(death)

    def _begin(self, request: generate.Request) -> None:
        opened = self._find_open(request)
        if opened is None:
            return
        guided = request.sampling_options.guided_decoding
        if guided is None:
            self.loop.submit(request)
        else:

            def fail(fault: BaseException) -> None:
                self._fail_uncompiled(opened, errors.EngineFailed(f"no grammar: {fault!r}"))

            work = self._begin_guided(opened, guided)
            opened.compilation = self._tasks.start("begin a guided answer", work, on_death=fail)

    def _accept_transfer(self, request: generate.Request) -> kv_transfer.FirstToken | None:
        """Prepare the export or import of the prompt; return the answer's first token if it comes with the prompt."""
        first_token = self._exchange.accept_request(request)
        if first_token is not None and first_token.token_id >= self._vocab_size:
            self._exchange.abort_import(request.id)
            raise errors.RemoteProtocolError(
                f"kv_transfer_params: expected a first token below {self._vocab_size}, got {first_token.token_id}"
            )
        return first_token

    def _begin_after(self, request: generate.Request, first_token: kv_transfer.FirstToken) -> None:
        """Deliver an answer's first token, which another engine has drawn, and only then pass on the request.

        So the token is sent before the engine's thread takes the processor.
        """
        if self._find_open(request) is None:  # aborted meanwhile
            return
        finish_reason, stop_reason = scheduler.check_finish(
            request,
            first_token.token_id,
            num_output=1,
            is_full=request.prompt_len + 1 >= self.facts.context_length,
        )
        output = generate.Output(
            token_ids=(first_token.token_id,),
            finish_reason=finish_reason,
            logprobs=None if first_token.logprobs is None else (first_token.logprobs,),
            cached_tokens=first_token.cached_tokens,
            stop_reason=stop_reason,
        )
        self._deliver(scheduler.StepResult(outputs=[scheduler.RequestOutput(request, output)]))
        if finish_reason is None:
            self.post(self._begin, request)
        else:
            self._exchange.skip_import(request.id)

    async def _begin_guided(self, opened: _OpenRequest, guided: generate.GuidedDecoding) -> None:
        """Pass on a request with its compiled grammar, or fail it; an abort cancels this."""
        request = opened.request
        try:
            grammar = await self._grammars.compile(guided, request.eos_token_ids)
        except errors.DynamoError as error:
            self._fail_uncompiled(opened, error)
        else:
            self.loop.submit(request, grammar)

    def _fail_uncompiled(self, opened: _OpenRequest, error: errors.DynamoError) -> None:
        if self._find_open(opened.request) is not None:
            opened.compilation = None  # which ends with this
            self._close(opened)
            self._exchange.abort_import(opened.request.id)
            self._sink.failed(opened.request.id, error)

    def _post_result(self, result: scheduler.StepResult) -> None:
        """Copy leased blocks from a GPU to where other engines read them; in the engine's thread."""
        if self.mirror is not None and result.holds_blocks:
            leases = [output.lease for output in result.outputs if output.lease is not None]
            blocks = [block for lease in leases for block in lease.block_ids]
            limit = transfer.TimeLimit(transfer.MAX_DEADLINE_S)
            self.mirror.move(transfer.TransferOperation.WRITE, blocks, blocks, limit)
        self.post(self._deliver, result)

    def _deliver(self, result: scheduler.StepResult) -> None:
        if self._is_stopped:
            return
        if result.holds_blocks:
            result.outputs = [self._publish_lease(*item) for item in result.outputs]
        batch = [
            api.EngineOutput(request.id, output)
            for request, output, _ in result.outputs
            if self._is_open_choice(request, output)
        ]
        if batch:
            self._sink.outputs(batch)
        for request, error in result.failed:
            if (opened := self._find_open(request)) is not None:
                self._close(opened)
                self._sink.failed(request.id, error)
        if result.block_events:
            self._sink.kv_events(result.block_events)

    def _publish_lease(
        self, request: generate.Request, output: generate.Output, lease: sharing.BlockLease | None
    ) -> scheduler.RequestOutput:
        """Complete an output that leases blocks to another engine, or free them if the request was aborted."""
        if lease is not None:
            opened = self._find_open(request)
            if opened is not None and output.index in opened.choices:
                output = self._exchange.publish_lease(request, output, lease)
            else:
                self._exchange.cancel_lease(lease)
        return scheduler.RequestOutput(request, output)

    def _is_open_choice(self, request: generate.Request, output: generate.Output) -> bool:
        """Return whether the choice of an output is open; its last output closes it."""
        opened = self._find_open(request)
        if opened is None or output.index not in opened.choices:
            return False
        if output.finish_reason is not None:
            self._close_choice(opened, output.index)
        return True

    def _close_choice(self, opened: _OpenRequest, index: int) -> None:
        opened.choices.discard(index)
        if not opened.choices:
            self._close(opened)

    def _close(self, opened: _OpenRequest) -> None:
        del self._open[opened.request.id]
        if opened.compilation is not None:
            opened.compilation.cancel()

    def _find_open(self, request: generate.Request) -> _OpenRequest | None:
        """Return None for a request that was aborted, even if its id is in use again."""
        opened = self._open.get(request.id)
        return opened if opened is not None and opened.request is request else None


class NativeEngine(exchanges.ExchangesKv):
    """An `api.Engine`; the methods other than `start` need a started engine."""

    def __init__(
        self, model_path: Path, settings: NativeConfig, room: local.Room | None = None
    ) -> None:
        self._model_path = model_path
        self._settings = settings
        self._exchange = exchanges.KvExchange(
            functools.partial(agents.make_agent, "native", settings, room),
            clocks.SystemClock(),
            timeout_s=settings.kv_transfer_timeout_s,
            patience_s=settings.kv_transfer_patience_s,
            lease_s=settings.kv_hold_s,
        )
        self._has_ended = asyncio.Event()
        self._loaded: LoadedEngine | None = None

    @property
    def capabilities(self) -> api.EngineCapabilities:
        """Return the exchange of KV blocks with other engines, and the report on their tiers if there are some."""
        has_tiers = bool(self._settings.tier_names)
        return api.EngineCapabilities(
            kv_transfer=self,
            kv_exports=self,
            kv_tiers=self if has_tiers else None,
            exports_prefixes=True,
            role_changer=self,
        )

    def report_tiers(self) -> tier_report.TierReport | None:
        """Return how full the tiers of the KV cache are and what was copied; None before the engine has started."""
        return None if self._loaded is None else self._loaded.loop.report_tiers()

    async def start(self, sink: api.EngineSink) -> api.EngineFacts:
        """Load the model in the thread that will compute. Raises ConfigError or EngineFailed."""
        event_loop = asyncio.get_running_loop()
        started: asyncio.Future[LoadedEngine] = event_loop.create_future()
        post = functools.partial(_post, event_loop)
        thread = threading.Thread(
            target=self._run, args=(sink, post, started), name="engine", daemon=True
        )
        thread.start()
        self._loaded = await started
        try:
            await self._exchange.start(self._loaded.region, self._loaded.loop, self._loaded.mirror)
        except errors.ConfigError:
            await self.stop()
            raise
        return self._loaded.facts

    def submit(self, request: generate.Request) -> None:
        """Check a request, and begin it with the next step."""
        self._started.submit(request)

    def abort(self, request_id: str) -> None:
        """Drop a request now; its blocks are free before the next step."""
        self._started.abort(request_id)

    def abort_choice(self, request_id: str, index: int) -> None:
        """Drop one choice of a request now; its blocks are free before the next step."""
        self._started.abort_choice(request_id, index)

    def load(self) -> Sequence[load.ForwardPassMetrics]:
        """Return the load of the only rank, as of the last step."""
        return (self._started.loop.load,)

    async def clear_kv_blocks(self) -> None:
        """Clear all reusable prefixes; returns when the thread has done so or has ended.

        Raises EngineFailed if some are left in a cache tier, where the next start finds them.
        """
        loaded, event_loop = self._started, asyncio.get_running_loop()
        fault: asyncio.Future[str | None] = event_loop.create_future()
        loaded.loop.clear(functools.partial(loaded.post, fault.set_result))
        ended = asyncio.ensure_future(self._has_ended.wait())
        await asyncio.wait((fault, ended), return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if fault.done() and (reason := fault.result()) is not None:
            raise errors.EngineFailed(reason)

    async def stop(self) -> None:
        """Drop all requests; returns when the thread has left its loop."""
        if self._loaded is not None:
            self._loaded.stop()
            await self._loaded.close_grammars()
            await self._exchange.close()
            await self._has_ended.wait()

    @property
    def _started(self) -> LoadedEngine:
        assert self._loaded is not None, "the engine is used before start() has returned"
        return self._loaded

    def _run(
        self, sink: api.EngineSink, post: Post, started: "asyncio.Future[LoadedEngine]"
    ) -> None:
        """Load the model and run the loop; the thread's main function. A library in Rust raises no Exception."""
        try:
            assembly = assemble(self._model_path, self._settings, self._exchange.allocate)
            loaded = LoadedEngine(assembly, self._exchange, sink, post)
        except errors.ConfigError as error:
            post(_fail_start, started, error)
            return
        except BaseException as error:  # noqa: BLE001 - supervises the thread: start() raises it
            post(_fail_start, started, _failure("the model could not be loaded", error))
            return
        post(_finish_start, started, loaded)
        try:
            loaded.loop.run()
        except BaseException as error:  # noqa: BLE001 - supervises the thread: the sink is told
            post(loaded.die, _failure("the engine's loop died", error))
        post(self._has_ended.set)


def _post(
    event_loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *arguments: Any
) -> None:
    """Call a function on the event loop, or drop the call if the loop is closed."""
    with contextlib.suppress(RuntimeError):
        event_loop.call_soon_threadsafe(function, *arguments)


def _finish_start(started: "asyncio.Future[LoadedEngine]", loaded: LoadedEngine) -> None:
    if started.cancelled():  # the caller of start() was cancelled
        loaded.stop()
    else:
        started.set_result(loaded)


def _fail_start(started: "asyncio.Future[LoadedEngine]", error: errors.DynamoError) -> None:
    if not started.cancelled():
        started.set_exception(error)


def _failure(message: str, error: BaseException) -> errors.EngineFailed:
    failure = errors.EngineFailed(f"{message}: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
