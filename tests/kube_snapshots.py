"""Objects as recorded exchanges show them: what a replay must create because it was there before it began."""

import copy
import dataclasses
import json
import re

_COLLECTION = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>v[^/]+)(?:/namespaces/(?P<namespace>[^/]+)(?=/[a-z]))?"
    r"/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+))?(?:/(?P<subresource>[a-z]+))?$"
)
_MINIMAL = {  # of objects that no answer shows whole
    "configmaps": {"apiVersion": "v1", "kind": "ConfigMap"},
    "pods": {
        "apiVersion": "v1",
        "kind": "Pod",
        "spec": {"containers": [{"name": "a", "image": "x"}]},
    },
    "dynamographdeployments": {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeployment",
        "spec": {"replicas": 1},
    },
}


@dataclasses.dataclass(frozen=True)
class Target:
    """The object or collection that a path names."""

    namespace: str
    plural: str
    name: str
    subresource: str

    @classmethod
    def parse(cls, path):
        """Return the target of a path, or None where it is no resource's."""
        match = _COLLECTION.match(path.partition("?")[0])
        if match is None:
            return None
        parts = {name: match[name] or "" for name in ("namespace", "plural", "name", "subresource")}
        if parts["plural"] == "namespaces" and parts["subresource"] not in (
            "",
            "status",
            "finalize",
        ):
            return None
        return cls(**parts)


def plural_of(kind):
    return {"Endpoints": "endpoints"}.get(
        kind, kind.lower() + ("es" if kind.endswith("ss") else "s")
    )


def collection_path(item):
    """Return the path below which an object of this version and kind is created."""
    root = "/apis/" if "/" in item["apiVersion"] else "/api/"
    namespace = item["metadata"].get("namespace")
    home = f"/namespaces/{namespace}" if namespace else ""
    return f"{root}{item['apiVersion']}{home}/{plural_of(item['kind'])}"


def shown_objects(body):
    """Yield the whole objects in an answer: one, those of a list, or those of a watch."""
    if not isinstance(body, dict):
        return
    for entry in body.get("_stream") or ():
        yield from shown_objects((entry.get("event") or {}).get("object"))
    if "uid" in (body.get("metadata") or {}) and "kind" in body and "apiVersion" in body:
        yield body
    for item in body.get("items") or ():
        kind = body["kind"].removesuffix("List")
        yield from shown_objects({"apiVersion": body["apiVersion"], "kind": kind, **item})


class Snapshots:
    """The objects that the answers of a file show, each with the line of its exchange."""

    def __init__(self, lines):
        self._shown = []
        self._created = set()  # uids and names of those that were made in the recording
        for n, line in enumerate(lines):
            exchange = json.loads(line)
            response = exchange.get("response") or {}
            if "direction" not in exchange:
                shown = [(n, item) for item in shown_objects(response.get("body"))]
                self._shown += shown
                if response.get("status") == 201:
                    for _, item in shown:
                        self._created |= {item["metadata"]["uid"], _place(item)}
        self._shown = [
            (n, item) for n, item in self._shown if item["metadata"]["uid"] not in self._created
        ]

    def find(self, target, line, request):
        """Return an object as it was before the request of a line: as an answer shows it, else by a guess."""
        found = [(n, item) for n, item in self._shown if _is_at(item, target)]
        answers = [item for n, item in found if n == line]
        if answers and request["method"] == "GET":
            return answers[0]
        if answers:
            before = [
                item
                for _, item in found
                if item["metadata"]["uid"] == answers[0]["metadata"]["uid"]
                and _age(item) < _age(answers[0])
            ]
            if before:  # a watch or a list that was recorded later may show it
                return max(before, key=_age)
            is_patch = request["method"] == "PATCH"
            return without_change(answers[0], request["body"]) if is_patch else answers[0]
        later = [item for n, item in found if n > line]
        if later:
            return min(later, key=_age)
        if found:
            return found[-1][1]
        guess = copy.deepcopy(_MINIMAL.get(target.plural))
        if guess and (target.namespace, target.plural, target.name) not in self._created:
            guess["metadata"] = {"name": target.name, "namespace": target.namespace}
            return guess
        return None

    def of_collection(self, target):
        """Return the first state of each object in a collection."""
        return _firsts(
            item
            for _, item in self._shown
            if plural_of(item["kind"]) == target.plural
            and target.namespace in ("", item["metadata"].get("namespace"))
        )

    def of_namespace(self, namespace, line):
        """Return the first state after a line of each object in a namespace."""
        return _firsts(
            item
            for n, item in self._shown
            if n >= line and item["metadata"].get("namespace") == namespace
        )

    def owned_by(self, uid):
        """Return the first state of each object with an owner of this uid."""
        return _firsts(
            item
            for _, item in self._shown
            if uid in [owner["uid"] for owner in item["metadata"].get("ownerReferences") or ()]
        )


def _age(item):
    """Return what orders the states of an object; the answer that frees it has the revision of the state before."""
    meta = item["metadata"]
    return int(meta["resourceVersion"]), -len(meta.get("finalizers") or ())


def _place(item):
    meta = item["metadata"]
    return meta.get("namespace", ""), plural_of(item["kind"]), meta["name"]


def _is_at(item, target):
    return _place(item) == (target.namespace, target.plural, target.name)


def _firsts(items):
    by_uid = {}
    for item in sorted(items, key=_age):
        by_uid.setdefault(item["metadata"]["uid"], item)
    return list(by_uid.values())


def without_change(item, patch):
    """Return an object without the fields that a patch sets, so that the patch changes it as it did."""
    before = copy.deepcopy(item)
    if isinstance(patch, dict):
        _remove_fields(before, patch)
        return before
    for operation in patch if isinstance(patch, list) else ():
        if operation["op"] == "add":
            _remove_at(before, operation["path"].split("/")[1:])
    return before


def without_admitted(pod):
    """Return the spec of a pod without what nobody owns, as admission and the scheduler filled it in, and its node."""
    owned = {
        field.removeprefix("f:")
        for entry in pod["metadata"]["managedFields"]
        for field in entry["fieldsV1"].get("f:spec", ())
    }
    spec = {name: value for name, value in pod["spec"].items() if name in owned}
    for field in {"containers", "initContainers"} & spec.keys():
        spec[field] = [
            {name: value for name, value in container.items() if name != "volumeMounts"}
            | ({"volumeMounts": mounts} if (mounts := _own_mounts(container)) else {})
            for container in spec[field]
        ]
    return spec, None if "nodeName" in owned else pod["spec"].get("nodeName")


def _own_mounts(container):
    mounts = container.get("volumeMounts", ())
    return [mount for mount in mounts if not mount["name"].startswith("kube-api-access-")]


def given_revision(body):
    """Return the revision that a write is based on, or None."""
    if isinstance(body, dict):
        return (body.get("metadata") or {}).get("resourceVersion")
    tests = (
        [op for op in body if op["path"] == "/metadata/resourceVersion"]
        if isinstance(body, list)
        else []
    )
    return tests[0]["value"] if tests else None


def _remove_fields(value, patch):
    for name, change in patch.items():
        if name in ("apiVersion", "kind", "name", "namespace", "uid", "resourceVersion"):
            continue
        if isinstance(change, dict) and isinstance(value.get(name), dict):
            _remove_fields(value[name], change)
            if not value[name]:
                del value[name]
        else:
            value.pop(name, None)


def _remove_at(value, path):
    for name in path[:-1]:
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, dict):
        value.pop(path[-1], None)
