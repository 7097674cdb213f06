"""The endpoints that a service of a user answers in this process: their requests, their metrics and their health.

`naming.Endpoint.serve_endpoint` makes a `ServedEndpoint` and adds it to the `ServedEndpoints` of the runtime, which the
system port (`system_port`) shows. Metrics have the names of NVIDIA Dynamo (`dynamo_component_*`) and the labels
`dynamo_namespace`, `dynamo_component` and `dynamo_endpoint`, beside those that the endpoint was given.

An endpoint is ready when discovery lists it. With a health check and a payload (`health_check_payload`) the payload is
sent to its handler whenever no item was sent for a while; the endpoint is not ready as long as that fails.
"""

import asyncio
import inspect
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.observability import metrics
from dynamo.protocols import instances, wire
from dynamo.runtime import requests
from dynamo.runtime.request_context import Context

Generate = Callable[..., AsyncIterator[Any]]
Handle = Callable[[Any, Context], AsyncIterator[Any]]
Adapter = Callable[[Handle, Any, Context], AsyncIterator[Any]]
"""Answers a request of other processes, as it came, by items of the plane's type, for which it asks the handler."""
_LABELS = ("dynamo_namespace", "dynamo_component", "dynamo_endpoint")
_ITEMS_AT_ONCE = 128  # then others get their turn, even if the handler waits for nothing
_log = logging.getLogger(__name__)
_is_label = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*").fullmatch


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointCheck:
    """The time limits of the health check of an endpoint, in seconds."""

    wait_s: float  # without an item, before the payload is sent
    answer_s: float  # for the first item of the answer


class ServedEndpoint:
    """One endpoint from its registration until it is withdrawn: its requests, their metrics and its health."""

    def __init__(
        self,
        name: instances.EndpointName,
        handler: Generate,
        *,
        is_graceful: bool = True,
        labels: Sequence[tuple[str, str]] = (),
        health_check_payload: Mapping[str, Any] | None = None,
        adapters: Mapping[instances.EndpointName, Adapter] = MappingProxyType({}),
        clock: clocks.Clock,
    ) -> None:
        """`is_graceful`: its requests under way may end when the process drains. Raises ConfigError."""
        _check(labels, health_check_payload)
        self.name = name
        self.is_graceful = is_graceful
        parts = (name.namespace, name.component, name.endpoint)
        self.labels = dict(zip(_LABELS, parts, strict=True)) | dict(labels)
        self.is_ready = False
        self.num_requests, self.num_bytes = metrics.FastNumber(), metrics.FastNumber()
        self.num_open, self.num_cancelled = metrics.FastNumber(), metrics.FastNumber()
        self.durations = metrics.FastHistogram(metrics.DURATION_BUCKETS)
        self.num_errors: dict[str, metrics.FastNumber] = {}  # by code
        self._handler = handler
        self._takes_context = "context" in inspect.signature(handler).parameters
        self._adapters = adapters
        self._payload = health_check_payload
        self._clock = clock
        self._answered_at = clock.now()
        self._calls: dict[asyncio.Task[None], requests.Call] = {}
        self._end: errors.DynamoError | None = None  # of the endpoint
        self._tasks = tasks.Tasks()

    def start_call(self, call: requests.Call) -> None:
        """Answer a request by a task; refuse it if the endpoint has ended."""
        if self._end is not None:
            call.fail(self._end)
            return
        context = Context(headers=call.headers)
        task = self._tasks.start(f"answer {call.endpoint}", self._answer(call, context))
        self._calls[task] = call
        task.add_done_callback(self._calls.pop)
        if self.name not in self._adapters:  # which would have signals of its own
            call.on_signal(lambda _: context.stop_generating())
        call.on_cancel(lambda: _cancel(task, context))

    def end_calls(self, error: errors.DynamoError) -> None:
        """Refuse new requests by this error, and end by it those that are under way, at their clients too."""
        self._end = self._end or error
        self.is_ready = False
        for task, call in list(self._calls.items()):
            call.fail(error)
            task.cancel()

    async def close(self) -> None:
        """End the endpoint, and wait until its handlers are gone."""
        self.end_calls(errors.WorkerLost(f"{self.name} is not served here any more: ask another"))
        await self._tasks.close()

    def start_checks(self, check: EndpointCheck | None) -> None:
        """Declare the endpoint ready, and begin its health checks if it has a payload and `check` is not None."""
        self.is_ready, self._answered_at = True, self._clock.now()
        if check is not None and self._payload is not None:
            self._tasks.start(f"check {self.name}", self._check(check, self._payload))

    async def _answer(self, call: requests.Call, context: Context) -> None:
        began_at = self._clock.now()
        # unless the handler completes the answer; GeneratorExit is how Dynamo's handlers say that their engine ends
        error: errors.DynamoError | None = errors.WorkerLost(f"{self.name} is ending: ask another")
        self.num_requests.inc()
        self.num_bytes.inc(memoryview(call.body).nbytes)
        self.num_open.inc()
        try:
            await self._send_items(call, context)
            error = None
        except errors.DynamoError as failure:
            error = failure
        except GeneratorExit:
            _log.warning("the engine behind %s ended", self.name.path)
        except asyncio.CancelledError as failure:
            if _is_cancelled():
                error = self._end or errors.Cancelled("the caller went away")
                raise
            error = self._describe(failure)  # of something that the handler waited for
        except Exception as failure:  # noqa: BLE001 (the supervisor of a user's handler)
            error = self._describe(failure)
        finally:
            self.num_open.dec()
            self.durations.observe(self._clock.now() - began_at)
            if error is None:
                call.finish()
            else:
                call.fail(error)
                self._count(error)

    async def _send_items(self, call: requests.Call, context: Context) -> None:
        try:
            request = msgspec.msgpack.decode(call.body)
        except wire.DECODE_ERRORS as error:
            raise errors.InvalidRequest(f"expected a request in msgpack: {error}") from error
        adapter = self._adapters.get(self.name)
        send: Callable[[Any], None] = call.reply if adapter is None else call.send
        items = (
            self._handle(request, context)
            if adapter is None
            else adapter(self._handle, request, context)
        )
        try:
            num_items = 0
            async for item in items:
                send(item)
                num_items += 1
                if not num_items % _ITEMS_AT_ONCE:
                    await asyncio.sleep(0)
                self.is_ready, self._answered_at = self._end is None, self._clock.now()
                if context.is_stopped():
                    call.finish()
                    break
        finally:
            await close_items(items)

    def _handle(self, request: Any, context: Context) -> AsyncIterator[Any]:
        return self._handler(request, **({"context": context} if self._takes_context else {}))

    def _describe(self, error: BaseException) -> errors.DynamoError:
        _log.error("the handler of %s failed", self.name.path, exc_info=error)
        return errors.DynamoError(f"internal error in {self.name.path}: {type(error).__name__}")

    def _count(self, error: errors.DynamoError) -> None:
        if isinstance(error, errors.Cancelled):
            self.num_cancelled.inc()
        else:
            self.num_errors.setdefault(error.code, metrics.FastNumber()).inc()

    async def _check(self, check: EndpointCheck, payload: Mapping[str, Any]) -> NoReturn:
        while True:
            left_s = self._answered_at + check.wait_s - self._clock.now()
            if left_s > 0:
                await self._clock.sleep(left_s)
                continue
            # a handler that hangs may hang in its end, too: it has as much time for that
            silence = "neither an item nor an end"
            late = self._clock.call_later(2 * check.answer_s, self._note_failure, silence)
            try:
                self.is_ready = await self._is_answering(check.answer_s, payload)
            finally:
                late.cancel()
            self._answered_at = self._clock.now()

    async def _is_answering(self, answer_s: float, payload: Mapping[str, Any]) -> bool:
        """Return whether the handler gives an item for the payload in time; its answer ends behind that item."""
        reason: object = "no item"
        try:
            async with self._clock.timeout(answer_s):
                items = self._handle(dict(payload), Context())
                try:
                    async for _ in items:
                        return True
                finally:
                    await close_items(items)
        except TimeoutError:
            reason = f"no item within {answer_s:g} s"
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            reason = "something that it waited for was cancelled"
        except Exception as error:  # noqa: BLE001 (the supervisor of a user's handler)
            reason = f"{type(error).__name__}: {error}"
        self._note_failure(reason)
        return False

    def _note_failure(self, reason: object) -> None:
        """Declare the endpoint unready, because its health check failed."""
        self.is_ready = False
        _log.warning("the health check of %s failed: %s", self.name.path, reason)


class ServedEndpoints:
    """The endpoints that one process serves, and the metrics and health of the process."""

    def __init__(self, clock: clocks.Clock, traffic: requests.Traffic) -> None:
        self.check: EndpointCheck | None = None  # None: payloads are not sent
        self.adapters: dict[instances.EndpointName, Adapter] = {}
        self._clock = clock
        self._traffic = traffic
        self._began_at = clock.now()
        self._endpoints: list[ServedEndpoint] = []
        self._foreign_metrics: list[Callable[[], str]] = []

    @property
    def uptime_s(self) -> float:
        """Seconds since the start."""
        return self._clock.now() - self._began_at

    def add(self, endpoint: ServedEndpoint) -> None:
        """Show an endpoint until `discard`. Raises LocalProtocolError for a second one of the same name."""
        if any(served.name == endpoint.name for served in self._endpoints):
            raise errors.LocalProtocolError(f"{endpoint.name} is served already in this process")
        self._endpoints.append(endpoint)

    def discard(self, endpoint: ServedEndpoint) -> None:
        """Show an endpoint no longer."""
        self._endpoints.remove(endpoint)

    def begin_drain(self) -> None:
        """End the requests under way of endpoints that are not graceful."""
        for endpoint in self._endpoints:
            if not endpoint.is_graceful:
                endpoint.end_calls(errors.WorkerLost("this worker is stopping: ask another"))

    def num_open(self, name: instances.EndpointName) -> int:
        """Return the number of requests under way at an endpoint."""
        return sum(int(each.num_open.value) for each in self._endpoints if each.name == name)

    def states(self) -> dict[str, bool]:
        """Return whether each endpoint is ready, by its name in its component."""
        return {endpoint.name.endpoint: endpoint.is_ready for endpoint in self._endpoints}

    def render(self) -> bytes:
        """Return the metrics of all endpoints; a label that an endpoint was not given is empty."""
        registry = metrics.Registry("dynamo_component")
        registry.gauge("uptime_seconds", "seconds since the process started").set(self.uptime_s)
        given_labels = {label for endpoint in self._endpoints for label in endpoint.labels}
        labels = (*_LABELS, *sorted(given_labels.difference(_LABELS)))
        counts = {
            name: registry.fast_counter(name, text, labels)
            for name, text in (
                ("requests", "requests accepted or refused"),
                ("request_bytes", "bytes of request bodies"),
                ("response_bytes", "bytes of the frames that carried answers"),
                ("cancellation", "requests that their callers cancelled"),
            )
        }
        num_open = registry.fast_gauge(
            "inflight_requests", "requests that are not answered in full yet", labels
        )
        durations = registry.fast_histogram(
            "request_duration_seconds",
            "seconds from receiving a request to its end",
            labels,
            buckets=metrics.DURATION_BUCKETS,
        )
        num_errors = registry.fast_counter(
            "errors", "requests that failed, by kind of error", (*labels, "error_type")
        )
        for endpoint in self._endpoints:
            values = [endpoint.labels.get(label, "") for label in labels]
            counts["requests"].adopt(endpoint.num_requests, *values)
            counts["request_bytes"].adopt(endpoint.num_bytes, *values)
            counts["cancellation"].adopt(endpoint.num_cancelled, *values)
            num_bytes = self._traffic.responses(endpoint.name.path)
            counts["response_bytes"].adopt(num_bytes, *values)
            num_open.adopt(endpoint.num_open, *values)
            durations.adopt(endpoint.durations, *values)
            for code, number in endpoint.num_errors.items():
                num_errors.adopt(number, *values, code)
        return b"".join([registry.render(), *map(_render_foreign, self._foreign_metrics)])

    def add_metrics(self, render_text: Callable[[], str]) -> None:
        """Show metrics that the service counts itself, as text in Prometheus's format."""
        self._foreign_metrics.append(render_text)


class RuntimeMetrics:
    """`endpoint.metrics` of NVIDIA Dynamo's bindings: the metrics that a service counts itself."""

    def __init__(self, served: ServedEndpoints) -> None:
        self._served = served

    def register_prometheus_expfmt_callback(self, callback: Callable[[], str]) -> None:
        """Append the text of `callback` to /metrics of the system port, each time it is asked for."""
        self._served.add_metrics(callback)

    def register_prometheus_typed_callback(self, callback: Callable[[], Any]) -> None:
        """Do nothing: metrics are not pushed by OTLP here."""


def _render_foreign(render_text: Callable[[], str]) -> bytes:
    """Return metrics of the service's own; none, and a line of the log, if they cannot be rendered."""
    try:
        return render_text().rstrip("\n").encode() + b"\n"
    except Exception:  # noqa: BLE001 (the supervisor of a user's function)
        _log.exception("metrics of the service are left out")
        return b""


def _check(labels: Sequence[tuple[str, str]], payload: object) -> None:
    for label, value in labels:
        if label in (*_LABELS, "error_type", "le") or not _is_label(label):
            raise errors.ConfigError(
                f"metrics_labels: expected a label of a-z, 0-9 and _ that is not used already, got {label!r}"
            )
        if not isinstance(value, str):
            raise errors.ConfigError(f"metrics_labels, {label}: expected a text, got {value!r:.60}")
    if not isinstance(payload, Mapping | None):
        raise errors.ConfigError(
            f"health_check_payload: expected a request as a dictionary, got {payload!r:.60}"
        )


async def close_items(items: AsyncIterator[Any]) -> None:
    """End a handler that may have more items."""
    close = getattr(items, "aclose", None)
    if close is not None:
        await close()


def _is_cancelled() -> bool:
    """Return whether the present task is to end, rather than something that it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _cancel(task: asyncio.Task[None], context: Context) -> None:
    context.kill()
    task.cancel()
