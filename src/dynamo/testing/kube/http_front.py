"""The API server over HTTP: paths, media types, lists in pages, watches and answers, on the project's own server."""

import base64
import json
import socket
import ssl
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from dynamo.runtime.http import exchange as exchanges
from dynamo.runtime.http import parser, server
from dynamo.testing.kube import (
    api,
    autoscaling,
    builtin_checks,
    calls,
    discovery,
    failures,
    resources,
    rights,
    tables,
    watches,
)

Object = dict[str, Any]
MAX_BODY_BYTES = 3 * 2**20
_UNREAD_S = 4 * 3600.0  # for which a log may wait for its reader, as with a kubelet
_POLICIES = ("Foreground", "Background", "Orphan")
_VERSION = {
    "major": "1",
    "minor": "33",
    "gitVersion": "v1.33.0+dynamo",
    "gitCommit": "",
    "gitTreeState": "clean",
    "buildDate": "2026-01-01T00:00:00Z",
    "goVersion": "",
    "compiler": "python",
    "platform": "linux/amd64",
}

# Answers requests to pods/log, pods/exec and the like: called with the exchange, the pod and the subresource.
PodHandler = Callable[["calls.ApiCall", Object, str], Awaitable[bool]]


class HttpFront:
    """The HTTP server of a cluster."""

    def __init__(
        self, served: api.Api, *, tls: ssl.SSLContext | None = None, authority: rights.Authority
    ) -> None:
        self.api = served
        self._authority = authority
        self.pod_handler: PodHandler | None = None
        self.pod_metrics: autoscaling.PodMetrics | None = None
        self.host = ""
        limits = parser.HttpLimits(
            body_bytes=MAX_BODY_BYTES, write_buffer_bytes=64 * 2**20, request_s=_UNREAD_S
        )
        self._server, self._outer_server = (
            server.HttpServer(
                self.answer, limits=limits, tls=tls, error_body=_error_body, takes_upgrades=True
            )
            for _ in range(2)
        )
        self._discovery = discovery.DiscoveryDocuments(served.registry)
        self._is_ready = True

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port. Raises ConfigError."""
        bound = await self._server.start(host, port, port_flag="--port")
        self.host = f"{host}:{bound}"
        return bound

    async def start_outside(self, listener: socket.socket) -> None:
        """Answer at the listening socket of another network as well."""
        await self._outer_server.start_on(listener)

    async def close(self) -> None:
        """Stop listening and end all watches."""
        await self._server.close()
        await self._outer_server.close()

    async def answer(self, exchange: exchanges.Exchange) -> None:
        exchange.headers = (
            ("audit-id", str(uuid.uuid4())),
            ("cache-control", "no-cache, private"),
        )
        call = calls.ApiCall(exchange)
        try:
            call.check_timeout()
            await self._route(call)
        except failures.ApiError as error:
            exchange.headers = (*exchange.headers, *error.headers)
            call.respond(error.code, error.body)

    async def _route(self, call: calls.ApiCall) -> None:
        path = call.request.path
        if path in ("/healthz", "/livez", "/readyz"):
            call.exchange.respond(200, b"ok", content_type="text/plain; charset=utf-8")
            return
        if path.rstrip("/") == "/version":
            call.respond(200, _VERSION)
            return
        call.user = self._authority.identify(call.request.headers)
        if await self._route_resource(call):
            return
        self._authority.check_path(call.user, path)
        if not self._discovery.answer(call, self.host):
            call.exchange.respond(
                404, b"404 page not found\n", content_type="text/plain; charset=utf-8"
            )

    async def _route_resource(self, call: calls.ApiCall) -> bool:
        group, version, additional = _split_path(call.request.path)
        if not additional:
            return False
        is_old_watch = additional[0] == "watch"
        additional = additional[1:] if is_old_watch else additional
        if (
            additional[0] == "namespaces"
            and len(additional) > 2
            and additional[2] not in ("status", "finalize")
        ):
            call.namespace, additional = additional[1], additional[2:]
        if additional[0] in rights.REVIEWS:
            call.respond(201, self._authority.review(call.request.body, call.user, additional[0]))
            return True
        resource = self.api.registry.find(group, version, additional[0])
        if resource is None or len(additional) > 3:
            return False
        is_post = call.request.method == "POST"
        if resource.is_namespaced and not call.namespace and (is_post or len(additional) > 1):
            if is_post and not resource.is_custom:
                raise failures.not_allowed(resource, "create")
            return False
        call.name, call.subresource = (*additional[1:], "", "")[:2]
        verb = _verb_of(call, is_old_watch=is_old_watch)
        plural = "/".join(filter(None, (resource.plural, call.subresource)))
        self._authority.check(
            call.user, rights.Access(verb, group, plural, call.namespace, call.name)
        )
        if resource.warning:
            call.warnings.append(resource.warning)
        if self.pod_metrics is not None and group == autoscaling.GROUP:
            await self.pod_metrics.refresh()
        await self._dispatch(call, resource, is_old_watch=is_old_watch)
        return True

    async def _dispatch(
        self, call: calls.ApiCall, resource: resources.ApiResource, *, is_old_watch: bool
    ) -> None:
        method = call.request.method
        if call.subresource not in ("", "status", "finalize") or (
            call.subresource == "status" and not resource.has_status
        ):
            await self._serve_subresource(call, resource)
        elif method in ("GET", "HEAD"):
            await self._read(call, resource, is_old_watch=is_old_watch)
        elif method == "POST" and not call.name:
            body = call.decode(resource)
            _check_object(body, resource, call)
            item = await self.api.create(resource, call.namespace, body, call.write_options())
            _respond_written(call, resource, 201, item)
        elif method == "PUT" and call.name:
            body = call.decode(resource)
            _check_object(body, resource, call)
            options = call.write_options()
            item = await self.api.update(resource, call.namespace, call.name, body, options)
            _respond_written(call, resource, 200, item)
        elif method == "PATCH" and call.name:
            await self._patch(call, resource)
        elif method == "DELETE" and call.subresource and resource.is_custom:
            raise failures.not_allowed(resource, "delete")
        elif method == "DELETE":
            await self._delete(call, resource)
        elif resource.is_custom and method in ("PUT", "PATCH"):
            raise failures.bad_request("name must be provided")
        else:
            raise failures.not_allowed(resource, "")

    async def _patch(self, call: calls.ApiCall, resource: resources.ApiResource) -> None:
        media_type = call.media_type
        is_apply = media_type == api.APPLY_PATCH
        if is_apply and not call.query.get("fieldManager"):
            error = failures.required("fieldManager", "is required for apply patch")
            raise failures.invalid("PatchOptions.meta.k8s.io", "", [error])
        if not is_apply and "force" in call.request.query and call.query.flag("force"):
            error = failures.forbidden_value("force", "may not be specified for non-apply patch")
            raise failures.invalid("PatchOptions.meta.k8s.io", "", [error])
        patch = call.decode(resource)
        is_list = media_type == api.JSON_PATCH
        if not isinstance(patch, list if is_list else dict):
            names: dict[type, str] = {list: "array", dict: "object", str: "string"}
            name = names.get(type(patch), "number")
            kind = "[]handlers.jsonPatchOp" if is_list else "map[string]interface {}"
            text = "error decoding patch: json: "
            if is_apply:
                text = "error decoding YAML: error unmarshaling JSON: while decoding JSON: json: "
            raise failures.bad_request(
                f"{text}cannot unmarshal {name} into Go value of type {kind}"
            )
        item, is_new = await self.api.patch(
            resource, call.namespace, call.name, media_type, patch, call.write_options()
        )
        _respond_written(call, resource, 201 if is_new else 200, item)

    async def _delete(self, call: calls.ApiCall, resource: resources.ApiResource) -> None:
        body = call.decode(resource) if call.request.body else {}
        body = body if isinstance(body, dict) else {}
        preconditions = body.get("preconditions") or {}
        grace = body.get("gracePeriodSeconds", call.query.number("gracePeriodSeconds"))
        options = api.DeleteOptions(
            policy=_policy_of(body) or call.query.get("propagationPolicy"),
            grace_s=grace,
            uid=preconditions.get("uid") or "",
            resource_version=preconditions.get("resourceVersion") or "",
            is_dry_run=call.query.get("dryRun") == "All" or "All" in (body.get("dryRun") or ()),
            user=call.user,
        )
        if not call.name:
            await self._delete_collection(call, resource, options)
            return
        if resource.key == ("batch", "jobs") and not options.policy:
            call.warnings.append(
                "child pods are preserved by default when jobs are deleted; set propagationPolicy=Background "
                "to remove them or set propagationPolicy=Orphan to suppress this warning"
            )
        item, is_gone = await self.api.delete(resource, call.namespace, call.name, options)
        if is_gone and resource.key != ("", "pods"):
            details = {"name": call.name, **({"group": resource.group} if resource.group else {})}
            details |= {"kind": resource.plural, "uid": item["metadata"]["uid"]}
            item = failures.success(details)
        call.respond(200, item)

    async def _delete_collection(
        self, call: calls.ApiCall, resource: resources.ApiResource, options: api.DeleteOptions
    ) -> None:
        labels, fields = call.query.get("labelSelector"), call.query.get("fieldSelector")
        items = []
        found = await self.api.list_items(resource, call.namespace, labels=labels, fields=fields)
        for item in found:
            meta = item["metadata"]
            home = meta.get("namespace", "")
            try:
                deleted, _ = await self.api.delete(resource, home, meta["name"], options)
                items.append(deleted)
            except failures.ApiError as error:
                if error.code != 404:
                    raise
        call.respond(
            200, _make_list(resource, items, {"resourceVersion": str(self.api.store.revision)})
        )

    async def _read(
        self, call: calls.ApiCall, resource: resources.ApiResource, *, is_old_watch: bool
    ) -> None:
        tables.check_accept(call.accept, calls.ACCEPTED)
        is_watch = is_old_watch or call.query.flag("watch")
        if call.name and not (is_watch and is_old_watch):
            watches.parse_revision(call.query.get("resourceVersion"), self.api.store.revision)
            item = await self.api.get(resource, call.namespace, call.name)
            call.respond(
                200,
                tables.present(resource, [item], call.accept, call.query.get("includeObject"), item)
                or item,
            )
        elif is_watch:
            await watches.Watch(self.api, resource, call).start()
        else:
            await self._list(call, resource)

    async def _list(self, call: calls.ApiCall, resource: resources.ApiResource) -> None:
        query = call.query
        test = self.api.make_test(resource, query.get("labelSelector"), query.get("fieldSelector"))
        limit, token = max(query.number("limit") or 0, 0), query.get("continue")

        def position(item: Object) -> str:
            """Return the place of an object in a list: its name, after the namespace in a list of all."""
            meta = item["metadata"]
            home = "" if call.namespace else meta.get("namespace")
            return f"/{home}/{meta['name']}" if home else f"/{meta['name']}"

        watches.check_list_options(query)
        revision = watches.parse_revision(query.get("resourceVersion"), self.api.store.revision)
        items, at, start = self.api.store, self.api.store.revision, ""
        is_exact = query.get("resourceVersionMatch") == "Exact" or (revision and limit)
        if token:
            at, start = decode_token(token, at)
        elif is_exact and revision:
            at = revision
        if query.get("resourceVersion") == "0":
            limit = 0
        findings = (
            items.list_items(resource.key, call.namespace)
            if at == items.revision
            else items.list_at(resource.key, call.namespace, at)
        )
        findings = [item for item in findings if test(item) and position(item) > start]
        page, additional = (findings[:limit], len(findings) - limit) if limit else (findings, 0)
        meta: Object = {"resourceVersion": str(at)}
        if additional > 0:
            meta["continue"] = encode_token(at, position(page[-1]))
            if not query.get("labelSelector") and not query.get("fieldSelector"):
                meta["remainingItemCount"] = additional
        shown = await self.api.present(resource, page)
        table = tables.present(resource, shown, call.accept, query.get("includeObject"), None, meta)
        call.respond(200, table or _make_list(resource, shown, meta))

    async def _serve_subresource(
        self, call: calls.ApiCall, resource: resources.ApiResource
    ) -> None:
        if call.subresource == "scale" and resource.scale is not None:
            await self._scale(call, resource, resource.scale)
            return
        if resource.key == ("", "pods"):
            if call.subresource in ("binding", "eviction"):
                await self._bind_or_evict(call, resource)
                return
            pod = await self.api.get(resource, call.namespace, call.name)
            if self.pod_handler is not None and await self.pod_handler(call, pod, call.subresource):
                return
        if resource.is_custom:
            raise failures.not_found(resource, call.name)
        text = "the server could not find the requested resource"
        raise failures.ApiError(404, "NotFound", text, {})

    async def _scale(
        self, call: calls.ApiCall, resource: resources.ApiResource, paths: resources.ScalePaths
    ) -> None:
        item = await self.api.get(resource, call.namespace, call.name)
        current = tables.scale_of(item, paths)
        method = call.request.method
        if method == "PATCH":
            body = call.decode(resource)
            media_type = call.media_type
            if media_type == api.APPLY_PATCH:
                text = (
                    f"failed to convert new object ({call.namespace}/{call.name}; autoscaling/v1, "
                    "Kind=Scale) to proper version: request to convert CR to an invalid group/version: "
                    "autoscaling/v1"
                )
                raise failures.ApiError(500, "", text)
            # a scale has no lists that a strategic patch could merge
            kind = api.JSON_PATCH if media_type == api.JSON_PATCH else api.MERGE_PATCH
            body = self.api.apply_patch(resource, current, kind, body)
        elif method == "PUT":
            body = call.decode(resource)
        else:
            call.respond(200, current)
            return
        replicas = (body.get("spec") or {}).get("replicas", 0)
        version = (body.get("metadata") or {}).get("resourceVersion")
        if version and version != current["metadata"]["resourceVersion"]:
            raise failures.conflict(resource, call.name)
        changed, _ = await self.api.patch(
            resource,
            call.namespace,
            call.name,
            api.MERGE_PATCH,
            paths.change(replicas),
            call.write_options(),
        )
        call.respond(200, tables.scale_of(changed, paths))

    async def _bind_or_evict(self, call: calls.ApiCall, resource: resources.ApiResource) -> None:
        body = call.decode(resource)
        _check_object(body, resource, call)
        if call.subresource == "binding":
            node = (body.get("target") or {}).get("name")
            if not node:
                error = failures.required("target.name")
                raise failures.invalid("Binding", call.name, [error])
            await self.api.bind(call.namespace, call.name, node)
        else:
            options = api.DeleteOptions(
                grace_s=(body.get("deleteOptions") or {}).get("gracePeriodSeconds")
            )
            await self.api.delete(resource, call.namespace, call.name, options)
        call.respond(201, {**failures.success(), "code": 201})


def _respond_written(
    call: calls.ApiCall, resource: resources.ApiResource, status: int, item: Object
) -> None:
    """Answer a write, and say what this cluster does not do of it."""
    if not (resource.is_custom or call.subresource):
        call.warnings.extend(builtin_checks.notices(resource, item))
    call.respond(status, item)


def _policy_of(body: dict[str, Any]) -> str:
    """Return how the options of a deletion want dependents treated. Raises ApiError (422)."""
    policy, orphans = body.get("propagationPolicy"), body.get("orphanDependents")
    if policy is not None and orphans is not None:
        text = "orphanDependents and deletionPropagation cannot be both set"
        error = failures.invalid_value("propagationPolicy", json.dumps(policy), text)
        raise failures.invalid("DeleteOptions.meta.k8s.io", "", [error])
    if policy not in (None, *_POLICIES):
        choices = ", ".join(json.dumps(choice) for choice in (*_POLICIES, "nil"))
        error = failures.unsupported("propagationPolicy", json.dumps(policy), choices)
        raise failures.invalid("DeleteOptions.meta.k8s.io", "", [error])
    if orphans is not None:
        return "Orphan" if orphans else "Background"
    return policy or ""


def _split_path(path: str) -> tuple[str, str, list[str]]:
    """Return group, version and the parts behind them of a path to resources; no parts for another path."""
    parts = [part for part in path.split("/") if part]
    if parts[:1] == ["api"]:
        return "", "".join(parts[1:2]), parts[2:]
    return (parts[1], parts[2], parts[3:]) if parts[:1] == ["apis"] and parts[3:] else ("", "", [])


def _verb_of(call: calls.ApiCall, *, is_old_watch: bool) -> str:
    """Return what a request does, as the rules of roles call it."""
    match call.request.method:
        case "GET" | "HEAD" if is_old_watch or (not call.name and call.query.flag("watch")):
            return "watch"
        case "GET" | "HEAD":
            return "get" if call.name else "list"
        case "DELETE":
            return "delete" if call.name else "deletecollection"
        case method:
            return {"POST": "create", "PUT": "update", "PATCH": "patch"}.get(method, method.lower())


_TYPE_FIELDS = (("APIVersion", "apiVersion"), ("Kind", "kind"))


def _error_body(status: int, message: str, path: str) -> bytes:
    return json.dumps(failures.ApiError(status, "", message).body).encode()


def _check_object(body: Any, resource: resources.ApiResource, call: calls.ApiCall) -> None:
    if not isinstance(body, dict):
        name = "array" if isinstance(body, list) else "string"
        fields = "; ".join(
            f'{field} string "json:\\"{key},omitempty\\""' for field, key in _TYPE_FIELDS
        )
        raise call.unrecognized(
            resource,
            f"couldn't get version/kind; json parse error: json: cannot unmarshal {name}"
            f" into Go value of type struct {{ {fields} }}",
        )
    if resource.is_custom and not body.get("kind"):
        text = call.request.body.decode("utf-8", "replace")
        raise call.unrecognized(resource, f"Object 'Kind' is missing in '{text}'")


def _make_list(resource: resources.ApiResource, items: list[Object], meta: Object) -> Object:
    head = {"kind": resource.list_kind, "apiVersion": resource.api_version}
    if resource.is_custom:
        meta = {"continue": "", **meta}
        return {
            "apiVersion": head["apiVersion"],
            "items": items,
            "kind": head["kind"],
            "metadata": meta,
        }
    shown = [
        {name: value for name, value in item.items() if name not in ("kind", "apiVersion")}
        for item in items
    ]
    return {**head, "metadata": meta, "items": shown}


def encode_token(revision: int, last: str) -> str:
    """Return the token that continues a list of a revision behind an object."""
    token = {"v": "meta.k8s.io/v1", "rv": revision, "start": f"{last}\0"}
    text = json.dumps(token, separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def decode_token(token: str, revision: int) -> tuple[int, str]:
    """Return revision and position of a token. Raises ApiError (400)."""
    mistake = "illegal base64 data"
    try:
        text = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode("utf-8", "replace")
        if not text.startswith("{"):
            mistake = f"invalid character {text[:1]!r} looking for beginning of value"
        content = json.loads(text)
        at = int(content["rv"])
        return (at if at > 0 else revision), content["start"].rstrip("\0")
    except (ValueError, KeyError, TypeError):
        text = f"invalid continue token: continue key is not valid: {mistake}"
        raise failures.bad_request(text) from None
