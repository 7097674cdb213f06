"""`dynamo build`, `dynamo get`, `dynamo containerize`: a graph as an archive that runs elsewhere.

An archive, `~/.dynamo/packages/NAME-VERSION.tar.gz`, has `manifest.json` (what it is), `requirements.lock` (each
distribution of this environment at its version) and `src/`, the files of the working directory. The version is a digest
of the sources, so that the same sources give the same tag.
"""

import contextlib
import hashlib
import importlib.metadata
import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dynamo.base import config, distribution, errors
from dynamo.launch import state
from dynamo.sdk import declaration, graph

_SKIPPED = frozenset((".git", ".venv", "venv", "__pycache__", "node_modules", ".pytest_cache"))
_ARCHIVE = re.compile(r".+-[0-9a-f]{12}\.tar\.gz")  # as `archive_path` names it
_SECRETS = re.compile(r"\.env(\.(?!example$|sample$|template$).+)?")
_MOST_BYTES = 256 * 2**20
DOCKERFILE = """FROM python:{python}-slim
COPY requirements.lock /graph/
RUN pip install --no-cache-dir -r /graph/requirements.lock
COPY . /graph/
WORKDIR /graph/src
CMD ["dynamo", "serve", "{target}"]
"""


class ServiceEntry(msgspec.Struct, kw_only=True):
    """A service in a manifest."""

    name: str
    module: str | None
    inside: str | None
    workers: int
    resources: dict[str, str]


class Manifest(msgspec.Struct, kw_only=True):
    """What an archive contains."""

    tag: str
    target: str
    dynamo_version: str
    python: str
    services: list[ServiceEntry]
    files: dict[str, str]  # digests by path


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildConfig:
    """Package a graph of services for deployment; optionally builds a container image."""

    target: str = config.option(flag="", help="the graph: module:Class")
    working_dir: str = config.option(".", help="directory of the sources")
    containerize: bool = config.option(False, help="build an image from the archive as well")
    output: str | None = config.option(
        None, help="directory of archives (default: ~/.dynamo/packages)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GetConfig:
    """Display the details of a packaged graph."""

    tag: str | None = config.option(None, flag="", help="tag of `dynamo build` (default: list all)")
    output: str | None = config.option(
        None, help="directory of archives (default: ~/.dynamo/packages)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerizeConfig:
    """Build a container image from a packaged graph."""

    tag: str = config.option(flag="", help="tag that `dynamo build` printed")
    output: str | None = config.option(
        None, help="directory of archives (default: ~/.dynamo/packages)"
    )


def build(options: BuildConfig) -> int:
    """Write the archive and print its tag. Raises ConfigError."""
    directory = Path(options.working_dir).resolve()
    specs = graph.load(options.target, directory)
    try:
        files = dict(sources(directory, _directory(options.output).resolve()))
        manifest = describe(options.target, specs, files)
        path = archive_path(manifest.tag, options.output)
        _write(path, manifest, files)
    except OSError as error:
        raise errors.ConfigError(
            f"{error.filename}: {error.strerror}; expected sources that can be read, and a directory for the archive"
            " that can be written (--output names another)"
        ) from error
    print(f"{len(files)} files, {path.stat().st_size / 1e6:.1f} MB: {path}")
    if options.containerize:
        containerize(ContainerizeConfig(tag=manifest.tag, output=options.output))
    print(f"Successfully built {manifest.tag}.")
    return 0


def _write(path: Path, manifest: Manifest, files: dict[str, bytes]) -> None:
    """Write an archive; it has its name when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    with tarfile.open(new, "w:gz") as archive:
        _add(archive, "manifest.json", msgspec.json.format(msgspec.json.encode(manifest)))
        _add(archive, "requirements.lock", requirements().encode())
        for name, content in files.items():
            _add(archive, f"src/{name}", content)
    new.replace(path)


def get(options: GetConfig) -> int:
    """Print a manifest, or a line for each archive; return 1 if one of them cannot be read. Raises ConfigError."""
    if options.tag is not None:
        manifest = _manifest(archive_path(options.tag, options.output))
        print(msgspec.json.format(msgspec.json.encode(manifest)).decode())
        return 0
    print(f"{'TAG':<40} {'SERVICES':>8}  TARGET")
    exit_code = 0
    for path in sorted(_directory(options.output).glob("*.tar.gz")):
        try:
            manifest = _manifest(path)
        except errors.ConfigError as error:
            print(f"dynamo: {error}", file=sys.stderr)
            exit_code = 1
        else:
            print(f"{manifest.tag:<40} {len(manifest.services):>8}  {manifest.target}")
    return exit_code


def containerize(options: ContainerizeConfig) -> int:
    """Build an image called like the tag. Raises ConfigError without Docker, EngineFailed if it fails."""
    path = archive_path(options.tag, options.output)
    manifest = _manifest(path)
    docker = shutil.which("docker") or shutil.which("podman")
    if docker is None:
        raise errors.ConfigError(
            "expected docker or podman to build an image, found neither; the archive"
            f" {path} runs without: unpack it, then `dynamo serve` in src"
        )
    with tempfile.TemporaryDirectory() as folder:
        unpack(path, folder)
        text = DOCKERFILE.format(python=manifest.python, target=manifest.target)
        Path(folder, "Dockerfile").write_text(text)
        process = subprocess.run([docker, "build", "--tag", manifest.tag, folder], check=False)
    if process.returncode:
        raise errors.EngineFailed(f"{docker} build ended with {process.returncode}")
    print(f"Successfully containerized {manifest.tag}.")
    return 0


def describe(
    target: str, specs: list[declaration.DeclaredService], files: dict[str, bytes]
) -> Manifest:
    """Return the manifest of a graph with these files."""
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    digest = hashlib.sha256(msgspec.json.encode((target, digests))).hexdigest()
    return Manifest(
        tag=f"{specs[0].name.lower()}:{digest[:12]}",
        target=target,
        dynamo_version=distribution.version(),
        python=".".join(map(str, sys.version_info[:2])),
        services=[
            ServiceEntry(
                name=spec.name,
                module=spec.module,
                inside=spec.inside,
                workers=spec.workers,
                resources=dict(spec.resources),
            )
            for spec in specs
        ],
        files=digests,
    )


def requirements() -> str:
    """Return the distributions of this environment at their versions, a line each."""
    lines = {
        f"{entry.metadata['Name']}=={entry.version}" for entry in importlib.metadata.distributions()
    }
    return "".join(f"{line}\n" for line in sorted(lines, key=str.lower))


def archive_path(tag: str, output: str | None) -> Path:
    """Return the archive of a tag. Raises ConfigError."""
    name, _, version = tag.removesuffix(".").partition(":")
    if not version:
        raise errors.ConfigError(
            f"expected the tag that `dynamo build` printed, like app:1a2b, got {tag!r}; `dynamo get` lists them"
        )
    return _directory(output) / f"{name}-{version}.tar.gz".replace("/", "_")


def unpack(path: Path, folder: str) -> Manifest:
    """Write all that an archive has into a folder, and return its manifest. Raises ConfigError if it is damaged."""
    with _opened(path) as archive:
        archive.extractall(folder, filter="data")
    return _manifest(path)


def _manifest(path: Path) -> Manifest:
    with _opened(path) as archive:
        content = archive.extractfile("manifest.json")
        assert content is not None
        return msgspec.json.decode(content.read(), type=Manifest)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(path) as archive:
            yield archive
    except (
        OSError,
        EOFError,
        zlib.error,
        KeyError,
        tarfile.TarError,
        msgspec.MsgspecError,
    ) as error:
        reason = getattr(error, "strerror", None) or error
        raise errors.ConfigError(
            f"{path}: expected an archive of `dynamo build`: {reason}; `dynamo get` lists them"
        ) from error


def _directory(output: str | None) -> Path:
    return Path(output) if output is not None else state.home() / "packages"


def sources(directory: Path, output: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the files to package, in order, without archives in `output`. Raises ConfigError if they are too large."""
    size = 0
    for path in sorted(directory.rglob("*")):
        relative = path.relative_to(directory)
        if path.parent == output and _ARCHIVE.fullmatch(path.name):  # else no tag would come twice
            continue
        if not _SKIPPED.isdisjoint(relative.parts):
            continue
        if path.is_symlink():
            print(f"dynamo: {relative} is a symbolic link, which is left out", file=sys.stderr)
        elif _SECRETS.fullmatch(path.name):
            text = "may have keys and is left out: set its variables where the graph runs"
            print(f"dynamo: {relative} {text}", file=sys.stderr)
        elif path.is_file():
            size += path.stat().st_size
            if size > _MOST_BYTES:
                raise errors.ConfigError(
                    f"{directory}: its files are larger than {_MOST_BYTES >> 20} MiB; expected sources, not models:"
                    " --working-dir names a smaller directory"
                )
            try:
                path.name.encode()
            except UnicodeEncodeError as error:
                raise errors.ConfigError(f"{path!a}: expected a name in UTF-8") from error
            yield relative.as_posix(), path.read_bytes()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o644
    archive.addfile(entry, io.BytesIO(content))
