"""The seam between a decision and the workers: a connector tells what there is, and orders what should be.

Three implement it: the local and the virtual connector here, and `kubernetes_connector`.

No connector waits until what it ordered is done. A worker that starts, one that serves and one that drains are told
apart (`PoolState`), so that decisions go on meanwhile. A worker serves when it is registered in discovery.

The local connector starts and drains worker processes on this machine through `launch`. Each worker gets cores and
devices of its own, if it is given any. A worker that is taken away gets SIGTERM: it leaves discovery, finishes or hands
over what it runs, and ends; only then are its cores free again. Of several workers the youngest goes first, and one
that has not served yet before all others. A worker that changes its role gets SIGUSR1 (prefill) or SIGUSR2 (decode),
which `worker.role_change` obeys; it counts as starting until it serves in that role. Workers that die are not restarted
here: the next decision orders a new one, with the planner's pauses between failures. If the planner dies, its workers
leave in the same way: no answer is cut, and no worker is left without owner.

The virtual connector writes decisions as state in discovery, for an orchestrator of others to carry out.

    v1/planner/{namespace}/target    {"num_prefill_workers": 2, "num_decode_workers": 3, "decision_id": 7}
    v1/planner/{namespace}/scaled    {"decision_id": 7}, written by the orchestrator when that is done

Ids rise across planners too, by the time of day: the order of an earlier planner may still be open, and its completion
must not complete ours. The orchestrator uses `VirtualOrchestrator`: wait for a target, make it so, complete it. Until
a target is completed its missing workers count as starting; after `TIMEOUT_S` seconds the planner says that none
carried it out. Where workers of a completed target go later, the same numbers are a new target.
"""

import asyncio
import dataclasses
import logging
import shlex
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import draining, errors, tasks
from dynamo.launch import allocation, children, guard
from dynamo.planner.observation import PoolState, Replicas
from dynamo.planner.scaling_pipeline import Decision
from dynamo.protocols import instances
from dynamo.runtime import discovery


class Connector(Protocol):
    """Orders workers."""

    async def observe(self) -> tuple[PoolState, PoolState]:
        """Return the prefill pool and the decode pool (in aggregated mode, all workers)."""
        ...

    async def scale(self, decision: Decision) -> None:
        """Order starts and drains towards `decision.replicas`, and give up `decision.withdrawals`."""
        ...

    async def close(self) -> None:
        """Stop; what becomes of the workers is the matter of the connector."""
        ...


class RegisteredWorkers:
    """The workers of one endpoint that are registered in discovery."""

    def __init__(self, registry: discovery.Discovery, endpoint: instances.EndpointName) -> None:
        self._registry = registry
        self._prefix = f"{instances.INSTANCES}{endpoint.path}/"

    async def read_ids(self) -> frozenset[str]:
        """Return the ids of the instances. Raises Unavailable."""
        return frozenset(await self._registry.get_prefix(self._prefix))


class WakeUpPromise:
    """The announcement, while no worker of a model runs, that one starts on demand: frontends then keep requests."""

    def __init__(
        self, registry: discovery.Discovery, *, namespace: str, model: str, instance_id: int
    ) -> None:
        self._registry = registry
        self._namespace, self.model = namespace, model
        self._key = f"{instances.STARTS}planner-{instance_id:x}"
        self._is_made = False

    async def update(self, *, is_asleep: bool, startup_s: float) -> None:
        """Make the promise if no worker runs, take it back if one does. Raises Unavailable."""
        if is_asleep and not self._is_made:
            start = instances.WorkerStart(
                model=self.model,
                namespace=self._namespace,
                estimate_s=startup_s,
                context_length=0,  # not known here, but the model is listed
                phase="unloaded",
            )
            await self._registry.put(self._key, msgspec.json.encode(start))
        elif self._is_made and not is_asleep:
            await self._registry.delete(self._key)
        self._is_made = is_asleep


def endpoints(namespace: str) -> tuple[instances.EndpointName, instances.EndpointName]:
    """Return the endpoints of prefill workers and of the others."""
    return (
        instances.EndpointName(namespace, "prefill", "generate"),
        instances.EndpointName(namespace, "backend", "generate"),
    )


Pool = Literal["prefill", "decode"]
MakeSpec = Callable[[Pool, int, allocation.Allocation], children.ChildSpec]
_logger = logging.getLogger(__name__)
_SMOOTHING = 0.3  # weight of the newest duration of a start or a change
_SIGNAL_BY_ROLE: dict[Pool, signal.Signals] = {"prefill": signal.SIGUSR1, "decode": signal.SIGUSR2}


@dataclass(slots=True, eq=False)
class _LocalWorker:
    pool: "_LocalPool"
    child: children.Child
    resources: allocation.Allocation
    ordered_at: float
    instance: str | None = None  # its key in discovery, once it serves
    is_draining: bool = False
    expected: Literal["start", "role change", "return"] = "start"  # while it does not serve


@dataclass(slots=True)
class _LocalPool:
    registered: RegisteredWorkers
    workers: list[_LocalWorker] = field(default_factory=list)
    startup_s: float | None = None
    role_change_s: float | None = None
    foreign_keys: set[str] = field(default_factory=set)  # of workers that are not ours
    # of workers that go; which worker had which of two keys is only known when one of the keys has gone
    leaving_keys: set[str] = field(default_factory=set)
    failure: str = ""
    num_started: int = 0
    num_failed: int = 0  # starts that ended without serving, since the last observation

    def note_leaving(self, worker: _LocalWorker) -> None:
        """Expect that a worker, which may have served, is registered no longer."""
        if worker.instance is not None:
            self.leaving_keys.add(worker.instance)

    def note_failure(self, reason: str) -> None:
        """Count a start that ended without serving."""
        self.num_failed += 1
        self.failure = reason

    def note_departures(self, keys: frozenset[str], now: float) -> None:
        """Take the keys that discovery no longer has from the workers; one of these that still runs shall return."""
        self.foreign_keys &= keys
        self.leaving_keys &= keys
        for worker in self.workers:
            if worker.instance is None or worker.instance in keys or worker.is_draining:
                continue
            if self.leaving_keys:  # this was the key of the one that goes
                worker.instance = self.leaving_keys.pop()
            else:
                self.failure = f"{worker.child.spec.name} left discovery, but runs"
                worker.instance, worker.expected, worker.ordered_at = None, "return", now

    def note_arrivals(self, keys: frozenset[str], now: float) -> None:
        """Give the new keys of discovery to the workers that start, and learn how long a start takes.

        While none starts, new keys are those of workers that are not ours.
        """
        known_keys = {worker.instance for worker in self.workers}
        new_keys = keys - known_keys - self.foreign_keys - self.leaving_keys
        starting = [w for w in self.workers if w.instance is None and not w.is_draining]
        if not starting:
            self.foreign_keys |= new_keys
        for worker, key in zip(starting, sorted(new_keys), strict=False):
            worker.instance = key
            measured_s = now - worker.ordered_at
            if worker.expected == "role change":
                self.role_change_s = _blend(self.role_change_s, measured_s)
            elif worker.expected == "start":
                self.startup_s = _blend(self.startup_s, measured_s)
            self.failure = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWorkerOptions:
    """What each worker process gets, and what it can do."""

    cores: int = 0
    devices: int = 0
    stop_timeout_s: float = draining.STOP_TIMEOUT_S
    can_change_roles: bool = False  # it obeys the two signals


class LocalConnector:
    """Owns the worker processes of one model; closing it drains them all."""

    def __init__(
        self,
        make_spec: MakeSpec,
        guardian: guard.Guard,
        clock: clocks.Clock,
        *,
        registered: tuple[RegisteredWorkers, RegisteredWorkers],
        allocator: allocation.Allocator,
        options: LocalWorkerOptions,
    ) -> None:
        self._make_spec = make_spec
        self._guard = guardian
        self._clock = clock
        self._pools: dict[Pool, _LocalPool] = {
            "prefill": _LocalPool(registered[0]),
            "decode": _LocalPool(registered[1]),
        }
        self._allocator = allocator
        self._options = options
        self._running = tasks.Tasks()

    async def observe(self) -> tuple[PoolState, PoolState]:
        """Return the prefill pool and the decode pool."""
        prefill, decode = [await self._observe_pool(pool) for pool in self._pools]
        return prefill, decode

    async def scale(self, decision: Decision) -> None:
        """Start, change and drain worker processes."""
        if decision.role_changes > 0:
            self._change_roles("prefill", "decode", decision.role_changes)
        elif decision.role_changes < 0:
            self._change_roles("decode", "prefill", -decision.role_changes)
        numbers = zip(self._pools, decision.replicas, decision.withdrawals, strict=True)
        for name, target, num_withdrawn in numbers:
            pool = self._pools[name]
            starting = [w for w in pool.workers if w.instance is None and not w.is_draining]
            starting.sort(key=lambda w: w.ordered_at)  # one that is to return came before others
            for worker in starting[:num_withdrawn]:
                self._drain(pool, worker)
            present = [worker for worker in pool.workers if not worker.is_draining]
            for _ in range(target - len(present)):
                await self._start(name, pool)
            youngest_first = sorted(present, key=lambda w: (w.instance is None, w.ordered_at))
            for worker in youngest_first[target:]:
                self._drain(pool, worker)

    async def close(self) -> None:
        """Drain all workers, and wait until they have ended."""
        workers = [worker for pool in self._pools.values() for worker in pool.workers]
        await asyncio.gather(
            *(worker.child.stop(self._options.stop_timeout_s) for worker in workers)
        )
        await self._running.close()

    async def _observe_pool(self, name: Pool) -> PoolState:
        pool = self._pools[name]
        keys = await pool.registered.read_ids()
        now = self._clock.now()
        pool.note_departures(keys, now)
        pool.note_arrivals(keys, now)
        present = [worker for worker in pool.workers if not worker.is_draining]
        num_failed, pool.num_failed = pool.num_failed, 0
        return PoolState(
            num_ready=sum(worker.instance is not None for worker in present),
            starting_since=tuple(
                sorted(self._awaited_since(each, now) for each in present if each.instance is None)
            ),
            num_draining=len(pool.workers) - len(present),
            startup_s=pool.startup_s,
            num_failed=num_failed,
            failure=pool.failure,
            role_change_s=(pool.role_change_s or 0.0) if self._options.can_change_roles else None,
        )

    def _awaited_since(self, worker: _LocalWorker, now: float) -> float:
        """Return when a worker began to start. One that changes its role may finish its answers before, in its time."""
        if worker.expected != "role change":
            return worker.ordered_at
        return min(now, worker.ordered_at + self._options.stop_timeout_s)

    def _change_roles(self, old: Pool, new: Pool, number: int) -> None:
        giver, taker = self._pools[old], self._pools[new]
        serving = [worker for worker in giver.workers if worker.instance and not worker.is_draining]
        for worker in sorted(serving, key=lambda w: w.ordered_at)[-number:]:
            giver.workers.remove(worker)
            giver.note_leaving(worker)
            worker.pool, worker.instance, worker.expected = taker, None, "role change"
            worker.ordered_at = self._clock.now()
            taker.workers.append(worker)
            worker.child.signal(_SIGNAL_BY_ROLE[new])

    async def _start(self, name: Pool, pool: _LocalPool) -> None:
        try:
            resources = self._allocator.acquire(
                num_cores=self._options.cores, num_devices=self._options.devices
            )
        except errors.ConfigError as error:
            pool.note_failure(str(error))
            return
        pool.num_started += 1
        spec = dataclasses.replace(
            self._make_spec(name, pool.num_started, resources), grace_s=self._options.stop_timeout_s
        )
        try:
            child = await children.start(spec, self._guard, self._running, self._clock)
        except OSError as error:
            pool.note_failure(f"{spec.name} cannot be started: {error}")
            self._allocator.release(resources)
            return
        _logger.info(
            "started %s, in the planner's environment: %s", spec.name, shlex.join(spec.argv)
        )
        worker = _LocalWorker(pool, child, resources, ordered_at=self._clock.now())
        pool.workers.append(worker)
        self._running.start(f"watch {spec.name}", self._watch(worker))

    def _drain(self, pool: _LocalPool, worker: _LocalWorker) -> None:
        worker.is_draining = True
        pool.note_leaving(worker)
        if worker.instance is None and worker.child.last_line:
            pool.failure = f"last words: {worker.child.last_line}"
        stop = worker.child.stop(self._options.stop_timeout_s)
        self._running.start(f"drain {worker.child.spec.name}", stop)

    async def _watch(self, worker: _LocalWorker) -> None:
        death = await worker.child.death()
        worker.pool.workers.remove(worker)
        self._allocator.release(worker.resources)
        if worker.is_draining:
            return
        worker.pool.note_leaving(worker)
        if worker.instance is None:
            worker.pool.note_failure(str(death))
        else:
            worker.pool.failure = str(death)


def _blend(earlier_s: float | None, measured_s: float) -> float:
    return measured_s if earlier_s is None else earlier_s + _SMOOTHING * (measured_s - earlier_s)


TIMEOUT_S = 1800.0


class ScalingTarget(msgspec.Struct, frozen=True, kw_only=True):
    """What the planner wants; `decision_id` rises with each change."""

    num_prefill_workers: int
    num_decode_workers: int
    decision_id: int


class ScalingDone(msgspec.Struct, frozen=True, kw_only=True):
    """The orchestrator has carried out the decision with this id, and all before it."""

    decision_id: int


def target_key(namespace: str) -> str:
    return f"v1/planner/{namespace}/target"


def done_key(namespace: str) -> str:
    """Return the key of the orchestrator's answer in discovery."""
    return f"v1/planner/{namespace}/scaled"


class VirtualConnector:
    """Writes targets, and counts the workers that are registered."""

    def __init__(
        self,
        registry: discovery.Discovery,
        namespace: str,
        clock: clocks.Clock,
        registered: tuple[RegisteredWorkers, RegisteredWorkers],
    ) -> None:
        self._registry = registry
        self._namespace = namespace
        self._clock = clock
        self._registered = registered
        self._target: Replicas | None = None
        self._decision_id = 0
        self._ordered_at = 0.0
        self._is_reached = False  # all workers of the target have been there, once it was completed

    async def observe(self) -> tuple[PoolState, PoolState]:
        """Return the pools: registered workers serve, further ones of an open target are starting."""
        counts = [len(await registered.read_ids()) for registered in self._registered]
        is_done = self._target is None or await self._last_completed_id() >= self._decision_id
        age_s = self._clock.now() - self._ordered_at
        failure = (
            f"no orchestrator completed decision {self._decision_id} within {TIMEOUT_S:.0f} s"
            if not is_done and age_s > TIMEOUT_S
            else ""
        )
        targets = Replicas(counts[0], counts[1]) if self._target is None else self._target
        self._is_reached |= is_done and counts[0] >= targets[0] and counts[1] >= targets[1]
        prefill, decode = [
            PoolState(
                num_ready=min(count, target) if not is_done else count,
                starting_since=(self._ordered_at,) * (0 if is_done else max(0, target - count)),
                num_draining=0 if is_done else max(0, count - target),
                failure=failure,
            )
            for count, target in zip(counts, targets, strict=True)
        ]
        return prefill, decode

    async def scale(self, decision: Decision) -> None:
        """Write a target if it is a new one, or if workers of the last one, which was reached, have gone."""
        current = decision.present if self._target is None else self._target
        pairs = zip(decision.present, current, strict=True)
        has_lost = self._is_reached and any(number < target for number, target in pairs)
        if decision.replicas == current and not has_lost:
            return
        if self._decision_id == 0:
            of_earlier_planners = int(1000 * self._clock.wall())
            self._decision_id = max(of_earlier_planners, await self._last_completed_id())
        self._decision_id += 1
        target = ScalingTarget(
            num_prefill_workers=decision.replicas.prefill,
            num_decode_workers=decision.replicas.decode,
            decision_id=self._decision_id,
        )
        await self._registry.put(target_key(self._namespace), msgspec.json.encode(target))
        self._target, self._ordered_at = decision.replicas, self._clock.now()
        self._is_reached = False

    async def close(self) -> None:
        """Leave the workers as they are."""

    async def _last_completed_id(self) -> int:
        """Return the id of the last decision that the orchestrator has carried out. Raises RemoteProtocolError."""
        key = done_key(self._namespace)
        content = (await self._registry.get_prefix(key)).get(key)
        try:
            answer = msgspec.json.decode(content or b'{"decision_id":0}', type=ScalingDone)
        except msgspec.DecodeError as error:
            raise errors.RemoteProtocolError(
                f"{key}: expected the last decision that an orchestrator carried out: {error}"
            ) from error
        return answer.decision_id


class VirtualOrchestrator:
    """The client of a foreign orchestrator: wait for a target, carry it out, complete it."""

    def __init__(self, registry: discovery.Discovery, namespace: str) -> None:
        self._registry = registry
        self._namespace = namespace
        self._completed_id = 0

    async def wait(self) -> ScalingTarget:
        """Wait for a target that is not completed, and return the newest."""
        key = target_key(self._namespace)
        async for change in self._registry.watch(key):
            if isinstance(change, discovery.Put) and change.key == key:
                target = msgspec.json.decode(change.value, type=ScalingTarget)
                if target.decision_id > self._completed_id:
                    return target
        raise asyncio.CancelledError

    async def complete(self, target: ScalingTarget) -> None:
        """Tell the planner that this target and all before it are carried out."""
        self._completed_id = target.decision_id
        answer = ScalingDone(decision_id=target.decision_id)
        await self._registry.put(done_key(self._namespace), msgspec.json.encode(answer))
