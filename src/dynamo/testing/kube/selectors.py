"""Label and field selectors, as lists, watches and workloads use them."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from dynamo.testing.kube import failures, resources

Object = dict[str, Any]
Test = Callable[[Object], bool]

_SET_BASED = re.compile(r"^\s*(\S+)\s+(in|notin)\s*\(([^)]*)\)\s*$")
_BINARY = re.compile(r"^\s*([^\s=!<>]+)\s*(==|=|!=|>|<)\s*([^\s=!<>]*)\s*$")
_OPERATORS = "in, notin, =, ==, !=, gt, lt"
_POD_FIELDS = (
    "spec.nodeName spec.restartPolicy spec.schedulerName spec.serviceAccountName spec.hostNetwork"
    " status.phase status.podIP status.nominatedNodeName"
)
_FIELDS = {  # that may be selected, besides name and namespace
    "pods": _POD_FIELDS,
    "events": "involvedObject.kind involvedObject.namespace involvedObject.name involvedObject.uid"
    " involvedObject.apiVersion involvedObject.resourceVersion involvedObject.fieldPath reason"
    " reportingComponent source type",
    "secrets": "type",
    "nodes": "spec.unschedulable",
    "namespaces": "status.phase",
    "services": "spec.clusterIP spec.type",
    "jobs": "status.successful",
    "replicationcontrollers": "status.replicas",
}
_STRICT_GROUPS = ("apps",)  # their refusal names the fields that are supported


def split(selector: str) -> list[str]:
    """Split a selector at the commas that are not inside brackets."""
    return [part for part in re.split(r",(?![^(]*\))", selector) if part.strip()]


def parse_labels(selector: str) -> Test:
    """Return a test of an object's labels. Raises ApiError for a selector that cannot be read."""
    tests = [_parse_requirement(part) for part in split(selector)]
    return lambda item: all(test(item["metadata"].get("labels") or {}) for test in tests)


def _parse_requirement(text: str) -> Callable[[Mapping[str, str]], bool]:
    if match := _SET_BASED.match(text):
        key, operator, listed = match.groups()
        values = {value.strip() for value in listed.split(",")}
        if operator == "in":
            return lambda labels: labels.get(key) in values
        return lambda labels: labels.get(key) not in values
    if match := _BINARY.match(text):
        key, operator, value = match.groups()
        if operator == "!=":
            return lambda labels: labels.get(key) != value
        if operator in "><":
            sign = 1 if operator == ">" else -1
            return lambda labels: (
                labels.get(key, "").isdigit() and sign * int(labels[key]) > sign * int(value)
            )
        return lambda labels: labels.get(key) == value
    words = text.split()
    if len(words) > 1:
        message = f"unable to parse requirement: found '{words[1]}', expected: {_OPERATORS}"
        raise failures.bad_request(message)
    name = words[0].removeprefix("!")
    if text.strip().startswith("!"):
        return lambda labels: name not in labels
    return lambda labels: name in labels


def matches(selector: Object | None, labels: Mapping[str, str]) -> bool:
    """Return whether labels fulfil the selector of a workload (matchLabels, matchExpressions)."""
    if not selector:
        return False
    for key, value in (selector.get("matchLabels") or {}).items():
        if labels.get(key) != value:
            return False
    for expression in selector.get("matchExpressions") or ():
        key, values = expression["key"], expression.get("values") or ()
        is_met = {
            "In": labels.get(key) in values,
            "NotIn": labels.get(key) not in values,
            "Exists": key in labels,
            "DoesNotExist": key not in labels,
        }[expression["operator"]]
        if not is_met:
            return False
    return True


def format_labels(labels: Mapping[str, str]) -> str:
    """Return a map of labels as the text of a selector."""
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


def parse_fields(selector: str, resource: resources.ApiResource | None = None) -> Test:
    """Return a test of an object's fields. Raises ApiError for a field of `resource` that cannot be selected."""
    requirements = []
    for part in split(selector):
        match = re.match(r"^\s*([^=!\s]+)\s*(==|=|!=)\s*(\S*)\s*$", part)
        if match is None:
            raise failures.bad_request(f"invalid selector: '{part}'; can't understand '{part}'")
        name, operator, value = match.groups()
        if resource is not None:
            _check_field(name, resource)
        requirements.append((name.split("."), operator == "!=", value))

    def test(item: Object) -> bool:
        return all(
            (_field_text(item, path) == value) != is_negated
            for path, is_negated, value in requirements
        )

    return test


def _check_field(name: str, resource: resources.ApiResource) -> None:
    allowed = {"metadata.name"} | ({"metadata.namespace"} if resource.is_namespaced else set())
    allowed |= {path.removeprefix(".") for path in resource.selectable}
    if not resource.is_custom:
        allowed |= set(_FIELDS.get(resource.plural, "").split())
    if name in allowed:
        return
    if resource.group in _STRICT_GROUPS:
        live_item = ", ".join(f'"{field}"' for field in sorted(allowed))
        message = f'"{name}" is not a known field selector: only {live_item}'
    else:
        message = f"field label not supported: {name}"
    raise failures.bad_request(message)


def _field_text(item: Any, path: list[str]) -> str:
    for name in path:
        item = item.get(name) if isinstance(item, dict) else None
    if item is None:
        return "false" if path[-1] in ("unschedulable", "hostNetwork") else ""
    return str(item).lower() if isinstance(item, bool) else str(item)
