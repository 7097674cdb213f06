"""Loads the models of one machine on demand: the decisions of `model_turns`, carried out by worker processes.

Every `POLL_S` it reads from the frontend how many requests wait for each model and how many run, and decides. Each
model's worker has an endpoint of its own, where it is seen in discovery once it serves. A worker that is unloaded gets
SIGTERM: it finishes the requests that it has, and requests that come meanwhile wait for its model's next turn. All
models are announced in discovery (`instances.WorkerStart`), so that frontends let requests wait for them. An operator's
`instances.ModelChange` comes by a frontend.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import draining, errors, tasks
from dynamo.launch import children, guard
from dynamo.planner import model_turns, traffic_source
from dynamo.planner.connectors import RegisteredWorkers
from dynamo.protocols import instances
from dynamo.runtime import discovery, requests

POLL_S = 0.5
UNLOAD_S = 600.0  # for which a worker that is unloaded may finish its requests
_NEWS = 0.2  # share by which an estimate must change to be announced again
_logger = logging.getLogger(__name__)
_SERIES = re.compile(
    r'^dynamo_frontend_(requests_waiting_for_worker|inflight_requests)\{.*?model="([^"]*)".*?\} (\d+(?:\.\d+)?)$',
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model that a worker process of this machine can serve."""

    name: str
    aliases: Sequence[str]
    endpoint: instances.EndpointName
    spec: children.ChildSpec
    context_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """Where a loader works."""

    frontend_url: str
    instance_id: int  # of this process, which takes changes
    namespace: str
    stop_timeout_s: float  # for its workers, when all ends


def parse_demand(exposition: str) -> dict[str, model_turns.Demand]:
    """Return the requests of each model, by its name in lower case, from the metrics of a frontend."""
    demand_by_label: dict[str, model_turns.Demand] = {}
    for series, label, value in _SERIES.findall(exposition):
        demand = demand_by_label.get(label, model_turns.Demand())
        if series == "inflight_requests":
            demand = demand._replace(num_running=demand.num_running + int(float(value)))
        else:
            demand = demand._replace(num_waiting=demand.num_waiting + int(float(value)))
        demand_by_label[label] = demand
    return demand_by_label


class ModelLoader:
    """Owns the worker processes of several models; closing it drains them all."""

    def __init__(
        self,
        models: Sequence[LocalModel],
        turns: model_turns.ModelTurns,
        registry: discovery.Discovery,
        guardian: guard.Guard,
        clock: clocks.Clock,
        options: LoaderOptions,
        *,
        on_start: Callable[[children.Child], None] = lambda child: None,
        on_change: Callable[[Mapping[str, str]], None] = lambda state_by_name: None,
    ) -> None:
        """`on_change` gets each model's state in words, whenever one has changed."""
        self._models = {model.name: model for model in models}
        self._turns = turns
        self._registry = registry
        self._guard = guardian
        self._clock = clock
        self._options = options
        self._on_start = on_start
        self._on_change = on_change
        self._children: dict[str, children.Child] = {}
        self._failures: dict[str, str] = {}
        self._announced: dict[str, instances.WorkerStart] = {}  # by key
        self._states: dict[str, str] = {}
        self._demand: dict[str, model_turns.Demand] = {}
        self._adapters: dict[str, Collection[str]] = {}  # that were last loaded, by model
        self._running = tasks.Tasks()

    async def announce(self) -> None:
        """Announce all models, so that requests for them wait. Raises Unavailable."""
        now = self._clock.now()
        for number, model in enumerate(self._models.values()):
            for alias_number, name in enumerate((model.name, *model.aliases)):
                start = instances.WorkerStart(
                    model=name,
                    namespace=self._options.namespace,
                    estimate_s=max(1.0, self._turns.estimate_s(model.name, now)),
                    is_on_demand=True,
                    context_length=None if alias_number else model.context_length,
                    failure=self._failures.get(model.name, ""),
                    phase=self._turns.phase_of(model.name),
                    is_pinned=self._turns.is_pinned(model.name),
                    loader=self._options.instance_id,
                )
                key = f"{instances.STARTS}{self._options.instance_id:x}-{number}-{alias_number}"
                if _is_news(start, self._announced.get(key)):
                    await self._registry.put(key, msgspec.json.encode(start))
                    self._announced[key] = start

    async def run(self) -> None:
        """Load and unload models until cancelled."""
        while True:
            try:
                await self._note_phases()  # before the requests are read, so that these are newer
                url = f"{self._options.frontend_url}/metrics"
                page = await traffic_source.get(url)
                for name in self._children:
                    adapters = await traffic_source.read_adapters(self._registry, name)
                    self._adapters[name] = adapters
                await self._decide(parse_demand(page.decode("utf-8", "replace")))
                await self.announce()
            except errors.DynamoError as error:
                _logger.warning("nothing is decided about models: %s", error)
            await self._clock.sleep(POLL_S)

    def change(self, call: requests.Call) -> None:
        """Answer an `instances.ModelChange` by the model's phase; the next decision carries it out."""
        try:
            change = msgspec.msgpack.decode(call.body, type=instances.ModelChange)
            self._apply(change)
        except msgspec.DecodeError as error:
            call.fail(errors.InvalidRequest(f"expected a change of a model: {error}"))
        except errors.DynamoError as error:
            call.fail(error)
        else:
            _logger.info("%s: %s, as an operator asked", change.model, change.action)
            call.reply({"phase": self._turns.phase_of(change.model)})
            call.finish()

    def _apply(self, change: instances.ModelChange) -> None:
        """Raises InvalidRequest, Conflict."""
        if change.model not in self._models:
            expected = ", ".join(self._models)
            raise errors.InvalidRequest(f"expected one of {expected}, got {change.model!r}")
        match change.action:
            case "load":
                self._turns.request_load(change.model)
            case "unload":
                self._turns.request_unload(change.model, self._clock.now())
            case "pin":
                self._turns.pin(change.model)
            case "unpin":
                self._turns.unpin(change.model)

    async def close(self) -> None:
        """Drain all workers, and wait until they have ended."""
        stops = (child.stop(self._options.stop_timeout_s) for child in self._children.values())
        await asyncio.gather(*stops)
        await self._running.close()

    async def _note_phases(self) -> None:
        now = self._clock.now()
        for name, child in list(self._children.items()):
            phase = self._turns.phase_of(name)
            if child.exit_code is not None:
                death = await child.death()
                del self._children[name]
                if phase == "unloading":
                    self._turns.record_phase(name, "unloaded", now)
                else:
                    self._note_failure(name, str(death), now)
            elif phase == "loading":
                workers = RegisteredWorkers(self._registry, self._models[name].endpoint)
                if await workers.read_ids():
                    self._turns.record_phase(name, "loaded", now)
        for name in [name for name in self._failures if not self._turns.has_failed(name, now)]:
            del self._failures[name]

    def _note_failure(self, name: str, reason: str, now: float) -> None:
        self._failures[name] = reason
        self._turns.record_failure(name, now)

    async def _decide(self, demand_by_label: Mapping[str, model_turns.Demand]) -> None:
        now = self._clock.now()
        self._demand = {
            model.name: self._demand_of(model, demand_by_label) for model in self._models.values()
        }
        decision = self._turns.decide(now, self._demand)
        for name in decision.unloads:
            self._turns.record_phase(name, "unloading", now)
            spec = self._children[name].spec
            limit_s = draining.stop_timeout_s(spec.argv, spec.environ)
            self._running.start(f"unload {name}", self._children[name].stop(limit_s))
        for name in decision.loads:
            self._turns.record_phase(name, "loading", now)
            spec = self._models[name].spec
            try:
                child = await children.start(spec, self._guard, self._running, self._clock)
            except OSError as error:
                self._note_failure(name, f"{spec.name} cannot be started: {error}", now)
                continue
            self._children[name] = child
            self._on_start(child)
        self._report(now)

    def _demand_of(
        self, model: LocalModel, demand_by_label: Mapping[str, model_turns.Demand]
    ) -> model_turns.Demand:
        """Return the requests for a model and its adapters; those that have lost its worker wait, too."""
        names = (model.name, *model.aliases, *self._adapters.get(model.name, ()))
        demands = [demand_by_label.get(name.lower(), model_turns.Demand()) for name in names]
        num_waiting = sum(demand.num_waiting for demand in demands)
        num_running = sum(demand.num_running for demand in demands)
        if self._turns.phase_of(model.name) == "unloaded":
            return model_turns.Demand(num_waiting=num_waiting + num_running)
        return model_turns.Demand(num_waiting, num_running)

    def _report(self, now: float) -> None:
        states = {name: self._describe(name, now) for name in self._models}
        if states != self._states:
            self._states = states
            self._on_change(states)

    def _describe(self, name: str, now: float) -> str:
        """Return the state of a model in words."""
        phase = self._turns.phase_of(name)
        demand = self._demand[name]
        if name in self._failures:
            return f"failed: {self._failures[name]}"
        words = f"{phase}, pinned" if self._turns.is_pinned(name) else str(phase)
        if demand.num_waiting and phase != "loaded":
            estimate_s = max(1.0, self._turns.estimate_s(name, now))
            words += f", {demand.num_waiting} waiting for about {estimate_s:.0f} s"
        if demand.num_running:
            words += f", {demand.num_running} running"
        return words


def _is_news(start: instances.WorkerStart, last: instances.WorkerStart | None) -> bool:
    """Return whether an announcement says something that the last one did not."""
    if last is None or msgspec.structs.replace(start, estimate_s=last.estimate_s) != last:
        return True
    return abs(start.estimate_s - last.estimate_s) > _NEWS * last.estimate_s
