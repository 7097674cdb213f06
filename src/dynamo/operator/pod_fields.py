"""The fields of Kubernetes's PodSpec and Container, one level deep, by the type of their value.

They let the API server refuse a mistyped field of `extraPodSpec`; what is in a field is checked when the operator
applies the Deployment. The complete schema of a pod would make each custom resource definition twenty times as large.
"""

from typing import Any

_OPEN = {"x-kubernetes-preserve-unknown-fields": True}
_SCHEMAS: dict[str, dict[str, Any]] = {
    "text": {"type": "string"},
    "flag": {"type": "boolean"},
    "number": {"type": "integer", "format": "int64"},
    "object": {"type": "object", **_OPEN},
    "objects": {"type": "array", "items": {"type": "object", **_OPEN}},
    "texts": {"type": "array", "items": {"type": "string"}},
}
_CONTAINER = {
    "text": "image imagePullPolicy name restartPolicy terminationMessagePath terminationMessagePolicy workingDir",
    "flag": "stdin stdinOnce tty",
    "object": "lifecycle livenessProbe readinessProbe resources securityContext startupProbe",
    "objects": "env envFrom ports resizePolicy restartPolicyRules volumeDevices volumeMounts",
    "texts": "args command",
}
_POD = {
    "text": "dnsPolicy hostname hostnameOverride nodeName preemptionPolicy priorityClassName restartPolicy"
    " runtimeClassName schedulerName serviceAccount serviceAccountName subdomain",
    "flag": "automountServiceAccountToken enableServiceLinks hostIPC hostNetwork hostPID hostUsers setHostnameAsFQDN"
    " shareProcessNamespace",
    "number": "activeDeadlineSeconds priority terminationGracePeriodSeconds",
    "object": "affinity dnsConfig nodeSelector os overhead resources securityContext",
    "objects": "containers ephemeralContainers hostAliases imagePullSecrets initContainers readinessGates"
    " resourceClaims schedulingGates tolerations topologySpreadConstraints volumes",
}


def _properties(names_by_kind: dict[str, str]) -> dict[str, Any]:
    return {
        name: _SCHEMAS[kind]
        for kind, names in sorted(names_by_kind.items())
        for name in names.split()
    }


CONTAINER_SCHEMA = {"type": "object", "properties": _properties(_CONTAINER)}
EXTRA_POD_SCHEMA = {
    "type": "object",
    "properties": {**_properties(_POD), "mainContainer": CONTAINER_SCHEMA},
}
PROBE_SCHEMA = _SCHEMAS["object"]
