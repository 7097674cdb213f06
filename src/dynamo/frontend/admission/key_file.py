"""The file of API keys: read at the start, and again when it has changed. A broken one changes nothing.

It is looked at once a second, which needs no watcher and follows every way to replace a file (write in place, rename,
a mounted secret whose link moves). SIGHUP looks at once.
"""

import asyncio
import contextlib
import logging
from pathlib import Path

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.frontend.admission import keys

LOOK_INTERVAL_S = 1.0
_Stamp = tuple[int, int, int]
_logger = logging.getLogger(__name__)


class KeyWatch:
    """Keeps `book` as the file says."""

    def __init__(self, path: Path, clock: clocks.Clock) -> None:
        self.book = keys.GuestBook()
        self._path = path
        self._clock = clock
        self._stamp: _Stamp | None = None
        self.look_now = asyncio.Event()

    def load(self) -> None:
        """Take over what the file says now. Raises ConfigError, and then nothing has changed."""
        try:
            self._stamp = self._look()
            content = self._path.read_text("utf-8")
            self.book.replace(keys.read(content), self._clock.now())
        except (OSError, UnicodeDecodeError, errors.ConfigError) as error:
            raise errors.ConfigError(f"--api-keys-file {self._path}: {error}") from None

    async def run(self) -> None:
        """Follow the file until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.look_now.wait(), LOOK_INTERVAL_S)
            if self.look_now.is_set() or self._has_changed():
                self.look_now.clear()
                self._reload()

    def _reload(self) -> None:
        try:
            self.load()
        except errors.ConfigError as error:
            _logger.error("the keys stay as they were: %s", error)  # noqa: TRY400 (one line says it)
        else:
            _logger.info("read %d API keys from %s", len(self.book), self._path)

    def _has_changed(self) -> bool:
        try:
            return self._look() != self._stamp
        except OSError:  # while it is being replaced
            return False

    def _look(self) -> _Stamp:
        found = self._path.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns
