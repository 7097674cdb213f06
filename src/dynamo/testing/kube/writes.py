"""Reading, creating and replacing objects, with the steps that every write takes.

They are: decode, restrict to the subresource, prune, fill in defaults, admit, validate, record the owners of fields,
store. A write that changes nothing is not stored.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from dynamo.testing.kube import (
    admission,
    builtin_checks,
    builtin_rules,
    builtin_schemas,
    failures,
    managed_fields,
    metadata,
    resources,
    rights,
    schema,
    selectors,
    store,
    webhooks,
)

Object = dict[str, Any]
_MAX_OBJECT_BYTES = 3 * 2**19


PLAIN = admission.WriteOptions(field_validation="Ignore")  # of controllers, which take no warnings


class ObjectWrites:
    """Reads, creates and replaces the objects of one cluster; `api.Api` adds patches and deletions."""

    def __init__(
        self,
        registry: resources.ResourceRegistry,
        objects: store.Store,
        authority: rights.Authority,
    ) -> None:
        self.registry = registry
        self.store = objects
        self._client = webhooks.WebhookClient(objects)
        self._admission = admission.Admission(objects, registry, authority, self._client)

    # Reading.

    async def get(self, resource: resources.ApiResource, namespace: str, name: str) -> Object:
        """Return an object in this version. Raises ApiError (404)."""
        item = self.store.get(resource.key, (namespace, name))
        if item is None:
            raise failures.not_found(resource, name)
        return (await self.present(resource, [item]))[0]

    def find(self, api_version: str, kind: str, namespace: str, name: str) -> Object | None:
        """Return an object by its kind, or None; for controllers."""
        resource = self.registry.find_kind(api_version, kind)
        return self.store.get(resource.key, (namespace, name)) if resource else None

    async def present(
        self, resource: resources.ApiResource, items: Sequence[Object]
    ) -> list[Object]:
        """Return stored objects as this version shows them, converted by its webhook. Raises ApiError (500)."""
        shown = list(items)
        others = [n for n, item in enumerate(items) if needs_conversion(resource, item)]
        for version in {items[n]["apiVersion"] for n in others}:
            chosen = [n for n in others if items[n]["apiVersion"] == version]
            converted = await self._client.convert(resource, [items[n] for n in chosen])
            for n, item in zip(chosen, converted, strict=True):
                shown[n] = item
        return [self.complete(resource, item) for item in shown]

    def complete(self, resource: resources.ApiResource, item: Object) -> Object:
        """Return an object that needs no conversion as this version shows it, with defaults that came later."""
        if not resource.is_custom:
            if resource.key == ("", "events"):
                item = builtin_rules.core_event(item)
            return item if resource.group != "events.k8s.io" else builtin_rules.newer_event(item)
        shown = schema.fill_defaults({**item, "apiVersion": resource.api_version}, resource.schema)
        return dict(sorted(shown.items()))

    async def list_items(
        self,
        resource: resources.ApiResource,
        namespace: str = "",
        *,
        labels: str = "",
        fields: str = "",
    ) -> list[Object]:
        """Return the present objects that two selectors choose."""
        test = self.make_test(resource, labels, fields)
        items = self.store.list_items(resource.key, namespace)
        return await self.present(resource, [item for item in items if test(item)])

    def make_test(
        self, resource: resources.ApiResource, labels: str, fields: str
    ) -> selectors.Test:
        """Return the test of two selectors. Raises ApiError (400)."""
        label_test = selectors.parse_labels(labels)
        field_test = selectors.parse_fields(fields, resource)
        return lambda item: label_test(item) and field_test(item)

    # Writing.

    async def create(
        self,
        resource: resources.ApiResource,
        namespace: str,
        body: Object,
        options: admission.WriteOptions = PLAIN,
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
        item = self._own(resource, None, item, options)
        return await self.store_new(resource, item, options)

    async def store_new(
        self, resource: resources.ApiResource, item: Object, options: admission.WriteOptions
    ) -> Object:
        """Admit, check and store an object that is complete. Raises ApiError."""
        item = await self._admit(resource, None, item, options)
        stored = await self._convert_to_stored(resource, item)
        name = _name(item)
        if self.store.get(resource.key, name) is not None:
            raise failures.already_exists(resource, name[1])
        return await self._store(resource, item, stored, options)

    async def update(
        self,
        resource: resources.ApiResource,
        namespace: str,
        name: str,
        body: Object,
        options: admission.WriteOptions = PLAIN,
    ) -> Object:
        """Replace an object. Raises ApiError."""
        body = self._decode(resource, body)
        given_metadata = body.get("metadata") or {}
        metadata.check_name(given_metadata, name)
        self.check_namespace(resource, namespace, given_metadata)
        old = await self.get(resource, namespace, name)
        version = given_metadata.get("resourceVersion")
        if resource.is_custom and not version:
            text = "must be specified for an update"
            error = failures.invalid_value("metadata.resourceVersion", "0", text)
            raise failures.invalid(resource.qualified_plural, name, [error])
        self.check_version(resource, old, version, given_metadata.get("uid"))
        return await self.replace_stored(resource, old, body, options)

    async def replace_stored(
        self,
        resource: resources.ApiResource,
        old: Object,
        body: Object,
        options: admission.WriteOptions,
    ) -> Object:
        """Store the new state of an object: the part that the subresource may change."""
        item = self._restrict(resource, old, body, options)
        item = self._shape(resource, old, item, options)
        item = await self._admit(resource, old, item, options)
        if not options.is_apply:
            item = self._own(resource, old, item, options)
        item = self._count_generation(resource, old, item)
        stored = await self._convert_to_stored(resource, item)
        self._check_current(resource, old)
        if self._is_same(item, old):
            return old
        return await self._store(resource, item, stored, options, old)

    def _check_current(self, resource: resources.ApiResource, old: Object) -> None:
        current = self.store.get(resource.key, _name(old))
        if (
            current is None
            or current["metadata"]["resourceVersion"] != old["metadata"]["resourceVersion"]
        ):
            raise failures.conflict(resource, old["metadata"]["name"])

    def _restrict(
        self,
        resource: resources.ApiResource,
        old: Object,
        body: Object,
        options: admission.WriteOptions,
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

    def _decode(self, resource: resources.ApiResource, body: Object) -> Object:
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
        self, resource: resources.ApiResource, namespace: str, body: Object, *, is_dry_run: bool
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
        self, resource: resources.ApiResource, namespace: str, given_metadata: Object
    ) -> None:
        """Refuse a body with another namespace than the path has. Raises ApiError (400)."""
        if resource.is_namespaced and given_metadata.get("namespace") not in (None, "", namespace):
            text = "the namespace of the provided object does not match the namespace sent on the request"
            raise failures.bad_request(text)

    def check_version(
        self, resource: resources.ApiResource, old: Object, version: str | None, uid: str | None
    ) -> None:
        """Refuse a write that is based on another version or object. Raises ApiError."""
        if version and not str(version).isdigit():
            text = f'strconv.ParseUint: parsing "{version}": invalid syntax'
            raise failures.ApiError(500, "", text)
        if version and version != old["metadata"]["resourceVersion"]:
            raise failures.conflict(resource, old["metadata"]["name"])
        if uid and uid != old["metadata"]["uid"]:
            key = "/".join(
                filter(None, (resource.group * resource.is_custom, resource.plural, *_name(old)))
            )
            text = (
                f"StorageError: invalid object, Code: 4, Key: /registry/{key}, ResourceVersion: 0, AdditionalErrorMsg:"
                f" Precondition failed: UID in precondition: {uid}, UID in object meta: {old['metadata']['uid']}"
            )
            raise failures.conflict(resource, old["metadata"]["name"], text)

    def prune(
        self, resource: resources.ApiResource, item: Object, options: admission.WriteOptions
    ) -> Object:
        """Return an object without unknown fields, and warn of them or refuse them. Raises ApiError."""
        if options.user is None and not resource.is_custom:
            return item
        item, unknown = find_unknown(resource, item)
        if unknown and options.field_validation == "Strict":
            raise failures.undecodable(resource, describe_unknown(unknown))
        if unknown and options.field_validation == "Warn":
            options.warnings.extend(f'unknown field "{path}"' for path in unknown)
        return item

    def _shape(
        self,
        resource: resources.ApiResource,
        old: Object | None,
        item: Object,
        options: admission.WriteOptions,
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
        resource: resources.ApiResource,
        old: Object | None,
        item: Object,
        options: admission.WriteOptions,
    ) -> Object:
        """Return an object as mutating webhooks want it, after all checks. Raises ApiError."""
        if not resource.is_custom:
            item = builtin_rules.admit(resource, item, self.store, is_new=old is None)
        operation = "CREATE" if old is None else "UPDATE"
        request = admission.WriteAttempt(
            resource=resource, operation=operation, item=item, old=old, options=options
        )
        mutated = await self._admission.mutate(request)
        if mutated is not item and mutated is not None:
            item = self._shape(resource, old, mutated, options)
        if old is not None:
            self._check_current(resource, old)
        self._validate(resource, old, item)
        await self._admission.validate(dataclasses.replace(request, item=item))
        return item

    async def _convert_to_stored(self, resource: resources.ApiResource, item: Object) -> Object:
        """Return an object in the version in which it is stored. Raises ApiError (500)."""
        storage = self.registry.storage_resource(resource)
        if needs_conversion(storage, item):
            (item,) = await self._client.convert(storage, [item])
        return item

    def _validate(self, resource: resources.ApiResource, old: Object | None, item: Object) -> None:
        findings = list(metadata.check(item, resource))
        if old is not None and old["metadata"].get("deletionTimestamp"):
            refusals = metadata.check_new_finalizers(old, item)
            findings += refusals * (
                2 if resource.is_custom else 1
            )  # a real server looks twice there
        if resource.is_custom:
            checked = schema.validate(item, old, resource.schema)
            findings += schema.check_scale(resource, item, checked)
            if findings and findings[0].field.startswith("metadata") and not checked:
                findings += schema.blocked_rules(findings, resource.schema)
        else:
            findings += builtin_checks.check(resource, item, old)
        if findings:
            is_event = resource.key == ("", "events")  # those of events.k8s.io are named without it
            kind = resource.kind if is_event else resource.qualified_kind
            raise failures.invalid(kind, item["metadata"].get("name", ""), findings)
        if len(json.dumps(item)) > _MAX_OBJECT_BYTES:
            raise failures.ApiError(500, "", "etcdserver: request is too large")

    def make_writer(
        self, resource: resources.ApiResource, options: admission.WriteOptions, operation: str
    ) -> managed_fields.Writer:
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
        resource: resources.ApiResource,
        old: Object | None,
        item: Object,
        options: admission.WriteOptions,
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
        if resource.key == ("", "namespaces"):  # the spec has only what holds a deletion
            own_item = {**own_item, "spec": (old or {}).get("spec")}
        if (
            resource.group == "events.k8s.io"
        ):  # whose fields have other names than those that are stored
            own_item, old = (
                builtin_rules.newer_event(own_item),
                old and builtin_rules.newer_event(old),
            )
        entries = managed_fields.record_update(old, own_item, shape, writer)
        if entries:
            meta["managedFields"] = entries
        else:
            meta.pop("managedFields", None)
        return {**item, "metadata": meta}

    def _count_generation(
        self, resource: resources.ApiResource, old: Object, item: Object
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

    async def _store(
        self,
        resource: resources.ApiResource,
        item: Object,
        stored: Object,
        options: admission.WriteOptions,
        old: Object | None = None,
    ) -> Object:
        """Store an object, at once, and return it in the version of the request."""
        if options.is_dry_run:
            if old is None:
                item["metadata"].pop("resourceVersion", None)
            return self.complete(resource, item)
        stored = {**stored, "apiVersion": self.registry.storage_api_version(resource)}
        if resource.group == "events.k8s.io":
            stored["apiVersion"] = "v1"
        meta = stored["metadata"]
        if (
            meta.get("deletionTimestamp")
            and not meta.get("finalizers")
            and not (resource.key == ("", "namespaces") and stored["spec"].get("finalizers"))
            and (resource.plural != "pods" or not meta.get("deletionGracePeriodSeconds"))
        ):
            if old is not None and old["metadata"].get("finalizers"):
                finalizers = old["metadata"]["finalizers"]
                stored = {**stored, "metadata": {**meta, "finalizers": finalizers}}
            stored = self.store.delete(resource.key, _name(stored), stored)
            kept = {key: value for key, value in stored["metadata"].items() if key != "finalizers"}
            stored = {**stored, "metadata": kept}  # only watches are told the last finalizer
        else:
            stored = self.store.put(resource.key, stored)
        return (await self.present(resource, [stored]))[0]


def find_unknown(resource: resources.ApiResource, item: Object) -> tuple[Object, list[str]]:
    """Return an object without unknown fields, and their paths. Raises ApiError (400) for a value of a wrong type."""
    unknown = metadata.unknown_fields(item)
    if resource.is_custom:
        item, findings = schema.prune(item, resource.schema, is_root=True)
        return item, unknown + findings
    try:
        item, findings = builtin_schemas.keep_known(resource.api_version, item, resource.kind)
    except builtin_schemas.WrongType as error:
        raise failures.undecodable(resource, str(error)) from error
    return item, unknown + findings


def describe_unknown(paths: Sequence[str]) -> str:
    """Return what the decoder says of unknown fields."""
    return "strict decoding error: " + ", ".join(f'unknown field "{path}"' for path in paths)


def needs_conversion(resource: resources.ApiResource, item: Object) -> bool:
    """Return whether only the webhook of its definition can turn a stored object into this version."""
    return bool(resource.conversion) and item["apiVersion"] != resource.api_version


def _name(item: Object) -> store.Name:
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]
