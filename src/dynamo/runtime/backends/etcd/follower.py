"""One watched prefix: read it, then hear of every change since that reading, over as many connections as it takes.

After each break of the connection the prefix is read anew, and the view tells its watchers the difference. To go on
from the last revision would save that reading (some 30 ms for 4,000 keys), but would go wrong in silence with an etcd
that was restarted empty: it waits for a revision that is far in its future, and tells nothing until then.
"""

import asyncio
import logging
from collections.abc import AsyncIterator

from dynamo.runtime.backends import view
from dynamo.runtime.backends.etcd import connection, grace
from dynamo.runtime.discovery import Change

log = logging.getLogger(__name__)


class Follower:
    """What is known of a prefix. `grace_s`: for how long after an outage a missing key is believed alive."""

    def __init__(self, prefix: str, grace_s: float) -> None:
        self._prefix = prefix
        self._grace_s = grace_s
        self._view = view.View()
        self._grace = grace.Grace(self._view)
        self._has_read = False

    def watch(self) -> AsyncIterator[Change]:
        """What is known, then every change; ends only by cancellation."""
        return self._view.watch("")

    async def follow(self, etcd: connection.Connection) -> None:
        """Keep the view as etcd has it, for as long as it answers. Raises Unavailable, ConfigError."""
        if self._has_read:
            self._grace.begin()
        timer = asyncio.get_running_loop().call_later(self._grace_s, self._grace.end)
        try:
            while True:
                await self._read_and_watch(etcd)
        finally:
            timer.cancel()  # if we could not look for the whole time, the next time starts anew

    async def _read_and_watch(self, etcd: connection.Connection) -> None:
        try:
            living, revision = await etcd.read(self._prefix)
            self._grace.replace(living)
            self._has_read = True
            async for changes in etcd.watch(self._prefix, revision + 1):
                self._grace.apply(changes)
        except connection.HistoryLost as error:
            log.info("reading %r anew: %s", self._prefix, error)
