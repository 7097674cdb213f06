"""The definitions of the custom resources: complete to the field, bounded, and as deploy/crds has them."""

import pathlib
import re

import pytest
from deploy.crds import generate as crds

from dynamo.base import errors
from dynamo.operator import api_types

ROOT = pathlib.Path(__file__).parents[3]
APPENDIX = ROOT.parent / "shared" / "spec" / "system.md"
RENDERED = {definition.kind: definition.render() for definition in crds.DEFINITIONS}


def openapi(kind):
    return RENDERED[kind]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def find(node, path):
    for part in path:
        if part in ("[]", "{}"):
            node = node["items" if part == "[]" else "additionalProperties"]
        else:
            node = node["properties"][part]
    return node


def appendix_rows():
    """Yield kind, path, type and the rest of the line of each field of Appendix 1."""
    if not APPENDIX.exists():
        return
    text = APPENDIX.read_text().rpartition("# Appendix 1. Flattened")[2]
    prefixes = {"": None}
    for line in text.partition("# Appendix 2")[0].splitlines():
        if line.startswith("### Dynamo"):
            prefixes = {"": line.split()[1]}
        elif line.startswith("### shared"):
            prefixes = {
                "spec": "DynamoComponentDeployment",
                "spec.services{}": "DynamoGraphDeployment",
            }
        elif match := re.match(r"((?:S|spec|status)[\w.{}\[\]*]*): ([\w-]+)(.*)", line):
            for prefix, kind in prefixes.items():
                name = match[1].replace("S.", f"{prefix}.", 1) if prefix else match[1]
                yield kind, tuple(re.findall(r"\w+|\[\]|\{\}", name)), match[2], match[3]


ROWS = list(appendix_rows())


@pytest.mark.skipif(not ROWS, reason="the specification is not here")
def test_every_field_of_the_original_has_its_type_and_limits():
    assert len(ROWS) > 130
    for kind, path, expected_type, constraints in ROWS:
        field = find(openapi(kind), path)

        if expected_type == "int-or-string":
            assert field["x-kubernetes-int-or-string"], path
        else:
            assert field["type"] == expected_type, path
        for key, value in re.findall(r"(enum|pattern|minimum|default|format)=(\S+)", constraints):
            found = field[key]
            assert "|".join(found) if key == "enum" else str(found) == value, path


def test_packaged_definitions_are_those_of_the_types():
    assert crds.PACKAGED.read_text() == crds.render_package(), "run `make crds`"


@pytest.mark.parametrize("name", crds.render_files())
def test_written_definition_is_current_and_small(name):
    text = crds.render_files()[name]

    assert (ROOT / "deploy" / "crds" / name).read_text() == text, "run `make crds`"
    assert len(text) < 256 * 2**10


def schemas(node):
    yield node
    children = [*node.get("properties", {}).values(), node.get("items")]
    additional = node.get("additionalProperties")
    for child in [*children, additional if isinstance(additional, dict) else None]:
        if child:
            yield from schemas(child)


@pytest.mark.parametrize("kind", RENDERED)
def test_schema_is_structural(kind):
    for node in schemas(openapi(kind)):
        is_open = node.get("x-kubernetes-preserve-unknown-fields") or node.get(
            "x-kubernetes-int-or-string"
        )
        assert "type" in node or is_open
        assert not {"properties", "additionalProperties"} <= node.keys()
        assert not {"$ref", "title", "definitions"} & node.keys()


@pytest.mark.parametrize("kind", RENDERED)
def test_rules_have_a_message(kind):
    for node in schemas(openapi(kind)):
        for rule in node.get("x-kubernetes-validations", ()):
            assert len(rule["message"]) > 20


def test_short_names_and_columns_are_the_original_ones():
    names = {crd["spec"]["names"]["shortNames"][0] for crd in RENDERED.values()}
    version = RENDERED["DynamoComponentDeployment"]["spec"]["versions"][0]

    assert {"dgd", "dcd"} <= names
    assert [column["name"] for column in version["additionalPrinterColumns"]] == [
        "DynamoComponent",
        "Available",
        "Message",
        "Age",
    ]
    adapter = RENDERED["DynamoGraphDeploymentScalingAdapter"]["spec"]["versions"][0]
    assert adapter["subresources"]["scale"]["specReplicasPath"] == ".spec.replicas"


@pytest.mark.parametrize(
    ("services", "message"),
    [
        ({"A": {"replicas": -1}}, "spec.services"),
        ({"A": {"multinode": {"nodeCount": 1}}}, ">= 2"),
        ({"A": {"replicas": "two"}}, "got `str`"),
    ],
)
def test_stored_object_that_the_types_refuse_is_an_error_with_the_field(services, message):
    graph = {"metadata": {"name": "g"}, "spec": {"services": services}}

    with pytest.raises(errors.ConfigError, match=message):
        api_types.read_spec(graph, api_types.GraphSpec)
