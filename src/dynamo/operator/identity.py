"""What the pods of a graph are allowed to do and know: accounts, roles, and the cluster token of a dynamo namespace.

The planner's account and the token belong to several graphs of a namespace, so each graph that uses them is one of
their owners, and the last one takes them with it. A token is made once and never changed: running pods have it. If its
Secret is lost, the next one says since when there is another token, and the pods with the former one are replaced.
"""  # decider

import base64
import re
from collections.abc import Iterator
from typing import Any

from dynamo.base import errors
from dynamo.operator import api_types, objects, pod_template
from dynamo.operator.objects import Object, Observed

_RBAC = "rbac.authorization.k8s.io"
_READ = ["get", "list", "watch"]
DISCOVERY_RULES = [
    {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": _READ},
    {"apiGroups": [""], "resources": ["pods"], "verbs": _READ},
    {
        "apiGroups": [api_types.GROUP],
        "resources": ["dynamoworkermetadatas"],
        "verbs": [*_READ, "create", "update", "patch", "delete"],
    },
]
PLANNER_RULES = [
    *DISCOVERY_RULES,
    {
        "apiGroups": [api_types.GROUP],
        "resources": ["dynamographdeployments", "dynamocomponentdeployments"],
        "verbs": [*_READ, "patch"],
    },
    {
        "apiGroups": [api_types.GROUP],
        "resources": [
            "dynamographdeploymentscalingadapters",
            "dynamographdeploymentscalingadapters/scale",
        ],
        "verbs": [*_READ, "patch", "update"],
    },
    {"apiGroups": ["apps"], "resources": ["deployments"], "verbs": _READ},
]


_LABEL_VALUE = re.compile("[a-z0-9]([-_a-z0-9]*[a-z0-9])?")


def check_namespace(dynamo_namespace: str) -> None:
    """Raise ConfigError for a dynamo namespace that cannot be the value of a label, as which pods have it."""
    if len(dynamo_namespace) > 63 or not _LABEL_VALUE.fullmatch(dynamo_namespace):
        raise errors.ConfigError(
            f"dynamoNamespace {dynamo_namespace}, by default dynamo- and the name of the deployment:"
            " expected at most 63 lower-case letters, digits, - and _, the first and the last no - or _;"
            " an update of workers adds nine"
        )


def find_namespace(resource: Object) -> str:
    """Return the dynamo namespace of a component; for one that stands alone it is named as that of a graph."""
    spec, name = resource["spec"], resource["metadata"]["name"]
    own = f"dynamo-{objects.labels_of(resource).get(objects.GRAPH_LABEL, name)}"
    default = "dynamo" if spec.get("globalDynamoNamespace") else own
    return str(spec.get("dynamoNamespace") or default)


def make_accounts(
    owner: Object, observed: Observed, *, graph: str, discovers: bool, has_planner: bool
) -> Iterator[Object]:
    """Yield the accounts, roles and bindings of a graph."""
    if discovers:
        yield from _make_account(owner, pod_template.discovery_account(graph), DISCOVERY_RULES)
    if has_planner:
        for rendered in _make_account(owner, pod_template.PLANNER_ACCOUNT, PLANNER_RULES):
            existing = observed.find(rendered["kind"], rendered["metadata"]["name"])
            rendered["metadata"]["ownerReferences"] = shared_owners(owner, existing)
            yield rendered


def _make_account(owner: Object, name: str, rules: list[Any]) -> Iterator[Object]:
    role = {"apiGroup": _RBAC, "kind": "Role", "name": f"{name}-role"}
    subject = {
        "kind": "ServiceAccount",
        "name": name,
        "namespace": owner["metadata"]["namespace"],
    }
    yield objects.make_object("v1", "ServiceAccount", name, owner)
    yield objects.make_object(f"{_RBAC}/v1", "Role", role["name"], owner, rules=rules)
    yield objects.make_object(
        f"{_RBAC}/v1",
        "RoleBinding",
        f"{name}-binding",
        owner,
        roleRef=role,
        subjects=[subject],
    )


def shared_owners(owner: Object, existing: Object | None) -> list[Object]:
    """Return the owners of an object that several graphs use, this one included, none of them controlling."""
    own = {**objects.owner_reference(owner), "controller": False, "blockOwnerDeletion": False}
    present = (existing or {}).get("metadata", {}).get("ownerReferences") or []
    return [*(entry for entry in present if entry["uid"] != own["uid"]), own]


def find_renewal(owner: Object, observed: Observed, dynamo_namespace: str) -> str:
    """Return since when pods of a dynamo namespace need another token, as theirs was lost; empty if it was not."""
    secret = observed.find("Secret", pod_template.token_secret_name(dynamo_namespace))
    if secret is not None:
        return objects.annotations_of(secret).get(objects.TOKEN_ANNOTATION, "")
    kinds = ("DynamoComponentDeployment", "Deployment", "LeaderWorkerSet", "PodCliqueSet")
    users = [objects.labels_of(item) for kind in kinds for item in observed.owned_by(owner, kind)]
    namespaces = {
        labels.get(objects.NAMESPACE_LABEL, "").removesuffix(f"-{labels.get(objects.HASH_LABEL)}")
        for labels in users
    }
    return observed.now if dynamo_namespace in namespaces else ""


def mark_renewal(spec: Object, renewed_at: str) -> Object:
    """Return the spec of a component with an annotation by which its pods are replaced if their token was renewed."""
    if not renewed_at:
        return spec
    annotations = {**(spec.get("annotations") or {}), objects.TOKEN_ANNOTATION: renewed_at}
    return {**spec, "annotations": annotations}


def make_token_secret(
    owner: Object, dynamo_namespace: str, token: str, renewed_at: str = ""
) -> Object:
    """Return the Secret with the cluster token of a dynamo namespace."""
    secret = objects.make_object(
        "v1",
        "Secret",
        pod_template.token_secret_name(dynamo_namespace),
        owner,
        annotations={objects.TOKEN_ANNOTATION: renewed_at} if renewed_at else {},
        type="Opaque",
        data={pod_template.TOKEN_KEY: base64.b64encode(token.encode()).decode()},
    )
    secret["metadata"]["ownerReferences"] = shared_owners(owner, None)
    return secret


def adopt_secret(owner: Object, existing: Object) -> Object | None:
    """Return the patch that makes `owner` one of a Secret's owners, or None if it is one."""
    if objects.is_owned(existing, owner):
        return None
    return objects.make_adoption(existing, shared_owners(owner, existing))
