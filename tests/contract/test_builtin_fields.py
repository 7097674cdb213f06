"""The fields of built-in objects at the laptop's API server are those of Kubernetes's own schemas.

After a change of the kinds that it serves, or of the version, run `python tests/contract/test_builtin_fields.py`.
"""

import importlib.resources
import json
import pathlib

import pytest

from dynamo.testing.kube import builtin_schemas, resources

kubernetes_validate = pytest.importorskip("kubernetes_validate")
VERSION = "v1.36.0-local"  # that of the recorded API server
FIELDS = pathlib.Path(builtin_schemas.__file__).with_name("builtin_fields.json")
_SCALARS = {"string": "string", "boolean": "bool", "integer": "int64", "number": "float64"}
_DECODED_OTHERWISE = ("byte", "date-time")  # texts with a form of their own


class FieldTable:
    """The types that built-in objects are made of, with their fields as Go writes their types."""

    def __init__(self):
        folder = importlib.resources.files(kubernetes_validate) / "kubernetes-json-schema" / VERSION
        self.definitions = json.loads((folder / "_definitions.json").read_text())["$defs"]
        self.full_names = {}  # by the short name
        self.types = {}

    def add(self, full_name):
        """Add a type with all that it is made of; return its short name, "" if it has no fields."""
        *_, group, version, kind = full_name.split(".")
        name = f"{version}.{kind}"
        if self.full_names.setdefault(name, full_name) != full_name:
            name = f"{group}/{name}"
        properties = self.definitions[full_name].get("properties")
        if properties and name not in self.types:
            self.types[name] = fields = {}
            fields |= {field: self.name_type(schema) for field, schema in properties.items()}
        return name if properties else ""

    def name_type(self, schema):
        """Return the type of a field, "" if it is not checked."""
        if "$ref" in schema:
            return self.add(schema["$ref"].rpartition("/")[2])
        if schema.get("format") in _DECODED_OTHERWISE:
            return ""
        kinds = schema.get("type", "")
        kind = kinds if isinstance(kinds, str) else kinds[0]
        if kind == "array":
            return f"[]{self.name_type(schema['items'])}"
        if kind == "object":
            below = schema.get("additionalProperties")
            return f"map[string]{self.name_type(below)}" if below else ""
        return schema["format"] if schema.get("format") == "int32" else _SCALARS.get(kind, "")


def make_table():
    """Return the fields of all types, those of the kinds that are served among them."""
    table = FieldTable()
    names = {
        (entry.get("group", ""), entry["version"], entry["kind"]): name
        for name, definition in table.definitions.items()
        for entry in definition.get("x-kubernetes-group-version-kind", ())
    }
    for item in resources.ResourceRegistry():
        if item.group != "events.k8s.io":  # they are stored as those of the core group
            table.add(names[item.group, item.version, item.kind])
    return table.types


def test_fields_are_those_of_kubernetes():
    assert json.loads(FIELDS.read_text()) == make_table()


if __name__ == "__main__":
    lines = [f'"{name}": {json.dumps(fields)}' for name, fields in sorted(make_table().items())]
    FIELDS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
