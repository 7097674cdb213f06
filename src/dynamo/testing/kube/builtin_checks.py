"""The checks of built-in objects that users meet; a real API server has more."""

import ipaddress
import json
import os
import re
from collections.abc import Iterator
from typing import Any

from dynamo.testing.kube import (
    builtin_rules,
    container_checks,
    failures,
    metadata,
    pod_volumes,
    resources,
    rules,
    selectors,
    webhooks,
)

Object = dict[str, Any]
_MAX_DATA_BYTES = 2**20
_WITHOUT_EFFECT = ("activeDeadlineSeconds", "affinity", "dnsConfig", "hostAliases", "hostIPC", "hostNetwork", "hostPID",
                   "nodeSelector", "priorityClassName", "runtimeClassName", "shareProcessNamespace",
                   "topologySpreadConstraints")  # fmt: skip
_WITHOUT_CONTROLLER = ("cronjobs", "daemonsets")
_NOT_ENFORCED = ("limitranges", "networkpolicies", "poddisruptionbudgets", "resourcequotas")
_DEADLINE_S = 600  # of a deployment's progress, the default
_LAST_PORT = 65_535
_FIXED_POD = (
    "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,"
    "`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),"
    "`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"
)
_FIXED_STATEFUL_SET = (
    "updates to statefulset spec for fields other than 'replicas', 'ordinals', 'template', 'updateStrategy',"
    " 'revisionHistoryLimit', 'persistentVolumeClaimRetentionPolicy' and 'minReadySeconds' are forbidden"
)
_CHANGEABLE_OF_STATEFUL_SET = re.findall(r"'(\w+)'", _FIXED_STATEFUL_SET)
_ACCESS_MODES = ("ReadOnlyMany", "ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod")
_DATA_KEY = re.compile(r"[-._a-zA-Z0-9]+")
_DATA_KEY_RULE = (
    "a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or 'KEY_NAME',"
    "  or 'key-name', regex used for validation is '[-._a-zA-Z0-9]+')"
)
_PERCENT_RULE = (
    "a valid percent string must be a numeric string followed by an ending '%' (e.g. '1%',  or '93%', regex used for"
    " validation is '[0-9]+%')"
)
_TARGET_TYPES = ("Utilization", "Value", "AverageValue")
_MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6,9}(Z|[+-]\d\d:\d\d)")


def check(
    resource: resources.ApiResource, item: Object, old: Object | None
) -> Iterator[failures.FieldError]:
    """Yield the mistakes of a built-in object that are checked here; not all that a real server checks."""
    spec = item.get("spec") or {}
    if (resource.group == "apps" and "spec" in item) or resource.plural == "jobs":
        yield from _check_workload(spec, (old or {}).get("spec"), resource.plural)
    if resource.plural == "pods":
        yield from _check_pod(item, old)
    if resource.plural == "customresourcedefinitions":
        yield from rules.check_definition(item)
        yield from webhooks.check_conversion(spec)
    if resource.plural in builtin_rules.WEBHOOKS:
        yield from webhooks.check_configuration(item)
    if resource.plural == "services":
        yield from _check_service(spec, (old or {}).get("spec"))
    if resource.plural in _SPEC_CHECKS:
        yield from _SPEC_CHECKS[resource.plural](spec)
    if resource.plural in ("rolebindings", "clusterrolebindings") and old is not None:
        yield from _check_role_reference(item, old)
    if resource.plural in ("configmaps", "secrets"):
        yield from _check_data(item, old)
    if resource.plural == "events" and resource.group in ("", "events.k8s.io"):
        yield from _check_event(item, is_new_form=bool(resource.group), is_created=old is None)


def notices(resource: resources.ApiResource, item: Object) -> Iterator[str]:
    """Yield what an object asks for that this cluster does not do, unlike a real one."""
    spec = item.get("spec") or {}
    if resource.plural in _WITHOUT_CONTROLLER:
        yield "spec: no pods are made of it on this cluster"
    if resource.plural in _NOT_ENFORCED:
        yield "spec: is not enforced on this cluster"
    if resource.key == ("", "services") and spec.get("type") in builtin_rules.EXPOSED:
        yield "spec.type: no port of the node is opened on this cluster: use kubectl port-forward"
    if spec.get("progressDeadlineSeconds", _DEADLINE_S) != _DEADLINE_S:
        yield "spec.progressDeadlineSeconds: has no effect on this cluster"
    if any(taint.get("effect") == "NoExecute" for taint in spec.get("taints") or ()):
        yield "spec.taints: NoExecute ends no pod that runs on this cluster; it only keeps others away"
    if resource.plural == "pods":
        yield from _pod_notices(spec, "spec")
    elif resource.group == "apps" or resource.plural == "jobs":
        template = (spec.get("template") or {}).get("spec") or {}
        yield from _pod_notices(template, "spec.template.spec")


def _pod_notices(spec: Object, path: str) -> Iterator[str]:
    for name in _WITHOUT_EFFECT:
        if spec.get(name):
            yield f"{path}.{name}: has no effect on this cluster"
    contexts = {path: spec} | {
        f"{path}.{field}[{n}]": container
        for field in ("initContainers", "containers")
        for n, container in enumerate(spec.get(field) or ())
    }
    for place, item in contexts.items():
        context = item.get("securityContext") or {}
        for name in ("privileged", "readOnlyRootFilesystem", "runAsUser", "runAsGroup"):
            if context.get(name) not in (None, False, os.geteuid()):
                yield f"{place}.securityContext.{name}: has no effect on this cluster"
    yield from pod_volumes.notices(spec, path)


def _check_pod(item: Object, old: Object | None) -> Iterator[failures.FieldError]:
    spec = item.get("spec") or {}
    yield from container_checks.check(spec, "spec")
    yield from _check_addresses(item.get("status") or {})
    if old is not None and _fixed_part(spec) != _fixed_part(old["spec"]):
        yield failures.forbidden_value("spec", _FIXED_POD)


def _fixed_part(spec: Object) -> Object:
    """Return what may not change of the spec of a pod."""
    changeable = ("activeDeadlineSeconds", "tolerations", "terminationGracePeriodSeconds")
    fixed = {name: value for name, value in spec.items() if name not in changeable}
    for field in {"containers", "initContainers"} & fixed.keys():
        fixed[field] = [
            {name: value for name, value in container.items() if name != "image"}
            for container in fixed[field]
        ]
    return fixed


def _check_addresses(status: Object) -> Iterator[failures.FieldError]:
    """Yield what is wrong with the addresses of a pod: one for each family, of which `podIP` is the first."""
    addresses = [entry.get("ip", "") for entry in status.get("podIPs") or ()]
    first = status.get("podIP")
    if first and addresses[:1] != [first]:
        addresses = [first]
    for n, address in enumerate(addresses):
        try:
            ipaddress.ip_address(address)
        except ValueError:
            text = "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)"
            yield failures.invalid_value(f"status.podIPs[{n}]", json.dumps(address), text)
            return
    families = [ipaddress.ip_address(address).version for address in addresses]
    if len(set(families)) < len(families):
        shown = json.dumps([{"IP": address} for address in addresses], separators=(",", ":"))
        text = "may specify no more than one IP for each IP family"
        yield failures.invalid_value("status.podIPs", shown, text)


def _check_ingress(spec: Object) -> Iterator[failures.FieldError]:
    for n, rule in enumerate(spec.get("rules") or ()):
        if host := (rule.get("host") or "").removeprefix("*."):
            yield from metadata.check_subdomain(host, f"spec.rules[{n}].host")
        for m, path in enumerate((rule.get("http") or {}).get("paths") or ()):
            if not path.get("pathType"):
                field = f"spec.rules[{n}].http.paths[{m}].pathType"
                yield failures.required(field, "pathType must be specified")


def _check_lease(spec: Object) -> Iterator[failures.FieldError]:
    duration = spec.get("leaseDurationSeconds")
    if duration is not None and duration <= 0:
        text = "must be greater than 0"
        yield failures.invalid_value("spec.leaseDurationSeconds", str(duration), text)
    for name in ("acquireTime", "renewTime"):
        moment = spec.get(name)
        if moment is not None and not _MICRO_TIME.fullmatch(str(moment)):
            text = f'cannot parse "{moment}" as "2006-01-02T15:04:05.000000Z07:00"'
            yield failures.invalid_value(f"spec.{name}", json.dumps(moment), text)


def _check_event(
    item: Object, *, is_new_form: bool, is_created: bool
) -> Iterator[failures.FieldError]:
    about, namespace = item.get("involvedObject") or {}, item["metadata"].get("namespace", "")
    if about.get("namespace", "") not in (namespace, "" if namespace == "default" else namespace):
        text = "does not match event.namespace"
        where = "involvedObject.namespace"
        yield failures.invalid_value(where, json.dumps(about.get("namespace", "")), text)
    if is_new_form and is_created:
        if not item.get("eventTime"):
            yield failures.required("eventTime")
        if item.get("type", "") not in ("Normal", "Warning"):
            shown = item.get("type", "")
            yield failures.invalid_value("type", json.dumps(shown), f"has invalid value: {shown}")


def _check_workload(spec: Object, old: Object | None, plural: str) -> Iterator[failures.FieldError]:
    template, selector = spec.get("template") or {}, spec.get("selector")
    labels = (template.get("metadata") or {}).get("labels")
    if not selector:
        yield failures.required("spec.selector")
    if not (labels and selectors.matches(selector, labels)):
        shown = json.dumps(labels, separators=(",", ":"))
        text = "`selector` does not match template `labels`"
        yield failures.invalid_value("spec.template.metadata.labels", shown, text)
    yield from metadata.check_labels(labels or {}, "spec.template.labels")
    if old is not None and plural == "statefulsets":
        before, after = (
            {name: part for name, part in each.items() if name not in _CHANGEABLE_OF_STATEFUL_SET}
            for each in (old, spec)
        )
        if _without_empty(before) != _without_empty(after):
            yield failures.forbidden_value("spec", _FIXED_STATEFUL_SET)
    elif old is not None and old.get("selector") != selector:
        yield _immutable("spec.selector", selector)
    replicas = spec.get("replicas", 0)
    if replicas < 0:
        text = "must be greater than or equal to 0"
        yield failures.invalid_value("spec.replicas", str(replicas), text)
    yield from _check_rolling((spec.get("strategy") or {}).get("rollingUpdate") or {})
    claims = {claim["metadata"].get("name") for claim in spec.get("volumeClaimTemplates") or ()}
    yield from container_checks.check(template.get("spec") or {}, "spec.template.spec", claims)
    policy = (template.get("spec") or {}).get("restartPolicy")
    if plural == "jobs":
        yield from _check_job(spec, old, policy)
    elif policy not in (None, "Always"):
        field, shown = "spec.template.spec.restartPolicy", json.dumps(policy)
        yield failures.unsupported(field, shown, '"Always"')


def _check_rolling(rolling: Object) -> Iterator[failures.FieldError]:
    """Yield the mistakes in how many pods may be too many, and too few, while a deployment rolls."""
    for name, value in rolling.items():
        field = f"spec.strategy.rollingUpdate.{name}"
        if isinstance(value, str) and not re.fullmatch(r"\d+%", value):
            yield failures.invalid_value(field, json.dumps(value), _PERCENT_RULE)
        elif not isinstance(value, str) and value < 0:
            yield failures.invalid_value(field, str(value), "must be greater than or equal to 0")
    if {str(value).rstrip("%") for value in rolling.values()} == {"0"} and len(rolling) == 2:
        text = "may not be 0 when `maxSurge` is 0"
        field = "spec.strategy.rollingUpdate.maxUnavailable"
        yield failures.invalid_value(field, json.dumps(rolling["maxUnavailable"]), text)


def _check_job(
    spec: Object, old: Object | None, policy: str | None
) -> Iterator[failures.FieldError]:
    if policy not in ("OnFailure", "Never"):
        text = 'valid values: "OnFailure", "Never"'
        yield failures.required("spec.template.spec.restartPolicy", text)
    if old is None or old.get("suspend"):  # of one that is suspended some of it may change
        return
    template = spec.get("template")
    if _without_empty(old.get("template")) != _without_empty(template):
        yield _immutable("spec.template", template)
    if spec.get("completionMode") != "Indexed" and old.get("completions") != spec.get(
        "completions"
    ):
        yield _immutable("spec.completions", spec.get("completions"))


def _immutable(field: str, value: Any) -> failures.FieldError:
    shown = json.dumps(value, separators=(",", ":"))
    return failures.invalid_value(field, shown, "field is immutable")


def _without_empty(value: Any) -> Any:
    """Return a value without what is null, false, 0 or empty, which may well mean the same as absent."""
    if isinstance(value, list):
        return [_without_empty(item) for item in value]
    if not isinstance(value, dict):
        return value
    children = {name: _without_empty(child) for name, child in value.items()}
    return {name: child for name, child in children.items() if child}


def _check_claim(spec: Object) -> Iterator[failures.FieldError]:
    if not spec.get("accessModes"):
        yield failures.required("spec.accessModes", "at least 1 access mode is required")
    for mode in spec.get("accessModes") or ():
        if mode not in _ACCESS_MODES:
            choices = ", ".join(map(json.dumps, _ACCESS_MODES))
            yield failures.unsupported("spec.accessModes", json.dumps(mode), choices)
    if not ((spec.get("resources") or {}).get("requests") or {}).get("storage"):
        yield failures.required("spec.resources[storage]")


def _check_autoscaler(spec: Object) -> Iterator[failures.FieldError]:
    least, most = spec["minReplicas"], spec.get("maxReplicas") or 0
    if least < 1:
        text = "must be greater than or equal to 1"
        yield failures.invalid_value("spec.minReplicas", str(least), text)
    if most < 1:
        yield failures.invalid_value("spec.maxReplicas", str(most), "must be greater than 0")
    if most < least:
        text = "must be greater than or equal to `minReplicas`"
        yield failures.invalid_value("spec.maxReplicas", str(most), text)
    for name in ("kind", "name"):
        if not (spec.get("scaleTargetRef") or {}).get(name):
            yield failures.required(f"spec.scaleTargetRef.{name}")
    for n, metric in enumerate(spec.get("metrics") or ()):
        yield from _check_metric(metric, f"spec.metrics[{n}]")


def _check_metric(metric: Object, path: str) -> Iterator[failures.FieldError]:
    """Yield the mistakes of what an autoscaler is to follow; of the kinds of metrics only resources are checked."""
    if not metric.get("type"):
        yield failures.required(f"{path}.type", "must specify a metric source type")
    if metric.get("type") != "Resource":
        return
    source, place = metric.get("resource"), f"{path}.resource"
    if source is None:
        yield failures.required(place, "must populate information for the given metric source")
        return
    target = source.get("target") or {}
    if not source.get("name"):
        yield failures.required(f"{place}.name", "must specify a resource name")
    if not target.get("type"):
        yield failures.required(f"{place}.target.type", "must specify a metric target type")
    if target.get("type") not in _TARGET_TYPES:
        text, shown = "must be either Utilization, Value, or AverageValue", target.get("type", "")
        yield failures.invalid_value(f"{place}.target.type", json.dumps(shown), text)
    if "averageUtilization" not in target and "averageValue" not in target:
        text = "must set either a target raw value or a target utilization"
        yield failures.required(f"{place}.target.averageUtilization", text)


def _check_role_reference(item: Object, old: Object) -> Iterator[failures.FieldError]:
    before, after = (
        {name: (each.get("roleRef") or {}).get(name) for name in ("kind", "name")}
        for each in (old, item)
    )
    if before != after:
        shown = json.dumps(item.get("roleRef"), separators=(",", ":"))
        yield failures.invalid_value("roleRef", shown, "cannot change roleRef")


def _check_service(spec: Object, old: Object | None) -> Iterator[failures.FieldError]:
    ports = spec.get("ports") or ()
    for n, port in enumerate(ports):
        if len(ports) > 1 and not port.get("name"):
            yield failures.required(f"spec.ports[{n}].name")
        if not 0 < (number := port.get("port") or 0) <= _LAST_PORT:
            text = f"must be between 1 and {_LAST_PORT}, inclusive"
            yield failures.invalid_value(f"spec.ports[{n}].port", str(number), text)
    if not ports and spec.get("clusterIP") != "None" and spec["type"] != "ExternalName":
        yield failures.required("spec.ports")
    before = (old or {}).get("clusterIP")
    if before and spec.get("clusterIP") != before and spec["type"] != "ExternalName":
        shown = json.dumps([spec.get("clusterIP")])
        yield failures.invalid_value("spec.clusterIPs[0]", shown, "may not change once set")


def _check_data(item: Object, old: Object | None) -> Iterator[failures.FieldError]:
    yield from _check_keys(item)
    size = sum(len(name) + len(value) for name, value in (item.get("data") or {}).items())
    if size > _MAX_DATA_BYTES:
        message = f"Too long: may not be more than {_MAX_DATA_BYTES} bytes"
        yield failures.FieldError("FieldValueTooLong", "[]", message)
    if old is not None and item.get("type") != old.get("type"):
        yield failures.invalid_value("type", json.dumps(item.get("type")), "field is immutable")
    if item.get("type") == "kubernetes.io/tls":
        for name in ("tls.crt", "tls.key"):
            if name not in (item.get("data") or {}):
                yield failures.required(f"data[{name}]")
    if old is not None and old.get("immutable"):
        text = "field is immutable when `immutable` is set"
        if not item.get("immutable"):
            yield failures.forbidden_value("immutable", text)
        if item.get("data") != old.get("data"):
            yield failures.forbidden_value("data", text)


def _check_keys(item: Object) -> Iterator[failures.FieldError]:
    for field in ("data", "binaryData"):
        for name in item.get(field) or ():
            if not _DATA_KEY.fullmatch(name):
                where = f"{field}[{name}]"
                yield failures.invalid_value(where, json.dumps(name), _DATA_KEY_RULE)


_SPEC_CHECKS = {
    "persistentvolumeclaims": _check_claim, "horizontalpodautoscalers": _check_autoscaler,
    "ingresses": _check_ingress, "leases": _check_lease,
}  # fmt: skip
