"""The checks of a pod's containers: names, ports, variables, probes, volumes and their mounts, resources.

The messages are those of a real API server (1.36). Defaults of probes are filled in before (`builtin_rules`).
"""

import json
import re
from collections.abc import Iterator, Sequence, Set
from typing import Any

from dynamo.testing.kube import builtin_rules, failures, metadata

Object = dict[str, Any]
_VARIABLE = re.compile(r"[ -<>-~]+")
_VARIABLE_RULE = "a valid environment variable name must consist only of printable ASCII characters other than '='"
_HEADER = re.compile(r"[-A-Za-z0-9]+")
_HEADER_RULE = (
    "a valid HTTP header must consist of alphanumeric characters or '-' (e.g. 'X-Header-Name', regex used for"
    " validation is '[-A-Za-z0-9]+')"
)
_SCHEMES = ("HTTP", "HTTPS")
_NAMED_VOLUMES = {
    "configMap": "name",
    "hostPath": "path",
    "persistentVolumeClaim": "claimName",
    "secret": "secretName",
}
_SOURCES = ("fieldRef", "resourceFieldRef", "configMapKeyRef", "secretKeyRef")
_HANDLERS = ("exec", "httpGet", "tcpSocket", "grpc", "sleep")
_SUBSCRIPTED = ("metadata.annotations", "metadata.labels")
_COMMON_FIELDS = ("metadata.name", "metadata.namespace", "metadata.uid")
# The fields of a pod in the environment and in volumes, and those that a server knows, but has in neither.
_VOLUME_FIELDS = (*_SUBSCRIPTED, *_COMMON_FIELDS)
_VARIABLE_FIELDS = (
    *_COMMON_FIELDS,
    *("spec.nodeName", "spec.serviceAccountName"),
    *("status.hostIP", "status.hostIPs", "status.podIP", "status.podIPs"),
)
_UNUSED_FIELDS = ("spec.restartPolicy", "spec.schedulerName", "status.phase")
_COUNTS = (
    *("initialDelaySeconds", "timeoutSeconds", "periodSeconds"),
    *("successThreshold", "failureThreshold"),
)
_PROTOCOLS, _PULL_POLICIES = ("SCTP", "TCP", "UDP"), ("Always", "IfNotPresent", "Never")
_LAST_PORT, _MAX_PORT_NAME_BYTES = 65_535, 15


def check(spec: Object, path: str, claims: Set[str] = frozenset()) -> Iterator[failures.FieldError]:
    """Yield the mistakes in the containers of a pod's specification at `path`; `claims` are further volumes."""
    if not spec.get("containers"):
        yield failures.required(f"{path}.containers")
    yield from _check_volumes(spec.get("volumes") or (), f"{path}.volumes")
    volumes = claims | {volume.get("name") for volume in spec.get("volumes") or ()}
    regular_names = [container.get("name") for container in spec.get("containers") or ()]
    for field, other_names in (("initContainers", regular_names), ("containers", [])):
        names = {*other_names}
        for n, container in enumerate(spec.get(field) or ()):
            place, name = f"{path}.{field}[{n}]", container.get("name")
            yield from _check_container(container, place, volumes)
            if name and name in names:
                yield failures.duplicate(f"{place}.name", _show(name))
            names.add(name)
            has_probes = field == "containers" or container.get("restartPolicy") == "Always"
            yield from _check_probes(container, place, has_probes=has_probes)
            for kind, handler in (container.get("lifecycle") or {}).items():
                if kind in ("postStart", "preStop"):
                    yield from _check_handlers(handler or {}, f"{place}.lifecycle.{kind}")


def _check_volumes(volumes: Sequence[Object], path: str) -> Iterator[failures.FieldError]:
    names = set()
    for n, volume in enumerate(volumes):
        name, where = volume.get("name"), f"{path}[{n}].name"
        if not name:
            yield failures.required(where)
            continue
        yield from metadata.check_label_name(name, where)
        if name in names:
            yield failures.duplicate(where, _show(name))
        names.add(name)
        yield from _check_content(volume, f"{path}[{n}]")


def _check_content(volume: Object, place: str) -> Iterator[failures.FieldError]:
    for kind, field in _NAMED_VOLUMES.items():
        if volume.get(kind) is not None and not volume[kind].get(field):
            yield failures.required(f"{place}.{kind}.{field}")
    for kind in ("configMap", "secret"):
        for n, entry in enumerate((volume.get(kind) or {}).get("items") or ()):
            where = f"{place}.{kind}.items[{n}]"
            for field in ("key", "path"):
                if not entry.get(field):
                    yield failures.required(f"{where}.{field}")
            yield from _check_descending(entry.get("path") or "", f"{where}.path")
    yield from _check_downward(volume.get("downwardAPI") or {}, f"{place}.downwardAPI")
    for n, source in enumerate((volume.get("projected") or {}).get("sources") or ()):
        where = f"{place}.projected.sources[{n}].downwardAPI"
        yield from _check_downward(source.get("downwardAPI") or {}, where)


def _check_downward(source: Object, place: str) -> Iterator[failures.FieldError]:
    for entry in source.get("items") or ():
        if not entry.get("path"):
            yield failures.required(f"{place}.path")
        yield from _check_descending(entry.get("path") or "", f"{place}.path")
        if reference := entry.get("fieldRef"):
            where = f"{place}.fieldRef.fieldPath"
            yield from _check_field(reference.get("fieldPath") or "", where, _VOLUME_FIELDS)
        elif not entry.get("resourceFieldRef"):
            yield failures.required(place, "one of fieldRef and resourceFieldRef is required")


def _check_field(path: str, field: str, choices: Sequence[str]) -> Iterator[failures.FieldError]:
    """Yield the mistake of a path to a field of the pod that cannot be read there."""
    name, bracket, _ = path.partition("['")
    if not path:
        yield failures.required(field)
    elif bracket and name not in _SUBSCRIPTED:
        text = f"error converting fieldPath: field label does not support subscript: {path}"
        yield failures.invalid_value(field, _show(path), text)
    elif name not in (*_VOLUME_FIELDS, *_VARIABLE_FIELDS, *_UNUSED_FIELDS):
        text = f"error converting fieldPath: field label not supported: {path}"
        yield failures.invalid_value(field, _show(path), text)
    elif not bracket and path not in choices:
        yield failures.unsupported(field, _show(path), ", ".join(map(json.dumps, sorted(choices))))


def _check_descending(target: str, field: str) -> Iterator[failures.FieldError]:
    """Yield the mistakes of a path that may not leave its volume."""
    if target.startswith("/"):
        yield failures.invalid_value(field, _show(target), "must be a relative path")
    if ".." in target.split("/"):
        yield failures.invalid_value(field, _show(target), "must not contain '..'")


def _check_container(
    container: Object, place: str, volumes: Set[str | None]
) -> Iterator[failures.FieldError]:
    if not container.get("name"):
        yield failures.required(f"{place}.name")
    else:
        yield from metadata.check_label_name(container["name"], f"{place}.name")
    yield from _check_resources(container.get("resources") or {}, f"{place}.resources")
    if not container.get("image"):
        yield failures.required(f"{place}.image")
    yield from _check_choice(container, "imagePullPolicy", _PULL_POLICIES, place)
    yield from _check_ports(container.get("ports") or (), f"{place}.ports")
    yield from _check_variables(container, place)
    yield from _check_mounts(container.get("volumeMounts") or (), f"{place}.volumeMounts", volumes)


def _check_variables(container: Object, place: str) -> Iterator[failures.FieldError]:
    for n, variable in enumerate(container.get("env") or ()):
        where = f"{place}.env[{n}].name"
        if not variable.get("name"):
            yield failures.required(where)
        else:
            yield from _check_variable(variable["name"], where)
        if variable.get("valueFrom") is not None:
            yield from _check_source(variable, f"{place}.env[{n}].valueFrom")
    for n, source in enumerate(container.get("envFrom") or ()):
        where = f"{place}.envFrom[{n}]"
        if source.get("prefix"):
            yield from _check_variable(source["prefix"], f"{where}.prefix")
        kinds = [kind for kind in ("configMapRef", "secretRef") if source.get(kind) is not None]
        for kind in kinds:
            if not source[kind].get("name"):
                yield failures.required(f"{where}.{kind}.name")
        if not kinds:
            text = "must specify one of: `configMapRef` or `secretRef`"
            yield failures.invalid_value(f"{place}.envFrom", '""', text)


def _check_source(variable: Object, place: str) -> Iterator[failures.FieldError]:
    """Yield the mistakes of a variable with a value from elsewhere."""
    source = variable["valueFrom"]
    kinds = [kind for kind in _SOURCES if source.get(kind) is not None]
    for kind in kinds:
        reference, where = source[kind], f"{place}.{kind}"
        if kind == "fieldRef":
            path = reference.get("fieldPath") or ""
            yield from _check_field(path, f"{where}.fieldPath", _VARIABLE_FIELDS)
        elif kind == "resourceFieldRef":
            if not reference.get("resource"):
                yield failures.required(f"{where}.resource")
        else:
            yield from metadata.check_subdomain(reference.get("name") or "", f"{where}.name")
            if not reference.get("key"):
                yield failures.required(f"{where}.key")
    text = ""
    if not kinds:
        text = "must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef` or `secretKeyRef`"
    elif variable.get("value"):
        text = "may not be specified when `value` is not empty"
    elif len(kinds) > 1:
        text = "may not have more than one field specified at a time"
    if text:
        yield failures.invalid_value(place, '""', text)


def _check_mounts(
    mounts: Sequence[Object], path: str, volumes: Set[str | None]
) -> Iterator[failures.FieldError]:
    paths = set()
    for n, mount in enumerate(mounts):
        where, target = f"{path}[{n}]", mount.get("mountPath")
        if mount.get("name") not in volumes:
            shown = _show(mount.get("name"))
            yield failures.FieldError("FieldValueNotFound", f"{where}.name", f"Not found: {shown}")
        if not target:
            yield failures.required(f"{where}.mountPath")
        elif target in paths:
            yield failures.invalid_value(f"{where}.mountPath", _show(target), "must be unique")
        paths.add(target)
        yield from _check_descending(mount.get("subPath") or "", f"{path}.subPath")


def _check_choice(
    owner: Object, name: str, choices: Sequence[str], place: str
) -> Iterator[failures.FieldError]:
    """Yield the mistake of a field that has a value which is none of the choices."""
    if owner.get(name) not in (None, *choices):
        listed = ", ".join(map(json.dumps, choices))
        yield failures.unsupported(f"{place}.{name}", _show(owner[name]), listed)


def _check_ports(ports: Sequence[Object], path: str) -> Iterator[failures.FieldError]:
    names = set()
    for n, port in enumerate(ports):
        where, name = f"{path}[{n}]", port.get("name")
        if name:
            mistakes = list(_check_port(name, f"{where}.name"))
            yield from mistakes
            if not mistakes and name in names:
                yield failures.duplicate(f"{where}.name", _show(name))
            names.add(name)
        if not port.get("containerPort"):
            yield failures.required(f"{where}.containerPort")
        else:
            yield from _check_port(port["containerPort"], f"{where}.containerPort")
        yield from _check_choice(port, "protocol", _PROTOCOLS, where)


def _check_variable(name: str, field: str) -> Iterator[failures.FieldError]:
    if not _VARIABLE.fullmatch(name):
        yield failures.invalid_value(field, _show(name), _VARIABLE_RULE)


def _check_resources(amounts: Object, path: str) -> Iterator[failures.FieldError]:
    for field in ("limits", "requests"):
        for name, amount in (amounts.get(field) or {}).items():
            place, shown = f"{path}.{field}[{name}]", json.dumps(amount)
            try:
                is_whole = builtin_rules.parse_quantity(amount) % 1 == 0
            except (ValueError, ArithmeticError):
                yield failures.invalid_value(place, shown, "must be a quantity such as 500m or 1Gi")
                continue
            if "/" in name and not is_whole:
                yield failures.invalid_value(place, shown, "must be an integer")
            if field == "requests":
                yield from _check_request(name, amount, amounts.get("limits") or {}, path)


def _check_request(
    name: str, amount: Any, limits: Object, path: str
) -> Iterator[failures.FieldError]:
    """Yield the mistake of a request beyond its limit; what cannot be shared, such as GPUs, needs an equal one."""
    is_shared = "/" not in name or "kubernetes.io/" in name
    if limits.get(name) is None:
        if not is_shared:
            text = "Limit must be set for non overcommitable resources"
            yield failures.required(f"{path}.limits", text)
        return
    try:
        excess = builtin_rules.parse_quantity(amount) - builtin_rules.parse_quantity(limits[name])
    except (ValueError, ArithmeticError):
        return  # the limit is told of above
    if excess > 0 or (excess and not is_shared):
        relation = "less than or equal" if is_shared else "equal"
        text = f"must be {relation} to {name} limit of {builtin_rules.canonical(limits[name])}"
        shown = json.dumps(builtin_rules.canonical(amount))
        yield failures.invalid_value(f"{path}.requests", shown, text)


def _check_probes(
    container: Object, place: str, *, has_probes: bool
) -> Iterator[failures.FieldError]:
    for name in builtin_rules.PROBES:
        probe, where = container.get(name), f"{place}.{name}"
        if probe is None:
            continue
        if not has_probes:
            text = "may not be set for init containers without restartPolicy=Always"
            yield failures.forbidden_value(where, text)
            continue
        yield from _check_handlers(probe, where)
        for count in _COUNTS:
            if (number := probe.get(count) or 0) < 0:
                text = "must be greater than or equal to 0"
                yield failures.invalid_value(f"{where}.{count}", str(number), text)
        grace_s = probe.get("terminationGracePeriodSeconds")
        if grace_s is not None and grace_s <= 0:
            field = f"{where}.terminationGracePeriodSeconds"
            yield failures.invalid_value(field, str(grace_s), "must be greater than 0")
        if name == "readinessProbe" and grace_s is not None:
            field, text = (
                f"{where}.terminationGracePeriodSeconds",
                "must not be set for readinessProbes",
            )
            yield failures.invalid_value(field, str(grace_s), text)
        successes = probe.get("successThreshold", 1)
        if name != "readinessProbe" and successes != 1:
            yield failures.invalid_value(f"{where}.successThreshold", str(successes), "must be 1")


def _check_handlers(probe: Object, place: str) -> Iterator[failures.FieldError]:
    kinds = [kind for kind in _HANDLERS if probe.get(kind) is not None]
    if not kinds:
        yield failures.required(place, "must specify a handler type")
        return
    kind, *further = kinds
    action, where = probe[kind], f"{place}.{kind}"
    if kind not in ("exec", "sleep"):
        yield from _check_port(action.get("port", 0), f"{where}.port")
    elif kind == "exec" and not action.get("command"):
        yield failures.required(f"{where}.command")
    if kind == "httpGet":
        if (scheme := action.get("scheme", "HTTP")) not in _SCHEMES:
            choices = ", ".join(map(json.dumps, _SCHEMES))
            yield failures.unsupported(f"{where}.scheme", _show(scheme), choices)
        for header in action.get("httpHeaders") or ():
            name = header.get("name", "")
            if not _HEADER.fullmatch(name):
                yield failures.invalid_value(f"{where}.httpHeaders", _show(name), _HEADER_RULE)
    for field in further:
        text = "may not specify more than 1 handler type"
        yield failures.forbidden_value(f"{place}.{field}", text)


def _check_port(port: int | str | None, field: str) -> Iterator[failures.FieldError]:
    """Yield the mistakes of a port's number, or of its name."""
    if not isinstance(port, str):
        if not 0 < (port or 0) <= _LAST_PORT:
            text = f"must be between 1 and {_LAST_PORT}, inclusive"
            yield failures.invalid_value(field, str(port or 0), text)
        return
    rules = {
        f"must be no more than {_MAX_PORT_NAME_BYTES} bytes": len(port) <= _MAX_PORT_NAME_BYTES,
        "must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)": re.fullmatch(
            "[-a-z0-9]+", port
        ),
        "must contain at least one letter (a-z)": re.search("[a-z]", port),
        "must not contain consecutive hyphens": "--" not in port,
        "must not begin or end with a hyphen": port.strip("-") == port,
    }
    for text, is_kept in rules.items():
        if not is_kept:
            yield failures.invalid_value(field, _show(port), text)


def _show(text: str | None) -> str:
    return json.dumps(text, ensure_ascii=False)
