"""Requests that wait for a worker, by the rule of `router.wait_policy`, and the workers that are expected.

A worker announces its start in discovery, with an estimate of how long that takes (`instances.WorkerStart`).
"""

import logging
from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.frontend.metrics import UNKNOWN_MODEL
from dynamo.observability import metrics
from dynamo.protocols import instances
from dynamo.router import wait_policy
from dynamo.runtime import discovery

PAUSE_S = 0.1  # between two tries to find a worker
T = TypeVar("T")
_logger = logging.getLogger(__name__)
_decode_start = msgspec.json.Decoder(instances.WorkerStart).decode


class ExpectedWorkers:
    """The workers that are starting, by what they announce in discovery."""

    def __init__(self, registry: discovery.Discovery, *, namespace: str = "") -> None:
        self._registry = registry
        self._namespace = namespace
        self._starts: dict[str, instances.WorkerStart] = {}  # by key

    def estimate_start(self, model: str) -> float | None:
        """Return the seconds that the start of a worker of this model takes in all; None if none is starting."""
        estimates = (start.estimate_s for start in self._starts.values() if start.model == model)
        return max(estimates, default=None)

    @property
    def starts(self) -> Collection[instances.WorkerStart]:
        """Return what the workers that are starting have announced."""
        return self._starts.values()

    async def watch(self) -> None:
        """Follow the starts in discovery until cancelled."""
        async for change in self._registry.watch(instances.STARTS):
            if isinstance(change, discovery.Delete):
                self._starts.pop(change.key, None)
                continue
            try:
                start = _decode_start(change.value)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                _logger.warning("ignored the start %s: %s", change.key, error)
                continue
            if instances.covers_namespace(self._namespace, start.namespace):
                self._starts[change.key] = start


class WorkerWait:
    """The waiting requests of one frontend."""

    def __init__(
        self,
        policy: wait_policy.WaitPolicy,
        clock: clocks.Clock,
        expected: ExpectedWorkers,
        gauge: metrics.Gauge | None = None,
        is_plane_away: Callable[[], bool] = lambda: False,
    ) -> None:
        """Show in `gauge` how many requests wait for a worker of each expected model."""
        self._is_plane_away = is_plane_away
        self._gauge = gauge
        self._policy = policy
        self._clock = clock
        self._expected = expected
        self._num_waiting = 0

    def is_expected(self, model: str) -> bool:
        """Return whether a worker of this model is starting."""
        return self._expected.estimate_start(model) is not None

    async def until_served(
        self,
        ask: Callable[[], Awaitable[T]],
        model: str,
        *,
        is_over: Callable[[], bool],
        is_under_way: bool = False,
    ) -> T:
        """Return what `ask` returns, which is called until a worker of the model can be asked.

        A request that is under way (its worker was lost) waits for busy workers too, and however many others wait; and
        for the request plane's server, if that is away.
        Raises the last error of `ask` when the wait is over, or as soon as `is_over` returns True.
        """
        asked_at, label = self._clock.now(), ""
        began_at = asked_at
        try:
            while True:
                try:
                    return await ask()
                except (errors.Unavailable, errors.WorkerLost) as error:
                    if is_over() or (isinstance(error, errors.Overloaded) and not is_under_way):
                        raise
                    if not (label or is_under_way):
                        if not self._policy.has_room(self._num_waiting):
                            raise
                        _logger.info("a request waits for a worker of %r: %s", model, error)
                        self._num_waiting += 1
                    if not is_under_way:
                        label = self._show(model, label)
                    limit_s = self._policy.limit_s(self._expected.estimate_start(model))
                    has_patience = self._clock.now() - asked_at < self._policy.outage_s
                    if is_under_way and has_patience and self._is_plane_away():
                        began_at = self._clock.now()  # workers can return once the server is back
                    if self._clock.now() - began_at >= limit_s:
                        raise
                await self._clock.sleep(PAUSE_S)
        finally:
            self._num_waiting -= bool(label)
            if label and self._gauge is not None:
                self._gauge.labels(label).dec()

    def _show(self, model: str, shown_as: str) -> str:
        """Count a waiting request under its model as soon as a worker of it is expected; return the label.

        Until then it counts under none: clients may invent names. A planner announces its model after the last worker
        has gone, perhaps later than a request has come, and takes that back when one serves, perhaps earlier than it
        is known here.
        """
        if shown_as == model.lower():
            return shown_as
        label = model.lower() if self.is_expected(model) else UNKNOWN_MODEL
        if self._gauge is not None and label != shown_as:
            self._gauge.labels(label).inc()
            if shown_as:
                self._gauge.labels(shown_as).dec()
        return label
