"""The supervisor of a command's children: starts them, waits until they are ready, restarts them, stops them.

    async with Supervisor(guard, clock, report) as supervisor:
        supervisor.stop_on((signal.SIGINT, signal.SIGTERM))
        await supervisor.start(spec)
        ...
        await supervisor.run()

A child that dies is restarted after a growing pause. It ends the command if it has died too
often. The first signal stops all children in order, a second one kills them.
"""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any

from dynamo.base import clock as clocks
from dynamo.base import tasks
from dynamo.launch import children, guard

_PROBE_INTERVAL_S = 0.1


class Supervisor:
    """Owns the children of one command; `report` gets a sentence about each restart."""

    def __init__(
        self,
        guardian: guard.Guard,
        clock: clocks.Clock,
        report: Callable[[str], None],
        *,
        stop_timeout_s: float,
        on_start: Callable[[children.Child], None] = lambda child: None,
    ) -> None:
        """`on_start` gets each process that was started, also those in place of a dead one."""
        self._on_start = on_start
        self._guard = guardian
        self._clock = clock
        self._report = report
        self._stop_timeout_s = stop_timeout_s
        self._running = tasks.Tasks()
        self._stop = asyncio.Event()
        self._starting = asyncio.Lock()
        self._death: children.ChildDied | None = None
        self._child_by_name: dict[str, children.Child] = {}
        self._adopted: list[children.Child] = []

    async def __aenter__(self) -> "Supervisor":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        async with self._starting:  # a child that is being started again is stopped as the others
            children_left = [*self._child_by_name.values()]
        await asyncio.gather(*(child.stop(self._stop_timeout_s) for child in children_left))
        await self._running.close()

    @property
    def child_by_name(self) -> Mapping[str, children.Child]:
        """The latest process of each child."""
        return self._child_by_name

    def stop_on(self, numbers: Iterable[int], announce: Callable[[], None] = lambda: None) -> None:
        """Stop at the first of these signals, after calling `announce`; kill all children at the next one."""

        def handle() -> None:
            if self._stop.is_set():
                self.signal_all(signal.SIGKILL)
            else:
                announce()
                self._stop.set()

        for number in numbers:
            asyncio.get_running_loop().add_signal_handler(number, handle)

    def signal_all(self, number: int) -> None:
        """Send a signal to each child, those that another part has started among them."""
        for child in (*self._child_by_name.values(), *self._adopted):
            child.signal(number)

    def adopt(self, child: children.Child) -> None:
        """Let `signal_all`, and so a second signal, reach a child that another part starts and stops."""
        self._adopted = [*(each for each in self._adopted if each.exit_code is None), child]

    async def start(self, spec: children.ChildSpec) -> None:
        """Start a child that is not watched yet."""
        async with self._starting:
            child = await children.start(spec, self._guard, self._running, self._clock)
            self._child_by_name[spec.name] = child
            self._on_start(child)

    async def wait_until(
        self,
        probe: Callable[[], Awaitable[bool]],
        *,
        timeout_s: float,
        on_wait: Callable[[], None] = lambda: None,
    ) -> bool:
        """Wait until the probe returns true; call `on_wait` after each probe that does not.

        Returns False if a signal came first. Raises ChildDied for a child that ends or after `end`, TimeoutError after
        `timeout_s`.
        """
        deadline = self._clock.now() + timeout_s
        while not self._stop.is_set():
            for child in self._child_by_name.values():
                if child.exit_code is not None:
                    raise await child.death()
            if await probe():
                return True
            if self._clock.now() > deadline:
                raise TimeoutError
            on_wait()
            with contextlib.suppress(TimeoutError):
                async with self._clock.timeout(_PROBE_INTERVAL_S):
                    await self._stop.wait()
        if self._death is not None:
            raise self._death
        return False

    def end(self, reason: children.ChildDied) -> None:
        """Stop all children in order; `wait_until` and `run` raise the reason."""
        self._death = reason
        self._stop.set()

    def watch(self, name: str, *, fatal_codes: frozenset[int] = frozenset()) -> None:
        """Watch a child from now on: restart it when it dies; an exit code in `fatal_codes` stops all."""
        self._running.start(f"watch {name}", self._watch(name, fatal_codes))

    def run_beside(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do this work as well, until it ends or is cancelled; `run` raises its error."""
        return self._running.start(name, work)

    async def run(self) -> None:
        """Wait until a signal comes. Raises ChildDied if a child died that cannot be restarted."""
        await self._running.run_until(self._stop)
        if self._death is not None:
            raise self._death

    async def _watch(self, name: str, fatal_codes: frozenset[int]) -> None:
        policy = RestartPolicy()
        refusal: children.ChildDied | None = None  # of the last start
        while True:
            child = self._child_by_name[name]
            death = refusal or await child.death()
            if self._stop.is_set():
                return
            pause_s = policy.pause_s(0.0 if refusal else self._clock.now() - child.started_at)
            if death.exit_code in fatal_codes or pause_s is None:
                self.end(death)
                return
            self._report(f"{death}; starting it again in {pause_s:g} s")
            await self._clock.sleep(pause_s)
            if self._stop.is_set():
                return
            try:
                await self.start(child.spec)
            except OSError as error:  # such as too many processes
                refusal = children.ChildDied(f"{name} cannot be started: {error}")
            else:
                refusal = None


FIRST_PAUSE_S = 0.5  # doubled each time
MAX_RESTARTS = 5
STABLE_S = 60.0  # a process that ran longer starts with the first pause again


class RestartPolicy:
    """Counts the deaths of one process."""

    def __init__(self) -> None:
        self._num_restarts = 0

    def pause_s(self, ran_s: float) -> float | None:
        """Return the seconds to wait before the next start of a process that ran `ran_s`; None to give up."""
        if ran_s > STABLE_S:
            self._num_restarts = 0
        if self._num_restarts == MAX_RESTARTS:
            return None
        self._num_restarts += 1
        return FIRST_PAUSE_S * 2.0 ** (self._num_restarts - 1)
