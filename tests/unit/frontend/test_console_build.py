"""The checked-in build of the console belongs to its sources; node is not needed to know that."""

import gzip
import hashlib
import json
import pathlib

ROOT = pathlib.Path(__file__).parents[3]
ASSETS = ROOT / "src/dynamo/frontend/console/assets"
MOST_BYTES = 300 * 1024  # of all files, compressed


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_build_was_made_from_these_sources():
    built = json.loads((ASSETS / "build.json").read_text())
    sources = {name: digest(ROOT / "console" / name) for name in built["sources"]}
    present = {f"src/{path.name}" for path in (ROOT / "console/src").iterdir()}

    assert present <= sources.keys()
    assert sources == built["sources"], "in console/: npm ci && npm run build"


def test_build_is_as_it_was_made_and_small():
    built = json.loads((ASSETS / "build.json").read_text())
    files = {path.name: path for path in ASSETS.iterdir() if path.name != "build.json"}

    assert {name: digest(path) for name, path in files.items()} == built["outputs"]
    assert sum(len(gzip.compress(path.read_bytes())) for path in files.values()) < MOST_BYTES
