"""One watched prefix in etcd: read it, then receive every change since that reading, over any number of connections.

After each break of the connection the prefix is read anew, and the view tells its watchers the difference. To go on
from the last revision would save that reading (some 30 ms for 4,000 keys), but would go wrong in silence with an etcd
that was restarted empty: it waits for a revision that is far in its future, and reports nothing until then.
"""

import logging
from collections.abc import AsyncIterator, Mapping, Sequence

from dynamo.base import clock
from dynamo.runtime.backends import key_view
from dynamo.runtime.backends.etcd import connection
from dynamo.runtime.discovery import Change, Put

log = logging.getLogger(__name__)


class OutageGrace:
    """The decision which keys to believe dead after an outage of etcd, without clock or network; it feeds a view.

    An etcd that comes back may have lost everything, or have ended leases because their holders could not reach it.
    Those holders live, and put their keys back within moments. So for a while after each outage, between `begin` and
    `end`, a missing key is shown as it was. A request to an instance that is really dead fails at its connection and
    goes to another; to forget all living instances would leave none to ask.
    """

    def __init__(self, view: key_view.KeyView) -> None:
        self._view = view
        self._missing: set[str] = set()
        self._is_active = False

    def begin(self) -> None:
        """Keep missing keys from now on, since their owners may put them back."""
        self._is_active = True

    def end(self) -> None:
        """Remove the keys that are still missing."""
        self._is_active = False
        for key in self._missing:
            self._view.remove(key)
        self._missing.clear()

    def replace(self, living: Mapping[str, bytes]) -> None:
        """Take all keys of the prefix as etcd has them now."""
        if self._is_active:
            shown = self._view.get_prefix("")
            self._missing = shown.keys() - living.keys()
            living = {**shown, **living}
        self._view.replace(living)

    def apply(self, changes: Sequence[Change]) -> None:
        """Take changes that etcd reports."""
        for change in changes:
            if isinstance(change, Put):
                self._missing.discard(change.key)
                self._view.put(change.key, change.value)
            elif self._is_active:
                self._missing.add(change.key)
            else:
                self._view.remove(change.key)


class PrefixWatcher:
    """The known keys of a prefix. `grace_s`: seconds after an outage for which a missing key is believed alive."""

    def __init__(self, prefix: str, grace_s: float, time: clock.Clock) -> None:
        self._prefix = prefix
        self._grace_s = grace_s
        self._clock = time
        self._view = key_view.KeyView()
        self._grace = OutageGrace(self._view)
        self._has_read = False

    def watch(self) -> AsyncIterator[Change]:
        """Iterate over the known keys, then over every change; ends only by cancellation."""
        return self._view.watch("")

    async def follow(self, etcd: connection.EtcdConnection) -> None:
        """Keep the view as etcd has it, for as long as it answers. Raises Unavailable, ConfigError."""
        if self._has_read:
            self._grace.begin()
        timer = self._clock.call_later(self._grace_s, self._grace.end)
        try:
            while True:
                await self._read_and_watch(etcd)
        finally:
            timer.cancel()  # the grace begins anew if this connection did not last for the whole time

    async def _read_and_watch(self, etcd: connection.EtcdConnection) -> None:
        try:
            living, revision = await etcd.read(self._prefix)
            self._grace.replace(living)
            self._has_read = True
            async for changes in etcd.watch(self._prefix, revision + 1):
                self._grace.apply(changes)
        except connection.HistoryLost as error:
            log.info("reading %r anew: %s", self._prefix, error)
