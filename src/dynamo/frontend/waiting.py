"""Requests that wait for a worker, by the rule of `router.retry_rules`, and the workers that are expected.

A worker announces its start in discovery, with an estimate of how long that takes (`instances.WorkerStart`).
"""

import itertools
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.frontend.metrics import UNKNOWN_MODEL
from dynamo.observability import metrics
from dynamo.protocols import instances
from dynamo.router import retry_rules
from dynamo.runtime import discovery

PAUSE_S = 0.1  # between two tries to find a worker
NOTICE_S = 5.0  # between two notices to a client that waits; the first one comes after NOTICE_S / 5
T = TypeVar("T")
_logger = logging.getLogger(__name__)
_decode_start = msgspec.json.Decoder(instances.WorkerStart).decode


class WaitingMetrics:
    """The metrics of requests that wait for a worker, and of models that may lack workers on purpose."""

    def __init__(self, registry: metrics.Registry) -> None:
        self.waiting = registry.gauge(
            "requests_waiting_for_worker",
            "Requests of a model that no worker serves yet",
            ("model",),
        )
        self.wakeable = registry.gauge(
            "model_wakeable",
            "1 while the model may lack workers on purpose: a request starts one, or they sleep",
            ("model",),
        )


class ExpectedWorkers:
    """The workers that are starting, by what they announce in discovery."""

    def __init__(
        self,
        registry: discovery.Discovery,
        *,
        namespace: str = "",
        wakeable: metrics.Gauge | None = None,
    ) -> None:
        """Show in `wakeable` which models may lack workers on purpose; alerts leave these out."""
        self._registry = registry
        self._namespace = namespace
        self._starts: dict[str, instances.WorkerStart] = {}  # by key
        self._wakeable = wakeable
        self._shown_labels: set[str] = set()  # of `wakeable`

    def estimate_start(self, model: str, waited_s: float = 0.0) -> float | None:
        """Return the seconds that a start of this model takes in all, for a request that has waited; None without one.

        A model on demand is announced again and again, by the seconds that remain.
        """
        estimates = [
            start.estimate_s + (waited_s if start.is_on_demand else 0.0)
            for start in self._starts.values()
            if start.model == model and start.answers_requests and not start.failure
        ]
        return max(estimates, default=None)

    def failure_of(self, model: str) -> str:
        """Return why the last start of a model on demand failed; "" if it did not."""
        failures = (start.failure for start in self._starts.values() if start.model == model)
        return next(filter(None, failures), "")

    @property
    def starts(self) -> Collection[instances.WorkerStart]:
        """Return what the workers that are starting have announced."""
        return [
            start
            for start in self._starts.values()
            if not start.is_on_demand and start.sleeper is None
        ]

    @property
    def sleeping(self) -> Collection[instances.WorkerStart]:
        """Return what the workers that sleep have announced."""
        return [start for start in self._starts.values() if start.sleeper is not None]

    @property
    def on_demand(self) -> Collection[instances.WorkerStart]:
        """Return the models that are loaded when a request comes for them, by one name each."""
        return [start for start in self._starts.values() if start.context_length is not None]

    def can_wake(self) -> bool:
        """Return whether a request would wake some model that lacks workers on purpose."""
        return any(start.can_be_woken for start in self._starts.values())

    def find_wakeable(self, model: str) -> instances.WorkerStart | None:
        """Return what is announced of this model if a request would wake it; None if it would not."""
        starts = (start for start in self._starts.values() if start.model == model)
        return next((start for start in starts if start.can_be_woken), None)

    async def watch(self) -> None:
        """Follow the starts in discovery until cancelled."""
        async for change in self._registry.watch(instances.STARTS):
            self._apply_change(change)
            if self._wakeable is not None:
                self._show_wakeable(self._wakeable)

    def _apply_change(self, change: discovery.Change) -> None:
        if isinstance(change, discovery.Delete):
            self._starts.pop(change.key, None)
            return
        try:
            start = _decode_start(change.value)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            _logger.warning("ignored the start %s: %s", change.key, error)
            return
        if instances.covers_namespace(self._namespace, start.namespace):
            self._starts[change.key] = start

    def _show_wakeable(self, gauge: metrics.Gauge) -> None:
        starts = self._starts.values()
        labels = {start.model.lower() for start in starts if start.can_be_woken}
        for label in self._shown_labels - labels:
            gauge.remove(label)
        for label in labels - self._shown_labels:
            gauge.labels(label).set(1)
        self._shown_labels = labels


class WaitNotice(NamedTuple):
    """What a client that waits for a model is told."""

    model: str
    position: int  # among the requests of this frontend for the same model, from 1
    estimate_s: float  # until a worker serves it


@dataclass(slots=True, eq=False)
class _WaitingRequest:
    model: str
    notice_at: float  # when its client is told something


class WorkerWait:
    """The waiting requests of one frontend."""

    def __init__(
        self,
        policy: retry_rules.WaitPolicy,
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
        self._waiting: dict[object, _WaitingRequest] = {}  # the oldest first

    def is_expected(self, model: str) -> bool:
        """Return whether a worker of this model is starting."""
        return self._expected.estimate_start(model) is not None

    def failure_of(self, model: str) -> str:
        """Return why the last start of this model failed; "" if it did not, or requests wait for another one."""
        return "" if self.is_expected(model) else self._expected.failure_of(model)

    async def until_served(
        self,
        ask: Callable[[], Awaitable[T]],
        model: str,
        *,
        is_over: Callable[[], bool],
        is_under_way: bool = False,
        notify: Callable[[WaitNotice], None] = lambda notice: None,
    ) -> T:
        """Return what `ask` returns, which is called until a worker of the model can be asked.

        A request that is under way (its worker was lost) waits for busy workers too, and however many others wait; and
        for the request plane's server, if that is away.
        `notify` gets what to tell the client, every `NOTICE_S` while a worker is expected.
        Raises the last error of `ask` when the wait is over, or as soon as `is_over` returns True.
        """
        asked_at, label, ticket = self._clock.now(), "", object()
        began_at = asked_at
        try:
            while True:
                try:
                    return await ask()
                except (errors.Unavailable, errors.WorkerLost) as error:
                    if is_over() or (isinstance(error, errors.Overloaded) and not is_under_way):
                        raise
                    if not (label or is_under_way):
                        if not self._policy.has_room(len(self._waiting)):
                            raise
                        _logger.info("a request waits for a worker of %r: %s", model, error)
                        self._waiting[ticket] = _WaitingRequest(model, asked_at + NOTICE_S / 5)
                    if not is_under_way:
                        label = self._show(model, label)
                    waited_s = self._clock.now() - began_at
                    estimate_s = self._expected.estimate_start(model, waited_s)
                    self._notify(ticket, (estimate_s or 0.0) - waited_s, notify)
                    limit_s = self._policy.limit_s(estimate_s)
                    has_patience = self._clock.now() - asked_at < self._policy.outage_s
                    if is_under_way and has_patience and self._is_plane_away():
                        began_at = self._clock.now()  # workers can return once the server is back
                    if self._clock.now() - began_at >= limit_s:
                        raise
                    await self._pause(error, is_over)
        finally:
            self._waiting.pop(ticket, None)
            if label and self._gauge is not None:
                self._gauge.labels(label).dec()

    async def _pause(self, error: errors.DynamoError, is_over: Callable[[], bool]) -> None:
        """Wait until the next try. Raises `error` if no client reads any more what a worker would compute."""
        await self._clock.sleep(PAUSE_S)
        if is_over():
            raise error

    def _notify(
        self, ticket: object, estimate_s: float, notify: Callable[[WaitNotice], None]
    ) -> None:
        """Tell the client of a new request how long it still waits, if a worker is expected and it is time to."""
        request = self._waiting.get(ticket)
        if request is None or estimate_s <= 0 or self._clock.now() < request.notice_at:
            return
        request.notice_at = self._clock.now() + NOTICE_S
        older = itertools.takewhile(lambda other: other is not request, self._waiting.values())
        position = 1 + sum(other.model == request.model for other in older)
        notify(WaitNotice(request.model, position, estimate_s))

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
