"""The loop that all controllers share: changed objects become keys, and a task reconciles one key after the other.

Controllers are level-triggered: `reconcile` looks at the objects as they are, so that a key stands for any number of
changes. A reconciliation that fails is tried again with back-off.
"""

import asyncio
import logging
from collections.abc import Hashable, Iterable
from typing import Protocol

from dynamo.base import clock as clocks
from dynamo.testing.kube import failures, store

_logger = logging.getLogger(__name__)
_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 10.0


class Controller(Protocol):
    """One control loop."""

    def keys_of(self, change: "store.Change") -> Iterable[Hashable]:
        """Return the keys that a change concerns."""
        ...

    async def reconcile(self, key: Hashable) -> float | None:
        """Bring what the key names one step further; return after how many seconds to look again, or None."""
        ...


class ReconcileQueue:
    """Runs controllers on the changes of a store."""

    def __init__(
        self,
        objects: "store.Store",
        controllers: Iterable[Controller],
        clock: clocks.Clock,
    ) -> None:
        self._controllers = tuple(controllers)
        self._clock = clock
        self._pending: dict[tuple[Controller, Hashable], None] = {}
        self._delays: dict[tuple[Controller, Hashable], float] = {}
        self._timers: dict[tuple[Controller, Hashable], tuple[float, clocks.Timer]] = {}
        self._wake = asyncio.Event()
        self._unsubscribe = objects.subscribe(self._on_change)

    def register(self, controller: Controller) -> None:
        """Run one more controller from now on."""
        self._controllers = (*self._controllers, controller)

    def _on_change(self, change: "store.Change") -> None:
        for controller in self._controllers:
            for key in controller.keys_of(change):
                self.add(controller, key)

    def add(self, controller: Controller, key: Hashable) -> None:
        """Reconcile a key soon."""
        self._pending[controller, key] = None
        self._wake.set()

    def _add_later(self, item: tuple[Controller, Hashable], delay_s: float) -> None:
        due = self._clock.now() + delay_s
        earlier = self._timers.get(item)
        if earlier is not None:
            if earlier[0] <= due:
                return
            earlier[1].cancel()

        def add() -> None:
            self._timers.pop(item, None)
            self.add(*item)

        self._timers[item] = due, self._clock.call_later(delay_s, add)

    async def run(self) -> None:
        """Reconcile until cancelled."""
        while True:
            while self._pending:
                item = next(iter(self._pending))
                del self._pending[item]
                await self._reconcile(item)
                await asyncio.sleep(0)
            self._wake.clear()
            await self._wake.wait()

    async def _reconcile(self, item: tuple[Controller, Hashable]) -> None:
        controller, key = item
        try:
            again_s = await controller.reconcile(key)
        except failures.ApiError as error:
            again_s = min(self._delays.get(item, _FIRST_RETRY_S / 2) * 2, _LAST_RETRY_S)
            self._delays[item] = again_s
            if error.code not in (404, 409):
                _logger.warning("%s %s: %s", type(controller).__name__, key, error)
        except Exception:  # a mistake here must not end all controllers
            _logger.exception("%s %s", type(controller).__name__, key)
            again_s = _LAST_RETRY_S
        else:
            self._delays.pop(item, None)
        if again_s is not None:
            self._add_later(item, again_s)

    def close(self) -> None:
        """Take no further changes."""
        self._unsubscribe()
        for _, timer in self._timers.values():
            timer.cancel()
