"""The checks of a pod's containers: variables, probes, mounts, resources.

The messages are those of a real API server (1.36). Defaults of probes are filled in before (`builtin_rules`).
"""

import json
import re
from collections.abc import Iterator, Set
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
_HANDLERS = ("exec", "httpGet", "tcpSocket", "grpc")
_COUNTS = (
    *("initialDelaySeconds", "timeoutSeconds", "periodSeconds"),
    *("successThreshold", "failureThreshold"),
)
_LAST_PORT, _MAX_PORT_NAME_BYTES = 65_535, 15


def check(spec: Object, path: str, claims: Set[str] = frozenset()) -> Iterator[failures.FieldError]:
    """Yield the mistakes in the containers of a pod's specification at `path`; `claims` are further volumes."""
    if not spec.get("containers"):
        yield failures.required(f"{path}.containers")
    volumes = claims | {volume.get("name") for volume in spec.get("volumes") or ()}
    for field in ("initContainers", "containers"):
        for n, container in enumerate(spec.get(field) or ()):
            place = f"{path}.{field}[{n}]"
            yield from _check_container(container, place, volumes)
            has_probes = field == "containers" or container.get("restartPolicy") == "Always"
            yield from _check_probes(container, place, has_probes=has_probes)


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
    for n, variable in enumerate(container.get("env") or ()):
        where = f"{place}.env[{n}].name"
        if not variable.get("name"):
            yield failures.required(where)
        else:
            yield from _check_variable(variable["name"], where)
    for n, source in enumerate(container.get("envFrom") or ()):
        if source.get("prefix"):
            yield from _check_variable(source["prefix"], f"{place}.envFrom[{n}].prefix")
    for n, mount in enumerate(container.get("volumeMounts") or ()):
        if mount.get("name") not in volumes:
            where = f"{place}.volumeMounts[{n}].name"
            shown = _show(mount.get("name"))
            yield failures.FieldError("FieldValueNotFound", where, f"Not found: {shown}")


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
    if kind != "exec":
        yield from _check_port(action.get("port", 0), f"{where}.port")
    elif not action.get("command"):
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
    """Yield the mistakes of a port's number, or of the name of one of the container's ports."""
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
