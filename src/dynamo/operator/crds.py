"""The custom resource definitions: `make crds` writes them to deploy/crds, and a test compares.

    python -m dynamo.operator.crds DIRECTORY

Each file is JSON, which is YAML too, so that no YAML library is needed to write it. A definition stays far below the
256 KiB that `kubectl apply` can note in its annotation.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dynamo.operator import api_types, schema

_AGE = {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}
_NAME_RULE = {
    "rule": "!has(self.spec) || !has(self.spec.services) || self.spec.services.all(a, size(self.metadata.name) + 1"
    f" + size(a) <= {api_types.MAX_DERIVED_NAME})",
    "message": "the name of the deployment and that of each service, joined by -, may have"
    f" {api_types.MAX_DERIVED_NAME} characters together: Services and labels are named by them",
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

    def render(self) -> dict[str, Any]:
        """Return the definition as Kubernetes takes it."""
        subresources: dict[str, Any] = {} if self.status is None else {"status": {}}
        if self.scale is not None:
            subresources["scale"] = self.scale
        version = {
            "name": api_types.VERSION,
            "served": True,
            "storage": True,
            "schema": {"openAPIV3Schema": self._schema()},
            "subresources": subresources,
            "additionalPrinterColumns": [*self.columns, _AGE],
        }
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
                "versions": [version],
            },
        }

    def _schema(self) -> schema.Schema:
        texts = {
            name: {"type": kind}
            for name, kind in (("apiVersion", "string"), ("kind", "string"), ("metadata", "object"))
        }
        complete_schema: schema.Schema = {
            "type": "object",
            "description": schema.schema_of(self.spec)["description"],
            "properties": {**texts, "spec": schema.schema_of(self.spec)},
        }
        if self.status is not None:
            complete_schema["properties"]["status"] = schema.schema_of(self.status)
        if self.rules:
            complete_schema["x-kubernetes-validations"] = list(self.rules)
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
        Path(sys.argv[1], file_name).write_text(text)
