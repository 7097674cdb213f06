"""Which releases of a library an adapter is written for; asked before it is imported, which takes seconds.

The Python interfaces of engines move with each release. An older release than an adapter knows would fail somewhere
within; a newer one may work, so it is only warned of.
"""

import importlib.metadata
import importlib.util
import logging
import re
from dataclasses import dataclass

from dynamo.base import errors

_logger = logging.getLogger(__name__)
Release = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A library as an adapter needs it."""

    name: str  # as people write it
    package: str
    how: str  # what to do to have it
    oldest: Release
    newest: Release

    def check(self) -> None:
        """Raises ConfigError if it is not installed, or is older than we know."""
        if importlib.util.find_spec(self.package) is None:
            raise errors.ConfigError(
                f"the {self.name} engine needs {self.package}, which is not installed: {self.how}, or serve with the"
                f" built-in engine, python -m dynamo.native, which needs no {self.name}"
            )
        self.judge(self._version())

    def judge(self, version: str) -> None:
        """What there is to say of this version. Raises ConfigError for one that is too old."""
        found = re.match(r"(\d+)\.(\d+)", version)
        if found is None:
            _logger.warning(
                "%s calls its version %r: it may not be one that we know", self.name, version
            )
            return
        release = (int(found[1]), int(found[2]))
        if release < self.oldest:
            raise errors.ConfigError(
                f"{self.name} {version} is too old: expected {_text(self.oldest)} to {_text(self.newest)}; {self.how}"
            )
        if release > self.newest:
            _logger.warning(
                "%s %s is newer than the newest that we know, %s",
                self.name, version, _text(self.newest),
            )  # fmt: skip

    def _version(self) -> str:
        """Of whichever distribution brings the package: there may be several."""
        distributions = importlib.metadata.packages_distributions().get(self.package, [])
        return importlib.metadata.version(distributions[0]) if distributions else "unknown"


def _text(release: Release) -> str:
    return ".".join(map(str, release))
