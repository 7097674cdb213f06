"""What the API server says of itself: groups, resources, and the OpenAPI documents that kubectl needs.

kubectl validates on the server when a document says that PATCH takes `fieldValidation`, and patches custom resources by
merge when no document says otherwise, so that is what the documents contain, and the schemas for `kubectl explain`.
"""

import hashlib
import json
from typing import Any

from dynamo.testing.kube import calls, resources

Object = dict[str, Any]
_VERBS = [
    "delete",
    "deletecollection",
    "get",
    "list",
    "patch",
    "create",
    "update",
    "watch",
]  # of custom resources
_SUBRESOURCE_VERBS = ["get", "patch", "update"]
_AGGREGATED = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
_PROTOBUF = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"
_OPENAPI_V2 = (
    b"\n\x032.0"  # a document of no schemas: what is not in it is left to the server to check
)
_SCALE = {"group": "autoscaling", "version": "v1", "kind": "Scale"}
_POD_SUBRESOURCES = {  # with the kind of what is sent
    "log": ("Pod", ["get"]),
    "exec": ("PodExecOptions", ["create", "get"]),
    "portforward": ("PodPortForwardOptions", ["create", "get"]),
    "attach": ("PodAttachOptions", ["create", "get"]),
    "binding": ("Binding", ["create"]),
}
_EVICTION = {"group": "policy", "version": "v1", "kind": "Eviction"}


class DiscoveryDocuments:
    """The documents about one registry of resources."""

    def __init__(self, registry: resources.ResourceRegistry) -> None:
        self._registry = registry

    def answer(self, call: calls.ApiCall, host: str) -> bool:
        """Answer a request for a document; return False if there is none at this path."""
        parts = [part for part in call.request.path.split("/") if part]
        if parts[:2] == ["openapi", "v3"]:
            return self._answer_openapi(call, "/".join(parts[2:]))
        if parts == ["openapi", "v2"]:  # kubectl looks there for the items of a `kind: List`
            call.exchange.respond(200, _OPENAPI_V2, content_type=_PROTOBUF)
            return True
        if parts in (["api"], ["apis"]):
            if "as=APIGroupDiscoveryList" in call.accept:
                self._answer_aggregated(call, is_core=parts == ["api"])
            else:
                call.respond(200, self._plain_index(host, is_core=parts == ["api"]))
            return True
        document = self._plain_document(parts)
        if document is not None:
            call.respond(200, document)
        return document is not None

    def _groups(self) -> dict[str, dict[str, list[resources.ApiResource]]]:
        groups: dict[str, dict[str, list[resources.ApiResource]]] = {}
        for resource in self._registry:
            groups.setdefault(resource.group, {}).setdefault(resource.version, []).append(resource)
        return {
            group: dict(sorted(versions.items(), key=lambda entry: version_priority(entry[0])))
            for group, versions in groups.items()
        }

    def _plain_index(self, host: str, *, is_core: bool) -> Object:
        if is_core:
            addresses = [{"clientCIDR": "0.0.0.0/0", "serverAddress": host}]
            return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": addresses}  # fmt: skip
        groups = [_group(name, list(versions)) for name, versions in self._groups().items() if name]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}

    def _plain_document(self, parts: list[str]) -> Object | None:
        groups = self._groups()
        if parts == ["api", "v1"]:
            return _resource_list("v1", groups[""]["v1"])
        if len(parts) == 2 and parts[0] == "apis" and parts[1] in groups:
            group = _group(parts[1], list(groups[parts[1]]))
            return {"kind": "APIGroup", "apiVersion": "v1", **group}
        if len(parts) == 3 and parts[0] == "apis" and parts[2] in groups.get(parts[1], {}):
            return _resource_list(f"{parts[1]}/{parts[2]}", groups[parts[1]][parts[2]])
        return None

    def _answer_aggregated(self, call: calls.ApiCall, *, is_core: bool) -> None:
        items = [
            {
                "metadata": {"name": group} if group else {},
                "versions": [
                    {
                        "version": version,
                        "resources": [_aggregated(resource) for resource in findings],
                        "freshness": "Current",
                    }
                    for version, findings in versions.items()
                ],
            }
            for group, versions in self._groups().items()
            if (group == "") == is_core
        ]
        body = {
            "kind": "APIGroupDiscoveryList",
            "apiVersion": "apidiscovery.k8s.io/v2",
            "metadata": {},
            "items": items,
        }
        content = json.dumps(body, separators=(",", ":")).encode()
        tag = f'"{hashlib.sha512(content).hexdigest().upper()}"'
        headers = (("etag", tag), ("vary", "Accept"))
        if call.request.headers.get("if-none-match") == tag:
            call.exchange.respond(304, b"", content_type=_AGGREGATED, headers=headers)
        else:
            call.exchange.respond(200, content, content_type=_AGGREGATED, headers=headers)

    def _answer_openapi(self, call: calls.ApiCall, path: str) -> bool:
        documents = {
            f"apis/{group}/{version}" if group else f"api/{version}": findings
            for group, versions in self._groups().items()
            for version, findings in versions.items()
        }
        if not path:
            paths = {}
            for name, findings in documents.items():
                mark = hashlib.sha512(json.dumps(_openapi(findings)).encode()).hexdigest().upper()
                paths[name] = {"serverRelativeURL": f"/openapi/v3/{name}?hash={mark}"}
            call.respond(200, {"paths": paths})
            return True
        if path not in documents:
            return False
        content = json.dumps(_openapi(documents[path])).encode()
        mark = hashlib.sha512(content).hexdigest().upper()
        requested = call.query.get("hash")
        if requested and requested != mark:
            location = ("location", f"/openapi/v3/{path}?hash={mark}")
            call.exchange.respond(301, b"", headers=(location,))
        else:
            call.exchange.respond(200, content, headers=(("etag", f'"{mark}"'),))
        return True


def version_priority(version: str) -> tuple[int, int, int]:
    """Order versions as Kubernetes does: v2, v1, v1beta1, v1alpha1."""
    name = version.lstrip("v")
    stage = 1 if "beta" in name else 2 if "alpha" in name else 0
    major, _, minor = name.replace("beta", ".").replace("alpha", ".").partition(".")
    return stage, -int(major or 0), -int(minor or 0)


def _group(name: str, versions: list[str]) -> Object:
    listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}


def _subresources(resource: resources.ApiResource) -> list[tuple[str, list[str], Object]]:
    own = {"group": resource.group, "version": resource.version, "kind": resource.kind}
    findings = [("status", _SUBRESOURCE_VERBS, own)] if resource.has_status else []
    if resource.scale is not None:
        findings.append(("scale", _SUBRESOURCE_VERBS, _SCALE))
    if resource.key == ("", "pods"):
        findings += [
            (name, verbs, {**own, "kind": kind})
            for name, (kind, verbs) in _POD_SUBRESOURCES.items()
        ]
        findings.append(("eviction", ["create"], _EVICTION))
    return findings


def _verbs(resource: resources.ApiResource) -> list[str]:
    if resource.is_custom:
        return _VERBS
    is_namespaces = resource.key == ("", "namespaces")
    return sorted(verb for verb in _VERBS if verb != "deletecollection" or not is_namespaces)


def _resource_list(group_version: str, findings: list[resources.ApiResource]) -> Object:
    listed: list[Object] = []
    for resource in findings:
        entry: Object = {"name": resource.plural, "singularName": resource.singular}
        entry |= {
            "namespaced": resource.is_namespaced,
            "kind": resource.kind,
            "verbs": _verbs(resource),
        }
        if resource.short_names:
            entry["shortNames"] = list(resource.short_names)
        if resource.categories:
            entry["categories"] = list(resource.categories)
        listed.append(entry)
        for name, verbs, kind in _subresources(resource):
            shown: Object = {
                "name": f"{resource.plural}/{name}",
                "singularName": "",
                "namespaced": resource.is_namespaced,
            }
            if kind in (_SCALE, _EVICTION):
                shown |= {"group": kind["group"], "version": kind["version"]}
            listed.append({**shown, "kind": kind["kind"], "verbs": verbs})
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": group_version,
        "resources": listed,
    }


def _aggregated(resource: resources.ApiResource) -> Object:
    kind = {"group": resource.group, "version": resource.version, "kind": resource.kind}
    entry: Object = {
        "resource": resource.plural,
        "responseKind": kind,
        "scope": "Namespaced" if resource.is_namespaced else "Cluster",
        "singularResource": resource.singular,
        "verbs": _verbs(resource),
    }
    if resource.short_names:
        entry["shortNames"] = list(resource.short_names)
    if resource.categories:
        entry["categories"] = list(resource.categories)
    subresources = [
        {"subresource": name, "responseKind": responded, "verbs": verbs}
        for name, verbs, responded in _subresources(resource)
    ]
    return {**entry, "subresources": subresources} if subresources else entry


def _openapi(findings: list[resources.ApiResource]) -> Object:
    paths: Object = {}
    schemas: Object = {}
    for resource in findings:
        group = ".".join(reversed(resource.group.split("."))) or "core"
        name = f"{group}.{resource.version}.{resource.kind}"
        kind = {"group": resource.group, "version": resource.version, "kind": resource.kind}
        schemas[name] = {
            **(resource.schema if resource.is_custom else {"type": "object"}),
            "x-kubernetes-group-version-kind": [kind],
        }
        root = f"/apis/{resource.group}" if resource.group else "/api"
        scope = "/namespaces/{namespace}" if resource.is_namespaced else ""
        parameters = [
            {"name": option, "in": "query", "schema": {"type": "string", "uniqueItems": True}}
            for option in ("dryRun", "fieldManager", "fieldValidation")
        ]
        reference = {"schema": {"$ref": f"#/components/schemas/{name}"}}
        paths[f"{root}/{resource.version}{scope}/{resource.plural}/{{name}}"] = {
            "patch": {
                "operationId": f"patch{resource.kind}",
                "parameters": parameters,
                "requestBody": {"content": {"application/merge-patch+json": {"schema": {"type": "object"}}}},
                "responses": {"200": {"description": "OK", "content": {"application/json": reference}}},
                "x-kubernetes-action": "patch",
                "x-kubernetes-group-version-kind": kind,
            }
        }  # fmt: skip
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": "v1.33.0"},
        "paths": paths,
        "components": {"schemas": schemas},
    }
