"""Request bodies in protobuf, which `kubectl create TYPE` sends; answers are always JSON.

Only the kinds and fields that kubectl's generators set most are known; see `_MESSAGES`.
"""

import base64
from typing import Any

from dynamo.testing.kube import failures

Object = dict[str, Any]
MEDIA_TYPE = "application/vnd.kubernetes.protobuf"
MAGIC = b"k8s\0"

# Message → field number → name and type: s text, b bytes, n number, o one that is left out if 0, t truth value,
# `m…` map, `*…` repeated, else a message; one without a name has fields of the message around it.
_MESSAGES: dict[str, dict[int, tuple[str, str]]] = {
    "Meta": {
        1: ("name", "s"), 2: ("generateName", "s"), 3: ("namespace", "s"),
        11: ("labels", "ms"), 12: ("annotations", "ms"),
    },
    "Namespace": {1: ("metadata", "Meta")},
    "ServiceAccount": {1: ("metadata", "Meta")},
    "ConfigMap": {1: ("metadata", "Meta"), 2: ("data", "ms"), 3: ("binaryData", "mb")},
    "Secret": {1: ("metadata", "Meta"), 2: ("data", "mb"), 3: ("type", "s"), 4: ("stringData", "ms")},
    "Deployment": {1: ("metadata", "Meta"), 2: ("spec", "DeploymentSpec")},
    "DeploymentSpec": {1: ("replicas", "n"), 2: ("selector", "Selector"), 3: ("template", "Template")},
    "Selector": {1: ("matchLabels", "ms"), 2: ("matchExpressions", "*Requirement")},
    "Requirement": {1: ("key", "s"), 2: ("operator", "s"), 3: ("values", "*s")},
    "Template": {1: ("metadata", "Meta"), 2: ("spec", "PodSpec")},
    "PodSpec": {2: ("containers", "*Container"), 3: ("restartPolicy", "s")},
    "Container": {1: ("name", "s"), 2: ("image", "s"), 3: ("command", "*s"), 4: ("args", "*s"), 6: ("ports", "*Port")},
    "Port": {1: ("name", "s"), 3: ("containerPort", "n"), 4: ("protocol", "s")},
    "Job": {1: ("metadata", "Meta"), 2: ("spec", "JobSpec")},
    "JobSpec": {6: ("template", "Template")},
    "CronJob": {1: ("metadata", "Meta"), 2: ("spec", "CronJobSpec")},
    "CronJobSpec": {1: ("schedule", "s"), 3: ("concurrencyPolicy", "s"), 5: ("jobTemplate", "JobTemplate")},
    "JobTemplate": {1: ("metadata", "Meta"), 2: ("spec", "JobSpec")},
    "HorizontalPodAutoscaler": {1: ("metadata", "Meta"), 2: ("spec", "AutoscalerSpec")},
    "AutoscalerSpec": {
        1: ("scaleTargetRef", "Target"), 2: ("minReplicas", "n"), 3: ("maxReplicas", "n"), 4: ("metrics", "*Metric"),
    },
    "Service": {1: ("metadata", "Meta"), 2: ("spec", "ServiceSpec")},
    "ServiceSpec": {
        1: ("ports", "*ServicePort"), 2: ("selector", "ms"), 3: ("clusterIP", "s"), 4: ("type", "s"),
        10: ("externalName", "s"),
    },
    "ServicePort": {1: ("name", "s"), 2: ("protocol", "s"), 3: ("port", "n"), 4: ("targetPort", "IntOrString")},
    "IntOrString": {2: ("n", "n"), 3: ("s", "s")},
    "Ingress": {1: ("metadata", "Meta"), 2: ("spec", "IngressSpec")},
    "IngressSpec": {
        1: ("defaultBackend", "Backend"), 2: ("tls", "*IngressTls"), 3: ("rules", "*IngressRule"),
        4: ("ingressClassName", "s"),
    },
    "IngressTls": {1: ("hosts", "*s"), 2: ("secretName", "s")},
    "IngressRule": {1: ("host", "s"), 2: ("", "IngressRuleValue")},
    "IngressRuleValue": {1: ("http", "IngressPaths")},
    "IngressPaths": {1: ("paths", "*IngressPath")},
    "IngressPath": {1: ("path", "s"), 2: ("backend", "Backend"), 3: ("pathType", "s")},
    "Backend": {4: ("service", "BackendService")},
    "BackendService": {1: ("name", "s"), 2: ("port", "BackendPort")},
    "BackendPort": {1: ("name", "s"), 2: ("number", "o")},
    "ResourceQuota": {1: ("metadata", "Meta"), 2: ("spec", "QuotaSpec")},
    "QuotaSpec": {1: ("hard", "mQuantity"), 2: ("scopes", "*s")},
    "Quantity": {1: ("s", "s")},
    "PodDisruptionBudget": {1: ("metadata", "Meta"), 2: ("spec", "DisruptionSpec")},
    "DisruptionSpec": {
        1: ("minAvailable", "IntOrString"), 2: ("selector", "Selector"), 3: ("maxUnavailable", "IntOrString"),
    },
    "PriorityClass": {
        1: ("metadata", "Meta"), 2: ("value", "n"), 3: ("globalDefault", "t"), 4: ("description", "s"),
        5: ("preemptionPolicy", "s"),
    },
    "Role": {1: ("metadata", "Meta"), 2: ("rules", "*Rule")},
    "ClusterRole": {1: ("metadata", "Meta"), 2: ("rules", "*Rule")},
    "Rule": {
        1: ("verbs", "*s"), 2: ("apiGroups", "*s"), 3: ("resources", "*s"), 4: ("resourceNames", "*s"),
        5: ("nonResourceURLs", "*s"),
    },
    "RoleBinding": {1: ("metadata", "Meta"), 2: ("subjects", "*Subject"), 3: ("roleRef", "RoleRef")},
    "ClusterRoleBinding": {1: ("metadata", "Meta"), 2: ("subjects", "*Subject"), 3: ("roleRef", "RoleRef")},
    "Subject": {1: ("kind", "s"), 2: ("apiGroup", "s"), 3: ("name", "s"), 4: ("namespace", "s")},
    "RoleRef": {1: ("apiGroup", "s"), 2: ("kind", "s"), 3: ("name", "s")},
    "SelfSubjectAccessReview": {2: ("spec", "SelfReview")},
    "SelfReview": {1: ("resourceAttributes", "Attributes")},
    "Attributes": {
        1: ("namespace", "s"), 2: ("verb", "s"), 3: ("group", "s"), 5: ("resource", "s"), 6: ("subresource", "s"),
        7: ("name", "s"),
    },
    "Target": {1: ("kind", "s"), 2: ("name", "s"), 3: ("apiVersion", "s")},
    "Metric": {1: ("type", "s"), 4: ("resource", "ResourceMetric")},
    "ResourceMetric": {1: ("name", "s"), 3: ("target", "MetricTarget")},
    "MetricTarget": {1: ("type", "s"), 4: ("averageUtilization", "n")},
}  # fmt: skip


def decode(body: bytes, api_version: str, kind: str) -> Object:
    """Return the object of a request body. Raises ApiError (415) for kinds that are not known here."""
    if not body.startswith(MAGIC) or kind not in _MESSAGES:
        text = (
            "the body of the request was in an unknown format - accepted media types include: "
            "application/json, application/yaml"
        )
        raise failures.ApiError(415, "UnsupportedMediaType", text)
    try:
        envelope = dict(_fields(body[len(MAGIC) :]))
        item = _decode_message(kind, envelope[2])
    except (IndexError, KeyError, ValueError, TypeError) as error:
        raise failures.bad_request(f"error decoding protobuf: {error}") from error
    return {"apiVersion": api_version, "kind": kind, **item}


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position


def _fields(data: bytes) -> list[tuple[int, Any]]:
    result, position = [], 0
    while position < len(data):
        key, position = _varint(data, position)
        kind = key & 7
        value: Any
        if kind == 0:
            value, position = _varint(data, position)
        elif kind == 2:
            length, position = _varint(data, position)
            value, position = data[position : position + length], position + length
        else:
            size = {1: 8, 5: 4}[kind]
            value, position = data[position : position + size], position + size
        result.append((key >> 3, value))
    return result


def _decode_message(name: str, data: bytes) -> Object:
    item: Object = {}
    for number, value in _fields(data):
        if number not in _MESSAGES[name]:
            continue
        field, kind = _MESSAGES[name][number]
        if kind.startswith("m"):
            entry = dict(_fields(value))
            shown = _decode_value(kind[1:], entry.get(2, b""))
            item.setdefault(field, {})[entry.get(1, b"").decode()] = shown
        elif kind.startswith("*"):
            item.setdefault(field, []).append(_decode_value(kind[1:], value))
        else:
            shown = _decode_value(kind, value)
            if field == "":
                item |= shown
            elif shown != "":
                item[field] = shown
    return item


def _decode_value(kind: str, value: Any) -> Any:
    if kind == "s":
        return value.decode()
    if kind == "b":
        return base64.b64encode(value).decode()
    if kind == "n":
        return value - (value >> 63 << 64)  # negative ones are of 64 bits
    if kind == "o":
        return value or ""
    if kind == "t":
        return bool(value)
    item = _decode_message(kind, value)
    return item.get("s", item.get("n", 0)) if kind in ("IntOrString", "Quantity") else item
