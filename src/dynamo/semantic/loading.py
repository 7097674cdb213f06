"""A router from its file, and the same router with a new file: a wrong one keeps the old in force."""

import logging
from pathlib import Path

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.semantic import config_file, model_choice, router
from dynamo.semantic.classifiers import profile

RELOAD_INTERVAL_S = 2.0  # between looks at the file
_logger = logging.getLogger(__name__)


class RouterLoader:
    """Owns the file of a router. Raises ConfigError if the first file is wrong."""

    def __init__(
        self, path: Path, clock: clocks.Clock, served: model_choice.ServedModels | None = None
    ) -> None:
        self._path = path
        self._clock = clock
        self._profile = profile.load_profile()
        self._stamp = self._read_stamp()
        loaded = config_file.load(path, self._profile.categories)
        self.router = router.SemanticRouter(loaded, self._profile, clock, served)
        self.last_error = ""  # of the last file, if it was refused
        for note in loaded.notes:
            _logger.warning("%s: %s", path, note)

    async def watch(self) -> None:
        """Reload the file whenever it changes, until cancelled."""
        while True:
            await self._clock.sleep(RELOAD_INTERVAL_S)
            self.reload_if_changed()

    def reload_if_changed(self) -> bool:
        """Read a changed file, and return whether it is in force; a wrong one is logged and passed over."""
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            loaded = config_file.load(self._path, self._profile.categories)
        except errors.ConfigError as error:
            self.last_error = str(error)
            _logger.error("%s; the configuration from before stays in force", error)  # noqa: TRY400
            return False
        self.last_error = ""
        self.router.replace_config(loaded)
        _logger.info("%s: reloaded, %d decisions", self._path, len(loaded.settings.decisions))
        return True

    def _read_stamp(self) -> tuple[int, int, int]:
        """Return what changes with the file: time, size and number; zeros if it is not there."""
        try:
            status = self._path.stat()
        except OSError:
            return 0, 0, 0
        return status.st_mtime_ns, status.st_size, status.st_ino
