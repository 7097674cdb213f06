"""The operations of the API server on objects, without HTTP: those of `writes`, patches, apply and deletions.

The HTTP front, the controllers and the kubelet of this package all go through it.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dynamo.testing.kube import (
    admission,
    builtin_rules,
    failures,
    managed_fields,
    metadata,
    patches,
    resources,
    rights,
    writes,
)

Object = dict[str, Any]
WriteOptions = admission.WriteOptions
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
CONTROLLERS = "kube-controller-manager"
CLEANUP = "customresourcecleanup.apiextensions.k8s.io"  # of the objects of a definition that goes
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_MAX_ATTEMPTS = 5
_WITHOUT_GRACE = (("", "namespaces"), ("apiextensions.k8s.io", "customresourcedefinitions"))
_LASTING = ("default", "kube-system", "kube-public")
_FOREGROUND, _ORPHAN = "foregroundDeletion", "orphan"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteOptions:
    """The body or query parameters of a deletion."""

    policy: str = ""
    grace_s: int | None = None
    uid: str = ""
    resource_version: str = ""
    is_dry_run: bool = False
    user: rights.User | None = None  # None: a controller


_PLAIN_DELETE = DeleteOptions()


class Api(writes.ObjectWrites):
    """All operations on the objects of one cluster."""

    async def patch(
        self,
        resource: resources.ApiResource,
        namespace: str,
        name: str,
        media_type: str,
        patch: Any,
        options: admission.WriteOptions = writes.PLAIN,
    ) -> tuple[Object, bool]:
        """Change an object by a patch; return it, and whether the patch created it. Raises ApiError."""
        if media_type == STRATEGIC_PATCH and resource.is_custom:
            media_type = ""
        if media_type not in (APPLY_PATCH, MERGE_PATCH, JSON_PATCH, STRATEGIC_PATCH):
            raise unsupported_media_type(resource)
        for attempt in range(_MAX_ATTEMPTS):
            try:
                if media_type == APPLY_PATCH:
                    return await self._apply(resource, namespace, name, patch, options)
                old = await self.get(resource, namespace, name)
                body = self.apply_patch(resource, old, media_type, patch)
                self._check_patched(resource, old, body)
                if options.field_validation == "Strict":
                    shown = patch if media_type == STRATEGIC_PATCH else body
                    _refuse_unknown(resource, body, shown)
                return await self.replace_stored(resource, old, body, options), False
            except failures.ApiError as error:  # changed while webhooks were asked, say
                if not failures.is_stale(error) or attempt + 1 == _MAX_ATTEMPTS:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _check_patched(self, resource: resources.ApiResource, old: Object, body: Object) -> None:
        """Refuse a patch that names another object, or another version of it. Raises ApiError."""
        metadata.check_types(body, resource)
        given_metadata, name = body.get("metadata") or {}, old["metadata"]["name"]
        metadata.check_name(given_metadata, name)
        if given_metadata.get("uid") != old["metadata"]["uid"] and given_metadata.get("uid"):
            error = failures.invalid_value(
                "metadata.uid", json.dumps(given_metadata["uid"]), "field is immutable"
            )
            raise failures.invalid(resource.qualified_kind, name, [error])
        self.check_version(resource, old, given_metadata.get("resourceVersion"), None)

    async def merge(
        self,
        resource: resources.ApiResource,
        item: Object,
        change: Object,
        subresource: str = "",
        manager: str = CONTROLLERS,
    ) -> None:
        """Change an object by a merge patch, as a controller does. Raises ApiError."""
        meta = item["metadata"]
        options = WriteOptions(manager=manager, subresource=subresource)
        home = meta.get("namespace", "")
        await self.patch(resource, home, meta["name"], MERGE_PATCH, change, options)

    def apply_patch(
        self, resource: resources.ApiResource, old: Object, media_type: str, patch: Any
    ) -> Object:
        """Return an object with a patch applied, which is not stored. Raises ApiError."""
        if media_type == JSON_PATCH:
            if len(patch) > patches.MAX_OPERATIONS:
                text = f"The allowed maximum operations in a JSON patch is {patches.MAX_OPERATIONS}, got {len(patch)}"
                raise failures.ApiError(413, "RequestEntityTooLarge", text)
            try:
                result = patches.apply_operations(old, patch)
            except patches.PatchFailed as error:
                text = "the server rejected our request due to an error in our request"
                raise failures.ApiError(422, "Invalid", text, {}) from error
            return dict(result)
        try:
            if media_type == MERGE_PATCH:
                return dict(patches.merge(old, patch))
            return dict(patches.strategic(old, patch, resource.schema))
        except patches.PatchFailed as error:
            raise failures.ApiError(500, "", str(error)) from error

    async def _apply(
        self,
        resource: resources.ApiResource,
        namespace: str,
        name: str,
        config: Any,
        options: WriteOptions,
    ) -> tuple[Object, bool]:
        kind, version = config.get("kind") or "", config.get("apiVersion") or ""
        if (version, kind) != (resource.api_version, resource.kind):
            raise failures.bad_request(f"invalid object type: {version or '/'}, Kind={kind}")
        given_metadata = dict(config.get("metadata") or {})
        if given_metadata.get("managedFields"):
            raise failures.bad_request("metadata.managedFields must be nil")
        config = {**config, "metadata": {**given_metadata, "name": name}}
        live = self.store.get(resource.key, (namespace, name))
        if live is None:
            if options.subresource:
                raise failures.not_found(resource, name)
            if given_metadata.get("uid"):
                uid = given_metadata["uid"]
                why = f"uid mismatch: the provided object specified uid {uid}, and no existing object was found"
                raise failures.conflict(resource, name, why)
            live = {"metadata": {}}
        else:
            (live,) = await self.present(resource, [live])
            self.check_version(
                resource, live, given_metadata.get("resourceVersion"), given_metadata.get("uid")
            )
        home = given_metadata.get("namespace", "")
        shape = managed_fields.Shape(resource.schema, resource.is_custom)
        mistakes = list(managed_fields.find_mistakes(managed_fields.own_fields(config), shape))
        mistakes = mistakes or [
            f".{path}: field not declared in schema"
            for path in writes.find_unknown(resource, config)[1]
        ]
        if mistakes:
            kind = f"{home}/{name}; {resource.api_version}, Kind={resource.kind}"
            text = f"failed to create typed patch object ({kind}): {mistakes[0]}"
            raise failures.ApiError(500, "", text)
        config = self._restrict_config(resource, config, options)
        writer = self.make_writer(resource, options, "Apply")
        applied = managed_fields.apply(live, config, shape, writer, is_forced=options.is_forced)
        metadata.check_name(given_metadata, name)
        self.check_namespace(resource, namespace, given_metadata)
        body = {**applied.item, "apiVersion": resource.api_version, "kind": resource.kind}
        body["metadata"] = {**body.get("metadata", {}), "managedFields": applied.entries}
        annotations = body["metadata"].get("annotations") or {}
        if (
            options.manager == "kubectl"
            and not options.subresource
            and _LAST_APPLIED in annotations
        ):
            annotations = {**annotations, _LAST_APPLIED: _last_applied(config)}
            body["metadata"]["annotations"] = annotations
        options = replace(options, is_apply=True)
        if "uid" in live["metadata"]:
            return await self.replace_stored(resource, live, body, options), False
        return await self._create_applied(resource, namespace, body, applied.entries, options), True

    def _restrict_config(
        self, resource: resources.ApiResource, config: Object, options: WriteOptions
    ) -> Object:
        """Drop what an apply through this path may not set, so that it is not owned either."""
        config = self.prune(resource, config, options)
        if options.subresource == "status":
            remaining = ("apiVersion", "kind", "metadata", "status")
            return {
                key: value if key != "metadata" else {"name": value["name"]}
                for key, value in config.items()
                if key in remaining
            }
        if resource.has_status:
            config = {key: value for key, value in config.items() if key != "status"}
        return config

    async def _create_applied(
        self,
        resource: resources.ApiResource,
        namespace: str,
        body: Object,
        entries: Sequence[Object],
        options: WriteOptions,
    ) -> Object:
        self.check_create(resource, namespace, body, is_dry_run=True)
        meta = metadata.for_create(body, resource, namespace)
        meta["managedFields"] = list(entries)
        item = self._shape(resource, None, {**body, "metadata": meta}, options)
        return await self.store_new(resource, item, options)

    async def bind(self, namespace: str, name: str, node: str) -> None:
        """Assign a pod to a node. Raises ApiError (404, 409)."""
        pod = self.store.get(("", "pods"), (namespace, name))
        resource = self.registry.require("", "pods")
        if pod is None:
            raise failures.not_found(resource, name)
        if pod["spec"].get("nodeName"):
            why = f'pod {name} is already assigned to node "{pod["spec"]["nodeName"]}"'
            raise failures.conflict(replace(resource, plural="pods/binding"), name, why)
        scheduled = {"type": "PodScheduled", "status": "True", "lastProbeTime": None,
                     "lastTransitionTime": metadata.timestamp()}  # fmt: skip
        status = {**pod["status"], "conditions": [scheduled]}
        self.store.put(
            resource.key, {**pod, "spec": {**pod["spec"], "nodeName": node}, "status": status}
        )

    # Deleting.

    async def delete(
        self,
        resource: resources.ApiResource,
        namespace: str,
        name: str,
        options: DeleteOptions = _PLAIN_DELETE,
    ) -> tuple[Object, bool]:
        """Delete an object, or mark it; return its last state, and whether it is gone. Raises ApiError."""
        old = self.store.get(resource.key, (namespace, name))
        if old is None:
            raise failures.not_found(resource, name)
        self._check_preconditions(resource, old, options)
        await self._admit_deletion(resource, old, options)
        stored = self.store.get(resource.key, (namespace, name))
        if stored is None:
            raise failures.not_found(resource, name)
        meta = dict(stored["metadata"])
        finalizers = _deletion_finalizers(resource, meta, options.policy)
        grace_s = _grace(resource, stored, options)
        is_held = bool(finalizers or (stored.get("spec") or {}).get("finalizers"))
        if options.is_dry_run:
            return (await self.present(resource, [stored]))[0], not is_held
        if not is_held and not grace_s:
            if resource.plural == "pods" and meta.get("deletionTimestamp") and options.grace_s == 0:
                meta["deletionGracePeriodSeconds"] = 0
                self.store.put(resource.key, {**stored, "metadata": meta})
            elif resource.key == ("", "pods"):
                _mark_deleted(resource, meta, (), 0)
            last = {**stored, "metadata": meta}
            return self.store.delete(resource.key, (namespace, name), last), True
        if meta.get("deletionTimestamp") and grace_s >= meta.get("deletionGracePeriodSeconds", 0):
            return (await self.present(resource, [stored]))[0], False
        _mark_deleted(resource, meta, finalizers, grace_s)
        item = {**stored, "metadata": meta}
        if resource.key == ("", "namespaces"):
            item["status"] = {**stored["status"], "phase": "Terminating"}
        item = self.store.put(resource.key, item)
        return (await self.present(resource, [item]))[0], False

    async def _admit_deletion(
        self, resource: resources.ApiResource, old: Object, options: DeleteOptions
    ) -> None:
        """Ask admission for a deletion. Raises ApiError."""
        request = admission.WriteAttempt(
            resource=self.registry.storage_resource(resource),
            operation="DELETE",
            item=None,
            old=old,
            options=admission.WriteOptions(user=options.user, is_dry_run=options.is_dry_run),
        )
        await self._admission.mutate(request)
        await self._admission.validate(request)

    def _check_preconditions(
        self, resource: resources.ApiResource, old: Object, options: DeleteOptions
    ) -> None:
        meta, name = old["metadata"], old["metadata"]["name"]
        if resource.key == ("", "namespaces") and name in _LASTING:
            raise failures.forbidden(resource, name, "this namespace may not be deleted")
        if options.uid and options.uid != meta["uid"]:
            text = (
                f"the UID in the precondition ({options.uid}) does not match the UID in "
                f"record ({meta['uid']}). The object might have been deleted and then "
                "recreated"
            )
            raise failures.unmet_precondition(resource, name, text)
        version = options.resource_version
        if version and version != meta["resourceVersion"]:
            text = (
                f"the ResourceVersion in the precondition ({version}) does not match the "
                f"ResourceVersion in record ({meta['resourceVersion']}). The object might "
                "have been modified"
            )
            raise failures.unmet_precondition(resource, name, text)


def _refuse_unknown(resource: resources.ApiResource, body: Object, shown: Object) -> None:
    """Refuse an object that a patch gave unknown fields. Raises ApiError (422)."""
    unknown = writes.find_unknown(resource, body)[1]
    if unknown:
        text = json.dumps(json.dumps(shown, separators=(",", ":"), sort_keys=True))
        error = failures.invalid_value("patch", text, writes.describe_unknown(unknown))
        raise failures.invalid("", "", [error])


def _last_applied(config: Object) -> str:
    """Return what `kubectl apply` notes of a configuration; the server keeps it current for those who mix both ways."""
    meta = dict(config["metadata"])
    if _LAST_APPLIED in (meta.get("annotations") or {}):
        meta["annotations"] = {k: v for k, v in meta["annotations"].items() if k != _LAST_APPLIED}
    return json.dumps({**config, "metadata": meta}, separators=(",", ":"), sort_keys=True) + "\n"


def _deletion_finalizers(resource: resources.ApiResource, meta: Object, policy: str) -> list[str]:
    finalizers = [
        name
        for name in meta.get("finalizers") or ()
        if name not in (_FOREGROUND, _ORPHAN) or not policy
    ]
    if policy == "Foreground":
        finalizers.append(_FOREGROUND)
    elif policy == "Orphan" or (not policy and resource.key == ("batch", "jobs")):
        finalizers.append(_ORPHAN)
    if resource.plural == "customresourcedefinitions":
        finalizers.append(CLEANUP)
    return list(dict.fromkeys(finalizers))


def _mark_deleted(
    resource: resources.ApiResource, meta: Object, finalizers: Sequence[str], grace_s: int
) -> None:
    meta["deletionTimestamp"] = builtin_rules.timestamp_after(grace_s)
    if finalizers:
        meta["finalizers"] = list(finalizers)
    if resource.key in _WITHOUT_GRACE:  # these count no generation either
        return
    if "generation" in meta and "deletionGracePeriodSeconds" not in meta:
        meta["generation"] += 1
    meta["deletionGracePeriodSeconds"] = grace_s


def _grace(resource: resources.ApiResource, item: Object, options: DeleteOptions) -> int:
    if resource.key != ("", "pods") or not item.get("spec", {}).get("nodeName"):
        return 0
    if (item.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return 0
    if options.grace_s is not None:
        return options.grace_s
    return int(item["spec"].get("terminationGracePeriodSeconds", 30))


def unsupported_media_type(resource: resources.ApiResource) -> failures.ApiError:
    """Return the refusal of a patch in a form that the resource does not take."""
    types = [JSON_PATCH, MERGE_PATCH, APPLY_PATCH]
    if not resource.is_custom:
        types.insert(2, STRATEGIC_PATCH)
    text = "the body of the request was in an unknown format - accepted media types include: "
    return failures.ApiError(415, "UnsupportedMediaType", text + ", ".join(types))


def find_owned(items: Iterable[Object], uid: str) -> list[Object]:
    """Return the objects with a controller of this uid."""
    return [
        item
        for item in items
        for owner in item["metadata"].get("ownerReferences") or ()
        if owner["uid"] == uid and owner.get("controller")
    ]
