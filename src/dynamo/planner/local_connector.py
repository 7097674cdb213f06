"""The local connector: worker processes on this machine, started and drained through `launch`.

Each worker gets cores and devices of its own, if it is given any. A worker that is taken away gets SIGTERM: it leaves
discovery, finishes or hands over what it runs, and ends; only then are its cores free again. Of several workers the
youngest goes first, and one that has not served yet before all others. A worker that changes its role gets SIGUSR1
(prefill) or SIGUSR2 (decode), which `worker.role_change` obeys; it counts as starting until it serves in that role.
Workers that die are not restarted here: the next decision orders a new one, with the planner's pauses between failures.
If the planner dies, its workers leave in the same way: no answer is cut, and no worker is left without owner.
"""

import asyncio
import dataclasses
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.launch import allocation, children, guard
from dynamo.planner.connectors import RegisteredWorkers
from dynamo.planner.observation import PoolState
from dynamo.planner.scaling_pipeline import Decision

Pool = Literal["prefill", "decode"]
MakeSpec = Callable[[Pool, int, allocation.Allocation], children.ChildSpec]
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
    is_changing: bool = False  # it was in the other pool


@dataclass(slots=True)
class _LocalPool:
    registered: RegisteredWorkers
    workers: list[_LocalWorker] = field(default_factory=list)
    startup_s: float | None = None
    role_change_s: float | None = None
    left_keys: set[str] = field(default_factory=set)  # of workers that change into the other pool
    failure: str = ""
    num_started: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWorkerOptions:
    """What each worker process gets, and what it can do."""

    cores: int = 0
    devices: int = 0
    stop_timeout_s: float = 35.0
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
        pool.left_keys &= keys
        new_keys = sorted(keys - {worker.instance for worker in pool.workers} - pool.left_keys)
        for worker in pool.workers:
            if worker.instance is None and not worker.is_draining and new_keys:
                worker.instance = new_keys.pop(0)
                measured_s = now - worker.ordered_at
                if worker.is_changing:
                    pool.role_change_s = _blend(pool.role_change_s, measured_s)
                else:
                    pool.startup_s = _blend(pool.startup_s, measured_s)
                pool.failure = ""
        present = [worker for worker in pool.workers if not worker.is_draining]
        return PoolState(
            num_ready=sum(worker.instance is not None for worker in present),
            starting_since=tuple(
                sorted(worker.ordered_at for worker in present if worker.instance is None)
            ),
            num_draining=len(pool.workers) - len(present),
            startup_s=pool.startup_s,
            failure=pool.failure,
            role_change_s=(pool.role_change_s or 0.0) if self._options.can_change_roles else None,
        )

    def _change_roles(self, old: Pool, new: Pool, number: int) -> None:
        giver, taker = self._pools[old], self._pools[new]
        serving = [worker for worker in giver.workers if worker.instance and not worker.is_draining]
        for worker in sorted(serving, key=lambda w: w.ordered_at)[-number:]:
            giver.workers.remove(worker)
            giver.left_keys.add(worker.instance or "")
            worker.pool, worker.instance, worker.is_changing = taker, None, True
            worker.ordered_at = self._clock.now()
            taker.workers.append(worker)
            worker.child.signal(_SIGNAL_BY_ROLE[new])

    async def _start(self, name: Pool, pool: _LocalPool) -> None:
        try:
            resources = self._allocator.acquire(
                num_cores=self._options.cores, num_devices=self._options.devices
            )
        except errors.ConfigError as error:
            pool.failure = str(error)
            return
        pool.num_started += 1
        spec = dataclasses.replace(
            self._make_spec(name, pool.num_started, resources), grace_s=self._options.stop_timeout_s
        )
        try:
            child = await children.start(spec, self._guard, self._running, self._clock)
        except OSError as error:
            pool.failure = f"{spec.name} cannot be started: {error}"
            self._allocator.release(resources)
            return
        worker = _LocalWorker(pool, child, resources, ordered_at=self._clock.now())
        pool.workers.append(worker)
        self._running.start(f"watch {spec.name}", self._watch(worker))

    def _drain(self, pool: _LocalPool, worker: _LocalWorker) -> None:
        worker.is_draining = True
        if worker.instance is None and worker.child.last_line:
            pool.failure = f"last words: {worker.child.last_line}"
        stop = worker.child.stop(self._options.stop_timeout_s)
        self._running.start(f"drain {worker.child.spec.name}", stop)

    async def _watch(self, worker: _LocalWorker) -> None:
        death = await worker.child.death()
        worker.pool.workers.remove(worker)
        self._allocator.release(worker.resources)
        if not worker.is_draining:
            worker.pool.failure = str(death)


def _blend(earlier_s: float | None, measured_s: float) -> float:
    return measured_s if earlier_s is None else earlier_s + _SMOOTHING * (measured_s - earlier_s)
