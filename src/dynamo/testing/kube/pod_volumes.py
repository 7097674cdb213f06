"""The content of a pod's volumes that comes from other objects, or from the pod itself, as files of a folder."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dynamo.testing.kube import pods

Object = dict[str, Any]
# kinds of volumes with content that changes with objects
_WRITTEN = frozenset(("configMap", "secret", "projected", "downwardAPI"))
_KINDS = _WRITTEN | {"emptyDir", "hostPath", "persistentVolumeClaim"}
_PROJECTED = frozenset(("configMap", "secret", "downwardAPI"))
_READ_ONLY = 0o644
_MESSAGE_BYTES, _LOG_BYTES = 4096, 2048  # of messages, and of logs that stand for them
Mount = tuple[Path, str]  # what the node has, and where a pod sees it


class PodVolumes:
    """The volumes of one pod: folders in its own, those of claims in that of the node, and those of the host."""

    def __init__(self, folder: Path, node_folder: Path, lookup: pods.Lookup) -> None:
        self._folder = folder / "volumes"
        self._claims = node_folder / "claims"
        self._lookup = lookup
        self._mounts: list[Mount] = []

    def make(self, pod: Object) -> list[Mount]:
        """Write the content of volumes; return what is to be mounted where. Raises MissingReference."""
        spec = pod["spec"]
        sources = {each["name"]: self._make_volume(each, pod) for each in spec.get("volumes") or ()}
        mounts = {}
        for container in (*(spec.get("initContainers") or ()), *spec["containers"]):
            for mount in container.get("volumeMounts") or ():
                if (source := sources.get(mount["name"])) is not None:
                    sub_path = source / mount.get("subPath", "")
                    if not sub_path.exists():
                        sub_path.mkdir(parents=True)
                    mounts[mount["mountPath"].rstrip("/")] = sub_path
        self._mounts = [
            (source, target) for target, source in sorted(mounts.items()) if target != "/dev/shm"
        ]
        return self._mounts

    def relocate(self, path: str) -> str | None:
        """Return where the node has what the pod sees at a path, or None for a path in no volume."""
        for source, target in self._mounts:
            if path == target or path.startswith(f"{target}/"):
                return str(source) + path.removeprefix(target)
        return None

    def message_file(self, container: Object) -> Mount:
        """Return the file in which a container says why it ends, and where the container is to see it."""
        return self._folder / f"..{container['name']}", container["terminationMessagePath"]

    def read_last_words(self, container: Object, log: Path, *, has_failed: bool) -> Object:
        """Return what a container has said of its end or, if it failed and asks for that, the end of its log."""
        with self.message_file(container)[0].open("rb") as file:
            text = file.read(_MESSAGE_BYTES).decode(errors="replace")
        is_fallback = container["terminationMessagePolicy"] == "FallbackToLogsOnError"
        if has_failed and is_fallback and not text:
            with log.open("rb") as file:
                file.seek(-min(_LOG_BYTES, file.seek(0, os.SEEK_END)), os.SEEK_END)
                text = file.read().decode(errors="replace")
        return {"message": text} if text else {}

    def refresh(self, pod: Object) -> None:
        """Write what has changed of the objects in volumes that are mounted; what has gone stays there."""
        for volume in pod["spec"].get("volumes") or ():
            if self._mounts and volume.keys() & _WRITTEN:
                with contextlib.suppress(pods.MissingReference):
                    self._make_volume(volume, pod)

    def _make_volume(self, volume: Object, pod: Object) -> Path:
        folder = self._folder / str(volume["name"])
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        if "persistentVolumeClaim" in volume:
            name = volume["persistentVolumeClaim"]["claimName"]
            claim = self._lookup("PersistentVolumeClaim", name)
            if claim is None:
                raise pods.MissingReference(f'persistentvolumeclaim "{name}" not found')
            folder = self._claims / claim["metadata"]["uid"]
        folder.mkdir(parents=True, exist_ok=True)
        projected = volume.get("projected") or {}
        for part in (volume, *(projected.get("sources") or ())):
            for kind, field_name in (("ConfigMap", "configMap"), ("Secret", "secret")):
                if source := part.get(field_name):
                    content = self._read(kind, source)
                    _write_files(folder, content, {**projected, **source}, "key")
            if source := part.get("downwardAPI"):
                items = source.get("items") or ()
                content = {item["path"]: pods.downward_file(pod, item) for item in items}
                _write_files(folder, content, {**projected, **source}, "path")
        return folder

    def _read(self, kind: str, source: Object) -> dict[str, bytes]:
        """Return the entries of a config map or secret. Raises MissingReference."""
        name = source.get("secretName") or source.get("name", "")
        item = self._lookup(kind, name)
        if item is None and not source.get("optional"):
            raise pods.MissingReference(f'{kind.lower()} "{name}" not found')
        return pods.file_contents(item) if item is not None else {}


def make_mount_point(mount: Mount) -> list[Path]:
    """Make a file or folder to mount at, and return what the host lacked of its path. Raises OSError."""
    is_folder, target = mount[0].is_dir(), Path(mount[1])
    missing = [level for level in (*reversed(target.parents), target) if not level.exists()]
    for level in missing:
        try:
            level.touch() if level == target and not is_folder else level.mkdir()
        except OSError as error:
            text = (
                f"mountPath {target} cannot be made: {error.strerror}; make it, or choose another"
            )
            raise OSError(text) from error
    return missing


def _write_files(folder: Path, content: Mapping[str, bytes], source: Object, key: str) -> None:
    """Write entries to the paths and with the modes that the items of a source name by their `key`."""
    entries = {entry[key]: entry for entry in source.get("items") or ()}
    for name, value in content.items():
        if not entries or name in entries:
            entry = entries.get(name, {"path": name})
            path = folder / entry["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.read_bytes() != value:
                whole = path.with_name(f"..{path.name}")  # readers see one of both contents
                whole.write_bytes(value)
                whole.chmod(entry.get("mode", source.get("defaultMode", _READ_ONLY)))
                whole.replace(path)


def notices(spec: Object, path: str) -> Iterator[str]:
    """Yield what this cluster leaves out of the volumes of a pod's specification at `path`."""
    for n, volume in enumerate(spec.get("volumes") or ()):
        place = f"{path}.volumes[{n}]"
        for kind in volume.keys() - _KINDS - {"name"}:
            yield f"{place}.{kind}: is not mounted on this cluster: an empty folder stands for it"
        for source in (volume.get("projected") or {}).get("sources") or ():
            for kind in source.keys() - _PROJECTED:
                yield f"{place}.projected: {kind} is left out on this cluster; a pod's token is in KUBECONFIG"
