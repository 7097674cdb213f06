"""The clients of the API server and their rights: tokens, impersonation, and RBAC over the stored roles.

The owner of the cluster's token may do everything, as a member of system:masters. Each service account has a token of
its own, derived from that one, with which its pods come; their rights are those of the bindings, and no others. As on
a real server, a client cannot grant rights by a role or a binding which it has not itself.
"""

import hashlib
import hmac
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dynamo.testing.kube import failures, protobuf, resources, store

Object = dict[str, Any]
_RBAC, _ACCOUNTS = "rbac.authorization.k8s.io", ("", "serviceaccounts")
_AUTHORIZATION = "authorization.k8s.io/v1"
_MASTERS, _AUTHENTICATED = "system:masters", "system:authenticated"
_ACCOUNT = "system:serviceaccount"
REVIEWS = {"selfsubjectaccessreviews": "SelfSubjectAccessReview", "subjectaccessreviews": "SubjectAccessReview",
           "selfsubjectreviews": "SelfSubjectReview"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class User:
    """A client, as authentication finds it."""

    name: str
    groups: tuple[str, ...] = (_AUTHENTICATED,)


ADMIN = User("admin", (_MASTERS, _AUTHENTICATED))
ANONYMOUS = User("system:anonymous", ("system:unauthenticated",))


@dataclass(frozen=True, slots=True)
class Access:
    """One thing that a client wants to do; `resource` has its subresource behind a slash."""

    verb: str
    group: str
    resource: str
    namespace: str = ""
    name: str = ""

    def is_allowed_by(self, rule: Object) -> bool:
        """Return True if a rule of a role allows this."""
        wanted = (("verbs", self.verb), ("apiGroups", self.group), ("resources", self.resource))
        names = rule.get("resourceNames")
        return all(_has(rule.get(key), value) for key, value in wanted) and (
            not names or self.name in names
        )


def _has(values: Iterable[str] | None, value: str) -> bool:
    present = tuple(values or ())
    return value in present or "*" in present or f"*/{value.partition('/')[2]}" in present


def account_user(namespace: str, name: str) -> User:
    groups = (f"{_ACCOUNT}s", f"{_ACCOUNT}s:{namespace}", _AUTHENTICATED)
    return User(f"{_ACCOUNT}:{namespace}:{name}", groups)


class Authority:
    """Authenticates the clients of one cluster, and decides what they may do."""

    def __init__(self, objects: store.Store, token: str) -> None:
        self._store, self._token = objects, token

    def account_token(self, namespace: str, name: str) -> str:
        account = f"{namespace}:{name}"
        mark = hmac.new(self._token.encode(), account.encode(), hashlib.sha256).hexdigest()
        return f"{account}:{mark}"

    def identify(self, headers: Mapping[str, str]) -> User:
        """Return the client of a request with these headers. Raises ApiError (401, 403)."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return ANONYMOUS
        user = self._find_user(token.strip())
        impersonated = headers.get("impersonate-user")
        if not impersonated:
            return user
        if _MASTERS not in user.groups:
            why = f'User "{user.name}" cannot impersonate resource "users" in API group "" at the cluster scope'
            raise failures.ApiError(403, "Forbidden", f'users "{impersonated}" is forbidden: {why}')
        groups = [text.strip() for text in headers.get("impersonate-group", "").split(",") if text]
        if impersonated.startswith(f"{_ACCOUNT}:") and impersonated.count(":") == 3:
            return account_user(*impersonated.split(":")[2:])
        return User(impersonated, (*groups, _AUTHENTICATED))

    def _find_user(self, token: str) -> User:
        if hmac.compare_digest(token.encode(), self._token.encode()):
            return ADMIN
        namespace, _, end = token.partition(":")
        name = end.rpartition(":")[0]
        is_ours = hmac.compare_digest(token.encode(), self.account_token(namespace, name).encode())
        if not is_ours or self._store.get(_ACCOUNTS, (namespace, name)) is None:
            raise failures.ApiError(401, "Unauthorized", "Unauthorized")
        return account_user(namespace, name)

    def allows(self, user: User, access: Access) -> bool:
        """Return True if a client may do this."""
        return _MASTERS in user.groups or any(
            access.is_allowed_by(rule) for rule in self._rules_of(user, access.namespace)
        )

    def check(self, user: User, access: Access) -> None:
        """Refuse what a client may not do. Raises ApiError (403)."""
        if self.allows(user, access):
            return
        where = (
            f'in the namespace "{access.namespace}"' if access.namespace else "at the cluster scope"
        )
        plural = access.resource.partition("/")[0]
        qualified = f"{plural}.{access.group}" if access.group else plural
        subject = f'{qualified} "{access.name}"' if access.name else qualified
        details = {"name": access.name} if access.name else {}
        details |= {"group": access.group} if access.group else {}
        raise failures.ApiError(
            403,
            "Forbidden",
            f'{subject} is forbidden: User "{user.name}" cannot {access.verb} resource "{access.resource}" in API'
            f' group "{access.group}" {where}',
            {**details, "kind": plural},
        )

    def check_path(self, user: User, path: str) -> None:
        """Refuse a path without resources to clients that are not authenticated. Raises ApiError (403)."""
        is_document = path.startswith(("/api", "/openapi"))
        if _MASTERS in user.groups or (is_document and _AUTHENTICATED in user.groups):
            return
        text = f'forbidden: User "{user.name}" cannot get path "{path}"'
        raise failures.ApiError(403, "Forbidden", text, {})

    def _rules_of(self, user: User, namespace: str) -> Iterator[Object]:
        """Yield the rules that hold for a client in a namespace, or for the cluster."""
        for plural, home in (("clusterrolebindings", ""), ("rolebindings", namespace)):
            if plural == "rolebindings" and not namespace:
                continue
            for binding in self._store.list_items((_RBAC, plural), home):
                if any(_is_subject(entry, user, home) for entry in binding.get("subjects") or ()):
                    yield from self._rules_behind(binding["roleRef"], home)

    def _rules_behind(self, reference: Object, namespace: str) -> list[Object]:
        if reference["name"] == "cluster-admin":
            return [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}]
        is_role = reference["kind"] == "Role"
        key = (_RBAC, "roles" if is_role else "clusterroles")
        role = self._store.get(key, (namespace if is_role else "", reference["name"]))
        return (role or {}).get("rules") or []

    def check_write(
        self, user: User, resource: resources.ApiResource, item: Object, *, is_applied: bool
    ) -> None:
        """Refuse a role or binding that grants more than its writer has, and an apply that creates without the right.

        `is_applied` holds for a new object that comes by apply. Raises ApiError (403).
        """
        if _MASTERS in user.groups:
            return
        namespace, name = item["metadata"].get("namespace", ""), item["metadata"].get("name", "")
        if is_applied:
            self.check(user, Access("create", resource.group, resource.plural, namespace, name))
        granted = item.get("rules") or []
        if "roleRef" in item:
            granted = self._rules_behind(item["roleRef"], namespace)
        own_rules = list(self._rules_of(user, namespace))
        missing = [rule for rule in granted if not _is_covered(rule, own_rules)]
        if resource.group == _RBAC and missing:
            why = (
                f'user "{user.name}" (groups={json.dumps(user.groups)}) is attempting to grant RBAC permissions not'
                f" currently held:\n{json.dumps(missing)}"
            )
            raise failures.forbidden(resource, name, why)

    def review(self, body: bytes, user: User, plural: str) -> Object:
        """Answer a question about rights (`kubectl auth can-i`, `whoami`). Raises ApiError."""
        kind = REVIEWS[plural]
        if plural == "selfsubjectreviews":
            info = {"username": user.name, "groups": list(user.groups)}
            return _answer("authentication.k8s.io/v1", kind, {"status": {"userInfo": info}})
        if body.startswith(protobuf.MAGIC):
            spec = protobuf.decode(body, _AUTHORIZATION, kind).get("spec") or {}
        else:
            try:
                spec = json.loads(body)["spec"]
            except (ValueError, LookupError, TypeError) as error:
                raise failures.bad_request(f"{kind}: expected an object with a spec") from error
        wanted = spec.get("resourceAttributes") or {}
        if plural == "subjectaccessreviews":
            user = User(spec.get("user", ""), (*(spec.get("groups") or ()), _AUTHENTICATED))
        plural_name = wanted.get("resource", "")
        access = Access(
            wanted.get("verb", ""),
            wanted.get("group", ""),
            "/".join(filter(None, (plural_name, wanted.get("subresource", "")))),
            wanted.get("namespace", ""),
            wanted.get("name", ""),
        )
        status = {"allowed": self.allows(user, access)}
        return _answer(_AUTHORIZATION, kind, {"spec": spec, "status": status})


def _answer(api_version: str, kind: str, content: Object) -> Object:
    return {"kind": kind, "apiVersion": api_version, "metadata": {}, **content}


def _is_subject(entry: Object, user: User, namespace: str) -> bool:
    match entry.get("kind"):
        case "ServiceAccount":
            home = entry.get("namespace") or namespace
            return user.name == f"{_ACCOUNT}:{home}:{entry['name']}"
        case "Group":
            return entry["name"] in user.groups
        case _:
            return bool(entry["name"] == user.name)


def _is_covered(rule: Object, own_rules: list[Object]) -> bool:
    """Return True if other rules allow all that a rule grants."""
    return all(
        any(Access(verb, group, plural, name=name).is_allowed_by(own) for own in own_rules)
        for verb in rule.get("verbs") or ()
        for group in rule.get("apiGroups") or ()
        for plural in rule.get("resources") or ()
        for name in rule.get("resourceNames") or ("",)
    )
