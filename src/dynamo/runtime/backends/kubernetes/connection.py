"""The one way to a Kubernetes cluster's API: discovery, the planner's connector and the operator use it.

Objects are the plain dictionaries of the API, and a kind of object is addressed by its apiVersion and kind, as in a
manifest; the path is asked of the cluster once. lightkube reads the configuration and authenticates (`access`); the
calls are ours, because its client wants a Python class for each kind and can neither send preconditions nor resume a
watch with bookmarks (docs/decisions/0034-kubernetes-client.md).

A call that the cluster cannot answer now raises Unavailable and may be repeated. What it refuses is told apart by what
the caller will do: KindMissing (install the definitions), ObjectMissing, Conflict (read again), InvalidRequest (mend
the object), Forbidden and Unauthenticated (mend the rights). Each call has a deadline.
"""

import copy
import logging
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Literal, NamedTuple, NoReturn, Self

import httpx2
import msgspec

from dynamo.base import clock, errors
from dynamo.runtime.backends.kubernetes import access, pod_records
from dynamo.runtime.backends.kubernetes.pod_records import Object, WatchEvent

log = logging.getLogger(__name__)

Propagation = Literal["Background", "Foreground", "Orphan"]
PAGE_OBJECTS = 500
WATCH_S = 240  # the cluster ends a watch after so long; it is resumed
_SILENCE_S = 90.0  # a cluster that has nothing to tell sends a bookmark each minute
_BUSY_ATTEMPTS = 5  # a kind that has just been defined answers 429 for a moment
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 5.0
_STABLE_S = 1.0  # a watch that lasted so long is resumed at once
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_JSON = "application/json"
_NO_SUCH_FORM = "failed to create typed patch object"  # an apply that the schema refuses: a 500


class KindMissing(errors.ConfigError):
    """The cluster does not know this kind of object."""

    code = "kind_missing"


class ObjectMissing(errors.RequestError):
    """The object that a call would change does not exist."""

    code = "object_missing"


class _HistoryLost(Exception):
    """The changes since a revision are not to be had any more: list the objects again."""


class _Kind(NamedTuple):
    """How the cluster spells a kind in its paths."""

    base: str
    plural: str
    is_namespaced: bool

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        parts = [self.base]
        if self.is_namespaced and namespace:
            parts += ["namespaces", namespace]
        return "/".join(part for part in (*parts, self.plural, name, subresource) if part)


class KubernetesConnection:
    """The calls to the API of one cluster. Made by `open`; `async with` closes it.

    `namespace` is that of the kubeconfig or of the pod: it holds where a call on one object names none. A list or a
    watch without namespace is over all namespaces.
    """

    def __init__(
        self, client: httpx2.AsyncClient, namespace: str, *, time: clock.Clock | None = None
    ) -> None:
        self.namespace = namespace
        self.address = str(client.base_url).rstrip("/")
        self._client = client
        self._clock = time or clock.SystemClock()
        self._kinds: dict[str, dict[str, _Kind]] = {}  # by apiVersion and kind
        self._check_write: Callable[[], None] = lambda: None

    @classmethod
    def open(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Prepare a connection to the cluster that this process belongs to. Raises ConfigError if there is none."""
        return cls(*access.open_client(environ))

    def guard_writes(self, check: Callable[[], None]) -> Self:
        """Return this connection with a check that is called before each write is sent; its error refuses the write."""
        guarded = copy.copy(self)
        guarded._check_write = check
        return guarded

    async def close(self) -> None:
        """Close all connections; watches end with an error."""
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def check(self) -> str:
        """Return the version of the cluster, such as v1.31.2. Raises Unavailable if it cannot be reached."""
        version = await self._call("GET", "/version")
        return str(version["gitVersion"])

    async def get(
        self, api_version: str, kind: str, name: str, namespace: str | None = None
    ) -> Object | None:
        """Return an object, or None if it does not exist."""
        path = await self._path(api_version, kind, namespace, name)
        try:
            return await self._call("GET", path)
        except ObjectMissing:
            return None

    async def list(
        self,
        api_version: str,
        kind: str,
        namespace: str | None = None,
        *,
        labels: str = "",
        fields: str = "",
    ) -> Sequence[Object]:
        """Return all objects of a kind that match the selectors, such as `app=x,tier!=y`."""
        objects, _ = await self._list(api_version, kind, namespace, labels, fields)
        return objects

    async def watch(
        self,
        api_version: str,
        kind: str,
        namespace: str | None = None,
        *,
        labels: str = "",
        fields: str = "",
    ) -> AsyncIterator[WatchEvent]:
        """Iterate over the objects (ADDED), then over each change (ADDED, MODIFIED, DELETED); ends by cancellation.

        After each list comes one SYNCED with an empty object. A watch that breaks is resumed; when the cluster no
        longer has the changes since then, the objects are listed again, and the difference is told as changes. While
        the cluster cannot be reached or, after the first list, refuses, the watch waits for it. Raises KindMissing,
        Forbidden and Unauthenticated for the first list.
        """
        watched = pod_records.WatchedObjects()
        revision: str | None = None
        has_synced = False
        pause_s = _FIRST_PAUSE_S
        while True:
            started_at = self._clock.now()
            try:
                if revision is None:
                    objects, revision = await self._list(
                        api_version, kind, namespace, labels, fields
                    )
                    for change in watched.replace(objects):
                        yield change
                    has_synced = True
                    yield "SYNCED", {}
                path = await self._path(api_version, kind, namespace)
                query = _query(labelSelector=labels, fieldSelector=fields, resourceVersion=revision)
                async for type_, obj in self._stream(path, query):
                    revision = obj["metadata"]["resourceVersion"]
                    if (event := watched.apply(type_, obj)) is not None:
                        yield event
            except _HistoryLost:
                revision = None
            except errors.DynamoError as error:
                if not has_synced and not isinstance(error, errors.Unavailable):
                    raise
                log.warning("watching %s again: %s", kind, error)
            was_stable = self._clock.now() - started_at > _STABLE_S
            pause_s = _FIRST_PAUSE_S if was_stable else min(2 * pause_s, _LONGEST_PAUSE_S)
            await self._clock.sleep(random.uniform(pause_s / 2, pause_s))

    async def create(self, obj: Object, *, field_manager: str = "") -> Object:
        """Create an object and return it as stored. Raises Conflict if it exists."""
        namespace = obj["metadata"].get("namespace") or self.namespace
        path = await self._path(obj["apiVersion"], obj["kind"], namespace)
        return await self._call("POST", path, obj, _query(fieldManager=field_manager))

    async def apply(self, obj: Object, field_manager: str, *, force: bool = False) -> Object:
        """Make the fields of `obj` so, create it if need be, and remove what this manager applied before and omits now.

        Raises Conflict if another manager owns a field, unless `force` takes it over.
        """
        return await self._apply(obj, field_manager, force, "")

    async def apply_status(self, obj: Object, field_manager: str, *, force: bool = False) -> Object:
        """Apply the status of an object that exists; its other fields are ignored. Raises ObjectMissing, Conflict."""
        return await self._apply(obj, field_manager, force, "status")

    async def patch(
        self,
        api_version: str,
        kind: str,
        name: str,
        changes: Object,
        namespace: str | None = None,
        *,
        subresource: str = "",
    ) -> Object:
        """Merge `changes` into an object, where None removes a field, and return it.

        A `metadata.resourceVersion` or `metadata.uid` in `changes` is a precondition. Raises ObjectMissing, Conflict.
        """
        path = await self._path(api_version, kind, namespace, name, subresource)
        return await self._call("PATCH", path, changes, content_type=_MERGE)

    async def scale(
        self, api_version: str, kind: str, name: str, replicas: int, namespace: str | None = None
    ) -> Object:
        """Set the replicas of an object with a scale subresource, and return its Scale. Raises ObjectMissing."""
        changes = {"spec": {"replicas": replicas}}
        return await self.patch(api_version, kind, name, changes, namespace, subresource="scale")

    async def delete(
        self,
        api_version: str,
        kind: str,
        name: str,
        namespace: str | None = None,
        *,
        propagation: Propagation | None = None,
        preconditions: Mapping[str, str] | None = None,
    ) -> bool:
        """Ask for the deletion of an object; return False if it does not exist.

        `preconditions` has `uid`, `resourceVersion` or both; a mismatch raises Conflict.
        """
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if propagation is not None:
            options["propagationPolicy"] = propagation
        if preconditions is not None:
            options["preconditions"] = dict(preconditions)
        path = await self._path(api_version, kind, namespace, name)
        try:
            await self._call("DELETE", path, options)
        except ObjectMissing:
            return False
        return True

    async def read_log(self, pod: str, namespace: str | None = None, *, tail_lines: int) -> str:
        """Return the last lines that the first container of a pod wrote."""
        path = await self._path("v1", "Pod", namespace, pod, "log")
        query = _query(tailLines=str(tail_lines), limitBytes=str(1 << 16))
        response = await self._send("GET", path, None, query, _JSON)
        return response.text

    async def _apply(self, obj: Object, manager: str, force: bool, subresource: str) -> Object:
        metadata = obj["metadata"]
        namespace, name = metadata.get("namespace"), metadata["name"]
        path = await self._path(obj["apiVersion"], obj["kind"], namespace, name, subresource)
        query = _query(fieldManager=manager, force="true" if force else "")
        return await self._call("PATCH", path, obj, query, content_type=_APPLY)

    async def _list(
        self, api_version: str, kind: str, namespace: str | None, labels: str, fields: str
    ) -> tuple[Sequence[Object], str]:
        """Return all pages, and the revision of the cluster at which the objects were so."""
        path = await self._path(api_version, kind, namespace)
        query = _query(labelSelector=labels, fieldSelector=fields, limit=str(PAGE_OBJECTS))
        objects: list[Object] = []
        while True:
            try:
                page = await self._call("GET", path, query=query)
            except _HistoryLost:  # between two pages
                objects.clear()
                del query["continue"]
                continue
            objects += page.get("items") or ()
            metadata = page["metadata"]
            if not metadata.get("continue"):
                break
            query["continue"] = metadata["continue"]
        for obj in objects:  # built-in lists leave both out
            obj.setdefault("apiVersion", api_version)
            obj.setdefault("kind", kind)
        return objects, metadata["resourceVersion"]

    async def _stream(self, path: str, query: dict[str, str]) -> AsyncIterator[WatchEvent]:
        """Iterate over the events of one watch. Raises _HistoryLost, Unavailable; a silent one simply ends."""
        query |= {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_S)}
        timeout = httpx2.Timeout(_SILENCE_S, connect=self._client.timeout.connect)
        try:
            async with self._client.stream("GET", path, params=query, timeout=timeout) as response:
                if response.is_error:
                    await response.aread()
                    self._refuse(response)
                async for line in response.aiter_lines():
                    event = msgspec.json.decode(line)
                    if event["type"] == "ERROR":
                        self._end_watch(event["object"])
                    yield event["type"], event["object"]
        except httpx2.ReadTimeout:
            return
        except httpx2.ConnectError as error:  # it was away, and may come back with other data
            raise _HistoryLost from error
        except (httpx2.HTTPError, msgspec.DecodeError, ValueError) as error:
            raise self._unavailable(error) from error

    def _end_watch(self, status: Object) -> NoReturn:
        if status.get("code") == 410:
            raise _HistoryLost
        raise self._unavailable(status.get("message"))

    async def _path(
        self,
        api_version: str,
        kind: str,
        namespace: str | None,
        name: str = "",
        subresource: str = "",
    ) -> str:
        resource = self._kinds.get(api_version, {}).get(kind)
        if resource is None:
            self._kinds[api_version] = await self._read_kinds(api_version)
            resource = self._kinds[api_version].get(kind)
        if resource is None:
            raise KindMissing(
                f"the cluster at {self.address} has no kind {kind} in {api_version}: install its definition"
                " (for nvidia.com: the chart dynamo-crds)"
            )
        return resource.path(namespace or (self.namespace if name else None), name, subresource)

    async def _read_kinds(self, api_version: str) -> dict[str, _Kind]:
        base = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
        try:
            answer = await self._call("GET", base)
        except (ObjectMissing, KindMissing):
            return {}
        return {
            resource["kind"]: _Kind(base, resource["name"], resource["namespaced"])
            for resource in answer["resources"]
            if "/" not in resource["name"]
        }

    async def _call(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        query: dict[str, str] | None = None,
        content_type: str = _JSON,
    ) -> Object:
        response = await self._send(method, path, body, query or {}, content_type)
        try:
            answer: Object = msgspec.json.decode(response.content)
        except msgspec.DecodeError as error:
            raise self._unavailable(error) from error
        return answer

    async def _send(
        self, method: str, path: str, body: Object | None, query: dict[str, str], content_type: str
    ) -> httpx2.Response:
        content = None if body is None else msgspec.json.encode(body)
        headers = {"Accept": _JSON, "Content-Type": content_type}
        for attempt in range(_BUSY_ATTEMPTS):
            if method != "GET":
                self._check_write()
            try:
                response = await self._client.request(
                    method, path, params=query, content=content, headers=headers
                )
            except httpx2.HTTPError as error:
                raise self._unavailable(error) from error
            if response.status_code != 429 or attempt == _BUSY_ATTEMPTS - 1:
                break
            await self._clock.sleep(_seconds(response))
        if response.is_error:
            self._refuse(response)
        return response

    def _refuse(self, response: httpx2.Response) -> NoReturn:
        """Raise the error that an answer of the cluster means."""
        code = response.status_code
        try:
            status = msgspec.json.decode(response.content)
            message = status["message"]
        except (msgspec.DecodeError, LookupError, TypeError):
            message = response.text.strip()[:200]
            if code == 404:  # in plain text: the path, not the object, is unknown
                self._kinds.clear()
                raise KindMissing(
                    f"the cluster at {self.address} does not serve {response.url.path}: install its definition"
                ) from None
        sentence = f"the cluster at {self.address} refuses: {message}"
        if code == 410:  # of a watch or of a second page, since nothing else names a revision
            raise _HistoryLost
        if (code == 429 or code >= 500) and not str(message).startswith(_NO_SUCH_FORM):
            raise errors.Unavailable(sentence, retry_after_s=_seconds(response))
        raise _ERROR_BY_CODE.get(code, errors.InvalidRequest)(sentence)

    def _unavailable(self, reason: object) -> errors.Unavailable:
        text = str(reason) or type(reason).__name__
        return errors.Unavailable(f"the cluster at {self.address} does not answer: {text}")


_ERROR_BY_CODE: Mapping[int, type[errors.RequestError]] = {
    401: errors.Unauthenticated,
    403: errors.Forbidden,
    404: ObjectMissing,
    409: errors.Conflict,
}


def _query(**values: str) -> dict[str, str]:
    return {name: value for name, value in values.items() if value}


def _seconds(response: httpx2.Response) -> float:
    """Return the seconds after which the cluster wants to be asked again; one if it does not say."""
    try:
        return min(max(float(response.headers.get("Retry-After", "1")), 0.0), _LONGEST_PAUSE_S)
    except ValueError:
        return 1.0
