"""The operator as a process: its ports and webhooks, which it always serves, and the terms in which it acts.

While it holds the Lease it has a controller: watches fill the cache and the queue, and workers reconcile. An error of
one object is said in its status and tried again later; others go on. When another operator has taken the Lease, the
controller ends with all it knows, and the process stands for election again.
"""

import asyncio
import logging
from typing import Any

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.observability import metrics
from dynamo.operator import objects
from dynamo.operator.election import RENEW_S, Election, lease_name
from dynamo.operator.object_cache import ROOTS, Key, ObjectCache
from dynamo.operator.reconciler import API_VERSION_BY_KIND, Reconciler
from dynamo.operator.settings import OperatorConfig, parse_address
from dynamo.operator.webhooks import WebhookService
from dynamo.operator.work_queue import KeyQueue
from dynamo.runtime.backends.kubernetes import connection
from dynamo.runtime.http import exchange, server

_NUM_WORKERS = 64  # most wait: a pod behind a network policy holds one for seconds at each look
_MISSING_KIND_S = 300.0  # between two looks whether an optional kind has been installed
_MISSING_DEFINITION_S = 10.0  # the same of a kind that the operator needs
_OPTIONAL = ("LeaderWorkerSet", "PodCliqueSet", "VirtualService")
_ALL = (*ROOTS, "DynamoGraphDeploymentScalingAdapter", "PersistentVolumeClaim")  # watched whole
_MANAGED = f"{objects.MANAGED_BY}={objects.FIELD_MANAGER}"
_PODS = f"{objects.MANAGED_BY} in ({objects.FIELD_MANAGER},grove-operator)"  # Grove writes its name over ours
_logger = logging.getLogger(__name__)


class OperatorMetrics:
    """The metrics of the operator, named as the original's.

    Of its labels only `resources_total` has the namespace: counters would keep those that are gone.
    """

    def __init__(self) -> None:
        self.registry = registry = metrics.Registry("dynamo_operator")
        labels = ("resource_type", "result")
        self.duration = registry.histogram(
            "reconcile_duration_seconds",
            "seconds of one look at an object",
            labels,
            buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5),
        )
        self.total = registry.counter("reconcile_total", "looks at objects", labels)
        self.errors = registry.counter(
            "reconcile_errors_total", "looks that failed", ("resource_type", "error_type")
        )
        for kind in ROOTS:  # shown as 0, so that a dashboard sees the difference from no operator
            for result in ("success", "requeue", "error"):
                self.total.labels(kind, result)
        self.resources = registry.gauge(
            "resources_total",
            "objects by kind, namespace and state",
            ("resource_type", "namespace", "status"),
        )
        self.is_leader = registry.gauge("is_leader", "1 while this operator acts")


class Controller:
    """What an operator knows and does in one term."""

    def __init__(
        self,
        cluster: connection.KubernetesConnection,
        settings: OperatorConfig,
        clock: clocks.Clock,
        metrics: OperatorMetrics,
        election: Election | None,
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._election = election
        self.cache = ObjectCache()
        self.queue: KeyQueue[Key] = KeyQueue(clock)
        writer = cluster if election is None else cluster.guard_writes(election.check_held)
        self._reconciler = Reconciler(writer, self.cache, settings, clock)
        self._unsynced = set(API_VERSION_BY_KIND)
        self._synced = asyncio.Event()

    def start(self, running: tasks.Tasks) -> set[asyncio.Task[Any]]:
        """Begin to watch and to act; return the tasks."""
        work = {
            f"watch {kind}": self._watch(kind, api_version)
            for kind, api_version in API_VERSION_BY_KIND.items()
        }
        work |= {f"reconcile {number}": self._work() for number in range(_NUM_WORKERS)}
        work["resync"] = self._resync()
        return {running.start(name, coroutine) for name, coroutine in work.items()}

    async def _watch(self, kind: str, api_version: str) -> None:
        labels = "" if kind in _ALL else _PODS if kind == "Pod" else _MANAGED
        namespace = self._settings.restricted_namespace or None
        while True:
            try:
                async for event, resource in self._cluster.watch(
                    api_version, kind, namespace, labels=labels
                ):
                    self._take_event(kind, event, resource)
            except connection.KindMissing as error:
                if kind not in _OPTIONAL:
                    _logger.warning("the operator waits for a definition: %s", error)
                    await self._clock.sleep(_MISSING_DEFINITION_S)
                    continue
            except errors.Forbidden as error:
                if kind not in _OPTIONAL:
                    raise
                _logger.warning("the operator does without %s: %s", kind, error)
            self._note_synced(kind, is_served=False)
            await self._clock.sleep(_MISSING_KIND_S)

    def _take_event(self, kind: str, event: str, resource: objects.Object) -> None:
        if event == "SYNCED":
            self._note_synced(kind, is_served=True)
            return
        if not self.cache.apply_event(event, resource):
            return
        if event == "DELETED":
            self._reconciler.forget(resource)
            namespace = resource["metadata"].get("namespace", "")
            if self._election is not None and namespace not in self.cache.namespaces:
                self._election.forget(namespace)
        for key in self.cache.roots_of(resource):
            self.queue.add(key)

    def _note_synced(self, kind: str, *, is_served: bool) -> None:
        if kind == "PodCliqueSet" and is_served != self.cache.has_grove:
            self.cache.has_grove = is_served
            for key in self.cache.roots():  # services on several nodes may have waited for it
                self.queue.add(key)
        self._unsynced.discard(kind)
        if not self._unsynced and not self._synced.is_set():
            _logger.info("the operator knows the cluster: %d objects wait", len(self.queue))
            self._synced.set()

    async def _work(self) -> None:
        await self._synced.wait()  # what is not known yet must not look absent
        while True:
            key = await self.queue.take()
            if self._election is not None:
                await self._election.wait_until_held()
            started_at = self._clock.now()
            result, error_type = "error", "internal"
            try:
                delay_s = await self._reconcile(key)
                if delay_s is not None:
                    self.queue.add_later(key, delay_s)
                result = "success" if delay_s is None else "requeue"
            except errors.DynamoError as error:
                error_type = error.code
                _logger.warning("%s %s/%s: %s", *key, error)
            except Exception:  # of one object, unforeseen: the work for others goes on
                _logger.exception("%s %s/%s cannot be reconciled", *key)
            finally:
                self.queue.release(key, has_failed=result == "error")
            if result == "error":
                self._metrics.errors.labels(key[0], error_type).inc()
            self._metrics.total.labels(key[0], result).inc()
            self._metrics.duration.labels(key[0], result).observe(self._clock.now() - started_at)

    async def _reconcile(self, key: Key) -> float | None:
        if self.cache.get(key) is None:  # it is gone, and its namespace may be forgotten
            return None
        election = None if self._settings.restricted_namespace else self._election
        if election is not None and await election.is_left(key[1]):
            return 2 * RENEW_S
        return await self._reconciler.reconcile(key)

    async def _resync(self) -> None:
        while True:
            await self._clock.sleep(self._settings.resync_s)
            for key in self.cache.roots():
                self.queue.add(key)


class OperatorService:
    """Owns the tasks and the ports; the connection belongs to the caller.

    `controller` is that of the present term, None while this operator does not lead.
    """

    def __init__(
        self,
        cluster: connection.KubernetesConnection,
        settings: OperatorConfig,
        clock: clocks.Clock,
        *,
        identity: str,
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._clock = clock
        self._metrics = OperatorMetrics()
        self._election: Election | None = None
        if settings.leader_elect:
            self._election = Election(
                cluster,
                clock,
                identity=identity,
                name=lease_name(settings.restricted_namespace),
                namespace=settings.lease_namespace
                or settings.restricted_namespace
                or cluster.namespace,
            )
        self.controller: Controller | None = None
        self._running = tasks.Tasks()
        self._servers: list[server.HttpServer] = []
        self._webhooks: WebhookService | None = None
        if settings.webhook_bind_address != "0":
            self._webhooks = WebhookService(cluster, settings, clock, self._metrics.registry)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve, and reconcile in each term, until `stop`. Raises ConfigError, Forbidden and KindMissing."""
        await self._listen()
        try:
            if self._webhooks is not None:
                await self._webhooks.start()
                self._running.start("keep the certificate", self._webhooks.keep_certificate())
            self._running.start("lead", self._lead())
            await self._running.run_until(stop)
        finally:
            await self._running.close()
            if self._election is not None:
                try:
                    await self._election.release()
                except errors.DynamoError as error:
                    _logger.info("the lease is not released: %s", error)
            if self._webhooks is not None:
                await self._webhooks.close(is_stopped=stop.is_set())
            for listening in self._servers:
                await listening.close()

    async def _lead(self) -> None:
        """Act in one term after another; without election there is one term."""
        while True:
            if self._election is not None:
                await self._election.acquire()
            self.controller = Controller(
                self._cluster, self._settings, self._clock, self._metrics, self._election
            )
            term = self.controller.start(self._running)
            if self._webhooks is not None:
                registering = self._webhooks.keep_registered()
                term.add(self._running.start("register the webhooks", registering))
            if self._election is None:
                return
            await self._election.keep()
            await tasks.cancel(term)
            self.controller.queue.close()
            self.controller = None

    async def _listen(self) -> None:
        def answer_alive(request: exchange.Exchange) -> None:
            request.respond(200, b"ok", content_type="text/plain")

        def answer_ready(request: exchange.Exchange) -> None:
            if self._webhooks is None or self._webhooks.is_ready:
                answer_alive(request)
            else:  # a Service must not lead to a handshake that fails
                request.respond(503, b"no certificate yet", content_type="text/plain")

        health = {("GET", "/healthz"): answer_alive, ("GET", "/readyz"): answer_ready}
        numbers = {("GET", "/metrics"): self._answer_metrics}
        for routes, flag, address in (
            (health, "--health-probe-bind-address", self._settings.health_probe_bind_address),
            (numbers, "--metrics-bind-address", self._settings.metrics_bind_address),
        ):
            if address == "0":  # as controllers spell "none"
                continue
            host, port = parse_address(address, flag)
            listening = server.HttpServer(
                exchange.HttpRouter(routes, error_body=server.plain_error),
                error_body=server.plain_error,
            )
            await listening.start(host, port, port_flag=flag)
            self._servers.append(listening)

    def _answer_metrics(self, request: exchange.Exchange) -> None:
        self._metrics.resources.clear()
        if self.controller is not None:
            cache = self.controller.cache
            for key in cache.roots():
                self._metrics.resources.labels(*key[:2], objects.state_of(cache.get(key))).inc()
        is_acting = self.controller is not None and (
            self._election is None or self._election.is_held
        )
        self._metrics.is_leader.set(int(is_acting))
        body = self._metrics.registry.render()
        request.respond(200, body, content_type=metrics.CONTENT_TYPE)
