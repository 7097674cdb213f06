"""A Kubernetes API server in memory, without sockets, for tests: `MemoryKubernetes.connect()` gives a connection to it.

It is the transport below `KubernetesConnection`, so the paths, bodies and errors of the connection are tested with it.
It stores the kinds that are built into `testing.kube` and those of this project, with resource versions, generations,
label selectors, paged lists, watches with bookmarks and 410, merge patches, server-side apply, status and scale
subresources, preconditions, finalizers, and deletion of what a deleted object owns. It runs no controllers, defaults
and validates nothing, and owns fields by leaf: a list is one field. `tests/contract/test_kubernetes_connection.py`
runs one suite over it and over real servers.
"""

import asyncio
import copy
import itertools
import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

import httpx2
import msgspec

from dynamo.base import ids
from dynamo.runtime.backends.kubernetes import connection
from dynamo.testing.kube import failures, patches, resources, selectors

Object = dict[str, Any]
Path = tuple[str, ...]
_REGISTRY = resources.ResourceRegistry()
_GROUP = "nvidia.com/v1alpha1"
_OWN_KINDS = (
    "DynamoGraphDeployment DynamoComponentDeployment DynamoGraphDeploymentRequest"
    " DynamoGraphDeploymentScalingAdapter DynamoModel DynamoWorkerMetadata"
)
_PATH = re.compile(
    r"/(?:api/(?P<core>[^/]+)|apis/(?P<group>[^/]+/[^/]+))(?:/namespaces/(?P<namespace>[^/]+)(?=/))?"
    r"(?:/(?P<plural>[^/]+))?(?:/(?P<name>[^/]+))?(?:/(?P<subresource>[^/]+))?$"
)
_UNCOUNTED = ("metadata", "status")  # a change of these leaves the generation as it is
_KEPT = ("uid", "creationTimestamp", "resourceVersion", "generation", "deletionTimestamp")


class _Kind(NamedTuple):
    api_version: str
    kind: str
    plural: str
    is_namespaced: bool


class _Key(NamedTuple):
    kind: _Kind
    namespace: str
    name: str


class MemoryKubernetes(httpx2.AsyncBaseTransport):
    """All objects of one cluster. Its attributes let a test look in and disturb it.

    `log_by_pod` is what `read_log` answers, `failures` are answers to be given first, `num_writes` counts changes.
    """

    def __init__(self) -> None:
        self.objects: dict[_Key, Object] = {}
        self.log_by_pod: dict[str, str] = {}
        self.failures: list[httpx2.Response | httpx2.HTTPError] = []
        self.num_writes = 0
        self._revisions = itertools.count(1)
        self._revision = 0
        self._oldest_revision = 0
        self._history: list[tuple[int, str, _Key, Object, Object]] = []
        self._owners: dict[_Key, dict[str, set[Path]]] = {}  # the fields that each manager applied
        self._changed = asyncio.Event()
        self._generation_of_streams = 0
        self._kinds: dict[str, list[_Kind]] = {}
        built_in = ((r.api_version, r.kind, r.plural, r.is_namespaced) for r in _REGISTRY)
        own = ((_GROUP, kind, kind.lower() + "s", True) for kind in _OWN_KINDS.split())
        for kind in itertools.starmap(_Kind, (*built_in, *own)):
            self._kinds.setdefault(kind.api_version, []).append(kind)

    def undefine(self, api_version: str) -> None:
        """Forget all kinds of an apiVersion."""
        del self._kinds[api_version]

    def connect(self, namespace: str = "default") -> connection.KubernetesConnection:
        """Return a connection to this cluster."""
        client = httpx2.AsyncClient(transport=self, base_url="http://memory-kubernetes")
        return connection.KubernetesConnection(client, namespace)

    def put_object(self, obj: Object) -> None:
        """Create or replace an object, as a controller of the cluster would."""
        kind = next(k for k in self._kinds[obj["apiVersion"]] if k.kind == obj["kind"])
        self._store(_Key(kind, obj["metadata"].get("namespace", ""), obj["metadata"]["name"]), obj)

    def remove_object(self, api_version: str, kind: str, namespace: str, name: str) -> None:
        """Remove an object and nothing that it owns, as if the cluster collected garbage late."""
        found = next(k for k in self._kinds[api_version] if k.kind == kind)
        self._remove(_Key(found, namespace, name), with_owned=False)

    def forget_history(self) -> None:
        """Answer 410 to every watch that wants to resume from before now, and cut those that run."""
        self._oldest_revision = self._revision
        self._history.clear()
        self.cut_watches()

    def cut_watches(self) -> None:
        """Break the connections of all watches."""
        self._generation_of_streams += 1
        self._wake()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Answer one request of a connection."""
        await asyncio.sleep(0)
        if self.failures:
            failure = self.failures.pop(0)
            if isinstance(failure, httpx2.HTTPError):
                raise failure
            return failure
        try:
            return self._answer(request)
        except failures.ApiError as refusal:
            return _json(refusal.body, refusal.code)

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/version":
            return _json({"gitVersion": "v0.0.0-memory"})
        match = _PATH.match(request.url.path)
        api_version = (match["core"] or match["group"]) if match else ""
        kinds = self._kinds.get(api_version)
        if match is None or kinds is None:
            return httpx2.Response(404, text="404 page not found\n")
        if match["plural"] is None:
            return _json(
                {
                    "resources": [
                        {"name": kind.plural, "kind": kind.kind, "namespaced": kind.is_namespaced}
                        for kind in kinds
                    ]
                }
            )
        kind = next((kind for kind in kinds if kind.plural == match["plural"]), None)
        if kind is None:
            return httpx2.Response(404, text="404 page not found\n")
        if match["name"] is None:
            return self._answer_collection(request, kind, match["namespace"] or "")
        key = _Key(kind, match["namespace"] or "", match["name"])
        return self._answer_object(request, key, match["subresource"] or "")

    def _answer_collection(
        self, request: httpx2.Request, kind: _Kind, namespace: str
    ) -> httpx2.Response:
        query = request.url.params
        if request.method == "POST":
            return _json(self._create(kind, namespace, msgspec.json.decode(request.content)), 201)

        has_labels = selectors.parse_labels(query.get("labelSelector", ""))
        has_fields = selectors.parse_fields(query.get("fieldSelector", ""))

        def is_selected(key: _Key, obj: Object) -> bool:
            is_here = key.kind == kind and namespace in ("", key.namespace)
            return is_here and has_labels(obj) and has_fields(obj)

        if query.get("watch") == "true":
            since = int(query["resourceVersion"])
            return httpx2.Response(200, content=self._watch(is_selected, since))
        selected = [obj for key, obj in sorted(self.objects.items()) if is_selected(key, obj)]
        start, limit = int(query.get("continue", "0")), int(query.get("limit", "500"))
        metadata: Object = {"resourceVersion": str(self._revision)}
        if len(selected) > start + limit:
            metadata["continue"] = str(start + limit)
        return _json({"metadata": metadata, "items": selected[start : start + limit]})

    async def _watch(
        self, is_selected: Callable[[_Key, Object], bool], since: int
    ) -> AsyncIterator[bytes]:
        generation = self._generation_of_streams
        if since < self._oldest_revision:
            yield _line("ERROR", {"code": 410, "message": "too old resource version"})
            return
        while True:
            changed = self._changed
            for revision, type_, key, obj, before in [e for e in self._history if e[0] > since]:
                since = revision
                told = _seen(type_, obj, is_selected(key, before), is_selected(key, obj))
                if told:
                    yield _line(told, obj)
            yield _line("BOOKMARK", {"metadata": {"resourceVersion": str(since)}})
            await changed.wait()
            if generation != self._generation_of_streams:
                raise httpx2.ReadError("the watch was cut")

    def _answer_object(
        self, request: httpx2.Request, key: _Key, subresource: str
    ) -> httpx2.Response:
        if subresource == "log":
            return httpx2.Response(200, text=self.log_by_pod[key.name])
        body: Object = msgspec.json.decode(request.content) if request.content else {}
        is_apply = "apply-patch" in request.headers.get("Content-Type", "")
        if request.method == "PATCH" and is_apply:
            query = request.url.params
            return _json(
                self._apply(
                    key, body, query["fieldManager"], query.get("force") == "true", subresource
                )
            )
        stored = self.objects.get(key)
        if stored is None:
            raise failures.ApiError(
                404,
                "NotFound",
                f'{key.kind.plural}.{key.kind.api_version.rpartition("/")[0]} "{key.name}" not found',
            )
        if request.method == "GET":
            return _json(stored)
        if request.method == "DELETE":
            return _json(self._delete(key, body))
        _check_preconditions(stored, body.get("metadata", {}))
        if subresource == "scale":
            self._store(key, patches.merge(stored, {"spec": body["spec"]}))
            return _json({"kind": "Scale", "spec": body["spec"]})
        return _json(self._store(key, patches.merge(stored, _of_subresource(body, subresource))))

    def _create(self, kind: _Kind, namespace: str, obj: Object) -> Object:
        obj = copy.deepcopy(obj)
        metadata = obj["metadata"]
        if "name" not in metadata:
            metadata["name"] = metadata["generateName"] + f"{ids.new_instance_id() % 16**5:05x}"
        if kind.is_namespaced:
            metadata["namespace"] = namespace or metadata.get("namespace", "default")
        key = _Key(kind, metadata.get("namespace", ""), metadata["name"])
        if key in self.objects:
            raise failures.ApiError(
                409, "AlreadyExists", f'{kind.plural} "{key.name}" already exists'
            )
        return self._store(key, obj)

    def _apply(
        self, key: _Key, body: Object, manager: str, force: bool, subresource: str
    ) -> Object:
        stored = self.objects.get(key)
        if stored is None and subresource:
            raise failures.ApiError(404, "NotFound", f'{key.kind.plural} "{key.name}" not found')
        body = _of_subresource(body, subresource)
        applied = dict(_leaves(body))
        applied = {path: value for path, value in applied.items() if path[:1] != ("apiVersion",)}
        current = dict(_leaves(stored or {}))
        owners = self._owners.setdefault(key, {})
        manager_key = f"{manager} {subresource}".strip()
        for other, paths in owners.items():
            taken = {p for p in applied if p in paths and current.get(p) != applied[p]}
            if other == manager_key or not taken:
                continue
            if not force:
                field = "." + ".".join(min(taken))
                raise failures.ApiError(
                    409,
                    "Conflict",
                    f'Apply failed with 1 conflict: conflict with "{other}": {field}',
                )
            paths -= taken
        result = copy.deepcopy(stored or {})
        others = set().union(*(paths for name, paths in owners.items() if name != manager_key))
        for path in owners.get(manager_key, set()) - applied.keys() - others:
            _remove(result, path)
        owners[manager_key] = set(applied) - {("kind",), ("metadata", "name")}
        result = patches.merge(result, body)
        if stored is None:
            return self._create(key.kind, key.namespace, result)
        return self._store(key, result)

    def _delete(self, key: _Key, options: Object) -> Object:
        stored = self.objects[key]
        _check_preconditions(stored, options.get("preconditions", {}))
        if stored["metadata"].get("finalizers"):
            return self._store(key, stored, deleted=True)
        self._remove(key)
        return {"kind": "Status", "status": "Success"}

    def _remove(self, key: _Key, *, with_owned: bool = True) -> None:
        obj = copy.deepcopy(self.objects.pop(key))
        self._owners.pop(key, None)
        uid = obj["metadata"]["uid"]
        self._record("DELETED", key, obj, obj)
        for other, dependent in list(self.objects.items()) if with_owned else ():
            owners = dependent["metadata"].get("ownerReferences", ())
            if other in self.objects and [owner["uid"] for owner in owners] == [uid]:
                self._delete(other, {})

    def _store(self, key: _Key, obj: Object, *, deleted: bool = False) -> Object:
        """Store an object if it differs, as a real server does; return what is stored."""
        obj = copy.deepcopy(obj)
        before = self.objects.get(key)
        metadata = obj["metadata"]
        if before is None:
            obj |= {"apiVersion": key.kind.api_version, "kind": key.kind.kind}
            metadata |= {"uid": f"uid-{next(self._revisions)}", "generation": 1}
            metadata |= {"creationTimestamp": "2026-01-01T00:00:00Z"}
            self._record("ADDED", key, obj, {"metadata": {}})
        else:
            kept = before["metadata"]
            metadata |= {name: kept[name] for name in _KEPT if name in kept}
            if deleted:
                metadata.setdefault("deletionTimestamp", "2026-01-01T00:00:00Z")
            if obj == before:
                return before
            if _counted(obj) != _counted(before) or (deleted and "deletionTimestamp" not in kept):
                metadata["generation"] += 1
            if "deletionTimestamp" in metadata and not metadata.get("finalizers"):
                self._remove(key)
                return obj
            self._record("MODIFIED", key, obj, before)
        self.objects[key] = obj
        return obj

    def _record(self, type_: str, key: _Key, obj: Object, before: Object) -> None:
        self.num_writes += 1
        self._revision = next(self._revisions)
        obj["metadata"]["resourceVersion"] = str(self._revision)
        self._history.append((self._revision, type_, key, obj, before))
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _seen(type_: str, obj: Object, was_selected: bool, is_selected: bool) -> str | None:
    """Return what a watch tells of a change: to leave its selection is a deletion, to enter it an addition."""
    if type_ == "DELETED":
        return type_ if was_selected else None
    if is_selected:
        return "MODIFIED" if was_selected else "ADDED"
    return "DELETED" if was_selected else None


def _leaves(value: Object, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    for name, part in value.items():
        if isinstance(part, dict) and part:
            yield from _leaves(part, (*path, name))
        else:
            yield (*path, name), part


def _remove(obj: Object, path: Path) -> None:
    """Remove a leaf, and the maps that this leaves empty."""
    part = obj.get(path[0])
    if len(path) == 1:
        obj.pop(path[0], None)
    elif isinstance(part, dict):
        _remove(part, path[1:])
        if not part:
            del obj[path[0]]


def _of_subresource(body: Object, subresource: str) -> Object:
    if subresource == "status":
        return {"status": body.get("status", {})}
    return {name: value for name, value in body.items() if name != "status"}


def _counted(obj: Object) -> Object:
    return {name: value for name, value in obj.items() if name not in _UNCOUNTED}


def _check_preconditions(stored: Object, conditions: Object) -> None:
    for name in ("uid", "resourceVersion"):
        if name in conditions and conditions[name] != stored["metadata"][name]:
            raise failures.ApiError(
                409,
                "Conflict",
                f"the {name} {conditions[name]} does not match {stored['metadata'][name]}",
            )


def _json(value: Object, code: int = 200) -> httpx2.Response:
    return httpx2.Response(code, content=msgspec.json.encode(value))


def _line(type_: str, obj: Object) -> bytes:
    return msgspec.json.encode({"type": type_, "object": obj}) + b"\n"
