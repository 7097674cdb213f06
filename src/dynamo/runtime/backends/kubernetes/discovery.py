"""Discovery by the objects of a Kubernetes cluster, without etcd: `pod_records` has the rules of what is shown.

The lease of a process is its pod: the cluster deletes the pod's metadata with the pod, and hides it while the pod is
not ready. What this process wants to be there is kept here, and written again whenever the object differs from it: when
the cluster was away, or the object was deleted. The first writing replaces what an earlier container of the pod, or an
earlier pod of its name, left there.

While the cluster's API is away, watchers keep the keys that they know. A pod that is not ready any more, because its
probe fails or because nothing is heard of its node, is asked last while its process answers. The two watches start
with the first watcher, so a worker that sends no requests watches its own object only.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping

from dynamo.base import clock, errors, tasks
from dynamo.runtime.backends.kubernetes import connection, pod_records
from dynamo.runtime.backends.kubernetes.pod_records import Object
from dynamo.runtime.discovery import (
    REMOVED,
    UNCONFIRMED_S,
    Change,
    KeyRetention,
    KeyView,
    OwnerCheck,
    Put,
)

log = logging.getLogger(__name__)

FIELD_MANAGER = "dynamo-worker"
DATA_LIMIT = 1 << 20  # a cluster stores 1.5 MiB an object, with the names of its fields
START_TIMEOUT_S = 120.0
_PUT_TIMEOUT_S = 60.0
_LEAVE_TIMEOUT_S = 2.0
_RETRY_S = 0.5
_REFUSED_S = 10.0
_JUDGE_EVERY_S = 0.5
_SETTLE_S = 1.0  # for pods that move from one slice to another
_SLICES = ("discovery.k8s.io/v1", "EndpointSlice", pod_records.SLICE_LABELS)
_METADATAS = (pod_records.API_VERSION, pod_records.KIND, "")


class KubernetesDiscovery:
    """The metadata of one pod, and the view of all pods of its namespace."""

    def __init__(
        self,
        kubernetes: connection.KubernetesConnection,
        environ: Mapping[str, str],
        time: clock.Clock,
        is_alive: OwnerCheck,
    ) -> None:
        """Made by `open`. Raises ConfigError if the environment does not name the pod."""
        self._kubernetes = kubernetes
        self._clock = time
        self._name = _variable(environ, "POD_NAME")
        self._uid = _variable(environ, "POD_UID")
        self._namespace = environ.get("POD_NAMESPACE") or kubernetes.namespace
        self._desired: dict[str, bytes] = {}
        self._stored: Object | None = None  # what the last writing made
        self._write_requested = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []  # for the next writing
        self._outage: errors.DynamoError | None = None
        self._tasks = tasks.Tasks()
        self._view = KeyView()
        self._retention = KeyRetention(self._view, is_alive, UNCONFIRMED_S, is_answer_enough=False)
        self._slices = pod_records.Slices()
        self._pods: dict[str, pod_records.PodKeys] = {}
        self._view_changed = asyncio.Event()
        self._is_watching = False
        self._is_open = True

    @classmethod
    async def open(
        cls,
        kubernetes: connection.KubernetesConnection,
        environ: Mapping[str, str],
        *,
        start_timeout_s: float = START_TIMEOUT_S,
        is_alive: OwnerCheck = lambda _key, _value: False,
        time: clock.Clock | None = None,
    ) -> "KubernetesDiscovery":
        """Replace the metadata of this pod by an empty one. Raises ConfigError if the cluster refuses or is away."""
        self = cls(kubernetes, environ, time or clock.SystemClock(), is_alive)
        self._tasks.start("write pod metadata", self._write_when_requested())
        try:
            await self._write(start_timeout_s)
        except errors.DynamoError as error:
            await self._tasks.close()
            await kubernetes.close()
            raise errors.ConfigError(f"no discovery by Kubernetes: {error}") from error
        self._tasks.start("watch pod metadata", self._repair())
        return self

    async def put(self, key: str, value: bytes) -> None:
        if not self._is_open:
            raise errors.LocalProtocolError(f"put {key!r}: this discovery is closed")
        size = len(value) + sum(len(v) for k, v in self._desired.items() if k != key)
        if size > DATA_LIMIT:
            raise errors.ConfigError(
                f"{key}: expected at most {DATA_LIMIT} bytes in all records of a pod, got {size}"
            )
        former, self._desired[key] = self._desired.get(key), value
        try:
            await self._write(_PUT_TIMEOUT_S)
        except errors.ConfigError:  # else no other record would be taken any more
            if former is None:
                self._desired.pop(key, None)
            else:
                self._desired[key] = former
            raise

    async def delete(self, *keys: str) -> None:
        removed = [key for key in keys if self._desired.pop(key, None) is not None]
        if not self._is_open or not removed:
            return
        try:
            await self._write(_LEAVE_TIMEOUT_S)
        except (errors.Unavailable, errors.ConfigError) as error:
            names = ", ".join(removed)
            log.info("%s: removed when the cluster is back, or allows it: %s", names, error)

    async def get_prefix(self, prefix: str) -> Mapping[str, bytes]:
        """Return all living keys that begin with `prefix`, as the cluster has them now. Raises Unavailable."""
        slices = pod_records.Slices()
        for slice_ in await self._kubernetes.list(*_SLICES[:2], self._namespace, labels=_SLICES[2]):
            slices.set(slice_)
        metadatas = await self._kubernetes.list(*_METADATAS[:2], self._namespace)
        living = pod_records.living_keys(map(pod_records.read_keys, metadatas), slices)
        return {key: value for key, value in living.items() if key.startswith(prefix)}

    async def watch(self, prefix: str) -> AsyncIterator[Change]:
        if not self._is_watching:
            self._is_watching = True
            self._tasks.start("watch slices", self._follow(*_SLICES, self._take_slice))
            self._tasks.start("watch metadata", self._follow(*_METADATAS, self._take_metadata))
            self._tasks.start("show pods", self._show())
        async for change in self._view.watch(prefix):
            yield change

    async def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        await self._tasks.close()
        try:
            async with self._clock.timeout(_LEAVE_TIMEOUT_S):
                await self._leave()
        except (TimeoutError, errors.DynamoError) as error:
            log.info("our keys leave the cluster with our pod: %r", error)
        await self._kubernetes.close()

    async def _leave(self) -> None:
        """Delete the metadata, unless another process has written it since."""
        if self._stored is None:
            return
        metadata = self._stored["metadata"]
        await self._kubernetes.delete(
            pod_records.API_VERSION,
            pod_records.KIND,
            self._name,
            self._namespace,
            preconditions={name: metadata[name] for name in ("uid", "resourceVersion")},
        )

    async def _write(self, within_s: float) -> None:
        """Wait until the desired keys are in the cluster. Raises Unavailable; they are written when it is back."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(written)
        self._write_requested.set()
        try:
            async with self._clock.timeout(within_s):
                await written
        except TimeoutError:
            raise errors.Unavailable(f"not done within {within_s:g} s: {self._outage}") from None

    async def _write_when_requested(self) -> None:
        while True:
            await self._write_requested.wait()
            self._write_requested.clear()
            waiting, self._waiting = self._waiting, []
            refusal: errors.DynamoError | None = None
            try:
                self._stored = await self._kubernetes.apply(
                    self._metadata(), FIELD_MANAGER, force=True
                )
            except errors.Unavailable as error:
                self._outage = error
                self._waiting = waiting + self._waiting
                self._write_requested.set()
                await self._clock.sleep(_RETRY_S)
                continue
            except errors.DynamoError as error:
                refusal = error
                log.warning("the cluster does not take the metadata of %s: %s", self._name, error)
                self._clock.call_later(_REFUSED_S, self._write_requested.set)
            for written in waiting:
                if written.done():
                    continue
                if refusal is None:
                    written.set_result(None)
                else:
                    written.set_exception(errors.ConfigError(str(refusal)))

    def _metadata(self) -> Object:
        return pod_records.describe_pod(self._name, self._namespace, self._uid, self._desired)

    async def _repair(self) -> None:
        """Write the metadata again whenever it is not as desired."""
        field = f"metadata.name={self._name}"
        kind = pod_records.API_VERSION, pod_records.KIND
        async for type_, obj in self._watch(*kind, "our own pod is not watched", fields=field):
            if type_ == "DELETED" or obj.get("spec") != self._metadata()["spec"]:
                self._write_requested.set()

    async def _follow(
        self, api_version: str, kind: str, labels: str, take: Callable[[str, Object], None]
    ) -> None:
        complaint = "no other pod is found"
        async for type_, obj in self._watch(api_version, kind, complaint, labels=labels):
            if obj:
                take(type_, obj)
                self._view_changed.set()

    async def _watch(
        self, api_version: str, kind: str, complaint: str, **selectors: str
    ) -> AsyncIterator[pod_records.WatchEvent]:
        """Iterate over a watch, which is begun again, with a complaint, while the cluster refuses its first list."""
        while True:
            try:
                async for event in self._kubernetes.watch(
                    api_version, kind, self._namespace, **selectors
                ):
                    yield event
            except errors.DynamoError as error:  # before the first list; later ones are waited for
                log.warning("%s: %s", complaint, error)
                await self._clock.sleep(_REFUSED_S)

    def _take_slice(self, type_: str, obj: Object) -> None:
        has_vanished = self._slices.remove(obj) if type_ == "DELETED" else self._slices.set(obj)
        if has_vanished:
            self._clock.call_later(_SETTLE_S, self._settle)

    def _settle(self) -> None:
        self._slices.settle()
        self._view_changed.set()

    def _take_metadata(self, type_: str, obj: Object) -> None:
        name = obj["metadata"]["name"]
        if type_ == "DELETED":
            self._pods.pop(name, None)
        else:
            self._pods[name] = pod_records.read_keys(obj)

    async def _show(self) -> None:
        """Keep the view as slices and metadata say, once for all events that came together."""
        while True:
            await self._await_change()
            self._view_changed.clear()
            living = pod_records.living_keys(self._pods.values(), self._slices)
            unready = pod_records.unready_keys(self._pods.values(), self._slices)
            removed = self._view.get_prefix("").keys() - living.keys() - unready
            now = self._clock.now()
            self._retention.apply([Put(key=key, value=REMOVED) for key in removed], now)
            self._retention.replace(living, now)

    async def _await_change(self) -> None:
        """Wait for news of the cluster; not for long, while it is to be seen which owners of lost keys answer."""
        if not self._retention.is_judging:
            await self._view_changed.wait()
            return
        with contextlib.suppress(TimeoutError):
            async with self._clock.timeout(_JUDGE_EVERY_S):
                await self._view_changed.wait()


async def join(
    environ: Mapping[str, str], *, is_alive: OwnerCheck, time: clock.Clock
) -> KubernetesDiscovery:
    """Open the discovery of the cluster that this process belongs to. Raises ConfigError."""
    return await KubernetesDiscovery.open(
        connection.KubernetesConnection.open(environ), environ, is_alive=is_alive, time=time
    )


def _variable(environ: Mapping[str, str], name: str) -> str:
    if value := environ.get(name):
        return value
    raise errors.ConfigError(
        f"discovery by Kubernetes needs the variable {name}: in pods of a DynamoGraphDeployment the operator sets it;"
        " elsewhere use --discovery-backend file or etcd"
    )
