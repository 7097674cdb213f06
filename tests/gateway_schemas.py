"""The objects of the Gateway API and of Envoy Gateway that our manifests have, as schemas without further fields.

They have the fields of the standard channel (v1) and of EnvoyPatchPolicy (v1alpha1) by their published references, as
far as our manifests may want them: a field that is not here is to be looked up and added.
"""

import jsonschema

_LABEL = {"type": "string", "maxLength": 63, "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}
_NAME = {"type": "string", "minLength": 1, "maxLength": 253}
_KIND = {"type": "string", "maxLength": 63, "pattern": r"^[a-zA-Z]([-a-zA-Z0-9]*[a-zA-Z0-9])?$"}
_HOST = {"type": "string", "maxLength": 253, "pattern": r"^(\*\.)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"}
_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
_DURATION = {"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}


def _record(*required, **fields):
    return {
        "type": "object",
        "required": list(required),
        "properties": fields,
        "additionalProperties": False,
    }


def _list(items, most):
    return {"type": "array", "minItems": 1, "maxItems": most, "items": items}


_REFERENCE = {"group": {"type": "string", "maxLength": 253}, "kind": _KIND, "name": _NAME}
_PARENT = _record("name", **_REFERENCE, namespace=_LABEL, sectionName=_NAME, port=_PORT)
_BACKEND = _record(
    "name",
    **_REFERENCE,
    namespace=_LABEL,
    port=_PORT,
    weight={"type": "integer", "minimum": 0, "maximum": 1_000_000},
)
_PATH = _record(
    type={"enum": ["Exact", "PathPrefix", "RegularExpression"]},
    value={"type": "string", "maxLength": 1024, "pattern": "^/"},
)
_HEADER = _record(
    "name",
    "value",
    type={"enum": ["Exact", "RegularExpression"]},
    name=_NAME,
    value={"type": "string", "minLength": 1, "maxLength": 4096},
)
_MATCH = _record(
    path=_PATH,
    headers=_list(_HEADER, 16),
    method={"enum": "GET HEAD POST PUT DELETE CONNECT OPTIONS TRACE PATCH".split()},  # noqa: SIM905
)
_ROUTE = _record(
    parentRefs=_list(_PARENT, 32),
    hostnames=_list(_HOST, 16),
    rules=_list(
        _record(
            name=_NAME,
            matches=_list(_MATCH, 64),
            backendRefs=_list(_BACKEND, 16),
            timeouts=_record(request=_DURATION, backendRequest=_DURATION),
        ),
        16,
    ),
)
_GATEWAY = _record(
    "gatewayClassName",
    "listeners",
    gatewayClassName=_NAME,
    listeners=_list(
        _record(
            "name",
            "port",
            "protocol",
            name=_NAME,
            hostname=_HOST,
            port=_PORT,
            protocol={"enum": ["HTTP", "HTTPS", "TLS", "TCP", "UDP"]},
            allowedRoutes=_record(
                namespaces=_record(**{"from": {"enum": ["All", "Selector", "Same"]}})
            ),
        ),
        64,
    ),
)
_PATCH = _record(
    "type",
    "name",
    "operation",
    type={
        "enum": [
            f"type.googleapis.com/envoy.config.{name}"
            for name in (
                "listener.v3.Listener",
                "route.v3.RouteConfiguration",
                "cluster.v3.Cluster",
                "endpoint.v3.ClusterLoadAssignment",
            )
        ]
    },
    name=_NAME,
    operation=_record(
        "op",
        op={"enum": ["add", "remove", "replace", "move", "copy", "test"]},
        path={"type": "string"},
        jsonPath={"type": "string"},
        value={},
        **{"from": {"type": "string"}},
    ),
)
_POLICY = _record(
    "type",
    "targetRef",
    type={"enum": ["JSONPatch"]},
    targetRef=_record("group", "kind", "name", **_REFERENCE),
    jsonPatches={"type": "array", "items": _PATCH},
    priority={"type": "integer"},
)
_SPECS = {
    ("gateway.networking.k8s.io/v1", "Gateway"): _GATEWAY,
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): _ROUTE,
    ("gateway.envoyproxy.io/v1alpha1", "EnvoyPatchPolicy"): _POLICY,
}


def find_mistakes(item):
    """Return the mistakes in the spec of an object, with their places."""
    validator = jsonschema.Draft202012Validator(_SPECS[item["apiVersion"], item["kind"]])
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(item["spec"])]
