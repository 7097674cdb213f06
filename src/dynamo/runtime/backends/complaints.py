"""What strangers do is worth a line in the log, but not a line for each of them."""

import logging
import time
from collections.abc import Callable

_INTERVAL_S = 1.0

_log = logging.getLogger(__name__)


class Complaints:
    """At most one line in a second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said_at = float("-inf")

    def say(self, reason: str) -> None:
        """`reason` continues a sentence that begins with "the peer"."""
        now = self._clock()
        if now - self._said_at >= _INTERVAL_S:
            self._said_at = now
            _log.warning("dropped a connection to the request plane: the peer %s", reason)
