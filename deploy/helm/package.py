"""Package the charts: `make charts RELEASE_VERSION=0.4.1` writes dist/charts/*.tgz.

The custom resource definitions are copied from deploy/crds into the chart's templates, so that an upgrade of the chart
brings them along (Helm never upgrades what is in a `crds` folder).
"""

import pathlib
import shutil
import sys
import tempfile

import helm_python

HERE = pathlib.Path(__file__).parent
CHARTS = {
    "dynamo-crds": HERE / "dynamo-crds",
    "dynamo-platform": HERE / "dynamo-platform",
    "dynamo-vllm": HERE.parent / "kubernetes" / "dynamo" / "helm-chart",
}
DEFINITIONS = HERE.parent / "crds"


def package(version: str, destination: pathlib.Path) -> list[pathlib.Path]:
    """Write one archive for each chart, of this version of the charts and of our images; return their paths."""
    destination.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        return [
            pathlib.Path(
                helm_python.package(
                    complete(name, pathlib.Path(scratch)),
                    destination=destination,
                    version=version,
                    app_version=version,
                )
            )
            for name in CHARTS
        ]


def complete(name: str, scratch: pathlib.Path) -> pathlib.Path:
    """Copy a chart below `scratch`, with the definitions if they are part of it, and return the copy."""
    copy = scratch / name
    shutil.copytree(CHARTS[name], copy)
    if name == "dynamo-crds":
        (copy / "templates").mkdir(exist_ok=True)
        for definition in sorted(DEFINITIONS.glob("*.yaml")):
            shutil.copy(definition, copy / "templates")
    return copy


if __name__ == "__main__":
    for archive in package(sys.argv[1], pathlib.Path(sys.argv[2])):
        sys.stdout.write(f"{archive}\n")
