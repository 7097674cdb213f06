"""The local connector: worker processes on this machine, started and drained through `launch`.

Each worker gets cores and devices of its own, if it is given any. A worker that is taken away gets SIGTERM: it leaves
discovery, finishes or hands over what it runs, and ends; only then are its cores free again. Of several workers the
youngest goes first, and one that has not served yet before all others. Workers that die are not restarted here: the
next decision orders a new one, with the planner's pauses between failures. If the planner dies, its workers leave in
the same way: no answer is cut, and no worker is left without owner.
"""

import asyncio
import dataclasses
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
_SMOOTHING = 0.3  # weight of the newest start-up time


@dataclass(slots=True, eq=False)
class _LocalWorker:
    child: children.Child
    resources: allocation.Allocation
    ordered_at: float
    instance: str | None = None  # its key in discovery, once it serves
    is_draining: bool = False


@dataclass(slots=True)
class _LocalPool:
    registered: RegisteredWorkers
    workers: list[_LocalWorker] = field(default_factory=list)
    startup_s: float | None = None
    failure: str = ""
    num_started: int = 0


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
        cores_per_worker: int = 0,
        devices_per_worker: int = 0,
        stop_timeout_s: float = 35.0,
    ) -> None:
        self._make_spec = make_spec
        self._guard = guardian
        self._clock = clock
        self._pools: dict[Pool, _LocalPool] = {
            "prefill": _LocalPool(registered[0]),
            "decode": _LocalPool(registered[1]),
        }
        self._allocator = allocator
        self._resources = (cores_per_worker, devices_per_worker)
        self._stop_timeout_s = stop_timeout_s
        self._running = tasks.Tasks()

    async def observe(self) -> tuple[PoolState, PoolState]:
        """Return the prefill pool and the decode pool."""
        prefill, decode = [await self._observe_pool(pool) for pool in self._pools]
        return prefill, decode

    async def scale(self, decision: Decision) -> None:
        """Start and drain worker processes."""
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
        await asyncio.gather(*(worker.child.stop(self._stop_timeout_s) for worker in workers))
        await self._running.close()

    async def _observe_pool(self, name: Pool) -> PoolState:
        pool = self._pools[name]
        keys = await pool.registered.read_ids()
        now = self._clock.now()
        earlier_keys = {worker.instance for worker in pool.workers}
        new_keys = sorted(keys - earlier_keys)
        for worker in pool.workers:
            if worker.instance is None and not worker.is_draining and new_keys:
                worker.instance = new_keys.pop(0)
                measured_s = now - worker.ordered_at
                earlier_s = measured_s if pool.startup_s is None else pool.startup_s
                pool.startup_s = earlier_s + _SMOOTHING * (measured_s - earlier_s)
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
        )

    async def _start(self, name: Pool, pool: _LocalPool) -> None:
        num_cores, num_devices = self._resources
        try:
            resources = self._allocator.acquire(num_cores=num_cores, num_devices=num_devices)
        except errors.ConfigError as error:
            pool.failure = str(error)
            return
        pool.num_started += 1
        spec = dataclasses.replace(
            self._make_spec(name, pool.num_started, resources), grace_s=self._stop_timeout_s
        )
        try:
            child = await children.start(spec, self._guard, self._running, self._clock)
        except OSError as error:
            pool.failure = f"{spec.name} cannot be started: {error}"
            self._allocator.release(resources)
            return
        worker = _LocalWorker(child, resources, ordered_at=self._clock.now())
        pool.workers.append(worker)
        self._running.start(f"watch {spec.name}", self._watch(pool, worker))

    def _drain(self, pool: _LocalPool, worker: _LocalWorker) -> None:
        worker.is_draining = True
        if worker.instance is None and worker.child.last_line:
            pool.failure = f"last words: {worker.child.last_line}"
        stop = worker.child.stop(self._stop_timeout_s)
        self._running.start(f"drain {worker.child.spec.name}", stop)

    async def _watch(self, pool: _LocalPool, worker: _LocalWorker) -> None:
        death = await worker.child.death()
        pool.workers.remove(worker)
        self._allocator.release(worker.resources)
        if not worker.is_draining:
            pool.failure = str(death)
