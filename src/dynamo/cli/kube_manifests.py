"""`dynamo kube convert` and `apply`: manifests in forms that no cluster serves (`manifest_forms`)."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import yaml

from dynamo.base import errors
from dynamo.cli import manifest_forms
from dynamo.runtime.backends.kubernetes import connection


def read_manifests(file: str) -> list[manifest_forms.ConvertedManifest]:
    """Read and convert the manifests of a file, or of standard input for `-`. Raises ConfigError."""
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        documents = [part for document in yaml.safe_load_all(content) for part in _unpack(document)]
    except OSError as error:
        raise errors.ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise errors.ConfigError(f"{file}: expected manifests in YAML: {reason}") from error
    if not documents or not all(isinstance(document, dict) for document in documents):
        raise errors.ConfigError(f"{file}: expected at least one manifest, each of them a mapping")
    return [manifest_forms.convert(document) for document in documents]


def _unpack(document: Any) -> list[Any]:
    """Return a manifest that is not empty, or those of a `kind: List`, as `kubectl get -o yaml` prints them."""
    is_list = isinstance(document, dict) and document.get("kind") == "List"
    if is_list and isinstance(items := document.get("items"), list):
        return items
    return [document] if document else []


def print_manifests(file: str) -> int:
    """Print the converted manifests, and the notes on standard error; return the exit code."""
    manifests = read_manifests(file)
    print(yaml.safe_dump_all([m.document for m in manifests], sort_keys=False), end="")
    for note in (note for manifest in manifests for note in manifest.notes):
        print(f"note: {note}", file=sys.stderr)
    return 0


def apply_manifests(file: str) -> int:
    """Apply the converted manifests to the cluster of the kubeconfig; return the exit code. Raises DynamoError.

    Nothing is applied if one of them is not whole.
    """
    manifests = read_manifests(file)
    for number, manifest in enumerate(manifests, 1):
        document, metadata = manifest.document, manifest.document.get("metadata")
        fields = {name: document.get(name) for name in ("apiVersion", "kind")}
        fields["metadata.name"] = metadata.get("name") if isinstance(metadata, dict) else None
        for name, value in fields.items():
            if not value or not isinstance(value, str):
                raise errors.ConfigError(
                    f"{file}, manifest {number}: {name}: expected a text, got {value!r:.60}"
                )
    return asyncio.run(_apply(manifests))


async def _apply(manifests: list[manifest_forms.ConvertedManifest]) -> int:
    async with connection.KubernetesConnection.open() as cluster:
        for manifest in manifests:
            applied = await cluster.apply(manifest.document, "dynamo-cli")
            print(f"{applied['kind'].lower()}/{applied['metadata']['name']} applied")
            for note in manifest.notes:
                print(f"note: {note}", file=sys.stderr)
    return 0
