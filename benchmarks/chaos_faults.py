"""What `chaos` does to a fleet: one fault after the other, drawn from all that its mix can suffer.

The first frontend and the first worker are only ever stopped and woken: they live through the whole run, so that their
memory and file descriptors can be compared.
"""

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence

from benchmarks import fleet as fleets

ENDS = ("SIGKILL", "SIGTERM")
WAYS = {"etcd": ("killed", "killed, emptied", "stopped"), "nats": ("killed", "stopped")}
AWAY_S = {"process": (1, 6), "etcd": (1, 8), "nats": (0.5, 3)}  # a moved answer waits for 5 s


class Chaos:
    """Hurts one at a time, as long as two workers and one frontend stay well."""

    def __init__(self, fleet: fleets.Fleet, draw: random.Random) -> None:
        self._fleet = fleet
        self._draw = draw
        self._healing: set[asyncio.Task[None]] = set()
        self._hurt_services: set[str] = set()
        self.faults: Counter[str] = Counter()
        self.bad_exits: Counter[int] = Counter()

    async def run(self, duration_s: float, every_s: float) -> None:
        until = time.monotonic() + duration_s
        while time.monotonic() < until:
            await asyncio.sleep(every_s)
            workers, frontends = await asyncio.to_thread(self._well)
            self._hurt_one(workers, frontends)
        while self._healing:
            await asyncio.wait(self._healing)

    def _well(self) -> tuple[list[fleets.Process], list[fleets.Process]]:
        workers, frontends = self._fleet.workers, self._fleet.frontends
        return [one for one in workers if one.is_well], [one for one in frontends if one.is_well]

    def _hurt_one(
        self, workers: Sequence[fleets.Process], frontends: Sequence[fleets.Process]
    ) -> None:
        """Each kind of fault that is possible now is as likely as the others."""
        if len(workers) < 2 or not frontends:
            return
        possible: dict[str, Callable[[], None]] = {}
        for kind, well, least in (("worker", workers, 3), ("frontend", frontends, 2)):
            if len(well) >= least:
                possible |= self._faults_of(kind, well)
        if not self._hurt_services:
            for name in self._fleet.services:
                possible |= {f"{name} {way}": self._service_fault(name, way) for way in WAYS[name]}
        if possible:
            fault = self._draw.choice(list(possible))
            self.faults[fault] += 1
            possible[fault]()

    def _faults_of(
        self, kind: str, well: Sequence[fleets.Process]
    ) -> dict[str, Callable[[], None]]:
        elders = (self._fleet.workers[0], self._fleet.frontends[0])
        mortal = [one for one in well if one not in elders]
        victims = {"SIGSTOP": well} | dict.fromkeys(ENDS, mortal)
        return {
            f"{kind} {end}": self._process_fault(some, end) for end, some in victims.items() if some
        }

    def _process_fault(self, some: Sequence[fleets.Process], fault: str) -> Callable[[], None]:
        def hurt() -> None:
            process = self._draw.choice(some)
            process.signal(signal.Signals[fault])
            self._heal(self._wake(process) if fault == "SIGSTOP" else self._replace(process, fault))

        return hurt

    def _service_fault(self, name: str, way: str) -> Callable[[], None]:
        def hurt() -> None:
            service = self._fleet.services[name]
            self._hurt_services.add(name)
            if way == "stopped":
                service.freeze()
            else:
                service.stop()
            self._heal(self._restore(name, service, way))

        return hurt

    def _heal(self, cure: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(cure)
        self._healing.add(task)
        task.add_done_callback(self._healing.discard)

    async def _wake(self, process: fleets.Process) -> None:
        await asyncio.sleep(self._draw.uniform(*AWAY_S["process"]))
        process.signal(signal.SIGCONT)

    async def _replace(self, process: fleets.Process, fault: str) -> None:
        code = await asyncio.to_thread(process.wait)
        if fault == "SIGTERM" and code != 0:
            self.bad_exits[code] += 1
        process.start()

    async def _restore(self, name: str, service: fleets.Service, way: str) -> None:
        await asyncio.sleep(self._draw.uniform(*AWAY_S[name]))
        if way == "stopped":
            service.thaw()
        else:
            if way == "killed, emptied":
                service.lose_data()
            await asyncio.to_thread(service.start)
        self._hurt_services.discard(name)
