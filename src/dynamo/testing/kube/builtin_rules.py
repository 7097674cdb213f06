"""What the API server does with built-in objects: defaults and allocated values.

Quantities such as `500m` or `1Gi` are stored in a canonical form.
"""

import base64
import ipaddress
import json
import re
import secrets
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from dynamo.testing.kube import (
    metadata,
    pod_network,
    resources,
    store,
    webhooks,
)

Object = dict[str, Any]

_POD = {
    "restartPolicy": "Always",
    "terminationGracePeriodSeconds": 30,
    "dnsPolicy": "ClusterFirst",
    "securityContext": {},
    "schedulerName": "default-scheduler",
}
PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
_PROBE = {"timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3}
_SERVICE_NETWORK = ipaddress.ip_network(pod_network.SERVICE_NETWORK)
_FIRST_NODE_PORT, _LAST_NODE_PORT = 30000, 32767
_TOLERATIONS = [
    {"key": f"node.kubernetes.io/{name}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
    for name in ("not-ready", "unreachable")
]  # fmt: skip
_ADMITTED_POD: Object = {
    "serviceAccountName": "default",
    "serviceAccount": "default",
    "priority": 0,
    "preemptionPolicy": "PreemptLowerPriority",
    "tolerations": _TOLERATIONS,
}


def timestamp_after(seconds: float) -> str:
    """Return the time in so many seconds, as objects carry it."""
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def remaining_s(begun_at: str, seconds: float) -> float:
    """Return how much is left of so many seconds that began at a time of an object; 0 if none is."""
    age = datetime.now(UTC) - datetime.fromisoformat(begun_at)
    return max(seconds - age.total_seconds(), 0.0)


def complete(
    resource: resources.ApiResource, item: Object, old: Object | None, objects: store.Store
) -> Object:
    """Return a built-in object with its defaults and allocated values."""
    item = json.loads(json.dumps(item))
    filler = _FILLERS.get(resource.plural)
    if filler is not None:
        filler(item, old, objects)
    return dict(item)


def _fill(target: Object, defaults: Object) -> None:
    for name, value in defaults.items():
        if target.get(name) is None:
            target[name] = json.loads(json.dumps(value))


def _fill_blanks(target: Object, defaults: Object) -> None:
    """Fill in defaults also for what is there as 0 or as an empty text."""
    target |= {name: value for name, value in defaults.items() if not target.get(name)}


def fill_pod_spec(spec: Object) -> None:
    """Fill in the defaults of a pod's or a template's specification."""
    _fill(spec, _POD)
    if spec.get("serviceAccountName"):
        spec["serviceAccount"] = spec["serviceAccountName"]
    for container in [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]:
        _fill_container(container)
    for volume in spec.get("volumes") or ():
        for kind in ("configMap", "secret", "projected", "downwardAPI"):
            if isinstance(volume.get(kind), dict):
                _fill(volume[kind], {"defaultMode": 420})
        if isinstance(volume.get("emptyDir"), dict) and "sizeLimit" in volume["emptyDir"]:
            limit = volume["emptyDir"]["sizeLimit"]
            volume["emptyDir"]["sizeLimit"] = canonical(limit)


def _fill_container(container: Object) -> None:
    tag = container.get("image", "").rpartition("/")[2].partition(":")[2]
    policy = "Always" if tag in ("", "latest") else "IfNotPresent"
    _fill(
        container,
        {
            "resources": {},
            "terminationMessagePath": "/dev/termination-log",
            "terminationMessagePolicy": "File",
            "imagePullPolicy": policy,
        },
    )
    for port in container.get("ports") or ():
        _fill(port, {"protocol": "TCP"})
    for values in container["resources"].values():
        if isinstance(values, dict):
            values.update({name: canonical(value) for name, value in values.items()})
    checks = [container[name] for name in PROBES if container.get(name) is not None]
    for probe in checks:
        _fill_blanks(probe, _PROBE)
    lifecycle = container.get("lifecycle") or {}
    for handler in (*checks, *filter(None, map(lifecycle.get, ("postStart", "preStop")))):
        if handler.get("httpGet") is not None:
            _fill_blanks(handler["httpGet"], {"path": "/", "scheme": "HTTP"})
    for variable in container.get("env") or ():
        reference = (variable.get("valueFrom") or {}).get("fieldRef")
        if reference is not None:
            _fill(reference, {"apiVersion": "v1"})


def _fill_pod(item: Object, old: Object | None, objects: store.Store) -> None:
    spec = item.setdefault("spec", {})
    fill_pod_spec(spec)
    _fill(spec, {"enableServiceLinks": True})
    for container in spec.get("containers") or ():
        limits = container["resources"].get("limits") or {}
        if limits:
            container["resources"]["requests"] = {
                **limits,
                **(container["resources"].get("requests") or {}),
            }
    if old is None:
        item["status"] = {"phase": "Pending", "qosClass": quality_of_service(spec)}
    for condition in (item.get("status") or {}).get("conditions") or ():
        condition.setdefault("lastProbeTime", None)


_PROTECTED = {
    ("", "persistentvolumeclaims"): "kubernetes.io/pvc-protection",
    ("", "persistentvolumes"): "kubernetes.io/pv-protection",
}


def admit(
    resource: resources.ApiResource, item: Object, objects: store.Store, *, is_new: bool
) -> Object:
    """Return an object with what the server itself adds to it, which no client owns."""
    if is_new and resource.key in _PROTECTED:
        meta, name = item["metadata"], _PROTECTED[resource.key]
        finalizers = list(dict.fromkeys([*(meta.get("finalizers") or ()), name]))
        return {**item, "metadata": {**meta, "finalizers": finalizers}}
    if resource.key == ("", "pods"):
        return {**item, "spec": {**_ADMITTED_POD, **item["spec"]}}
    if resource.key == ("", "services"):
        item = json.loads(json.dumps(item))
        _allocate_addresses(item, objects)
    if resource.key == ("batch", "jobs") and not item["spec"].get("manualSelector"):
        item = json.loads(json.dumps(item))
        _select_own_pods(item)
    return item


def quality_of_service(spec: Object) -> str:
    """Return the class of a pod by its requests and limits."""
    findings = [container.get("resources") or {} for container in spec.get("containers") or ()]
    if not any(part.get("limits") or part.get("requests") for part in findings):
        return "BestEffort"
    is_guaranteed = all(
        {"cpu", "memory"} <= set(part.get("limits") or {})
        and part.get("limits") == part.get("requests")
        for part in findings
    )
    return "Guaranteed" if is_guaranteed else "Burstable"


def _fill_template(item: Object) -> Object:
    spec: Object = item.setdefault("spec", {})
    fill_pod_spec(spec.setdefault("template", {}).setdefault("spec", {}))
    return spec


def _fill_deployment(item: Object, old: Object | None, objects: store.Store) -> None:
    spec = _fill_template(item)
    _fill(
        spec,
        {"replicas": 1, "strategy": {}, "revisionHistoryLimit": 10, "progressDeadlineSeconds": 600},
    )
    _fill(spec["strategy"], {"type": "RollingUpdate"})
    if spec["strategy"]["type"] == "RollingUpdate":
        _fill(spec["strategy"], {"rollingUpdate": {}})
        _fill(spec["strategy"]["rollingUpdate"], {"maxUnavailable": "25%", "maxSurge": "25%"})
    _fill(item, {"status": {}})


def _fill_replica_set(item: Object, old: Object | None, objects: store.Store) -> None:
    _fill(_fill_template(item), {"replicas": 1})
    _fill(item, {"status": {"replicas": 0}})


def _fill_stateful_set(item: Object, old: Object | None, objects: store.Store) -> None:
    spec = _fill_template(item)
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"partition": 0}}
    retention = {"whenDeleted": "Retain", "whenScaled": "Retain"}
    _fill(spec, {"replicas": 1, "podManagementPolicy": "OrderedReady", "updateStrategy": strategy,
                 "revisionHistoryLimit": 10, "persistentVolumeClaimRetentionPolicy": retention})  # fmt: skip
    for claim in spec.get("volumeClaimTemplates") or ():
        head = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {}}
        _fill(claim, {**head, "spec": {}})
        _fill(claim["spec"], {"volumeMode": "Filesystem"})
        _fill(claim, {"status": {"phase": "Pending"}})
    _fill(item, {"status": {"replicas": 0, "availableReplicas": 0}})


def _fill_job(item: Object, old: Object | None, objects: store.Store) -> None:
    spec = _fill_template(item)
    _fill(
        spec,
        {
            "parallelism": 1,
            "completions": 1,
            "backoffLimit": 6,
            "completionMode": "NonIndexed",
            "suspend": False,
            "manualSelector": False,
            "podReplacementPolicy": "TerminatingOrFailed",
        },
    )
    _fill(item, {"status": {}})


def _select_own_pods(item: Object) -> None:
    spec = item["spec"]
    uid, name = item["metadata"]["uid"], item["metadata"]["name"]
    labels = {"batch.kubernetes.io/controller-uid": uid, "batch.kubernetes.io/job-name": name,
              "controller-uid": uid, "job-name": name}  # fmt: skip
    spec["template"].setdefault("metadata", {}).setdefault("labels", {}).update(labels)
    _fill(spec, {"selector": {"matchLabels": {"batch.kubernetes.io/controller-uid": uid}}})
    _fill(item["metadata"], {"labels": spec["template"]["metadata"]["labels"]})


EXPOSED = ("NodePort", "LoadBalancer")


def _fill_service(item: Object, old: Object | None, objects: store.Store) -> None:
    spec = item.setdefault("spec", {})
    _fill(
        spec, {"type": "ClusterIP", "sessionAffinity": "None", "internalTrafficPolicy": "Cluster"}
    )
    for port in spec.get("ports") or ():
        _fill(port, {"protocol": "TCP", "targetPort": port.get("port")})
    if spec["type"] in EXPOSED:
        _fill(spec, {"externalTrafficPolicy": "Cluster"})
    if spec["type"] == "LoadBalancer":
        _fill(spec, {"allocateLoadBalancerNodePorts": True})
    _fill(item, {"status": {"loadBalancer": {}}})
    if old is not None and spec["type"] != "ExternalName":
        _fill(spec, {"clusterIP": old["spec"].get("clusterIP")})


def _allocate_addresses(item: Object, objects: store.Store) -> None:
    spec = item["spec"]
    if spec["type"] in EXPOSED:
        used = {
            port.get("nodePort")
            for other in _services(objects)
            for port in other.get("ports") or ()
        }
        for port in spec.get("ports") or ():
            free = (n for n in range(_FIRST_NODE_PORT, _LAST_NODE_PORT + 1) if n not in used)
            _fill(port, {"nodePort": next(free)})
            used.add(port["nodePort"])
    if spec["type"] == "ExternalName":
        return
    _fill(spec, {"clusterIP": _free_cluster_ip(objects)})
    _fill(spec, {"clusterIPs": [spec["clusterIP"]]})
    _fill(spec, {"ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack"})


def _services(objects: store.Store) -> list[Object]:
    return [service["spec"] for service in objects.list_items(("", "services"))]


def _free_cluster_ip(objects: store.Store) -> str:
    used = {spec.get("clusterIP") for spec in _services(objects)}
    while True:
        address = str(_SERVICE_NETWORK[secrets.randbelow(_SERVICE_NETWORK.num_addresses - 2) + 1])
        if address not in used:
            return address


def _fill_secret(item: Object, old: Object | None, objects: store.Store) -> None:
    texts = item.pop("stringData", None) or {}
    encoded = {name: base64.b64encode(text.encode()).decode() for name, text in texts.items()}
    if encoded:
        item["data"] = {**(item.get("data") or {}), **encoded}
    _fill(item, {"type": "Opaque"})


def _fill_namespace(item: Object, old: Object | None, objects: store.Store) -> None:
    name = item["metadata"].get("name", "")
    item["metadata"].setdefault("labels", {})["kubernetes.io/metadata.name"] = name
    _fill(item, {"spec": {"finalizers": ["kubernetes"]}, "status": {"phase": "Active"}})
    if not item["spec"].get("finalizers"):
        item["spec"].pop("finalizers", None)


def _fill_claim(item: Object, old: Object | None, objects: store.Store) -> None:
    spec = item.setdefault("spec", {})
    _fill(spec, {"volumeMode": "Filesystem"})
    requests = (spec.get("resources") or {}).get("requests") or {}
    requests.update({name: canonical(value) for name, value in requests.items()})
    if old is None:
        item["status"] = {"phase": "Pending"}


def _fill_definition(item: Object, old: Object | None, objects: store.Store) -> None:
    spec = item.get("spec") or {}
    _fill(spec, {"conversion": {"strategy": "None"}})
    names = spec.get("names") or {}
    _fill(
        names,
        {"singular": names.get("kind", "").lower(), "listKind": names.get("kind", "") + "List"},
    )
    if old is None:
        stored = [
            version["name"] for version in spec.get("versions") or () if version.get("storage")
        ]
        empty = {"plural": "", "kind": ""}
        item["status"] = {"conditions": None, "acceptedNames": empty, "storedVersions": stored}
    else:
        stored = (item.get("status") or {}).get("storedVersions") or []
        current = [version["name"] for version in spec["versions"] if version.get("storage")]
        if "status" in item:
            item["status"]["storedVersions"] = list(dict.fromkeys([*stored, *current]))


def _fill_node(item: Object, old: Object | None, objects: store.Store) -> None:
    names = ("machineID", "systemUUID", "bootID", "kernelVersion", "osImage", "operatingSystem",
             "containerRuntimeVersion", "kubeletVersion", "kubeProxyVersion", "architecture")  # fmt: skip
    _fill(item, {"spec": {}, "status": {}})
    _fill(item["status"], {"daemonEndpoints": {"kubeletEndpoint": {"Port": 0}}, "nodeInfo": {}})
    _fill(item["status"]["nodeInfo"], dict.fromkeys(names, ""))


def _fill_volume(item: Object, old: Object | None, objects: store.Store) -> None:
    spec = item.setdefault("spec", {})
    _fill(spec, {"volumeMode": "Filesystem"})
    if "hostPath" in spec:
        _fill(spec["hostPath"], {"type": ""})
    if old is None:
        item["status"] = {"phase": "Pending", "lastPhaseTransitionTime": metadata.timestamp()}


def _fill_autoscaler(item: Object, old: Object | None, objects: store.Store) -> None:
    _fill(item.setdefault("spec", {}), {"minReplicas": 1})
    _fill(item, {"status": {"desiredReplicas": 0, "currentMetrics": None}})


def _fill_status(item: Object, old: Object | None, objects: store.Store) -> None:
    _fill(item, {"status": {"loadBalancer": {}}})


def _fill_webhooks(item: Object, old: Object | None, objects: store.Store) -> None:
    webhooks.fill_configuration(item)


WEBHOOKS = ("mutatingwebhookconfigurations", "validatingwebhookconfigurations")
_FILLERS = {
    "pods": _fill_pod, "deployments": _fill_deployment, "replicasets": _fill_replica_set,
    "statefulsets": _fill_stateful_set, "jobs": _fill_job, "services": _fill_service,
    "secrets": _fill_secret, "namespaces": _fill_namespace, "nodes": _fill_node, "persistentvolumes": _fill_volume,
    "persistentvolumeclaims": _fill_claim,
    "customresourcedefinitions": _fill_definition, "horizontalpodautoscalers": _fill_autoscaler,
    "ingresses": _fill_status,
    **dict.fromkeys(WEBHOOKS, _fill_webhooks),
}  # fmt: skip


_NEWER_NAMES = {"note": "message", "regarding": "involvedObject", "deprecatedCount": "count",
                "deprecatedFirstTimestamp": "firstTimestamp", "deprecatedLastTimestamp": "lastTimestamp",
                "deprecatedSource": "source", "reportingController": "reportingComponent"}  # fmt: skip


def older_event(body: Object) -> Object:
    """Return an event of `events.k8s.io` as the core API stores it."""
    item = {_NEWER_NAMES.get(name, name): value for name, value in body.items()}
    return {**item, "apiVersion": "v1", "kind": "Event"}


_EMPTY_EVENT: Object = {
    "source": {},
    "firstTimestamp": None,
    "lastTimestamp": None,
    "eventTime": None,
    "reportingComponent": "",
    "reportingInstance": "",
}


def core_event(item: Object) -> Object:
    """Return a stored event as the core API shows it, with the fields that are always there."""
    return {**_EMPTY_EVENT, **item}


def newer_event(item: Object) -> Object:
    """Return an event of the core API as `events.k8s.io` shows it, where empty names are left out."""
    names = {older: newer for newer, older in _NEWER_NAMES.items()}
    shown = {names.get(name, name): value for name, value in item.items() if value != ""}
    return {**shown, "apiVersion": "events.k8s.io/v1"}


def new_event(about: Object, reason: str, message: str, source: str, kind: str) -> Object:
    """Return an event about an object; `kind` is Normal or Warning."""
    meta, now = about["metadata"], metadata.timestamp()
    involved = {"kind": about["kind"], "apiVersion": about["apiVersion"], "name": meta["name"],
                "namespace": meta.get("namespace", ""), "uid": meta["uid"],
                "resourceVersion": meta.get("resourceVersion", "")}  # fmt: skip
    return {
        "metadata": {"name": f"{meta['name'][:200]}.{secrets.token_hex(8)}"},
        "involvedObject": involved,
        "reason": reason,
        "message": message,
        "source": {"component": source},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
        "type": kind,
        "eventTime": None,
        "reportingComponent": source,
        "reportingInstance": "",
    }


_BINARY_SUFFIXES = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_BINARY = {suffix: Decimal(2 ** (10 * power)) for power, suffix in enumerate(_BINARY_SUFFIXES)}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_FORM = re.compile(r"^([+-]?[0-9.]+)((?:[KMGTPE]i)|[numkMGTPE]|(?:[eE][+-]?[0-9]+))?$")


def parse_quantity(text: Any) -> Decimal:
    """Return a quantity as a number. Raises ValueError for text that is none."""
    match = _FORM.match(str(text))
    if match is None:
        raise ValueError(f"expected a quantity such as 500m or 1Gi, got {text!r}")
    number, suffix = Decimal(match[1]), match[2] or ""
    if suffix in _BINARY:
        return number * _BINARY[suffix]
    exponent = _DECIMAL.get(suffix)
    return number.scaleb(int(suffix[1:]) if exponent is None else exponent)


def canonical(text: Any) -> str:
    """Return a quantity with the largest suffix that keeps it whole; what is no quantity is returned as it is."""
    try:
        value = parse_quantity(text)
    except (ValueError, ArithmeticError):
        return str(text)
    if str(text).endswith("i"):
        for suffix, size in reversed(_BINARY.items()):
            if value and value % size == 0:
                return f"{value // size:f}{suffix}"
    for suffix, exponent in sorted(_DECIMAL.items(), key=lambda entry: -entry[1]):
        scaled = value.scaleb(-exponent)
        if value and scaled == scaled.to_integral_value():
            return f"{scaled.to_integral_value():f}{suffix}"
    return "0"
