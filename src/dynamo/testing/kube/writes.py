"""Reading, creating and replacing objects, with the steps that every write takes.

They are: decode, restrict to the subresource, prune, fill in defaults, admit, validate, record the owners of fields,
store. A write that changes nothing is not stored.
"""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from dynamo.testing.kube import (
    builtin_rules,
    failures,
    managed_fields,
    metadata,
    resources,
    rights,
    schema,
    selectors,
    store,
)

Object = dict[str, Any]
_MAX_OBJECT_BYTES = 3 * 2**19


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """The query parameters of a write; `warnings` collects what the client is to be told."""

    manager: str = "unknown"
    user: "rights.User | None" = None  # None: a controller, which may do everything
    is_dry_run: bool = False
    is_forced: bool = False
    field_validation: str = "Warn"
    subresource: str = ""
    is_apply: bool = False
    warnings: list[str] = field(default_factory=list)


PLAIN = WriteOptions(field_validation="Ignore")  # of controllers, which take no warnings


Admit = Callable[
    ["resources.ApiResource", str, Object | None, Object | None, WriteOptions],
    Awaitable[Object | None],
]  # resource, operation, object, old object → object


class ObjectWrites:
    """Reads, creates and replaces the objects of one cluster; `api.Api` adds patches and deletions."""

    def __init__(self, registry: "resources.ResourceRegistry", objects: "store.Store") -> None:
        self.registry = registry
        self.store = objects
        self.admit: Admit | None = None  # the checks of admission

    # Reading.

    def get(self, resource: "resources.ApiResource", namespace: str, name: str) -> Object:
        """Return an object in this version. Raises ApiError (404)."""
        item = self.store.get(resource.key, (namespace, name))
        if item is None:
            raise failures.not_found(resource, name)
        return self.present(resource, item)

    def find(self, api_version: str, kind: str, namespace: str, name: str) -> Object | None:
        """Return an object by its kind, or None; for controllers."""
        resource = self.registry.find_kind(api_version, kind)
        return self.store.get(resource.key, (namespace, name)) if resource else None

    def present(self, resource: "resources.ApiResource", item: Object) -> Object:
        """Return a stored object as this version shows it, with defaults that came later."""
        if not resource.is_custom:
            if resource.group == "events.k8s.io":
                return builtin_rules.newer_event(item)
            return item
        shown = schema.fill_defaults({**item, "apiVersion": resource.api_version}, resource.schema)
        return dict(sorted(shown.items()))

    def list_items(
        self,
        resource: "resources.ApiResource",
        namespace: str = "",
        *,
        labels: str = "",
        fields: str = "",
    ) -> list[Object]:
        """Return the present objects that two selectors choose."""
        test = self.make_test(resource, labels, fields)
        items = self.store.list_items(resource.key, namespace)
        return [self.present(resource, item) for item in items if test(item)]

    def make_test(
        self, resource: "resources.ApiResource", labels: str, fields: str
    ) -> "selectors.Test":
        """Return the test of two selectors. Raises ApiError (400)."""
        label_test = selectors.parse_labels(labels)
        field_test = selectors.parse_fields(fields, resource)
        return lambda item: label_test(item) and field_test(item)

    # Writing.

    async def create(
        self,
        resource: "resources.ApiResource",
        namespace: str,
        body: Object,
        options: WriteOptions = PLAIN,
    ) -> Object:
        """Store a new object. Raises ApiError."""
        body = self._decode(resource, body)
        self.check_create(resource, namespace, body, is_dry_run=options.is_dry_run)
        body = self.prune(resource, body, options)
        meta = metadata.for_create(body, resource, namespace)
        item = {**body, "metadata": meta}
        if resource.has_status:
            item.pop("status", None)
        item = self._shape(resource, None, item, options)
        item = await self._admit(resource, "CREATE", item, None, options)
        self._validate(resource, None, item)
        name = (meta.get("namespace", ""), meta.get("name", ""))
        if self.store.get(resource.key, name) is not None:
            raise failures.already_exists(resource, name[1])
        item = self._own(resource, None, item, options)
        return self._store(resource, item, options)

    async def update(
        self,
        resource: "resources.ApiResource",
        namespace: str,
        name: str,
        body: Object,
        options: WriteOptions = PLAIN,
    ) -> Object:
        """Replace an object. Raises ApiError."""
        body = self._decode(resource, body)
        given_metadata = body.get("metadata") or {}
        check_name(given_metadata, name)
        self.check_namespace(resource, namespace, given_metadata)
        old = self.get(resource, namespace, name)
        version = given_metadata.get("resourceVersion")
        if resource.is_custom and not version:
            text = "must be specified for an update"
            error = failures.invalid_value("metadata.resourceVersion", "0", text)
            raise failures.invalid(resource.qualified_kind, name, [error])
        self.check_version(resource, old, version, given_metadata.get("uid"))
        return await self.replace_stored(resource, old, body, options)

    async def replace_stored(
        self, resource: "resources.ApiResource", old: Object, body: Object, options: WriteOptions
    ) -> Object:
        """Store the new state of an object: the part that the subresource may change."""
        item = self._restrict(resource, old, body, options)
        item = self._shape(resource, old, item, options)
        item = await self._admit(resource, "UPDATE", item, old, options)
        current = self.store.get(resource.key, _name(old))
        if (
            current is None
            or current["metadata"]["resourceVersion"] != old["metadata"]["resourceVersion"]
        ):
            raise failures.conflict(resource, old["metadata"]["name"])
        self._validate(resource, old, item)
        if not options.is_apply:
            item = self._own(resource, old, item, options)
        item = self._count_generation(resource, old, item)
        if self._is_same(item, old):
            return old
        return self._store(resource, item, options, old)

    def _restrict(
        self, resource: "resources.ApiResource", old: Object, body: Object, options: WriteOptions
    ) -> Object:
        entries = (body.get("metadata") or {}).get("managedFields")
        if options.subresource == "status":
            item = {key: value for key, value in old.items() if key != "status"}
            if "status" in body:
                item["status"] = body["status"]
            meta = dict(old["metadata"])
            if entries is not None:
                meta["managedFields"] = entries
            return {**item, "metadata": meta}
        item = {**body, "apiVersion": old["apiVersion"], "kind": old["kind"]}
        if resource.has_status:
            item.pop("status", None)
            if "status" in old:
                item["status"] = old["status"]
        return {**item, "metadata": metadata.for_update(body, old)}

    def _decode(self, resource: "resources.ApiResource", body: Object) -> Object:
        kind, version = body.get("kind"), body.get("apiVersion")
        if not resource.is_custom:
            kind, version = kind or resource.kind, version or resource.api_version
            if kind != resource.kind:
                text = (
                    f'{kind} in version "{resource.version}" cannot be handled as a {resource.kind}: '
                    f"converting (v1.{kind}) to (core.{resource.kind}): unknown conversion"
                )
                raise failures.bad_request(text)
        if version != resource.api_version:
            text = (
                f"the API version in the data ({version or ''}) does not match the expected "
                f"API version ({resource.api_version})"
            )
            raise failures.bad_request(text)
        if kind != resource.kind:
            error = failures.invalid_value("kind", json.dumps(kind), f"must be {resource.kind}")
            name = (body.get("metadata") or {}).get("name", "")
            qualified = f"{kind}.{resource.group}" if resource.group else str(kind)
            raise failures.invalid(qualified, name, [error])
        metadata.check_types(body, resource)
        if resource.group == "events.k8s.io":
            return builtin_rules.older_event(body)
        return {**body, "kind": kind, "apiVersion": version}

    def check_create(
        self, resource: "resources.ApiResource", namespace: str, body: Object, *, is_dry_run: bool
    ) -> None:
        """Refuse an object that may not be created here. Raises ApiError."""
        given_metadata = body.get("metadata") or {}
        self.check_namespace(resource, namespace, given_metadata)
        if given_metadata.get("resourceVersion") and not is_dry_run:
            text = "resourceVersion should not be set on objects to be created"
            raise failures.ApiError(500, "", text)
        if not resource.is_namespaced:
            return
        home = self.store.get(("", "namespaces"), ("", namespace))
        if home is None:
            details = {"name": namespace, "kind": "namespaces"}
            raise failures.ApiError(404, "NotFound", f'namespaces "{namespace}" not found', details)
        if home["metadata"].get("deletionTimestamp"):
            text = f"unable to create new content in namespace {namespace} because it is being terminated"
            refusal = failures.forbidden(resource, given_metadata.get("name", ""), text)
            refusal.body["details"]["causes"] = [
                {
                    "reason": "NamespaceTerminating",
                    "message": f"namespace {namespace} is being terminated",
                    "field": "metadata.namespace",
                }
            ]
            raise refusal

    def check_namespace(
        self, resource: "resources.ApiResource", namespace: str, given_metadata: Object
    ) -> None:
        """Refuse a body whose namespace is not that of the path. Raises ApiError (400)."""
        if resource.is_namespaced and given_metadata.get("namespace") not in (None, "", namespace):
            text = "the namespace of the provided object does not match the namespace sent on the request"
            raise failures.bad_request(text)

    def check_version(
        self, resource: "resources.ApiResource", old: Object, version: str | None, uid: str | None
    ) -> None:
        """Refuse a write that is based on another version or object. Raises ApiError."""
        if version and not str(version).isdigit():
            text = f'strconv.ParseUint: parsing "{version}": invalid syntax'
            error = failures.invalid_value("metadata.resourceVersion", json.dumps(version), text)
            raise failures.ApiError(500, "", f"{error.field}: {error.message}")
        if version and version != old["metadata"]["resourceVersion"]:
            raise failures.conflict(resource, old["metadata"]["name"])
        if uid and uid != old["metadata"]["uid"]:
            text = f"Precondition failed: UID in precondition: {uid}, UID in object meta: {old['metadata']['uid']}"
            raise failures.conflict(resource, old["metadata"]["name"], text)

    def prune(
        self, resource: "resources.ApiResource", item: Object, options: WriteOptions
    ) -> Object:
        """Return an object without unknown fields, and warn of them or refuse them. Raises ApiError."""
        unknown = metadata.unknown_fields(item)
        if resource.is_custom:
            item, findings = schema.prune(item, resource.schema, is_root=True)
            unknown += findings
        if unknown and options.field_validation == "Strict":
            listed = ", ".join(f'unknown field "{path}"' for path in unknown)
            text = (
                f'{resource.kind} in version "{resource.version}" cannot be handled as '
                f"a {resource.kind}: strict decoding error: {listed}"
            )
            raise failures.bad_request(text)
        if unknown and options.field_validation == "Warn":
            options.warnings.extend(f'unknown field "{path}"' for path in unknown)
        return item

    def _shape(
        self,
        resource: "resources.ApiResource",
        old: Object | None,
        item: Object,
        options: WriteOptions,
    ) -> Object:
        """Return the object without unknown fields and with defaults, in the storage version."""
        item = self.prune(resource, item, options)
        if resource.is_custom:
            item = schema.fill_defaults(item, resource.schema)
        else:
            item = builtin_rules.complete(resource, item, old, self.store)
        return item

    async def _admit(
        self,
        resource: "resources.ApiResource",
        operation: str,
        item: Object,
        old: Object | None,
        options: WriteOptions,
    ) -> Object:
        if self.admit is None:
            return item
        admitted = await self.admit(resource, operation, item, old, options)
        return item if admitted is None else self._shape(resource, old, admitted, options)

    def _validate(
        self, resource: "resources.ApiResource", old: Object | None, item: Object
    ) -> None:
        findings = list(metadata.check(item, resource))
        if old is not None and old["metadata"].get("deletionTimestamp"):
            findings += _check_new_finalizers(old, item)
        if resource.is_custom:
            checked = schema.validate(item, old, resource.schema)
            findings += _check_scale(resource, item, checked)
            if findings and findings[0].field.startswith("metadata") and not checked:
                findings += schema.blocked_rules(findings, resource.schema)
        else:
            findings += builtin_rules.check(resource, item, old)
        if findings:
            name = item["metadata"].get("name", "")
            raise failures.invalid(resource.qualified_kind, name, findings)
        if len(json.dumps(item)) > _MAX_OBJECT_BYTES:
            raise failures.ApiError(500, "", "etcdserver: request is too large")

    def make_writer(
        self, resource: "resources.ApiResource", options: WriteOptions, operation: str
    ) -> "managed_fields.Writer":
        """Return the manager that writes with these options."""
        return managed_fields.Writer(
            options.manager,
            operation,
            resource.api_version,
            options.subresource,
            metadata.timestamp(),
        )

    def _own(
        self,
        resource: "resources.ApiResource",
        old: Object | None,
        item: Object,
        options: WriteOptions,
    ) -> Object:
        """Return the object with managedFields after a write that is no apply."""
        entries = item["metadata"].get("managedFields")
        meta = dict(item["metadata"])
        if entries == [{}]:
            meta.pop("managedFields")
            return {**item, "metadata": meta}
        shape = managed_fields.Shape(resource.schema, resource.is_custom)
        writer = self.make_writer(resource, options, "Update")
        own_item = item
        if old is None and resource.has_status:  # the server has filled in the status
            own_item = {name: value for name, value in item.items() if name != "status"}
        entries = managed_fields.record_update(old, own_item, shape, writer)
        if entries:
            meta["managedFields"] = entries
        else:
            meta.pop("managedFields", None)
        return {**item, "metadata": meta}

    def _count_generation(
        self, resource: "resources.ApiResource", old: Object, item: Object
    ) -> Object:
        if not resource.has_generation:
            return item
        ignored = {"metadata", "apiVersion", "kind"} | (
            {"status"} if resource.has_status else set()
        )
        before = {key: value for key, value in old.items() if key not in ignored}
        after = {key: value for key, value in item.items() if key not in ignored}
        if before == after:
            return item
        generation = old["metadata"].get("generation", 1) + 1
        return {**item, "metadata": {**item["metadata"], "generation": generation}}

    def _is_same(self, item: Object, old: Object) -> bool:
        def content(value: Object) -> Object:
            meta = dict(value["metadata"])
            meta["managedFields"] = [
                {key: part for key, part in entry.items() if key != "time"}
                for entry in meta.get("managedFields") or ()
            ]
            return {**value, "metadata": meta}

        return content(item) == content(old)

    def _store(
        self,
        resource: "resources.ApiResource",
        item: Object,
        options: WriteOptions,
        old: Object | None = None,
    ) -> Object:
        if options.is_dry_run:
            if old is None:
                item["metadata"].pop("resourceVersion", None)
            return self.present(resource, item)
        item = {**item, "apiVersion": self.registry.storage_api_version(resource)}
        if resource.group == "events.k8s.io":
            item["apiVersion"] = "v1"
        meta = item["metadata"]
        if (
            meta.get("deletionTimestamp")
            and not meta.get("finalizers")
            and (resource.plural != "pods" or not meta.get("deletionGracePeriodSeconds"))
        ):
            if old is not None and old["metadata"].get("finalizers"):
                item = {**item, "metadata": {**meta, "finalizers": old["metadata"]["finalizers"]}}
            return self.present(resource, self.store.delete(resource.key, _name(item), item))
        return self.present(resource, self.store.put(resource.key, item))


def _check_new_finalizers(old: Object, item: Object) -> list["failures.FieldError"]:
    before = old["metadata"].get("finalizers") or ()
    added = [name for name in item["metadata"].get("finalizers") or () if name not in before]
    if not added:
        return []
    listed = ", ".join(json.dumps(name) for name in added)
    text = f"no new finalizers can be added if the object is being deleted, found new finalizers []string{{{listed}}}"
    return [failures.forbidden_value("metadata.finalizers", text)]


def _check_scale(
    resource: "resources.ApiResource", item: Object, checked: list["failures.FieldError"]
) -> list["failures.FieldError"]:
    """Return the schema's errors with those of the scale subresource's field, before the errors of rules."""
    if resource.scale is None:
        return checked
    value = read_path(item, resource.scale.spec)
    extra = []
    if isinstance(value, int | float) and value < 0:
        extra.append(
            failures.invalid_value(
                resource.scale.spec, json.dumps(value), "should be a non-negative integer"
            )
        )
    elif isinstance(value, int | float) and value > 2**31 - 1:
        extra.append(
            failures.invalid_value(
                resource.scale.spec, json.dumps(value), "should be less than or equal to 2147483647"
            )
        )
    position = len(checked)
    for n, error in enumerate(checked):
        is_rule = error.reason == "FieldValueInvalid" and " in body " not in error.message
        if is_rule and "Checked value" not in error.message:
            position = n
            break
    return checked[:position] + extra + checked[position:]


def read_path(item: Any, path: str) -> Any:
    """Return the value at a simple JSON path such as `.spec.replicas`, or None."""
    for name in path.strip(".").split("."):
        item = item.get(name) if isinstance(item, dict) else None
    return item


def _name(item: Object) -> "store.Name":
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]


def check_name(given_metadata: Object, name: str) -> None:
    """Refuse a body whose name is not that of the path. Raises ApiError (400)."""
    shown = given_metadata.get("name", name)
    if shown != name:
        text = f"the name of the object ({shown}) does not match the name on the URL ({name})"
        raise failures.bad_request(text)
