"""The object store tier: one object for each segment of blocks, in whatever `obstore` can reach by a URL.

    PREFIX / fingerprint / sequence hashes, after that of the block before / local hashes      both in base64

The name has all that the index needs, so a start lists names and reads no block. It is one that any worker with these
tokens gives the segment, so that two store it once. The fingerprint (model, dtype, layout, ...) is a hash: blocks of
another engine are never seen. In an object each block follows its checksum, whose seed is the block's sequence hash: a
range of blocks can be read alone, and a block in another's place is found.

Workers may share a prefix: one that starts finds what others have stored by then, and asks for what they store later
(`find_segment`). Each removes what it evicts; what another worker has removed meanwhile is not there when it is read,
and is computed.
"""

import base64
import contextlib
import itertools
import os
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib import parse, request

import obstore
import xxhash
from obstore import exceptions
from obstore import store as stores

from dynamo.base import errors
from dynamo.kvbm.tiers import CachedBlock, Segment, TierSlots
from dynamo.protocols import kv_events

SEGMENT_TOKENS = 256
# Whose hashes fit into the 255 bytes that file systems allow for a part of a name.
MAX_SEGMENT_BLOCKS = 16
TIMEOUT_S = 10  # of one request
UNFINISHED_S = 60  # after which a write to a directory is one of a killed process
_NUMBER = struct.Struct("<Q")  # a checksum, a hash


class ObjectStorage:
    """A `storage.Storage`. Its methods may be called by any thread, one at a time for each slot."""

    tier = kv_events.REMOTE
    num_threads = 4

    def __init__(
        self,
        url: str,
        fingerprint: Mapping[str, str],
        *,
        num_blocks: int,
        block_size: int,
        part: str = "",
    ) -> None:
        """Find the blocks of earlier runs. `block_size` is in tokens, `part` the name of a rank.

        Raises ConfigError that names the option and what is wrong.
        """
        self.name = url
        self._segment_blocks = min(max(1, SEGMENT_TOKENS // block_size), MAX_SEGMENT_BLOCKS)
        self._num_slots = num_blocks // self._segment_blocks
        if not self._num_slots:
            raise errors.ConfigError(
                f"--kvbm-object-num-blocks {num_blocks}: expected at least {self._segment_blocks}, the blocks of one"
                " object"
            )
        text = "\n".join(f"{name}={value}" for name, value in sorted(fingerprint.items()))
        self._prefix = f"{xxhash.xxh3_64_hexdigest(text.encode())}/{part}".rstrip("/")
        self._lock = threading.Lock()
        self.generation = 0
        self._is_emptied = False  # from `forget` until `purge` has ended
        self._paths: dict[int, str] = {}  # by slot
        # By slot: objects that it may have left in the store, which its next segment replaces.
        self._former: dict[int, set[str]] = {}
        self._stored: dict[int, Segment] = {}  # of earlier runs, by slot, oldest first
        self._directory: Path | None = None  # of the objects, if they are files
        try:
            options: dict[str, Any] = {}  # of a directory, which has no time limits
            if (directory := _find_directory(url)) is not None:
                self._directory = directory / self._prefix
                self._make_directory()
            else:
                options = {
                    "client_options": {"timeout": f"{TIMEOUT_S}s", "allow_http": True},
                    "retry_config": {"max_retries": 1},
                }
            self._store = stores.from_url(url, **options)
            self._find_segments()
        except (exceptions.BaseError, OSError, ValueError) as error:
            raise errors.ConfigError(
                f"--kvbm-object-store {url}: expected a store that can be listed, got: {_describe(error)}"
            ) from error

    def write(
        self, slot: int, segment: Segment, contents: Sequence[memoryview], generation: int
    ) -> None:
        """Write a segment, and remove the one that the slot held.

        Raises OSError, also if all was forgotten meanwhile.
        """
        path = self._locate(segment)
        with self._lock:
            former = self._former.pop(slot, set())
            if slot in self._paths:
                former.add(self._paths[slot])
            self._paths[slot] = path  # so that `purge` leaves it
            others = self._paths.values()  # what was stored again, in another slot
            replaced = [each for each in former if each not in others]
        body: list[bytes | memoryview] = []
        for block, content in zip(segment, contents, strict=True):
            body += (_checksum(block, content), content)
        try:
            self._replace(replaced, path, b"".join(body), generation)
        except (exceptions.BaseError, OSError) as error:
            with self._lock:
                self._paths.pop(slot, None)
                # if the removal has not failed, the store may have the new one all the same
                self._former[slot] = set(replaced) or {path}
            raise OSError(_describe(error)) from error

    def _replace(self, former: list[str], path: str, body: bytes, generation: int) -> None:
        """Empty the list of former objects, by removing them, and write that of a segment.

        Raises OSError if all was forgotten meanwhile.
        """
        if former:
            self._remove(former)
            former.clear()
        if generation == self.generation:
            self._make_directory()
            obstore.put(self._store, path, body, use_multipart=False)
        if generation != self.generation:  # perhaps after `purge` has listed the objects
            self._remove([path])
            raise OSError("all blocks were forgotten while these were to be written")

    @property
    def slots(self) -> TierSlots:
        """All slots: each worker has a list of its own."""
        return TierSlots(
            num=self._num_slots,
            segment_blocks=self._segment_blocks,
            can_renumber=True,
            stored=self._stored,
        )

    def renumber(self, stored: Mapping[int, Segment]) -> None:
        """Give other slots to the objects of an earlier run, and forget the rest, which is left to the next start.

        The rest may be new objects of another worker, of which this one's other ranks have not seen their part yet.
        """
        with self._lock:
            self._paths = {slot: self._locate(segment) for slot, segment in stored.items()}

    def find_segment(self, slot: int, segment: Segment, generation: int) -> bool:
        """Ask the store for an object. Not while it is emptied: what is still there then was forgotten."""
        path = self._locate(segment)
        try:
            obstore.head(self._store, path)
        except FileNotFoundError:
            return False
        except exceptions.BaseError as error:
            raise OSError(_describe(error)) from error
        with self._lock:
            if generation != self.generation or self._is_emptied:
                return False
            self._paths[slot] = path
        return True

    def look(self) -> None:
        """Find nothing: the store is asked for what other workers have stored (`find_segment`)."""

    def read(
        self, slot: int, blocks: Sequence[CachedBlock], contents: Sequence[memoryview]
    ) -> frozenset[int]:
        """Read blocks of a slot by one request.

        Return the positions of those that are gone or wrong. Raises OSError.
        """
        path = self._paths.get(slot)
        segment = None if path is None else self._parse(path)
        if path is None or segment is None or not set(blocks) <= set(segment):
            return frozenset(range(len(blocks)))
        places = [segment.index(block) for block in blocks]
        first, num_bytes = min(places), _NUMBER.size + len(contents[0])
        try:
            read = obstore.get_range(
                self._store, path, start=first * num_bytes, end=(max(places) + 1) * num_bytes
            )
        except FileNotFoundError:
            return frozenset(range(len(blocks)))
        except exceptions.BaseError as error:
            raise OSError(_describe(error)) from error
        wrong, records = set(), memoryview(read)
        for i, (block, content, place) in enumerate(zip(blocks, contents, places, strict=True)):
            record = records[(place - first) * num_bytes :][:num_bytes]
            stored = record[_NUMBER.size :]
            if len(record) < num_bytes or record[: _NUMBER.size] != _checksum(block, stored):
                wrong.add(i)
            else:
                content[:] = stored
        return frozenset(wrong)

    def forget(self) -> None:
        """Find no block any more. Other workers, and a restart, find those that `purge` has not removed yet."""
        with self._lock:
            self._paths.clear()
            self._former.clear()
            self.generation += 1
            self._is_emptied = True

    def purge(self) -> None:
        """Remove all forgotten blocks of this fingerprint, those of other workers too. Raises OSError."""
        generation = self.generation
        self._remove_unfinished()
        try:
            for page in self._list():
                with self._lock:
                    kept = set(self._paths.values())
                self._remove([entry["path"] for entry in page if entry["path"] not in kept])
        except exceptions.BaseError as error:
            raise OSError(_describe(error)) from error
        with self._lock:
            self._is_emptied = generation != self.generation  # again, meanwhile

    def close(self) -> None:
        """Do nothing: there is no connection that would have to be closed."""

    def _find_segments(self) -> None:
        """Enter the newest objects as segments; remove those for which there is no slot, and what is none."""
        self._remove_unfinished()
        entries = list(itertools.chain.from_iterable(self._list()))
        entries.sort(key=lambda entry: entry["last_modified"], reverse=True)
        known: set[int] = set()
        for entry in entries:
            segment = self._parse(entry["path"])
            if segment is None or len(self._stored) == self._num_slots:
                continue
            if segment[-1].sequence_hash not in known:
                known.add(segment[-1].sequence_hash)
                slot = len(self._stored)
                self._stored[slot], self._paths[slot] = segment, entry["path"]
        kept = set(self._paths.values())
        self._remove([entry["path"] for entry in entries if entry["path"] not in kept])
        self._stored = dict(reversed(self._stored.items()))

    def _list(self) -> Iterator[list[Any]]:
        """Yield our objects, page by page; those of ranks, in directories below a lone worker's, are not ours."""
        most = self._prefix.count("/") + 2
        for page in obstore.list(self._store, prefix=self._prefix):
            yield [entry for entry in page if entry["path"].count("/") <= most]

    def _remove(self, paths: Sequence[str]) -> None:
        try:
            obstore.delete(self._store, paths)
        except FileNotFoundError:  # another worker was quicker with one, and the rest may be there
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    obstore.delete(self._store, path)
        if self._directory is not None:
            for path in paths:
                name = path.removeprefix(f"{self._prefix}/").partition("/")[0]
                with contextlib.suppress(OSError):  # written again meanwhile
                    (self._directory / name).rmdir()

    def _make_directory(self) -> None:
        """Make the objects' directory, anew if it was removed: what obstore makes, other users can read."""
        if self._directory is not None:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _remove_unfinished(self) -> None:
        """Remove what killed processes have written of objects, as NAME#NUMBER in a directory; no list has it."""
        if self._directory is None:
            return
        begun_before = time.time() - UNFINISHED_S
        for parent, _, names in os.walk(self._directory):
            for path in [Path(parent, name) for name in names if "#" in name]:
                with contextlib.suppress(OSError):  # another process was quicker
                    if path.stat().st_mtime < begun_before:
                        path.unlink()
                        path.parent.rmdir()

    def _locate(self, segment: Segment) -> str:
        return f"{self._prefix}/{_name(segment)}"

    def _parse(self, path: str) -> Segment | None:
        """Return the segment of an object's name; None for something else."""
        names = path.removeprefix(f"{self._prefix}/").split("/")
        try:
            chain, local_hashes = [_decode(name) for name in names]
        except ValueError:
            return None
        if len(local_hashes) != self._segment_blocks:
            return None
        parent = chain.pop(0) if len(chain) == self._segment_blocks + 1 else None
        if len(set(chain)) != self._segment_blocks or len(chain) != self._segment_blocks:
            return None
        blocks = zip(chain, local_hashes, (parent, *chain[:-1]), strict=True)
        return tuple(itertools.starmap(CachedBlock, blocks))


def _find_directory(url: str) -> Path | None:
    """Return the directory of a URL, None for other stores. Raises ValueError for one without an absolute path."""
    parts = parse.urlsplit(url)
    if parts.scheme != "file":
        return None
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ValueError("no absolute path, as in file:///DIRECTORY")
    return Path(request.url2pathname(parts.path))


def _name(segment: Segment) -> str:
    """Return the end of an object's name."""
    parent = segment[0].parent_hash
    chain = [block.sequence_hash for block in segment]
    chain = chain if parent is None else [parent, *chain]
    return f"{_encode(chain)}/{_encode([block.local_hash for block in segment])}"


def _encode(hashes: Sequence[int]) -> str:
    return base64.urlsafe_b64encode(b"".join(map(_NUMBER.pack, hashes))).rstrip(b"=").decode()


def _decode(name: str) -> list[int]:
    """Return the hashes that a part of a name has. Raises ValueError for something else."""
    packed = base64.b64decode(name + "=" * (-len(name) % 4), altchars=b"-_", validate=True)
    if len(packed) % _NUMBER.size:
        raise ValueError("expected whole hashes")
    return [number for (number,) in _NUMBER.iter_unpack(packed)]


def _checksum(block: CachedBlock, content: memoryview) -> bytes:
    return _NUMBER.pack(xxhash.xxh3_64_intdigest(content, block.sequence_hash))


def _describe(error: Exception) -> str:
    """Return the first line of an error, without the library's dump of its value."""
    return str(error).partition("\n")[0]
