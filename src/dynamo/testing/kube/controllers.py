"""The loop that all controllers share: changed objects become keys, and a task reconciles one key after the other.

Controllers are level-triggered: `reconcile` looks at the objects as they are, so that a key stands for any number of
changes. A reconciliation that fails is tried again with back-off.
"""

import asyncio
import logging
from collections.abc import Hashable, Iterable
from typing import Protocol

from dynamo.base import clock as clocks
from dynamo.operator import work_queue
from dynamo.testing.kube import failures, store

_logger = logging.getLogger(__name__)
_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 10.0


class Controller(Protocol):
    """One control loop."""

    def keys_of(self, change: store.Change) -> Iterable[Hashable]:
        """Return the keys that a change concerns."""
        ...

    async def reconcile(self, key: Hashable) -> float | None:
        """Bring what the key names one step further; return after how many seconds to look again, or None."""
        ...


class ControllerLoop:
    """Runs controllers on the changes of a store."""

    def __init__(
        self,
        objects: store.Store,
        controllers: Iterable[Controller],
        clock: clocks.Clock,
    ) -> None:
        self._controllers = tuple(controllers)
        self._queue: work_queue.KeyQueue[tuple[Controller, Hashable]] = work_queue.KeyQueue(
            clock, first_delay_s=_FIRST_RETRY_S, longest_delay_s=_LAST_RETRY_S
        )
        self._unsubscribe = objects.subscribe(self._on_change)

    def register(self, controller: Controller) -> None:
        """Run one more controller from now on."""
        self._controllers = (*self._controllers, controller)

    def _on_change(self, change: store.Change) -> None:
        for controller in self._controllers:
            for key in controller.keys_of(change):
                self._queue.add((controller, key))

    async def run(self) -> None:
        """Reconcile one key after the other until cancelled."""
        while True:
            controller, key = item = await self._queue.take()
            has_failed = True
            try:
                again_s = await controller.reconcile(key)
                if again_s is not None:
                    self._queue.add_later(item, again_s)
                has_failed = False
            except failures.ApiError as error:
                if error.code not in (404, 409):
                    _logger.warning("%s %s: %s", type(controller).__name__, key, error)
            except Exception:  # a mistake here must not end all controllers
                _logger.exception("%s %s", type(controller).__name__, key)
            self._queue.release(item, has_failed=has_failed)
            await asyncio.sleep(0)  # many keys in a row must not hold up the answers

    def close(self) -> None:
        """Take no further changes."""
        self._unsubscribe()
        self._queue.close()
