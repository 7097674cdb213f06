"""The object store tier: one object for each block, in whatever `obstore` can reach by a URL.

    PREFIX / fingerprint / sequence hash - local hash - parent hash

The name has all that the index needs, so a start lists names and reads no block. The fingerprint (model, dtype, layout,
...) is a hash: blocks of another engine are never seen. Each object begins with the checksum of its block.

Workers may share a prefix: one that starts finds what others have stored by then. Each removes what it evicts; a block
that another worker has removed meanwhile is not there when it is read, and is computed.
"""

import contextlib
import struct
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib import parse, request

import obstore
import xxhash
from obstore import exceptions
from obstore import store as stores

from dynamo.base import errors
from dynamo.kvbm.tiers import CachedBlock, TierSlots
from dynamo.protocols import kv_events

TIMEOUT_S = 10  # of one request
_HEADER = struct.Struct("<8sQ")  # format, checksum of the block
_FORMAT = b"dynkvb1\0"
_ROOT = "root"  # instead of a parent's hash
_NAME_PARTS = 3


class ObjectStorage:
    """A `storage.Storage`. Its methods may be called by any thread, one at a time for each slot."""

    tier = kv_events.REMOTE
    num_threads = 4

    def __init__(
        self, url: str, fingerprint: Mapping[str, str], *, num_slots: int, part: str = ""
    ) -> None:
        """Find the blocks of earlier runs. `part` is the name of a rank. Raises ConfigError that names the URL."""
        self.name, self.num_slots = url, num_slots
        text = "\n".join(f"{name}={value}" for name, value in sorted(fingerprint.items()))
        self._prefix = f"{xxhash.xxh3_64_hexdigest(text.encode())}/{part}".rstrip("/")
        self._lock = threading.Lock()
        self.generation = 0
        self._paths: dict[int, str] = {}  # by slot
        self.blocks: dict[int, CachedBlock] = {}
        try:
            options: dict[str, Any] = {}  # of a directory, which has no time limits
            if url.startswith("file:"):
                directory = Path(request.url2pathname(parse.urlsplit(url).path), self._prefix)
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            else:
                options = {
                    "client_options": {"timeout": f"{TIMEOUT_S}s", "allow_http": True},
                    "retry_config": {"max_retries": 1},
                }
            self._store = stores.from_url(url, **options)
            self._find_blocks()
        except (exceptions.BaseError, OSError, ValueError) as error:
            raise errors.ConfigError(
                f"--kvbm-object-store {url}: expected a store that can be listed, got: {_describe(error)}"
            ) from error

    def write(self, slot: int, block: CachedBlock, content: memoryview, generation: int) -> None:
        """Write a block, and remove the one that the slot held. Raises OSError, also if all was forgotten meanwhile."""
        parent = _ROOT if block.parent_hash is None else f"{block.parent_hash:016x}"
        path = f"{self._prefix}/{block.sequence_hash:016x}-{block.local_hash:016x}-{parent}"
        with self._lock:
            former = self._paths.get(slot)
            self._paths[slot] = path  # so that `purge` leaves it
        try:
            self._replace(former, path, content, generation)
        except (exceptions.BaseError, OSError) as error:
            with self._lock:
                self._paths.pop(slot, None)
            raise OSError(_describe(error)) from error

    def _replace(self, former: str | None, path: str, content: memoryview, generation: int) -> None:
        """Remove the object `former` and write that of a block. Raises OSError if all was forgotten meanwhile."""
        if former is not None and former != path:
            self._remove([former])
        if generation == self.generation:
            header = _HEADER.pack(_FORMAT, xxhash.xxh3_64_intdigest(content))
            obstore.put(self._store, path, b"".join((header, content)), use_multipart=False)
        if generation != self.generation:  # perhaps after `purge` has listed the objects
            self._remove([path])
            raise OSError("all blocks were forgotten while this one was to be written")

    @property
    def slots(self) -> TierSlots:
        """All slots: each worker has a list of its own."""
        return TierSlots(num=self.num_slots, stored=self.blocks)

    def look(self) -> None:
        """Find nothing: what other workers store is found at the next start."""

    def read(self, slot: int, content: memoryview, expected: CachedBlock | None = None) -> bool:
        """Read the block of a slot; return False if it is gone or wrong. Raises OSError."""
        path = self._paths.get(slot)
        if path is None:
            return False
        try:
            stored = memoryview(obstore.get(self._store, path).bytes())
        except FileNotFoundError:
            return False
        except exceptions.BaseError as error:
            raise OSError(_describe(error)) from error
        if len(stored) != _HEADER.size + len(content):
            return False
        format_name, checksum = _HEADER.unpack(stored[: _HEADER.size])
        content[:] = stored[_HEADER.size :]
        return bool(format_name == _FORMAT and xxhash.xxh3_64_intdigest(content) == checksum)

    def forget(self) -> None:
        """Find no block any more. Other workers, and a restart, find those that `purge` has not removed yet."""
        with self._lock:
            self._paths.clear()
            self.generation += 1

    def purge(self) -> None:
        """Remove all forgotten blocks of this fingerprint, those of other workers too. Raises OSError."""
        try:
            for page in obstore.list(self._store, prefix=self._prefix):
                with self._lock:
                    kept = set(self._paths.values())
                self._remove([entry["path"] for entry in page if entry["path"] not in kept])
        except exceptions.BaseError as error:
            raise OSError(_describe(error)) from error

    def close(self) -> None:
        """Do nothing: there is no connection that would have to be closed."""

    def _find_blocks(self) -> None:
        """Enter the newest objects as blocks; remove those for which there is no slot."""
        entries = [
            entry for page in obstore.list(self._store, prefix=self._prefix) for entry in page
        ]
        entries.sort(key=lambda entry: entry["last_modified"], reverse=True)
        for entry in entries:
            block = _parse(entry["path"])
            if block is not None and len(self.blocks) < self.num_slots:
                slot = len(self.blocks)
                self.blocks[slot], self._paths[slot] = block, entry["path"]
        kept = set(self._paths.values())
        self._remove([entry["path"] for entry in entries if entry["path"] not in kept])
        self.blocks = dict(reversed(self.blocks.items()))

    def _remove(self, paths: Sequence[str]) -> None:
        with contextlib.suppress(FileNotFoundError):  # another worker was quicker
            obstore.delete(self._store, paths)


def _parse(path: str) -> CachedBlock | None:
    """Return the block of an object's name; None for something else."""
    parts = path.rpartition("/")[2].split("-")
    if len(parts) != _NAME_PARTS:
        return None
    try:
        parent = None if parts[2] == _ROOT else int(parts[2], 16)
        return CachedBlock(int(parts[0], 16), int(parts[1], 16), parent)
    except ValueError:
        return None


def _describe(error: Exception) -> str:
    """Return the first line of an error, without the library's dump of its value."""
    return str(error).partition("\n")[0]
