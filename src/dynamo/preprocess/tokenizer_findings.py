"""Findings about tokenizers: what a first load found out by both libraries, kept for later loads in one directory.

To compare `fastokens` with the reference takes some tenths of a second, and the memory of a second library, of which
20 MB are never given back. Findings are named by the checksum of tokenizer.json and the versions of all that they
depend on, so they hold until one of these changes. A directory that cannot be read or written costs a check.
"""

import functools
import hashlib
import logging
import os
import tempfile
from importlib import metadata
from pathlib import Path

import msgspec

_REVISION = 2  # of the checks: a change of them makes earlier findings void
_PACKAGES = ("dynamo-serving", "fastokens", "tokenizers")
_logger = logging.getLogger(__name__)


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one tokenizer.json."""

    num_ids: int  # all ids are below it
    is_fastokens_equal: bool  # it gives the ids and texts of the reference
    is_cutting_exact: bool  # a prompt may be cut at the tokens that are taken out of the raw text
    splits_at_lines: bool  # long text may be cut at line ends before letters


class FindingsDirectory:
    """Keeps findings, one small file for each tokenizer; several processes may share it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def of_user(cls) -> "FindingsDirectory | None":
        """Return `pydynamo/tokenizers` in XDG_CACHE_HOME; None for a user without a home, as in some containers."""
        try:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        except RuntimeError:
            return None
        return cls(cache / "pydynamo" / "tokenizers")

    def find(self, definition: bytes) -> Findings | None:
        """Return the findings about this content of tokenizer.json; None if there are none."""
        try:
            return msgspec.json.decode(self._file(definition).read_bytes(), type=Findings)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            _logger.debug("findings about a tokenizer cannot be read: %s", error)
            return None

    def keep(self, definition: bytes, findings: Findings) -> None:
        """Write the whole file or nothing."""
        try:
            self._path.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=self._path, prefix="coming-", delete=False) as new:
                new.write(msgspec.json.encode(findings))
            Path(new.name).replace(self._file(definition))
        except OSError as error:
            _logger.debug("findings about a tokenizer cannot be kept: %s", error)

    def _file(self, definition: bytes) -> Path:
        key = hashlib.sha256(definition)
        key.update(_versions())
        return self._path / f"{key.hexdigest()}.json"


@functools.cache
def _versions() -> bytes:
    return msgspec.json.encode([_REVISION, *map(metadata.version, _PACKAGES)])
