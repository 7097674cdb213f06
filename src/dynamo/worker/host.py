"""The host of an engine: it makes any engine a worker.

`Host.start` starts everything that lives as long as the worker: the engine's own loop, the `generate` endpoint with the
requests in flight behind it, the `clear_kv_blocks` endpoint, the publisher of KV events and load, the
`kv_events_replay` endpoint for routers that missed events, and the lifecycle hooks. `Host.stop` ends them in the order
that loses nothing: leave discovery, refuse new requests, finish running ones, hand unfinished ones over, wait until
other engines have copied the KV blocks that they were promised, stop the engine. A request that is handed over fails as
`WorkerLost`, which makes its frontend migrate it to another worker.

An engine that dies or hangs (`canary`) ends the worker: its requests are handed over, the worker leaves discovery at
once, and `run_until` raises, so that the process ends and its supervisor can start another.

A `Fleet` is several hosts in one process, for simulated engines: a machine could not run hundreds as processes. Each is
an instance with its own engine, address and KV events. They share discovery's lease and the event plane, which would
cost a thread or a file each, and one system port with the metrics of all. They start and end together.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors, ids, tasks
from dynamo.engine import api
from dynamo.observability import tracing
from dynamo.protocols import instances, kv_events, load, model_card
from dynamo.runtime import component, requests
from dynamo.worker import card as cards
from dynamo.worker import (
    health,
    inflight,
    kv_event_publisher,
    kv_event_replays,
    kv_tiers,
    lora_adapters,
    sleep,
    startup,
)

_logger = logging.getLogger(__name__)
ENGINE_STOP_S = 10.0  # an engine that hangs does not stop either
MakeCard = Callable[[api.EngineFacts], model_card.ModelCard]


async def stop_engine(engine: api.Engine | api.Embedder, clock: clocks.Clock) -> None:
    """Stop an engine; one that hangs in a thread is left to the end of the process."""
    try:
        async with clock.timeout(ENGINE_STOP_S):
            await engine.stop()
    except TimeoutError:
        _logger.warning("the engine did not stop within %g s", ENGINE_STOP_S)


class LifecycleHook(Protocol):
    """Work that begins and ends with a worker."""

    async def start(self) -> None:
        """Begin, before the worker is registered in discovery. Raises ConfigError."""
        ...

    async def leave(self) -> None:
        """Begin nothing more: the worker stops."""
        ...

    async def close(self) -> None:
        """End within a bounded time: the requests of the worker have ended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """The settings of one host."""

    request_limit: int  # requests that may run or wait; more are refused as overload
    drain_timeout_s: float = 30.0  # for running requests when the worker is put to sleep
    drain_grace_s: float = 0.0  # in which new requests are still accepted then
    is_aggregated: bool = True  # the engine computes all prompts itself
    can_sleep: bool = True  # False: refuse the commands, whatever the engine can do
    health_check: health.HealthCheck | None = None  # None: a quiet engine is not checked
    traces: tracing.TracingConfig | None = None  # None: no spans are exported


class Host:
    """Serves one engine at one endpoint. It is the engine's sink."""

    def __init__(
        self,
        engine: api.Engine,
        runtime: component.DistributedRuntime,
        endpoint: instances.EndpointName,
        *,
        make_card: MakeCard,
        options: HostOptions,
        clock: clocks.Clock,
        counters: health.WorkerMetrics | None = None,
        hooks: Sequence[LifecycleHook] = (),
    ) -> None:
        self._engine = engine
        self._runtime = runtime
        self._endpoint = endpoint
        self._make_card = make_card
        self._options = options
        self._clock = clock
        self._metrics = counters or health.WorkerMetrics(endpoint, clock)
        self._metrics.follow(runtime)
        self._hooks = hooks
        self._requests = inflight.InFlight(
            engine,
            limit=options.request_limit,
            counters=self._metrics,
            clock=clock,
            is_aggregated=options.is_aggregated,
        )
        self._handle = inflight.logged(self._requests.handle)
        traces = options.traces
        self._exporter = tracing.make_exporter(traces) if traces is not None else None
        if traces is not None and self._exporter is not None:
            ratio = traces.otel_traces_sampler_arg
            self._handle = inflight.traced(
                self._handle, self._exporter, ratio, clock, runtime.instance_id
            )
        self._publisher = kv_event_publisher.KvEventPublisher(
            runtime.events,
            namespace=endpoint.namespace,
            component=endpoint.component,
            worker_id=runtime.instance_id,
            epoch=ids.new_instance_id(),
        )
        self._files = cards.FileSharing(runtime, clock)
        self._tasks = tasks.Tasks()
        self._ended = asyncio.Event()
        self._death: errors.EngineFailed | None = None
        self._is_ready = False
        self._is_loaded = False  # from the engine's start to its stop
        self._is_draining = False  # also while it sleeps
        self._sleep, self._lora_adapters = self._commands(engine.capabilities)
        reporter = engine.capabilities.kv_tiers
        self._tiers = kv_tiers.KvTierMonitor(reporter, self._metrics.registry) if reporter else None
        parts = (self._sleep, self._lora_adapters, self._tiers)
        commands = [part for part in parts if part is not None]
        self.command_routes = {
            path: route for part in commands for path, route in part.routes().items()
        }
        self.system_port = health.SystemPort(
            endpoints=(endpoint.endpoint,),
            is_ready=lambda: self._is_ready,
            uptime_s=lambda: self._metrics.uptime_s,
            render=self.render_metrics,
            command_routes=self.command_routes,
        )

    @property
    def is_ready(self) -> bool:
        """True while the worker is registered and accepts requests."""
        return self._is_ready

    def render_metrics(self) -> bytes:
        """Return the exposition of the worker's metrics."""
        if self._tiers is not None:
            self._tiers.update()
        return self._metrics.render(self.measure_load())

    def measure_load(self) -> Sequence[load.ForwardPassMetrics]:
        """Return the load of each rank, also while the worker drains or sleeps; none without a living engine."""
        return self._engine.load() if self._is_loaded and self._death is None else ()

    def _commands(
        self, capabilities: api.EngineCapabilities
    ) -> tuple[sleep.Sleep | None, lora_adapters.LoraAdapters | None]:
        """Make what an operator can command; None for what the engine or the options do not allow."""
        controller, store = capabilities.sleep, capabilities.lora_adapters
        can_sleep = controller is not None and self._options.can_sleep
        return (
            sleep.Sleep(controller, self, self._clock) if controller and can_sleep else None,
            lora_adapters.LoraAdapters(
                store, self._publish_lora_names, lambda: self._is_ready, self._clock
            )
            if store is not None
            else None,
        )

    async def start(
        self, after_load: startup.AfterLoad = startup.nothing_follows
    ) -> model_card.ModelCard:
        """Load the model, serve it and return its published card. Raises ConfigError or EngineFailed.

        `after_load` is awaited before the worker is registered, so whoever finds the worker finds its system port too.
        """
        facts = await self._engine.start(self)
        self._is_loaded = True
        await after_load()
        card = await self._files.share(self._make_card(facts), self._endpoint)
        await self._publisher.advertise()
        self._tasks.start(
            "publish heartbeats",
            self._publisher.publish_heartbeats(
                self._engine.load, self._clock, self._requests, lambda: self._is_draining
            ),
        )
        reporter = self._engine.capabilities.kv_tiers
        tiers = (reporter.report_tiers,) if reporter is not None else ()
        self._tasks.start(
            "log statistics",
            health.log_statistics(self._requests, self._engine.load, self._clock, *tiers),
        )
        handlers = {
            instances.CLEAR_KV_BLOCKS: self._clear_kv_blocks,
            instances.KV_EVENTS_REPLAY: kv_event_replays.replay_handler(
                self._publisher, self._tasks
            ),
        }
        for name, handler in handlers.items():
            endpoint = instances.EndpointName(
                self._endpoint.namespace, self._endpoint.component, name
            )
            await self._runtime.register(endpoint, handler)
        for hook in self._hooks:
            await hook.start()
        self._card = card
        self._instance = await self._runtime.register(self._endpoint, self._handle, card.record_for)
        self._is_ready = True
        check = self._options.health_check
        if check is not None:
            adapters = self._lora_adapters
            watcher = health.Canary(
                self._handle_if_awake,
                self._engine.load,
                check,
                self._clock,
                is_occupied=lambda: adapters is not None and adapters.is_changing,
                may_be_remote=not self._options.is_aggregated,
            )
            self._tasks.start("health check", self._die_when_hung(watcher))
        if self._sleep is not None:
            self._sleep.begin()
        if self._lora_adapters is not None:
            self._lora_adapters.begin(card.display_name)
        _logger.info("serving %s at %s", card.display_name, self._endpoint)
        return card

    async def run_until(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set. Raises EngineFailed if the engine dies."""

        async def end_with_stop() -> None:
            await stop.wait()
            self._ended.set()

        self._tasks.start("wait to be stopped", end_with_stop())
        await self._tasks.run_until(self._ended)
        if self._death is not None:
            raise self._death

    async def stop(self, timeout_s: float, grace_s: float = 0.0) -> None:
        """Finish running requests for `timeout_s` seconds and end; accept new ones for `grace_s` seconds before.

        A worker that does not serve accepts none. Idempotent.
        """
        grace_s = grace_s if self._is_ready else 0.0
        self._is_ready, self._is_draining = False, True
        if self._sleep is not None:
            await self._sleep.close()
        if self._lora_adapters is not None:
            await self._lora_adapters.close()
        deadline = self._clock.now() + grace_s + timeout_s
        for hook in self._hooks:
            await hook.leave()
        if not await self._runtime.drain(timeout_s, grace_s):
            _logger.warning(
                "%d requests did not finish within %g s: other workers continue them",
                len(self._requests),
                timeout_s,
            )
            self._requests.hand_over(errors.WorkerLost("the worker stops: ask another"))
        await self._wait_for_exports(deadline)
        for hook in self._hooks:
            await hook.close()
        self._is_loaded = False
        await stop_engine(self._engine, self._clock)
        await self._files.close()
        await self._tasks.close()
        await self.system_port.close()
        if self._exporter is not None:
            await asyncio.to_thread(self._exporter.close)
        _logger.info("stopped")

    async def withdraw(self) -> None:
        """Leave discovery and finish or hand over all requests; `restore` undoes it."""
        self._is_ready, self._is_draining = False, True
        if self._lora_adapters is not None:
            await self._lora_adapters.settle()
        await self._runtime.records.withdraw()
        await self._clock.sleep(self._options.drain_grace_s)
        deadline = self._clock.now() + self._options.drain_timeout_s
        refusal = errors.WorkerLost("the worker sleeps: ask another")
        await self._requests.drain(refusal, self._options.drain_timeout_s)
        await self._wait_for_exports(deadline)

    async def promise_wake_up(self, estimate_s: float) -> None:
        """Announce, until `restore`, that this worker sleeps and comes back."""
        start = instances.WorkerStart(
            model=self._card.display_name,
            namespace=self._endpoint.namespace,
            estimate_s=estimate_s,
            sleeper=instances.SleepingInstance(
                instance_id=self._runtime.instance_id,
                role=self._card.worker_type.value,
                endpoint=str(self._endpoint),
            ),
        )
        try:
            await self._runtime.discovery.put(self._start_key, msgspec.json.encode(start))
        except (errors.Unavailable, errors.ConfigError) as error:
            _logger.warning("requests wait for us for a shorter time: %s", error)

    @property
    def _start_key(self) -> str:
        return f"{instances.STARTS}{self._runtime.instance_id:x}"

    async def clear_prefixes(self) -> None:
        """Drop the engine's cached prefixes, so that no router expects them after the sleep."""
        await self._engine.clear_kv_blocks()

    async def restore(self) -> None:
        """Accept requests again and register in discovery."""
        self._requests.reopen()
        await self._runtime.records.restore()
        await self._runtime.discovery.delete(self._start_key)
        self._is_ready, self._is_draining = True, False

    def cached_blocks(self) -> Iterator[tuple[int, tuple[kv_events.Stored, ...]]]:
        """Yield each rank with the blocks that it holds, for the host that has the engine next."""
        return self._publisher.cached_blocks()

    def outputs(self, batch: Sequence[api.EngineOutput]) -> None:
        """Send the outputs of one engine step to their callers; called by the engine."""
        self._requests.outputs(batch)

    def failed(self, request_id: str, error: errors.DynamoError) -> None:
        """Fail one request that the engine gave up; called by the engine."""
        self._requests.failed(request_id, error)

    def kv_events(self, events: Sequence[kv_events.KvEvent], dp_rank: int = 0) -> None:
        """Publish the blocks that one step of one rank stored and removed; called by the engine."""
        self._publisher.publish_kv_events(events, dp_rank)

    def died(self, error: errors.EngineFailed) -> None:
        """Hand all requests over and end the worker; called by an engine that is unusable."""
        self._is_ready = False
        self._death = error
        self._requests.hand_over(errors.WorkerDied(f"the worker's engine is lost: {error}"))
        self._ended.set()

    async def _publish_lora_names(self, names: tuple[str, ...]) -> None:
        def change(value: bytes) -> model_card.CardRecord:
            return model_card.change_card(
                value, lambda card: msgspec.structs.replace(card, lora_names=names)
            )

        await self._runtime.records.change(self._instance.card_key, change)

    def _handle_if_awake(self, probe: requests.Call) -> None:
        if self._is_ready:
            self._requests.handle(probe, is_probe=True)
        else:  # it sleeps, or is about to leave
            probe.finish()

    async def _die_when_hung(self, watcher: health.Canary) -> None:
        self.died(await watcher.watch())

    async def _wait_for_exports(self, deadline: float) -> None:
        """Wait until other engines have copied the KV blocks held for them, or the clock shows `deadline`."""
        exports = self._engine.capabilities.kv_exports
        if self._death is not None or exports is None:
            return
        try:
            async with self._clock.timeout(max(0.0, deadline - self._clock.now())):
                await exports.wait_until_released()
        except TimeoutError:
            _logger.warning(
                "prompts that were computed for other workers are lost: no worker copied them"
            )

    def _clear_kv_blocks(self, call: requests.Call) -> None:
        self._tasks.start("clear KV blocks", self._clear_and_reply(call))

    async def _clear_and_reply(self, call: requests.Call) -> None:
        try:
            await self._engine.clear_kv_blocks()
        except errors.DynamoError as error:
            call.fail(error)
        else:
            call.reply({"status": "success", "message": "KV cache cleared"})
            call.finish()


MakeHost = Callable[[api.Engine, component.DistributedRuntime], Host]


class Fleet:
    """Several hosts in one process, with the methods of one `Host`."""

    def __init__(
        self,
        engines: Sequence[api.Engine],
        runtime: component.DistributedRuntime,
        make_host: MakeHost,
        *,
        endpoint: instances.EndpointName,
        counters: health.WorkerMetrics,
    ) -> None:
        self._runtimes = [runtime.sibling() for _ in engines]
        self._hosts = [
            make_host(engine, sibling)
            for engine, sibling in zip(engines, self._runtimes, strict=True)
        ]
        self._is_ready = False
        self.system_port = health.SystemPort(
            endpoints=(endpoint.endpoint,),
            is_ready=lambda: self._is_ready,
            uptime_s=lambda: counters.uptime_s,
            render=lambda: counters.render(self._load()),
        )

    async def start(self, after_load: startup.AfterLoad = startup.nothing_follows) -> None:
        """Start all hosts at once, then await `after_load`. Raises ConfigError or EngineFailed."""
        await asyncio.gather(*(host.start() for host in self._hosts))
        await after_load()
        self._is_ready = True

    async def run_until(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set. Raises EngineFailed if an engine dies."""
        try:
            async with asyncio.TaskGroup() as group:
                for host in self._hosts:
                    group.create_task(host.run_until(stop))
        except* errors.EngineFailed as deaths:
            raise deaths.exceptions[0] from deaths.exceptions[0].__cause__

    async def stop(self, timeout_s: float, grace_s: float = 0.0) -> None:
        """Stop all hosts at once, as `Host.stop` does."""
        self._is_ready = False
        await asyncio.gather(*(host.stop(timeout_s, grace_s) for host in self._hosts))
        for sibling in self._runtimes:
            await sibling.close()
        await self.system_port.close()

    def _load(self) -> list[load.ForwardPassMetrics]:
        return [rank_load for each in self._hosts for rank_load in each.measure_load()]
