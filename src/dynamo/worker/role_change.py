"""The change of a worker between prefill and decode, while its engine keeps running.

    prefill ── drain as when stopping ── register as when starting ──▶ decode, and back

A `RoleHost` hosts one engine by one `host.Host` after the other, each with an instance of its own, so a change is for
all other processes the end of one worker and the start of another. The model stays loaded and the KV blocks stay
cached: the next host publishes those that the former one has published. An engine allows it
by `EngineCapabilities.role_changer`; a worker keeps its role if its flags name none, or name its endpoint.

A worker is ordered to change by a signal (SIGUSR1: prefill, SIGUSR2: decode) or by a route of its system port:

POST /engine/role    {"role": "prefill"}    answers when the worker serves in that role, also if it did before;
                                            409: another change runs, or the worker does not serve
"""

import asyncio
import dataclasses
import functools
import logging
import signal
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Literal

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.engine import api
from dynamo.protocols import kv_events
from dynamo.runtime import component
from dynamo.runtime.http import exchange, json_body
from dynamo.worker import health, host, settings, startup

Role = Literal["prefill", "decode"]
MakeHost = Callable[[api.Engine, component.DistributedRuntime, Role], host.Host]
CachedBlocks = Callable[[], Iterable[tuple[int, Sequence[kv_events.KvEvent]]]]
_ROLE_BY_SIGNAL: dict[signal.Signals, Role] = {signal.SIGUSR1: "prefill", signal.SIGUSR2: "decode"}
_logger = logging.getLogger(__name__)


class RoleRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /engine/role."""

    role: Role


_decode_role = json_body.RequestDecoder(RoleRequest).decode


def can_change_role(worker: settings.WorkerConfig, engine: api.Engine) -> bool:
    """Return True if a worker with these settings may become a prefill worker or a decode worker."""
    has_role = worker.is_prefill or worker.is_decode
    can_change = engine.capabilities.role_changer is not None
    return has_role and worker.endpoint is None and can_change


class KeptEngine:
    """An `api.Engine` that runs on when its host stops it, until `end`; each host that starts it becomes its sink."""

    def __init__(self, engine: api.Engine) -> None:
        self._engine = engine
        self._sink: _PresentSink | None = None
        self._facts: api.EngineFacts | None = None
        self._is_ending = False
        self.cached_blocks: CachedBlocks = lambda: ()  # as the host before has published them
        self.capabilities = engine.capabilities
        self.submit, self.abort, self.abort_choice = (
            engine.submit,
            engine.abort,
            engine.abort_choice,
        )
        self.load, self.clear_kv_blocks = engine.load, engine.clear_kv_blocks

    async def start(self, sink: api.EngineSink) -> api.EngineFacts:
        """Start the engine, or direct the running one to another sink. Raises ConfigError or EngineFailed."""
        if self._sink is None or self._facts is None:
            self._sink = _PresentSink(sink)
            self._facts = await self._engine.start(self._sink)
            return self._facts
        if self._sink.death is not None:  # no host heard of it
            raise self._sink.death
        self._sink.present = sink
        for dp_rank, stored in self.cached_blocks():  # whatever stands in front learns them, too
            sink.kv_events(stored, dp_rank)
        store = self.capabilities.lora_adapters
        names = self._facts.lora_names if store is None else store.lora_names
        return dataclasses.replace(self._facts, lora_names=names)

    async def stop(self) -> None:
        """Stop the engine if it is to end with its host."""
        if self._is_ending:
            await self._engine.stop()
        elif self.capabilities.role_changer is not None:
            self.capabilities.role_changer.leave_role()

    def end(self) -> None:
        """Let the next `stop` stop the engine."""
        self._is_ending = True


class _PresentSink:
    """An `api.EngineSink` in front of that of the present host."""

    def __init__(self, present: api.EngineSink) -> None:
        self.present = present
        self.death: errors.EngineFailed | None = None

    def outputs(self, batch: Sequence[api.EngineOutput]) -> None:
        self.present.outputs(batch)

    def failed(self, request_id: str, error: errors.DynamoError) -> None:
        self.present.failed(request_id, error)

    def kv_events(self, events: Sequence[kv_events.KvEvent], dp_rank: int = 0) -> None:
        self.present.kv_events(events, dp_rank)

    def died(self, error: errors.EngineFailed) -> None:
        self.death = error
        self.present.died(error)


class RoleHost:
    """The host of one engine in the role of the moment, with the methods of one `Host`."""

    def __init__(
        self,
        engine: api.Engine,
        runtime: component.DistributedRuntime,
        make_host: MakeHost,
        *,
        worker: settings.WorkerConfig,
        clock: clocks.Clock,
    ) -> None:
        self._engine = KeptEngine(engine)
        self._runtime = runtime
        self._make_host = make_host
        self._clock = clock
        self._drain_s = (worker.graceful_shutdown_timeout_s, worker.grace_period_s)
        self._began_at = clock.now()
        self._tasks = tasks.Tasks()
        self._interruption = asyncio.Event()  # of the present host: by a change, or by the end
        self._change: asyncio.Future[None] | None = None
        self._role: Role = "prefill" if worker.is_prefill else "decode"
        self._open_host()
        self.system_port = health.SystemPort(
            endpoints=("generate",),
            is_ready=lambda: self._host.is_ready,
            uptime_s=lambda: self._clock.now() - self._began_at,
            render=lambda: self._host.render_metrics(),
            command_routes={
                ("POST", "/engine/role"): self._answer_role,
                **{
                    route: functools.partial(self._answer, route)
                    for route in self._host.command_routes
                },
            },
        )

    def _open_host(self) -> None:
        self._sibling = self._runtime.sibling()
        self._host = self._make_host(self._engine, self._sibling, self._role)

    async def start(self, after_load: startup.AfterLoad = startup.nothing_follows) -> None:
        """Serve in the first role, as `Host.start` does. Raises ConfigError or EngineFailed."""
        for number, role in _ROLE_BY_SIGNAL.items():
            asyncio.get_running_loop().add_signal_handler(number, self._obey, role)
        await self._host.start(after_load)

    async def run_until(self, stop: asyncio.Event) -> None:
        """Serve, in one role after the other, until `stop` is set. Raises EngineFailed if the engine dies."""

        async def end_with_stop() -> None:
            await stop.wait()
            self._interruption.set()

        self._tasks.start("wait to be stopped", end_with_stop())
        while True:
            await self._host.run_until(self._interruption)
            if stop.is_set() or self._change is None:
                return
            self._interruption.clear()
            began_at = self._clock.now()
            await self._host.stop(*self._drain_s)
            await self._sibling.close()
            if stop.is_set():
                return
            self._role = "decode" if self._role == "prefill" else "prefill"
            self._engine.cached_blocks = self._host.cached_blocks
            self._open_host()
            await self._host.start()
            _logger.info("became a %s worker in %.2f s", self._role, self._clock.now() - began_at)
            self._change.set_result(None)
            self._change = None

    async def stop(self, timeout_s: float, grace_s: float = 0.0) -> None:
        """Stop as `Host.stop` does, and the engine with it. Idempotent."""
        self._engine.end()
        if self._change is not None:
            self._change.cancel()
        await self._host.stop(timeout_s, grace_s)
        await self._sibling.close()
        await self._tasks.close()
        await self.system_port.close()

    async def change(self, role: Role) -> None:
        """Return when the worker serves in this role. Raises Conflict."""
        change = self._begin_change(role)
        if change is not None:
            await asyncio.wait([change])
            if change.cancelled():
                raise errors.Conflict(f"the worker stops before it is a {role} worker")

    def _begin_change(self, role: Role) -> "asyncio.Future[None] | None":
        """Return what ends with the change, None if nothing is to change. Raises Conflict."""
        if self._change is not None or not self._host.is_ready:
            raise errors.Conflict(
                "the worker does not serve now, so its role cannot change: ask again when it does"
            )
        if role != self._role:
            self._change = asyncio.get_running_loop().create_future()
            self._interruption.set()
        return self._change

    def _obey(self, role: Role) -> None:
        try:
            self._begin_change(role)
        except errors.Conflict as error:
            _logger.warning("ignored a signal: %s", error)

    def _answer(self, route: tuple[str, str], request: exchange.Exchange) -> Awaitable[None] | None:
        return self._host.command_routes[route](request)

    async def _answer_role(self, request: exchange.Exchange) -> None:
        async def change() -> dict[str, object]:
            role = _decode_role(request.request.body or b"{}").role
            await self.change(role)
            return {"status": "ok", "message": f"serves as a {role} worker"}

        await health.respond(request, change())
