"""`make crds`: write the custom resource definitions from the operator's Python types, so that the two cannot differ.

    python deploy/crds/generate.py

A type is written once (`dynamo.operator.api_types`); the schema that the API server checks and `kubectl explain` shows
is derived from it. What msgspec cannot say stands in `Meta(extra_json_schema=...)` and is copied: formats, Kubernetes's
extensions (`x-kubernetes-...`), and rules in CEL. Each file is JSON, which is YAML too, and stays far below the 256 KiB
that `kubectl apply` can note in its annotation.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from dynamo.operator import api_types, versions

Schema = dict[str, Any]
_BOUNDS = {"ge": "minimum", "le": "maximum", "pattern": "pattern"}


def schema_of(kind: Any) -> Schema:
    """Return the structural schema of a msgspec type."""
    return _render(inspect.type_info(kind))


def _render(kind: inspect.Type) -> Schema:
    match kind:
        case inspect.Metadata():
            extra = kind.extra_json_schema or {}
            return {**_without_any(_render(kind.type), extra), **extra}
        case inspect.UnionType():
            return _render_union(kind)
        case inspect.StructType():
            return _render_struct(kind)
        case inspect.DictType():
            return _sized(
                {"type": "object", "additionalProperties": _render(kind.value_type)},
                kind,
                "Properties",
            )
        case inspect.ListType() | inspect.VarTupleType():
            return _sized({"type": "array", "items": _render(kind.item_type)}, kind, "Items")
        case _:
            return _render_scalar(kind)


def _render_scalar(kind: inspect.Type) -> Schema:
    match kind:
        case inspect.LiteralType():
            return {"type": "string", "enum": list(kind.values)}
        case inspect.StrType():
            return _sized({"type": "string"}, kind, "Length")
        case inspect.IntType():
            return _sized({"type": "integer"}, kind, "")
        case inspect.BoolType():
            return {"type": "boolean"}
        case inspect.AnyType():
            return {"x-kubernetes-preserve-unknown-fields": True}
        case _:
            raise TypeError(f"{kind!r} has no structural schema: use one of those above")


def _render_union(kind: inspect.UnionType) -> Schema:
    """Render `X | None` as X: a field that is null is one that is absent; int or str is Kubernetes's int-or-string."""
    kinds = [member for member in kind.types if not isinstance(member, inspect.NoneType)]
    if len(kinds) == 1:
        return _render(kinds[0])
    return {"x-kubernetes-int-or-string": True, "anyOf": [_render(member) for member in kinds]}


def _render_struct(kind: inspect.StructType) -> Schema:
    schema: Schema = {"type": "object"}
    if text := kind.cls.__doc__:
        schema["description"] = " ".join(text.split())
    schema["properties"] = {
        field.encode_name: _render(field.type)
        | ({"default": field.default} if isinstance(field.default, int) else {})
        for field in kind.fields
    }
    if required := [field.encode_name for field in kind.fields if field.required]:
        schema["required"] = required
    if rules := getattr(kind.cls, "RULES", ()):
        schema["x-kubernetes-validations"] = [
            {"rule": rule, "message": message} for rule, message in rules
        ]
    return schema


def _sized(schema: Schema, kind: Any, noun: str) -> Schema:
    for attribute, keyword in _BOUNDS.items():
        if (value := getattr(kind, attribute, None)) is not None:
            schema[keyword] = value
    for attribute in ("min", "max"):
        if (value := getattr(kind, f"{attribute}_length", None)) is not None:
            schema[f"{attribute}{noun}"] = value
    return schema


def _without_any(schema: Schema, extra: Schema) -> Schema:
    """Leave out the schema of arbitrary values where `extra` says more: properties, or that unknown ones are kept."""
    if extra.keys() & {"properties", "x-kubernetes-preserve-unknown-fields"}:
        return {key: value for key, value in schema.items() if key != "additionalProperties"}
    return schema


_AGE = {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}
_NAME_RULE = {
    "rule": "!has(self.spec) || !has(self.spec.services) || self.spec.services.all(a, size(self.metadata.name) + 1"
    f" + size(a) <= {api_types.MAX_DERIVED_NAME})",
    "message": "the name of the deployment and that of each service, joined by -, may have"
    f" {api_types.MAX_DERIVED_NAME} characters together: Services and labels are named by them",
}

_BETA_NAME_RULE = {
    "rule": "!has(self.spec) || !has(self.spec.components) || self.spec.components.all(a, size(self.metadata.name) + 1"
    f" + size(a.name) <= {api_types.MAX_DERIVED_NAME})",
    "message": _NAME_RULE["message"].replace("service", "component"),
}
_PROFILED_RULE = {
    "rule": "!has(oldSelf.status) || !has(oldSelf.status.state) || oldSelf.status.state in ['Pending', 'Failed']"
    " || self.spec == oldSelf.spec",
    "message": "spec is immutable once profiling has begun: make another request",
}


def _column(name: str, path: str, kind: str = "string", priority: int = 0) -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": kind, "jsonPath": path}
    return column | ({"priority": priority} if priority else {})


def _condition(kind: str, field: str) -> str:
    return f".status.conditions[?(@.type=='{kind}')].{field}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """One kind: its names, types and the columns that `kubectl get` shows beside name and age."""

    kind: str
    plural: str
    short: str
    spec: type
    status: type | None = None
    columns: tuple[dict[str, Any], ...] = ()
    scale: dict[str, str] | None = None
    rules: tuple[dict[str, str], ...] = ()
    beta_spec: type | None = None  # of v1beta1
    beta_rules: tuple[dict[str, str], ...] = ()

    def render(self) -> dict[str, Any]:
        """Return the definition as Kubernetes takes it."""
        subresources: dict[str, Any] = {} if self.status is None else {"status": {}}
        if self.scale is not None:
            subresources["scale"] = self.scale
        common = {
            "subresources": subresources,
            "additionalPrinterColumns": [*self.columns, _AGE],
        }
        schema = {"openAPIV3Schema": self._schema(self.spec, self.rules)}
        version = {"name": api_types.VERSION, "served": True, "storage": True, "schema": schema}
        listed = [{**version, **common}]
        if self.beta_spec is not None:  # served once an operator's webhook converts it
            schema = {"openAPIV3Schema": self._schema(self.beta_spec, self.beta_rules)}
            version = {"name": versions.BETA_VERSION, "served": False, "storage": False}
            listed.append({**version, "schema": schema, **common})
        names = {
            "kind": self.kind,
            "listKind": f"{self.kind}List",
            "plural": self.plural,
            "singular": self.kind.lower(),
            "shortNames": [self.short],
        }
        return {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": f"{self.plural}.{api_types.GROUP}"},
            "spec": {
                "group": api_types.GROUP,
                "names": names,
                "scope": "Namespaced",
                "versions": listed,
            },
        }

    def _schema(self, spec: type, rules: tuple[dict[str, str], ...]) -> Schema:
        texts = {
            name: {"type": kind}
            for name, kind in (("apiVersion", "string"), ("kind", "string"), ("metadata", "object"))
        }
        complete_schema: Schema = {
            "type": "object",
            "description": schema_of(spec)["description"],
            "properties": {**texts, "spec": schema_of(spec)},
        }
        if self.status is not None:
            complete_schema["properties"]["status"] = schema_of(self.status)
        if rules:
            complete_schema["x-kubernetes-validations"] = list(rules)
        return complete_schema


DEFINITIONS = (
    Definition(
        kind="DynamoGraphDeployment",
        plural="dynamographdeployments",
        short="dgd",
        spec=api_types.GraphSpec,
        status=api_types.GraphStatus,
        columns=(
            _column("Ready", _condition("Ready", "status")),
            _column("State", ".status.state"),
            _column("Message", _condition("Ready", "message")),
        ),
        rules=(_NAME_RULE,),
        beta_spec=versions.BetaGraphSpec,
        beta_rules=(_BETA_NAME_RULE,),
    ),
    Definition(
        kind="DynamoComponentDeployment",
        plural="dynamocomponentdeployments",
        short="dcd",
        spec=api_types.ComponentSpec,
        status=api_types.ComponentStatus,
        columns=(
            _column("DynamoComponent", ".spec.dynamoComponent"),
            _column("Available", _condition("Available", "status")),
            _column("Message", _condition("Available", "message"), priority=1),
        ),
    ),
    Definition(
        kind="DynamoGraphDeploymentRequest",
        plural="dynamographdeploymentrequests",
        short="dgdr",
        spec=api_types.RequestSpec,
        status=api_types.RequestStatus,
        columns=(_column("Model", ".spec.model"), _column("State", ".status.state")),
        rules=(_PROFILED_RULE,),
    ),
    Definition(
        kind="DynamoGraphDeploymentScalingAdapter",
        plural="dynamographdeploymentscalingadapters",
        short="dgdsa",
        spec=api_types.ScalingSpec,
        status=api_types.ScalingStatus,
        columns=(
            _column("Deployment", ".spec.dgdRef.name"),
            _column("Service", ".spec.dgdRef.serviceName"),
            _column("Desired", ".spec.replicas", "integer"),
            _column("Current", ".status.replicas", "integer"),
        ),
        scale={
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        },
    ),
    Definition(
        kind="DynamoModel",
        plural="dynamomodels",
        short="dm",
        spec=api_types.ModelSpec,
        status=api_types.ModelStatus,
        columns=(
            _column("Base", ".spec.baseModelName"),
            _column("Ready", ".status.readyEndpoints", "integer"),
            _column("Total", ".status.totalEndpoints", "integer"),
        ),
    ),
    Definition(
        kind="DynamoWorkerMetadata",
        plural="dynamoworkermetadatas",
        short="dwm",
        spec=api_types.WorkerMetadataSpec,
    ),
)


PACKAGED = Path(api_types.__file__).with_name("definitions.json")  # for `dynamo kube up`


def render_package() -> str:
    """Return all definitions as one list, one a line."""
    lines = [msgspec.json.encode(definition.render()).decode() for definition in DEFINITIONS]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def render_files() -> dict[str, str]:
    """Return the text of each file of deploy/crds by its name."""
    return {
        f"{definition.plural}.yaml": msgspec.json.format(
            msgspec.json.encode(definition.render()), indent=2
        ).decode()
        + "\n"
        for definition in DEFINITIONS
    }


if __name__ == "__main__":
    for file_name, text in render_files().items():
        (Path(__file__).parent / file_name).write_text(text)
    PACKAGED.write_text(render_package())
