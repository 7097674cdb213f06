"""A graph's sources as a ConfigMap, so that a cluster runs them in an image that has pydynamo only.

A ConfigMap has at most 1 MiB, and keys without slashes: the files are numbered, and a volume gives them their paths.
Its name ends with a digest of them, so that an update starts new pods, and those that still run keep their own sources.
"""  # decider

import base64
import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from dynamo.base import errors

API_VERSION, KIND = "v1", "ConfigMap"
LABEL = "nvidia.com/dynamo-sources-of"  # the deployment
FOLDER = "/graph/src"  # where an image that `dynamo containerize` makes has them, too
_VOLUME = "sources"
_MOST_BYTES = 900_000  # the rest of the MiB is for names
Object = dict[str, Any]


def make(deployment: str, files: Mapping[str, bytes]) -> Object:
    """Return the ConfigMap of a deployment's files, by their paths. Raises ConfigError if they are too large."""
    size = sum(map(len, files.values()))
    if size > _MOST_BYTES:
        raise errors.ConfigError(
            f"--with-sources: expected at most {_MOST_BYTES:,} bytes, which a ConfigMap can hold, got {size:,} in"
            f" {len(files)} files; --working-dir names a smaller directory, or `dynamo containerize` makes an image"
        )
    texts, others = {}, {}
    for number, content in enumerate(files.values()):
        try:
            texts[str(number)] = content.decode()
        except UnicodeDecodeError:
            others[str(number)] = base64.b64encode(content).decode()
    digest = hashlib.sha256(msgspec.json.encode(files)).hexdigest()[:12]
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": f"{deployment}-sources-{digest}", "labels": {LABEL: deployment}},
        "data": texts,
        "binaryData": others,
    }


def mount(service: Object, source_map: Object, files: Mapping[str, bytes]) -> None:
    """Let the pods of a service of a DynamoGraphDeployment see the files in their folder."""
    items = [{"key": str(number), "path": path} for number, path in enumerate(files)]
    volume = {"name": source_map["metadata"]["name"], "items": items}
    pod = service["extraPodSpec"]
    pod["volumes"] = [{"name": _VOLUME, "configMap": volume}]
    pod["mainContainer"]["volumeMounts"] = [{"name": _VOLUME, "mountPath": FOLDER}]
