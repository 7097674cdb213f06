"""The metadata of objects: what the server sets, and which names, labels and owners are allowed."""

import json
import re
import secrets
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from dynamo.testing.kube import builtin_schemas, failures, resources

Object = dict[str, Any]

_FIELDS = frozenset(
    (
        *("name", "generateName", "namespace", "uid", "resourceVersion", "generation", "labels"),
        *("creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "annotations"),
        *("ownerReferences", "finalizers", "managedFields", "selfLink"),
    )
)
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = _LABEL + r"(\." + _LABEL + ")*"
_NAME = r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]"
_CHARACTERS = "alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character"
_NAME_RULE = (
    f"must consist of {_CHARACTERS} (e.g. 'MyName',  or 'my.name',  or '123-abc', "
    f"regex used for validation is '{_NAME}')"
)
_KEY_RULE = (
    "a valid label key "
    + _NAME_RULE
    + " with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')"
)
_VALUE_RULE = (
    f"a valid label must be an empty string or consist of {_CHARACTERS} (e.g. "
    "'MyValue',  or 'my_value',  or '12345', regex used for validation is "
    f"'({_NAME})?')"
)
_SUBDOMAIN_RULE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric "
    "characters, '-' or '.', and must start and end with an alphanumeric "
    f"character (e.g. 'example.com', regex used for validation is '{_SUBDOMAIN}')"
)
_LABEL_RULE = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters "
    "or '-', and must start and end with an alphanumeric character (e.g. "
    f"'my-name',  or '123-abc', regex used for validation is '{_LABEL}')"
)
_MAX_GENERATED = 58
_RANDOM = "bcdfghjklmnpqrstvwxz2456789"  # Kubernetes' own: no vowels, so that no words appear
_LABEL_NAMES = frozenset(("services", "namespaces"))


def timestamp() -> str:
    """Return the present time as objects carry it, in whole seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def check_types(body: Object, resource: resources.ApiResource) -> None:
    """Refuse metadata that cannot be decoded. Raises ApiError (400)."""
    metadata = body.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        found = builtin_schemas.go_type(metadata)
        text = f"{found} into Go struct field .metadata of type v1.ObjectMeta"
        raise failures.undecodable(resource, f"json: cannot unmarshal {text}")
    try:
        builtin_schemas.check_metadata(metadata)
    except builtin_schemas.WrongType as error:
        raise failures.undecodable(resource, str(error)) from error


def unknown_fields(body: Object) -> list[str]:
    """Return the paths of metadata fields that do not exist."""
    return [f"metadata.{name}" for name in body.get("metadata") or {} if name not in _FIELDS]


def owner_reference(item: Object) -> Object:
    """Return the reference of a controller to put into what it creates."""
    meta = item["metadata"]
    return {"apiVersion": item["apiVersion"], "kind": item["kind"], "name": meta["name"], "uid": meta["uid"],
            "controller": True, "blockOwnerDeletion": True}  # fmt: skip


def _without_null(value: Any) -> Any:
    """Return labels or annotations with empty texts for null, as a real server decodes it."""
    if not isinstance(value, dict):
        return value
    return {key: "" if child is None else child for key, child in value.items()}


def for_create(body: Object, resource: resources.ApiResource, namespace: str) -> Object:
    """Return the metadata of a new object."""
    given_metadata = body.get("metadata") or {}
    remaining = ("name", "generateName", "labels", "annotations", "ownerReferences", "finalizers")
    metadata = {
        name: _without_null(given_metadata[name])
        for name in remaining
        if given_metadata.get(name) not in (None, {}, [], "")
    }
    if "name" not in metadata and "generateName" in metadata:
        suffix = "".join(secrets.choice(_RANDOM) for _ in range(5))
        metadata["name"] = metadata["generateName"][:_MAX_GENERATED] + suffix
    if resource.is_namespaced:
        metadata["namespace"] = namespace
    metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": timestamp()}
    if resource.has_generation:
        metadata["generation"] = 1
    return metadata


def for_update(body: Object, old: Object) -> Object:
    """Return the metadata of a changed object: what the server keeps, with labels and the like of the new body."""
    given_metadata, before = body.get("metadata") or {}, old["metadata"]
    changeable = ("labels", "annotations", "ownerReferences", "finalizers", "managedFields")
    metadata = {name: value for name, value in before.items() if name not in changeable}
    for name in changeable:
        if given_metadata.get(name):
            metadata[name] = _without_null(given_metadata[name])
    if "managedFields" not in given_metadata and "managedFields" in before:
        metadata["managedFields"] = before["managedFields"]
    return metadata


def check(item: Object, resource: resources.ApiResource) -> Iterator[failures.FieldError]:
    """Yield the mistakes in an object's metadata."""
    metadata = item["metadata"]
    name = metadata.get("name", "")
    if not name:
        yield failures.required("metadata.name", "name or generateName is required")
    else:
        yield from _check_name(name, resource)
    yield from check_labels(metadata.get("labels") or {}, "metadata.labels")
    annotations = metadata.get("annotations") or {}
    for key in annotations:
        if not re.fullmatch(_NAME, key.rpartition("/")[2]):
            yield failures.invalid_value(
                "metadata.annotations", json.dumps(key), f"name part {_NAME_RULE}"
            )
    if sum(len(key) + len(value) for key, value in annotations.items()) > 2**18:
        message = "Too long: may not be more than 262144 bytes"
        yield failures.FieldError("FieldValueTooLong", "metadata.annotations", message)
    yield from _check_owners(metadata.get("ownerReferences") or ())


def _check_name(name: str, resource: resources.ApiResource) -> Iterator[failures.FieldError]:
    if resource.group == "rbac.authorization.k8s.io":
        return
    is_label = resource.plural in _LABEL_NAMES and not resource.group
    pattern, rule, limit = (
        (_LABEL, _LABEL_RULE, 63) if is_label else (_SUBDOMAIN, _SUBDOMAIN_RULE, 253)
    )
    if len(name) > limit:
        yield failures.invalid_value(
            "metadata.name", json.dumps(name), f"must be no more than {limit} bytes"
        )
    if not re.fullmatch(pattern, name):
        yield failures.invalid_value("metadata.name", json.dumps(name), rule)


def check_label_name(name: str, field: str) -> Iterator[failures.FieldError]:
    """Yield the mistake of a name that must be one label of a DNS name, such as a container's."""
    if not re.fullmatch(_LABEL, name):
        yield failures.invalid_value(field, json.dumps(name), _LABEL_RULE)
    elif len(name) > 63:
        yield failures.invalid_value(field, json.dumps(name), "must be no more than 63 bytes")


def check_subdomain(name: str, field: str) -> Iterator[failures.FieldError]:
    """Yield the mistake of a name that must be one of an object, such as a Secret's."""
    if not re.fullmatch(_SUBDOMAIN, name):
        yield failures.invalid_value(field, json.dumps(name), _SUBDOMAIN_RULE)


def check_labels(labels: Object, field: str) -> Iterator[failures.FieldError]:
    """Yield the mistakes in a map of labels."""
    for key, value in labels.items():
        prefix, slash, name = key.rpartition("/")
        if not re.fullmatch(_NAME, name) or "/" in prefix or (slash and not prefix):
            yield failures.invalid_value(field, json.dumps(key), _KEY_RULE)
        elif len(name) > 63:
            text = "name part must be no more than 63 bytes"
            yield failures.invalid_value(field, json.dumps(key), text)
        elif prefix and not re.fullmatch(_SUBDOMAIN, prefix):
            yield failures.invalid_value(field, json.dumps(key), f"prefix part {_SUBDOMAIN_RULE}")
        if not re.fullmatch(f"({_NAME})?", value):
            yield failures.invalid_value(field, json.dumps(value), _VALUE_RULE)
        elif len(value) > 63:
            yield failures.invalid_value(field, json.dumps(value), "must be no more than 63 bytes")


def _check_owners(owners: Any) -> Iterator[failures.FieldError]:
    for owner in owners:
        for name in ("apiVersion", "kind", "name", "uid"):
            if not owner.get(name):
                field = f"metadata.ownerReferences.{name}"
                yield failures.invalid_value(field, '""', "must not be empty")
    controllers = [f"{o['kind']}/{o['name']}" for o in owners if o.get("controller")]
    if len(controllers) > 1:
        shown = json.dumps(owners, separators=(",", ":"))
        text = (
            'Only one reference can have Controller set to true. Found "true" in '
            f"references for {controllers[0]} and {controllers[1]}"
        )
        yield failures.invalid_value("metadata.ownerReferences", shown, text)


def check_new_finalizers(old: Object, item: Object) -> list[failures.FieldError]:
    """Return the error of finalizers that are added to an object which is being deleted."""
    before = old["metadata"].get("finalizers") or ()
    added = [name for name in item["metadata"].get("finalizers") or () if name not in before]
    if not added:
        return []
    listed = ", ".join(json.dumps(name) for name in added)
    text = f"no new finalizers can be added if the object is being deleted, found new finalizers []string{{{listed}}}"
    return [failures.forbidden_value("metadata.finalizers", text)]


def check_name(given_metadata: Object, name: str) -> None:
    """Refuse a body with another name than the path has. Raises ApiError (400)."""
    shown = given_metadata.get("name", name)
    if shown != name:
        text = f"the name of the object ({shown}) does not match the name on the URL ({name})"
        raise failures.bad_request(text)
