"""Other forms of an object: tables for `kubectl get`, metadata alone, and the scale subresource."""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from dynamo.testing.kube import failures, pods, resources, selectors

Object = dict[str, Any]
Reader = Callable[[Object, Object, Object], Any]  # of an object, its spec and its status
_GROUP = "meta.k8s.io/v1"
_NAME = {"name": "Name", "type": "string", "format": "name", "priority": 0,
         "description": "Name must be unique within a namespace. Is required when creating resources, although some"
         " resources may allow a client to request the generation of an appropriate name automatically. Name is"
         " primarily intended for creation idempotence and configuration definition. Cannot be updated. More info:"
         " https://kubernetes.io/docs/concepts/overview/working-with-objects/names#names"}  # fmt: skip

# Columns of built-in kinds: name, type, and a `!` before those that only `-o wide` shows.
_COLUMNS = {
    "pods": "Name Ready Status Restarts Age !IP !Node !Nominated_Node !Readiness_Gates",
    "services": "Name Type Cluster-IP External-IP Port(s) Age !Selector",
    "deployments": "Name Ready Up-to-date Available Age !Containers !Images !Selector",
    "replicasets": "Name Desired Current Ready Age !Containers !Images !Selector",
    "statefulsets": "Name Ready Age !Containers !Images",
    "jobs": "Name Status Completions Duration Age",
    "nodes": "Name Status Roles Age Version !Internal-IP",
    "namespaces": "Name Status Age",
    "configmaps": "Name Data Age",
    "secrets": "Name Type Data Age",
    "serviceaccounts": "Name Secrets Age",
    "persistentvolumeclaims": "Name Status Volume Capacity Access_Modes StorageClass Age",
    "horizontalpodautoscalers": "Name Reference Targets MinPods MaxPods Replicas Age",
    "leases": "Name Holder Age",
    "endpointslices": "Name AddressType Ports Endpoints Age",
    "events": "Last_Seen Type Reason Object !Subobject !Source Message !First_Seen !Count !Name",
    "customresourcedefinitions": "Name Created_At",
}
_TYPES: dict[str | tuple[str, str], str] = {
    ("replicasets", "Ready"): "integer",
    **dict.fromkeys(
        ("Up-to-date", "Available", "Desired", "Current", "Data", "Secrets"), "integer"
    ),
    "Created_At": "date",
}


_AGE = ({"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},)


def check_accept(accept: str, accepted: str) -> None:
    """Refuse a client that takes none of our media types. Raises ApiError (406)."""
    if not accept or any(part in accept for part in ("json", "yaml", "*/*", "application/*")):
        return
    text = f"only the following media types are accepted: {accepted}"
    raise failures.ApiError(406, "NotAcceptable", text)


def present(
    resource: resources.ApiResource,
    items: list[Object],
    accept: str,
    include: str,
    single: Object | None,
    meta: Object | None = None,
) -> Object | None:
    """Return objects in the form that the client asks for, or None for the plain one."""
    form = re.search(r"as=(Table|PartialObjectMetadata(?:List)?)", accept.partition(",")[0])
    if form is None:
        return None
    meta = meta or {
        "resourceVersion": (single or {"metadata": {}})["metadata"].get("resourceVersion")
    }
    if form[1] != "Table":
        shown = [_partial(item) for item in items]
        if single is not None:
            return shown[0]
        return {
            "kind": "PartialObjectMetadataList",
            "apiVersion": _GROUP,
            "metadata": meta,
            "items": shown,
        }
    columns, rows = columns_of(resource), []
    for item in items:
        row: Object = {"cells": _cells(resource, item)}
        if include == "Object":
            row["object"] = item
        else:
            row["object"] = None if include == "None" else _partial(item)
        rows.append(row)
    return {
        "kind": "Table",
        "apiVersion": _GROUP,
        "metadata": meta,
        "columnDefinitions": columns,
        "rows": rows,
    }


def _partial(item: Object) -> Object:
    return {"kind": "PartialObjectMetadata", "apiVersion": _GROUP, "metadata": item["metadata"]}


def columns_of(resource: resources.ApiResource) -> list[Object]:
    """Return the definitions of the columns of a kind."""
    if resource.is_custom:
        described = "Custom resource definition column (in JSONPath format): "
        return [_NAME] + [
            {
                "name": column["name"],
                "type": column["type"],
                "format": column.get("format", ""),
                "description": column.get("description") or described + column["jsonPath"],
                "priority": column.get("priority", 0),
            }
            for column in resource.columns or _AGE
        ]
    names = _COLUMNS.get(resource.plural, "Name Age").split()
    return [
        {
            "name": name.lstrip("!").replace("_", " "),
            "type": _type_of(resource.plural, name),
            "format": "name" if name.lstrip("!") == "Name" else "",
            "description": "",
            "priority": 1 if name.startswith("!") else 0,
        }
        for name in names
    ]


def _type_of(plural: str, column: str) -> str:
    return _TYPES.get((plural, column)) or _TYPES.get(column, "string")


def _cells(resource: resources.ApiResource, item: Object) -> list[Any]:
    if resource.is_custom:
        cells = (_custom_cell(item, column) for column in resource.columns or _AGE)
        return [item["metadata"]["name"], *cells]
    return [
        _cell(resource.plural, column.lstrip("!"), item)
        for column in _COLUMNS.get(resource.plural, "Name Age").split()
    ]


def _custom_cell(item: Object, column: Object) -> Any:
    value = read_json_path(item, column["jsonPath"])
    if value is None:
        return None
    if column["type"] == "date":
        return age(str(value))
    if column["type"] in ("integer", "number", "boolean"):
        return value
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_json_path(item: Any, path: str) -> Any:
    """Return the first value at a JSON path with fields, indices and tests such as `[?(@.type=='Ready')]`."""
    pattern = r"\.([A-Za-z0-9_\-]+)|\[(\d+)\]|\['([^']+)'\]|\[\?\(@\.([\w.]+)\s*==\s*['\"]([^'\"]*)['\"]\)\]|\[(\*)\]"
    for name, index, quoted, field, value, _ in re.findall(pattern, path.replace("\\.", "\0")):
        key = (name or quoted).replace("\0", ".")
        if key:
            item = item.get(key) if isinstance(item, dict) else None
        elif not isinstance(item, list):
            return None
        elif field:
            item = next((x for x in item if isinstance(x, dict) and str(x.get(field)) == value), None)  # fmt: skip
        else:
            item = item[int(index or 0)] if int(index or 0) < len(item) else None
    return item


def age(text: str) -> str:
    """Return the time since a timestamp as kubectl shows it."""
    try:
        then = datetime.fromisoformat(str(text).replace("Z", "+00:00"))
        seconds = int((datetime.now(UTC) - then).total_seconds())
    except (ValueError, TypeError):  # TypeError: without a time zone
        return "<invalid>"
    if seconds < 120:
        return f"{max(seconds, 0)}s"
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if minutes < 10:
        return f"{minutes}m{seconds % 60}s" if seconds % 60 else f"{minutes}m"
    if hours < 3:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    return f"{hours}h" if hours < 48 else f"{days}d"


def _cell(plural: str, column: str, item: Object) -> Any:
    meta, spec, status = item["metadata"], item.get("spec") or {}, item.get("status") or {}
    if column == "Name":
        return meta["name"]
    if column == "Age":
        return age(meta["creationTimestamp"])
    reader = _CELLS.get((plural, column)) or _CELLS.get(("", column))
    if isinstance(reader, str):
        value = read_json_path(item, reader)
        is_count = _type_of(plural, column) == "integer"
        return value if value is not None else 0 if is_count else "<none>"
    return reader(item, spec, status) if reader is not None else "<none>"


def pod_status(item: Object) -> str:
    """Return the word that kubectl shows for a pod's state."""
    status = item.get("status") or {}
    text = str(status.get("reason") or status.get("phase") or "")
    inits = status.get("initContainerStatuses") or ()
    for n, container in enumerate(inits):
        state = container.get("state") or {}
        if (state.get("terminated") or {}).get("exitCode") == 0 or container.get("started"):
            continue
        reason = _reason(state)
        if "terminated" in state or (reason and reason != "PodInitializing"):
            text = f"Init:{reason}"
        else:
            text = f"Init:{n}/{len(inits)}"
        break
    else:
        is_running = False
        for container in reversed(status.get("containerStatuses") or ()):
            state = container.get("state") or {}
            text = _reason(state) or text
            is_running = is_running or ("running" in state and bool(container.get("ready")))
        if text == "Completed" and is_running:
            text = "Running"
    return "Terminating" if item["metadata"].get("deletionTimestamp") else text


def _reason(state: Object) -> str:
    terminated = state.get("terminated")
    if terminated:
        signal = terminated.get("signal")
        fallback = f"Signal:{signal}" if signal else f"ExitCode:{terminated.get('exitCode')}"
        return str(terminated.get("reason") or fallback)
    return str((state.get("waiting") or {}).get("reason") or "")


def _restarts(item: Object, spec: Object, status: Object) -> str:
    statuses = status.get("containerStatuses") or ()
    count = sum(container.get("restartCount", 0) for container in statuses)
    ends = [
        ((container.get("lastState") or {}).get("terminated") or {}).get("finishedAt")
        for container in statuses
    ]
    last = max((end for end in ends if end), default="")
    return f"{count} ({age(last)} ago)" if count and last else str(count)


def _ports(item: Object, spec: Object, status: Object) -> str:
    return (
        ",".join(
            f"{port['port']}{':' + str(port['nodePort']) if 'nodePort' in port else ''}/{port.get('protocol', 'TCP')}"
            for port in spec.get("ports") or ()
        )
        or "<none>"
    )


def _ready_pods(item: Object, spec: Object, status: Object) -> str:
    inits = spec.get("initContainers") or ()
    sidecars = [init["name"] for init in inits if init.get("restartPolicy") == "Always"]
    statuses = [
        *(status.get("containerStatuses") or ()),
        *(s for s in status.get("initContainerStatuses") or () if s["name"] in sidecars),
    ]
    ready = sum(bool(container.get("ready")) for container in statuses)
    return f"{ready}/{len(spec.get('containers') or ()) + len(sidecars)}"


def _template_names(field: str) -> Reader:
    def read(item: Object, spec: Object, status: Object) -> str:
        containers = spec.get("template", {}).get("spec", {}).get("containers") or ()
        return ",".join(container.get(field, "") for container in containers)

    return read


def _node_status(item: Object, spec: Object, status: Object) -> str:
    return "Ready" if pods.has_condition(item, "Ready") else "NotReady"


def _selector(item: Object, spec: Object, status: Object) -> str:
    chosen = spec.get("selector") or {}
    return selectors.format_labels(dict(chosen.get("matchLabels") or chosen)) or "<none>"


def _job_status(item: Object, spec: Object, status: Object) -> str:
    ends = (kind for kind in ("Complete", "Failed") if pods.has_condition(item, kind))
    return next(ends, "Running")


def _object_of_event(item: Object, spec: Object, status: Object) -> str:
    involved = item.get("involvedObject") or {}
    return f"{involved.get('kind', '').lower()}/{involved.get('name', '')}"


def _desired(item: Object, spec: Object, status: Object) -> str:
    return f"{status.get('readyReplicas', 0)}/{spec.get('replicas', 0)}"


def _joined(field: str, path: str) -> Reader:
    def read(item: Object, spec: Object, status: Object) -> str:
        return ",".join(str(read_json_path(part, path)) for part in item.get(field) or ())

    return read


def _reference(item: Object, spec: Object, status: Object) -> str:
    return f"{spec['scaleTargetRef']['kind']}/{spec['scaleTargetRef']['name']}"


def _targets(item: Object, spec: Object, status: Object) -> str:
    current = {
        metric["resource"]["name"]: metric["resource"]["current"]
        for metric in status.get("currentMetrics") or ()
    }
    parts = []
    for metric in spec.get("metrics") or ():
        if metric["type"] == "Resource":
            name, target = metric["resource"]["name"], metric["resource"]["target"]
            field = "averageValue" if "averageValue" in target else "averageUtilization"
            unit = "" if field == "averageValue" else "%"
            value = f"{current[name][field]}{unit}" if name in current else "<unknown>"
            parts.append(f"{name}: {value}/{target[field]}{unit}")
    return ", ".join(parts) or "<none>"


def _last_seen(item: Object, spec: Object, status: Object) -> str:
    created = item["metadata"]["creationTimestamp"]
    return age(item.get("lastTimestamp") or item.get("eventTime") or created)


def _first_seen(item: Object, spec: Object, status: Object) -> str:
    created = item["metadata"]["creationTimestamp"]
    return age(item.get("firstTimestamp") or item.get("eventTime") or created)


def _source_of_event(item: Object, spec: Object, status: Object) -> str:
    source = item.get("source") or {}
    component, host = source.get("component"), source.get("host")
    if not component:
        component, host = item.get("reportingComponent", ""), item.get("reportingInstance")
    return f"{component}, {host}" if host else component


def _count(field: str) -> Reader:
    return lambda item, spec, status: len(item.get(field) or ())


_CELLS: dict[tuple[str, str], Reader | str] = {  # a path stands for the value there
    ("pods", "Ready"): _ready_pods,
    ("pods", "Status"): lambda item, spec, status: pod_status(item),
    ("pods", "Restarts"): _restarts,
    ("pods", "IP"): ".status.podIP",
    ("pods", "Node"): ".spec.nodeName",
    ("services", "Type"): ".spec.type",
    ("services", "Cluster-IP"): ".spec.clusterIP",
    ("services", "Port(s)"): _ports,
    ("", "Selector"): _selector,
    ("", "Containers"): _template_names("name"),
    ("", "Images"): _template_names("image"),
    ("", "Ready"): _desired,
    ("", "Up-to-date"): ".status.updatedReplicas",
    ("", "Available"): ".status.availableReplicas",
    ("replicasets", "Desired"): ".spec.replicas",
    ("replicasets", "Current"): ".status.replicas",
    ("replicasets", "Ready"): ".status.readyReplicas",
    ("jobs", "Status"): _job_status,
    ("jobs", "Completions"): lambda i, spec, st: f"{st.get('succeeded', 0)}/{spec['completions']}",
    ("nodes", "Status"): _node_status,
    ("nodes", "Version"): ".status.nodeInfo.kubeletVersion",
    ("", "Status"): ".status.phase",
    ("configmaps", "Data"): _count("data"),
    ("secrets", "Data"): _count("data"),
    ("secrets", "Type"): ".type",
    ("serviceaccounts", "Secrets"): _count("secrets"),
    ("persistentvolumeclaims", "Volume"): ".spec.volumeName",
    ("persistentvolumeclaims", "Capacity"): ".status.capacity.storage",
    ("persistentvolumeclaims", "Access_Modes"): ".spec.accessModes[0]",
    ("persistentvolumeclaims", "StorageClass"): ".spec.storageClassName",
    ("horizontalpodautoscalers", "Reference"): _reference,
    ("horizontalpodautoscalers", "Targets"): _targets,
    ("horizontalpodautoscalers", "MinPods"): ".spec.minReplicas",
    ("horizontalpodautoscalers", "MaxPods"): ".spec.maxReplicas",
    ("horizontalpodautoscalers", "Replicas"): ".status.currentReplicas",
    ("leases", "Holder"): ".spec.holderIdentity",
    ("endpointslices", "AddressType"): ".addressType",
    ("endpointslices", "Ports"): _joined("ports", ".port"),
    ("endpointslices", "Endpoints"): _joined("endpoints", ".addresses[0]"),
    ("events", "Last_Seen"): _last_seen,
    ("events", "Type"): ".type",
    ("events", "Reason"): ".reason",
    ("events", "Object"): _object_of_event,
    ("events", "Subobject"): lambda i, spec, st: (i.get("involvedObject") or {}).get(
        "fieldPath", ""
    ),
    ("events", "Source"): _source_of_event,
    ("events", "Message"): ".message",
    ("events", "First_Seen"): _first_seen,
    ("events", "Count"): lambda item, spec, status: item.get("count", 1),
    ("customresourcedefinitions", "Created_At"): ".metadata.creationTimestamp",
}


def scale_of(item: Object, paths: resources.ScalePaths) -> Object:
    """Return the scale subresource of an object."""
    meta = item["metadata"]
    names = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    selector = read_json_path(item, paths.selector) if paths.selector else None
    if isinstance(selector, dict):
        selector = selectors.format_labels(selector.get("matchLabels") or {})
    status = {"replicas": read_json_path(item, paths.status) or 0}
    if selector:
        status["selector"] = selector
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {name: meta[name] for name in names if name in meta},
        "spec": {"replicas": read_json_path(item, paths.spec) or 0},
        "status": status,
    }
