"""Whom to believe dead after an outage of etcd; it decides, without clock or network.

An etcd that comes back may have lost everything, or have ended leases whose holders could not reach it. Those holders
live, and put their keys back within moments. So for a while after each outage a key that is missing is shown as it was.
Who asks an instance that is really dead is told so by its connection, and asks another; to forget all that live would
leave nobody to ask.
"""

from collections.abc import Mapping, Sequence

from dynamo.runtime.backends import view
from dynamo.runtime.discovery import Change, Put


class Grace:
    """Feeds a view with what etcd says; between `begin` and `end` it removes nothing."""

    def __init__(self, shown: view.View) -> None:
        self._shown = shown
        self._missing: set[str] = set()
        self._is_on = False

    def begin(self) -> None:
        """From now on who is missing may yet come back."""
        self._is_on = True

    def end(self) -> None:
        """Who is missing now is dead."""
        self._is_on = False
        for key in self._missing:
            self._shown.remove(key)
        self._missing.clear()

    def replace(self, living: Mapping[str, bytes]) -> None:
        """etcd was read: these are all its keys."""
        if self._is_on:
            known = self._shown.get_prefix("")
            self._missing = known.keys() - living.keys()
            living = {**known, **living}
        self._shown.replace(living)

    def apply(self, changes: Sequence[Change]) -> None:
        """etcd tells of changes."""
        for change in changes:
            if isinstance(change, Put):
                self._missing.discard(change.key)
                self._shown.put(change.key, change.value)
            elif self._is_on:
                self._missing.add(change.key)
            else:
                self._shown.remove(change.key)
