"""The one host that any engine plugs into: it makes an engine a worker.

`Host.start` is the list of everything that lives as long as the worker: the engine's own loop, the `generate` endpoint
with the requests in flight behind it, the `clear_kv_blocks` endpoint, the publisher of KV events and load, the
`kv_events_replay` endpoint for who missed some, and the system port. `Host.stop` takes them down in the order that
loses nothing: leave discovery, refuse what is new, finish what runs, give back what did not finish, let others read
what the engine holds for them, then stop it. What is given back fails as `WorkerLost`, so that the frontends go on with
it elsewhere.

An engine that dies, or hangs (`canary`), takes the worker with it: its requests are given back, the worker leaves
discovery at once, and `run_until` raises, so that the process ends and whoever watches over it can start another.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors, ids, tasks
from dynamo.engine import api
from dynamo.observability import tracing
from dynamo.protocols import instances, kv_events, model_card
from dynamo.runtime import component, requests
from dynamo.runtime.http import router
from dynamo.worker import (
    call_trace,
    canary,
    file_sharing,
    inflight,
    lora_routes,
    loras,
    metrics,
    publish,
    sleep_routes,
    sleeping,
    system,
)

_logger = logging.getLogger(__name__)
ENGINE_STOP_S = 10.0  # an engine that hangs does not stop either
MakeCard = Callable[[api.EngineFacts], model_card.ModelCard]


class Beside(Protocol):
    """What lives as long as the worker serves."""

    async def start(self) -> None:
        """Before the worker can be found. Raises ConfigError."""
        ...

    async def leave(self) -> None:
        """The worker stops: begin nothing more."""
        ...

    async def close(self) -> None:
        """What the worker had begun is over. Bounded in time."""
        ...


class Host:
    """Serves one engine at one endpoint. It is the engine's sink."""

    def __init__(
        self,
        engine: api.Engine,
        runtime: component.DistributedRuntime,
        endpoint: instances.EndpointName,
        *,
        make_card: MakeCard,
        request_limit: int,
        clock: clocks.Clock,
        counts: metrics.WorkerMetrics | None = None,
        traces: tracing.TracingConfig | None = None,
    ) -> None:
        self._engine = engine
        self._beside: Sequence[Beside] = ()
        self._runtime = runtime
        self._endpoint = endpoint
        self._make_card = make_card
        self._clock = clock
        self._patience: canary.Patience | None = None  # None: the engine is never asked
        self._counts = counts or metrics.WorkerMetrics(endpoint, clock)
        self._requests = inflight.InFlight(
            engine, limit=request_limit, counts=self._counts, clock=clock
        )
        self._take = call_trace.logged(self._requests.take)
        self._exporter = tracing.make_exporter(traces) if traces is not None else None
        if traces is not None and self._exporter is not None:
            ratio = traces.otel_traces_sampler_arg
            self._take = call_trace.traced(self._take, self._exporter, ratio, clock)
        self._publisher = publish.Publisher(
            runtime.events,
            namespace=endpoint.namespace,
            component=endpoint.component,
            worker_id=runtime.instance_id,
            epoch=ids.new_instance_id(),
        )
        self._files = file_sharing.FileSharing(runtime, clock)
        self._running = tasks.Tasks()
        self._system: system.SystemPort | None = None
        self._over = asyncio.Event()
        self._death: errors.EngineFailed | None = None
        self._is_ready = False
        self._sleeping: sleeping.Sleeping | None = None  # None: it cannot
        self._loras: loras.Loras | None = None  # None: it has none, or ever the same

    def ask_when_quiet(self, patience: canary.Patience) -> None:
        """From `start` on see to it that the engine still answers."""
        self._patience = patience

    def sleep_when_told(
        self, sleeper: api.SleepController, timeout_s: float, grace_s: float = 0.0
    ) -> None:
        """From `start` on, by the system port, which is not open yet; the times are those of `stop`."""
        self._sleeping = sleeping.Sleeping(sleeper, self)
        self._retire_s, self._retire_grace_s = timeout_s, grace_s

    def change_loras_when_told(self, engine: api.LoraAdapterStore) -> None:
        """From `start` on, by the system port, which is not open yet."""
        self._loras = loras.Loras(engine, self._tell_loras, lambda: self._is_ready)

    def live_with(self, beside: Sequence[Beside]) -> None:
        """From `start` on."""
        self._beside = beside

    async def start(self) -> model_card.ModelCard:
        """Load the engine and serve it; gives the card under which it is known. Raises ConfigError, EngineFailed."""
        facts = await self._engine.start(self)
        card = await self._files.share(self._make_card(facts), self._endpoint)
        await self._publisher.advertise()
        self._running.start(
            "publish load", self._publisher.publish_load(self._engine.load, self._clock)
        )
        self._running.start("publish KV positions", self._publisher.publish_positions(self._clock))
        beside = {
            instances.CLEAR_KV_BLOCKS: self._clear_kv_blocks,
            instances.KV_EVENTS_REPLAY: self._replay_kv_events,
        }
        for endpoint, handler in beside.items():
            await self._runtime.register(
                instances.EndpointName(
                    self._endpoint.namespace, self._endpoint.component, endpoint
                ),
                handler,
            )
        for one in self._beside:
            await one.start()
        self._card = card
        self._instance = await self._runtime.register(self._endpoint, self._take, card)
        self._is_ready = True
        if self._patience is not None:
            asked = canary.Canary(
                self._ask_if_awake, self._engine.load, self._patience, self._clock
            )
            self._running.start("canary", self._die_with(asked))
        if self._sleeping is not None:
            self._sleeping.begin()
        if self._loras is not None:
            self._loras.begin(card.display_name)
        _logger.info("serving %s at %s", card.display_name, self._endpoint)
        return card

    async def open_system_port(self, host: str, port: int) -> int:
        """Serve health and metrics; before `start`, so that a worker that still loads can be asked."""
        self._system = system.SystemPort(
            endpoints=(self._endpoint.endpoint,),
            is_ready=lambda: self._is_ready,
            uptime_s=lambda: self._counts.uptime_s,
            render=lambda: self._counts.render(self._engine.load() if self._is_ready else ()),
            beside=self._told_routes(),
        )
        return await self._system.start(host, port)

    async def run_until(self, stop: asyncio.Event) -> None:
        """Serve until told to stop. Raises EngineFailed if the engine dies."""
        self._running.start("wait to be stopped", self._end_with(stop))
        await self._running.run_until(self._over)
        if self._death is not None:
            raise self._death

    async def stop(self, timeout_s: float, grace_s: float = 0.0) -> None:
        """Finish what runs, within `timeout_s`, and end; take what still comes for `grace_s` first. Idempotent."""
        self._is_ready = False
        if self._sleeping is not None:
            await self._sleeping.close()
        if self._loras is not None:
            await self._loras.close()
        until = self._clock.now() + grace_s + timeout_s
        if len(self._requests):
            _logger.info("finishing %d requests", len(self._requests))
        for one in self._beside:
            await one.leave()
        if not await self._runtime.drain(timeout_s, 0.0 if self._death else grace_s):
            _logger.warning(
                "%d requests did not finish within %g s: others shall go on with them",
                len(self._requests),
                timeout_s,
            )
            self._requests.give_back(errors.WorkerLost("the worker stops: ask another"))
        await self._let_others_read(until)
        for one in self._beside:
            await one.close()
        await self._stop_engine()
        await self._files.close()
        await self._running.close()
        if self._system is not None:
            await self._system.close()
        if self._exporter is not None:
            await asyncio.to_thread(self._exporter.close)
        _logger.info("stopped")

    async def retire(self) -> None:
        """Be found no more, and have nothing under way; `come_back` undoes it."""
        self._is_ready = False
        if self._loras is not None:
            await self._loras.settle()
        await self._runtime.withdraw()
        await self._clock.sleep(self._retire_grace_s)
        until = self._clock.now() + self._retire_s
        asleep = errors.WorkerLost("the worker sleeps: ask another")
        await self._requests.leave(asleep, self._retire_s)
        await self._let_others_read(until)

    async def forget_prefixes(self) -> None:
        """So that nobody expects them here afterwards."""
        await self._engine.clear_kv_blocks()

    async def come_back(self) -> None:
        """Take requests, and be found."""
        self._requests.come_back()
        await self._runtime.restore()
        self._is_ready = True

    def outputs(self, batch: Sequence[api.EngineOutput]) -> None:
        """From the engine: all outputs of one step."""
        self._requests.outputs(batch)

    def failed(self, request_id: str, error: errors.DynamoError) -> None:
        """From the engine: it gives one request up."""
        self._requests.failed(request_id, error)

    def kv_events(self, events: Sequence[kv_events.KvEvent], dp_rank: int = 0) -> None:
        """From the engine: what one step of one rank stored and removed."""
        self._publisher.publish_kv_events(events, dp_rank)

    def died(self, error: errors.EngineFailed) -> None:
        """From the engine: it is beyond use."""
        self._is_ready = False
        self._death = error
        self._requests.give_back(errors.WorkerLost(f"the worker's engine is lost: {error}"))
        self._over.set()

    def _told_routes(self) -> Mapping[tuple[str, str], router.Handler]:
        """What an operator can tell it."""
        sleep = sleep_routes.table(self._sleeping) if self._sleeping is not None else {}
        adapt = lora_routes.table(self._loras) if self._loras is not None else {}
        return {**sleep, **adapt}

    async def _tell_loras(self, names: tuple[str, ...]) -> None:
        """Others find them by our card."""
        card = msgspec.structs.replace(self._card, lora_names=names)
        await self._runtime.change_card(self._instance, card)
        self._card = card

    def _ask_if_awake(self, question: requests.Call) -> None:
        if self._is_ready:
            self._requests.take(question)
        else:  # it sleeps, or is about to leave
            question.finish()

    async def _die_with(self, asked: canary.Canary) -> None:
        self.died(await asked.watch())

    async def _let_others_read(self, until: float) -> None:
        """What the engine has computed for others and still holds, but not beyond this time of our clock."""
        exports = self._engine.capabilities.kv_exports
        if self._death is not None or exports is None:
            return
        try:
            async with asyncio.timeout(max(0.0, until - self._clock.now())):
                await exports.wait_until_released()
        except TimeoutError:
            _logger.warning("prompts that were computed for other workers are lost: nobody came")

    async def _stop_engine(self) -> None:
        try:
            async with asyncio.timeout(ENGINE_STOP_S):
                await self._engine.stop()
        except TimeoutError:
            _logger.warning("the engine did not stop within %g s", ENGINE_STOP_S)

    async def _end_with(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._over.set()

    def _clear_kv_blocks(self, call: requests.Call) -> None:
        self._running.start("clear KV blocks", self._clear_and_reply(call))

    async def _clear_and_reply(self, call: requests.Call) -> None:
        try:
            await self._engine.clear_kv_blocks()
        except errors.DynamoError as error:
            call.fail(error)
        else:
            call.reply({"status": "success", "message": "KV cache cleared"})
            call.finish()

    def _replay_kv_events(self, call: requests.Call) -> None:
        replaying = self._running.start("replay KV events", self._replay_and_finish(call))

        def stop() -> None:
            replaying.cancel()

        call.on_cancel(stop)

    async def _replay_and_finish(self, call: requests.Call) -> None:
        try:
            request = msgspec.msgpack.decode(call.body, type=kv_events.ReplayRequest)
        except (msgspec.DecodeError, RecursionError) as error:
            call.fail(errors.RemoteProtocolError(f"expected a request for a replay: {error}"))
            return
        for part in self._publisher.replay(request):
            call.reply(part)
            await asyncio.sleep(0)  # the engine's outputs go between two parts
        call.finish()
