"""Admission: what may change or refuse a write before it is stored. The order is that of a real API server.

First the rights that a write needs beyond its verb, then mutating webhooks, the schema, and validating webhooks.
Configurations are read at each write, so a change of one is in force at once.
"""

import base64
import binascii
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from dynamo.testing.kube import (
    failures,
    patches,
    resources,
    rights,
    rules,
    selectors,
    store,
    tables,
    webhooks,
)

Object = dict[str, Any]
GROUP = "admissionregistration.k8s.io"
_API_VERSION = "admission.k8s.io/v1"
_NO_LABELS: Object = {"metadata": {}}
_OPTIONS = {"CREATE": "CreateOptions", "UPDATE": "UpdateOptions", "DELETE": "DeleteOptions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """The query parameters of a write; `warnings` collects what the client is to be told."""

    manager: str = "unknown"
    user: rights.User | None = None  # None: a controller, which may do everything
    is_dry_run: bool = False
    is_forced: bool = False
    field_validation: str = "Warn"
    subresource: str = ""
    is_apply: bool = False
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteAttempt:
    """One write: `item` is None for a deletion, and `old` for a creation."""

    resource: resources.ApiResource
    operation: str
    item: Object | None
    old: Object | None
    options: WriteOptions

    @property
    def metadata(self) -> Object:
        metadata: Object = (self.item or self.old or _NO_LABELS)["metadata"]
        return metadata

    @property
    def plural(self) -> str:
        """Return the plural with the subresource, as rules name it."""
        return "/".join(filter(None, (self.resource.plural, self.options.subresource)))


class Admission:
    """The admission chain of one cluster."""

    def __init__(
        self,
        objects: store.Store,
        registry: resources.ResourceRegistry,
        authority: rights.Authority,
        client: webhooks.WebhookClient,
    ) -> None:
        self._objects = objects
        self._registry = registry
        self._authority = authority
        self._client = client

    async def mutate(self, request: WriteAttempt) -> Object | None:
        """Return the object as mutating webhooks want it. Raises ApiError."""
        options = request.options
        if options.user is not None and request.item is not None:
            is_applied = options.is_apply and request.operation == "CREATE"
            self._authority.check_write(
                options.user, request.resource, request.item, is_applied=is_applied
            )
        for webhook, version in self._select_webhooks("mutatingwebhookconfigurations", request):
            seen = await self._convert(request, version)
            answer = await self._review(webhook, request, seen)
            if answer is None or not answer.get("patch"):
                continue
            if seen.item is None:
                text = f'admission webhook "{webhook["name"]}" attempted to modify the object, which is not supported'
                raise failures.internal(f"{text} for this operation")
            changed = _apply_patch(webhook["name"], answer, _shown(seen, seen.item))
            if request.options.subresource == "scale":
                continue  # other fields than those of a Scale stay as they are
            if version != request.resource:
                (changed,) = await self._client.convert(request.resource, [changed])
            request = replace(request, item=changed)
        return request.item

    async def validate(self, request: WriteAttempt) -> None:
        """Ask all validating webhooks. Raises ApiError for a refusal."""
        for webhook, version in self._select_webhooks("validatingwebhookconfigurations", request):
            await self._review(webhook, request, await self._convert(request, version))

    def _select_webhooks(
        self, plural: str, request: WriteAttempt
    ) -> Iterator[tuple[Object, resources.ApiResource]]:
        """Yield the webhooks that a write concerns, and the version of the object that each wants to see."""
        if request.resource.group == GROUP:
            return
        for configuration in self._objects.list_items((GROUP, plural)):
            for webhook in configuration.get("webhooks") or ():
                version = self._match_rules(webhook, request)
                if version is not None and self._is_selected(webhook, request):
                    yield webhook, version

    def _match_rules(self, webhook: Object, request: WriteAttempt) -> resources.ApiResource | None:
        resource = request.resource
        if _has_rule(webhook, request, resource):
            return resource
        if webhook.get("matchPolicy") == "Exact":
            return None
        others = self._registry.resources_of(resource.key)
        return next((other for other in others if _has_rule(webhook, request, other)), None)

    def _is_selected(self, webhook: Object, request: WriteAttempt) -> bool:
        """Return True if both selectors and all conditions of a webhook choose the object."""
        namespace = request.metadata.get("namespace")
        if namespace:
            home = self._objects.get(("", "namespaces"), ("", namespace)) or _NO_LABELS
            if not _is_chosen(webhook.get("namespaceSelector"), home):
                return False
        candidates = [item for item in (request.item, request.old) if item is not None]
        if not any(_is_chosen(webhook.get("objectSelector"), item) for item in candidates):
            return False
        variables = {"object": request.item, "oldObject": request.old}
        conditions = webhook.get("matchConditions") or ()
        return all(rules.is_true(entry["expression"], variables) for entry in conditions)

    async def _convert(self, request: WriteAttempt, version: resources.ApiResource) -> WriteAttempt:
        """Return the request with the objects in the version that a webhook wants."""
        if version == request.resource:
            return request
        present = [item for item in (request.item, request.old) if item is not None]
        converted = iter(await self._client.convert(version, present))
        item = next(converted) if request.item is not None else None
        old = next(converted) if request.old is not None else None
        return replace(request, resource=version, item=item, old=old)

    async def _review(
        self, webhook: Object, request: WriteAttempt, seen: WriteAttempt
    ) -> Object | None:
        """Return the answer of a webhook; None if its failure is to be ignored. Raises ApiError for a refusal."""
        review = _make_review(request, seen)
        prefix = "failed to call webhook: "
        try:
            answer = await self._client.call(
                webhook["clientConfig"], review, timeout_s=float(webhook["timeoutSeconds"])
            )
            prefix = ""
            response = _read_answer(answer, review["request"]["uid"])
        except webhooks.WebhookCallFailed as error:
            if webhook["failurePolicy"] == "Ignore":
                return None
            text = f'failed calling webhook "{webhook["name"]}": {prefix}{error}'
            raise failures.internal(text) from error
        request.options.warnings.extend(response.get("warnings") or ())
        if not response.get("allowed"):
            raise _make_refusal(webhook["name"], response.get("status") or {})
        return response


def _has_rule(webhook: Object, request: WriteAttempt, resource: resources.ApiResource) -> bool:
    scope = "Namespaced" if resource.is_namespaced else "Cluster"
    expected = {
        "operations": {request.operation},
        "apiGroups": {resource.group},
        "apiVersions": {resource.version},
        "resources": {request.plural, f"{resource.plural}/*" if request.options.subresource else "*", "*/*"},
    }  # fmt: skip
    return any(
        rule.get("scope", "*") in ("*", scope)
        and all({"*", *values} & {*rule[field]} for field, values in expected.items())
        for rule in webhook.get("rules") or ()
    )


def _is_chosen(selector: Object | None, item: Object) -> bool:
    return not selector or selectors.matches(selector, item["metadata"].get("labels") or {})


def _shown(request: WriteAttempt, item: Object) -> Object:
    """Return an object as a webhook sees it: of the scale subresource a Scale."""
    if request.options.subresource == "scale" and request.resource.scale is not None:
        return tables.scale_of(item, request.resource.scale)
    return item


def _make_review(request: WriteAttempt, seen: WriteAttempt) -> Object:
    """Return the AdmissionReview of a write; a webhook sees its objects in the version of `seen`."""
    options, user, metadata = request.options, request.options.user, request.metadata
    subresource = options.subresource

    def describe(resource: resources.ApiResource, suffix: str = "") -> Object:
        kind = {"group": resource.group, "version": resource.version, "kind": resource.kind}
        if subresource == "scale":
            kind = {"group": "autoscaling", "version": "v1", "kind": "Scale"}
        place = {"group": resource.group, "version": resource.version, "resource": resource.plural}
        names = ("requestKind", "requestResource", "requestSubResource")
        names = names if suffix else ("kind", "resource", "subResource")
        return {names[0]: kind, names[1]: place, **({names[2]: subresource} if subresource else {})}

    fields: Object = {"kind": _OPTIONS[request.operation], "apiVersion": "meta.k8s.io/v1"}
    if options.is_apply:
        fields["fieldManager"] = options.manager
    if options.is_dry_run:
        fields["dryRun"] = ["All"]
    return {
        "kind": "AdmissionReview",
        "apiVersion": _API_VERSION,
        "request": {
            "uid": str(uuid.uuid4()),
            **describe(seen.resource),
            **describe(request.resource, "request"),
            "name": metadata.get("name", ""),
            "namespace": metadata.get("namespace", ""),
            "operation": request.operation,
            "userInfo": {}
            if user is None
            else {"username": user.name, "uid": user.name, "groups": list(user.groups)},
            "object": None if seen.item is None else _shown(seen, seen.item),
            "oldObject": None if seen.old is None else _shown(seen, seen.old),
            "dryRun": options.is_dry_run,
            "options": fields,
        },
    }


def _read_answer(answer: Object, identity: str) -> Object:
    """Return the response in an AdmissionReview. Raises WebhookCallFailed."""
    version, kind = answer.get("apiVersion", ""), answer.get("kind", "")
    group, _, number = version.rpartition("/")
    if kind == "AdmissionReview" and version != _API_VERSION and group:
        text = f"failed to call webhook: converting ({number}.{kind}) to (v1.{kind}): unknown conversion"
        raise webhooks.WebhookCallFailed(text)
    prefix = "received invalid webhook response: "
    if (version, kind) != (_API_VERSION, "AdmissionReview"):
        text = f"expected webhook response of {_API_VERSION}, Kind=AdmissionReview, got {group}/{number}, Kind={kind}"
        raise webhooks.WebhookCallFailed(prefix + text)
    response: Object | None = answer.get("response")
    if response is None:
        raise webhooks.WebhookCallFailed(f"{prefix}webhook response was absent")
    if response.get("uid") != identity:
        text = f'expected response.uid="{identity}", got "{response.get("uid", "")}"'
        raise webhooks.WebhookCallFailed(prefix + text)
    if response.get("patch"):
        if response.get("patchType") != "JSONPatch":
            text = "webhook returned response.patch but not response.patchType"
            raise webhooks.WebhookCallFailed(prefix + text)
        try:
            base64.b64decode(response["patch"], validate=True)
        except binascii.Error as error:
            text = "failed to call webhook: illegal base64 data at input byte 0"
            raise webhooks.WebhookCallFailed(text) from error
    return response


def _apply_patch(name: str, answer: Object, item: Object) -> Object:
    try:
        return dict(patches.apply_operations(item, json.loads(base64.b64decode(answer["patch"]))))
    except (ValueError, patches.PatchFailed) as error:
        raise failures.internal(str(error)) from error


def _make_refusal(name: str, status: Object) -> failures.ApiError:
    message = status.get("message") or status.get("reason")
    text = f": {message}" if message else " without explanation"
    return failures.ApiError(
        status.get("code") or 400,
        status.get("reason") or "",
        f'admission webhook "{name}" denied the request{text}',
        status.get("details"),
    )
