"""What the API server emulator says of its resources, beside what a real one says: discovery and merge keys.

The emulator serves fewer resources, so that whole documents cannot be equal; what it says of those that it serves is.
"""

import json

import httpx
import pytest

from dynamo.testing.kube import builtin_schemas
from kube_recordings import RECORDINGS, any_cluster, read_lines
from waiting import PATIENT_S

pytestmark = pytest.mark.skipif(
    not RECORDINGS.is_dir(), reason="the recorded exchanges are not here"
)
_COMPARED = ("list-type", "list-map-keys", "map-type", "default")


def recorded_lists():
    """Return the recorded documents that list the resources of a version, by path."""
    documents = {}
    for line in [*read_lines("07-clients"), *read_lines("09-discovery-openapi")]:
        exchange = json.loads(line)
        body = (exchange.get("response") or {}).get("body")
        if isinstance(body, dict) and body.get("kind") == "APIResourceList":
            documents[exchange["request"]["path"]] = body
    return documents


async def test_served_resources_are_described_as_a_real_server_describes_them(tmp_path):
    compared, different = 0, []
    async with (
        any_cluster(tmp_path) as url,
        httpx.AsyncClient(base_url=url, verify=False, timeout=PATIENT_S) as http,
    ):
        for path, document in recorded_lists().items():
            answer = await http.get(path, headers={"Authorization": "Bearer replay"})
            if answer.status_code == 404:
                continue
            recorded = {entry["name"]: entry for entry in document["resources"]}
            for entry in answer.json()["resources"]:
                expected = dict(recorded[entry["name"]])
                expected.pop("storageVersionHash", None)
                entry.pop("storageVersionHash", None)
                compared += 1
                if entry != expected:
                    different.append((path, entry, expected))

    assert compared > 60
    assert not different


def _marks(schema, path=""):
    """Yield the marks of a schema that say how its fields are merged, by path."""
    found = {
        name: schema[key]
        for name in _COMPARED
        if (key := "default" if name == "default" else f"x-kubernetes-{name}") in schema
    }
    if found:
        yield path, found
    for name, child in (schema.get("properties") or {}).items():
        yield from _marks(child, f"{path}.{name}")
    if "items" in schema:
        yield from _marks(schema["items"], f"{path}[]")


@pytest.mark.parametrize("line", read_lines("09-merge-keys") if RECORDINGS.is_dir() else ())
def test_fields_of_built_in_objects_are_merged_by_the_recorded_keys(line):
    recorded = json.loads(line)
    expected = {
        path: kept
        for path, marks in recorded["fields"].items()
        if (kept := {name: marks[name] for name in _COMPARED if name in marks})
        and kept != {"list-type": "atomic"}  # as lists without a mark are
    }
    schema = builtin_schemas.load(recorded["groupVersion"], recorded["kind"])

    assert dict(_marks(schema)) == expected
