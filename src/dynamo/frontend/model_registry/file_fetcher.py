"""Gets the files of a model that lie on another host: a frontend needs no copy of the model's directory.

A file is taken from the first place that has the very one that the card names, by its checksum:

1. the path that the card names: the worker is on this host, or the directory is shared
2. our cache, a directory of files by checksum
3. the object store, if the worker put it there and we are connected to one
4. a worker that serves the model, over the request plane

So every mix of planes has a way, and whatever comes over a wire is checked before it is used.
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

from dynamo.base import errors
from dynamo.protocols import instances, model_card
from dynamo.runtime import requests, services

FETCH_TIMEOUT_S = 30.0  # for all files of a model
PART_TIMEOUT_S = 10.0
MAX_FILE_BYTES = 256 * 2**20
MAX_PROVIDERS = 3  # workers that are asked for a file
MAX_CACHED_FILES = 256  # files in the cache
_CHECKSUM = re.compile(r"sha256:([0-9a-f]{64})")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FileProvider:
    """A worker that has the files, and the path of the endpoint that gives them away."""

    address: str
    endpoint: str

    @classmethod
    def of(cls, instance: instances.Instance, plane: str) -> "FileProvider | None":
        """None if it cannot be reached by this plane."""
        address = instance.transport.get(plane)
        endpoint = model_card.model_files_path(instance.name)
        return cls(address, endpoint) if address is not None else None


def cache_directory(told: str | None) -> Path:
    """Where fetched files are kept: as told, or `pydynamo/models` in the user's cache (XDG_CACHE_HOME)."""
    if told:
        return Path(told).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "pydynamo" / "models"


class FileFetcher:
    """For one frontend; several may share the directory."""

    def __init__(
        self, plane: requests.RequestPlane, beside: services.Services, kept_in: Path
    ) -> None:
        self._plane = plane
        self._services = beside
        self._directory = kept_in

    @property
    def plane_name(self) -> str:
        """By which workers are asked."""
        return self._plane.name

    async def bring(
        self, card: model_card.ModelCard, givers: Sequence[FileProvider]
    ) -> model_card.ModelCard:
        """The card, with paths that can be read here. Raises ConfigError that says which file nobody gave."""
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                found = {
                    name: await self._find(card, name, file, givers)
                    for name, file in card.files.items()
                }
        except TimeoutError:
            raise errors.ConfigError(
                f"model {card.display_name!r}: its files did not come within {FETCH_TIMEOUT_S:g} s"
            ) from None
        return msgspec.structs.replace(card, files=found)

    async def _find(
        self,
        card: model_card.ModelCard,
        name: str,
        file: model_card.ModelFile,
        givers: Sequence[FileProvider],
    ) -> model_card.ModelFile:
        if await asyncio.to_thread(_is_it, Path(file.path), file):
            return file
        digest = _CHECKSUM.fullmatch(file.checksum)
        if digest is None or file.size > MAX_FILE_BYTES:
            return file  # whoever reads it says what is wrong
        kept = self._directory / digest[1]
        if not await asyncio.to_thread(_is_it, kept, file):
            content = await self._fetch(card, name, file, givers)
            try:
                await asyncio.to_thread(_keep, kept, content)
            except OSError as error:
                raise errors.ConfigError(
                    f"cannot keep {name} of the model {card.display_name!r} in {self._directory}: {error}; "
                    "give --model-cache a directory that can be written"
                ) from error
        return msgspec.structs.replace(file, path=str(kept))

    async def _fetch(
        self,
        card: model_card.ModelCard,
        name: str,
        file: model_card.ModelFile,
        givers: Sequence[FileProvider],
    ) -> bytes:
        refusals: list[errors.DynamoError] = []
        for giver in (None, *givers[:MAX_PROVIDERS]):
            try:
                content = await self._from(giver, name, file)
            except errors.DynamoError as error:
                refusals.append(error)
                continue
            if content is not None:
                came_from = f"the worker at {giver.address}" if giver else file.url
                _logger.info("fetched %s of %r from %s", name, card.display_name, came_from)
                return content
        why = "; ".join(map(str, refusals)) or "no worker gives it away"
        raise errors.ConfigError(
            f"model {card.display_name!r}: cannot read {file.path}, which its worker named, and cannot fetch it: {why}"
        )

    async def _from(
        self, giver: FileProvider | None, name: str, file: model_card.ModelFile
    ) -> bytes | None:
        """From a worker, or without one from the object store; None if there is none. Raises DynamoError."""
        content = (
            await self._from_store(file) if giver is None else await self._given(giver, name, file)
        )
        if content is not None and not _is_named(content, file):
            raise errors.RemoteProtocolError(
                f"expected {name} as {file.checksum}, got {len(content)} other bytes"
            )
        return content

    async def _from_store(self, file: model_card.ModelFile) -> bytes | None:
        store = self._services.object_store()
        if file.url is None or store is None:
            return None
        return await store.get(file.url, timeout_s=PART_TIMEOUT_S)

    async def _given(self, giver: FileProvider, name: str, file: model_card.ModelFile) -> bytes:
        content = bytearray()
        while len(content) < file.size:
            part = await requests.ask(
                self._plane,
                giver.address,
                giver.endpoint,
                model_card.FilePart(name=name, offset=len(content)),
                reply_type=bytes,
                timeout_s=PART_TIMEOUT_S,
            )
            if not part:
                break
            content += part
        return bytes(content)


def _is_it(path: Path, file: model_card.ModelFile) -> bool:
    """Is this the file that the card names?"""
    try:
        return path.stat().st_size == file.size and _is_named(path.read_bytes(), file)
    except OSError:
        return False


def _is_named(content: bytes, file: model_card.ModelFile) -> bool:
    return file.checksum == f"sha256:{hashlib.sha256(content).hexdigest()}"


def _keep(path: Path, content: bytes) -> None:
    """Whole or not at all; the oldest files make room. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix="coming-", delete=False) as coming:
        coming.write(content)
    Path(coming.name).replace(path)
    kept = sorted(path.parent.iterdir(), key=lambda one: one.stat().st_mtime)
    for old in kept[:-MAX_CACHED_FILES]:
        old.unlink(missing_ok=True)
