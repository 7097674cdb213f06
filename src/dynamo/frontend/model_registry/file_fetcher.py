"""Fetches the files of a model that lie on another host, so that a frontend needs no copy of the model's directory.

A file is taken from the first place that has the file that the card names, compared by its checksum:

1. the path that the card names: the worker is on this host, or the directory is shared
2. the cache, a directory of files named by their checksums
3. the object store, if the worker put the file there and this process is connected to one
4. a worker that serves the model, over the request plane

So every combination of planes works, and bytes that come over a network are checked before they are used.
"""

import asyncio
import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors, local_users
from dynamo.preprocess import loading
from dynamo.protocols import instances, model_card
from dynamo.runtime import requests, services

FETCH_TIMEOUT_S = 30.0  # for all files of a model
PART_TIMEOUT_S = 10.0
MAX_PROVIDERS = 3  # workers that are asked for a file
MAX_CACHED_FILES = 256
_CHECKSUM = re.compile(r"sha256:([0-9a-f]{64})")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FileProvider:
    """A worker that has the files, and the path of its endpoint that sends them."""

    address: str
    endpoint: str
    instance_id: int | None = None

    @classmethod
    def of(cls, instance: instances.Instance, plane: str) -> "FileProvider | None":
        """Return the provider for an instance; None if this request plane does not reach it."""
        address = instance.transport.get(plane)
        endpoint = model_card.model_files_path(instance.name)
        return cls(address, endpoint, instance.instance_id) if address is not None else None


def cache_directory(configured: str | None) -> Path:
    """Return the directory for fetched files: as configured, or `pydynamo/models` in XDG_CACHE_HOME.

    A user without a home, as containers have with an id of their own, has it among the temporary files.
    Raises ConfigError for one in the home of an unknown user, or that another user could change.
    """
    try:
        if configured:
            return Path(configured).expanduser()
        directory = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError as error:
        if configured:
            raise errors.ConfigError(f"--model-cache {configured}: {error}") from error
        directory = local_users.temporary_directory("cache", "--model-cache")
    return directory / "pydynamo" / "models"


class FileFetcher:
    """Fetches files into one cache directory, which several frontends may share."""

    def __init__(
        self,
        plane: requests.RequestPlane,
        runtime_services: services.Services,
        directory: Path,
        clock: clocks.Clock,
    ) -> None:
        self._plane = plane
        self._services = runtime_services
        self._directory = directory
        self._clock = clock

    @property
    def plane_name(self) -> str:
        """Return the name of the request plane by which workers are reached."""
        return self._plane.name

    async def fetch_files(
        self, card: model_card.ModelCard, providers: Sequence[FileProvider]
    ) -> model_card.ModelCard:
        """Return the card with paths that can be read here. Raises ConfigError that names the missing file."""
        try:
            async with self._clock.timeout(FETCH_TIMEOUT_S):
                files = {
                    name: await self._locate(card, name, file, providers)
                    for name, file in card.files.items()
                }
        except TimeoutError:
            raise errors.ConfigError(
                f"model {card.display_name!r}: its files did not come within {FETCH_TIMEOUT_S:g} s"
            ) from None
        return msgspec.structs.replace(card, files=files)

    async def _locate(
        self,
        card: model_card.ModelCard,
        name: str,
        file: model_card.ModelFile,
        providers: Sequence[FileProvider],
    ) -> model_card.ModelFile:
        if await asyncio.to_thread(_is_same_file, Path(file.path), file):
            return file
        digest = _CHECKSUM.fullmatch(file.checksum)
        if digest is None or file.size > loading.MAX_FILE_BYTES:
            return file  # the error is reported where the file is read
        cached = self._directory / digest[1]
        if not await asyncio.to_thread(_is_same_file, cached, file):
            content = await self._fetch(card, name, file, providers)
            try:
                await asyncio.to_thread(_write_to_cache, cached, content)
            except OSError as error:
                raise errors.ConfigError(
                    f"cannot keep {name} of the model {card.display_name!r} in {self._directory}: {error}; "
                    "give --model-cache a directory that can be written"
                ) from error
        return msgspec.structs.replace(file, path=str(cached))

    async def _fetch(
        self,
        card: model_card.ModelCard,
        name: str,
        file: model_card.ModelFile,
        providers: Sequence[FileProvider],
    ) -> bytes:
        """Fetch a file from the object store or a worker. Raises ConfigError if none of them gives it."""
        failures: list[errors.DynamoError] = []
        for provider in (None, *providers[:MAX_PROVIDERS]):
            try:
                content = await (
                    self._fetch_from_store(file)
                    if provider is None
                    else self._fetch_from_worker(provider, name, file)
                )
                if content is None:
                    continue
                if not _has_checksum(content, file):
                    raise errors.RemoteProtocolError(
                        f"expected {name} as {file.checksum}, got {len(content)} other bytes"
                    )
            except errors.DynamoError as error:
                failures.append(error)
                continue
            source = f"the worker at {provider.address}" if provider else file.url
            _logger.info("fetched %s of %r from %s", name, card.display_name, source)
            return content
        reason = "; ".join(map(str, failures)) or "no worker gives it away"
        raise errors.ConfigError(
            f"model {card.display_name!r}: cannot read {file.path}, which its worker named, and cannot fetch it: "
            f"{reason}"
        )

    async def _fetch_from_store(self, file: model_card.ModelFile) -> bytes | None:
        store = self._services.object_store()
        if file.url is None or store is None:
            return None
        return await store.get(file.url, timeout_s=PART_TIMEOUT_S)

    async def _fetch_from_worker(
        self, provider: FileProvider, name: str, file: model_card.ModelFile
    ) -> bytes:
        content = bytearray()
        while len(content) < file.size:
            part = await requests.call(
                self._plane,
                provider.address,
                provider.endpoint,
                model_card.FilePart(name=name, offset=len(content)),
                reply_type=bytes,
                timeout_s=PART_TIMEOUT_S,
                instance_id=provider.instance_id,
            )
            if not part:
                break
            content += part
        return bytes(content)


def _is_same_file(path: Path, file: model_card.ModelFile) -> bool:
    try:
        return _has_checksum(loading.read_regular_file(path, file.size), file)
    except OSError:
        return False


def _has_checksum(content: bytes, file: model_card.ModelFile) -> bool:
    return file.checksum == f"sha256:{hashlib.sha256(content).hexdigest()}"


def _write_to_cache(path: Path, content: bytes) -> None:
    """Write the whole file or nothing, and remove the oldest files beyond the limit. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix="coming-", delete=False) as partial:
        try:
            partial.write(content)
            partial.flush()
            Path(partial.name).replace(path)
        except OSError:  # the model is loaded again and again, and would leave a file each time
            Path(partial.name).unlink(missing_ok=True)
            raise
    for old in sorted(path.parent.iterdir(), key=_modified_at)[:-MAX_CACHED_FILES]:
        old.unlink(missing_ok=True)


def _modified_at(path: Path) -> float:
    """Return when a file was last changed; 0 if another process has just renamed or removed it."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
