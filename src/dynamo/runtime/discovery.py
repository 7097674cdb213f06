"""Discovery: the records of all living processes, such as the endpoints that they serve.

A process holds one *lease*: the keys that it puts vanish when it closes, when it dies, or when its lease is lost for
longer than the time to live. Keys are `/`-separated paths (see `protocols.instances`), values are small bytes (JSON).

Implementations: `backends.memory` (one process), `backends.file` (one host, the default),
`backends.etcd` (several hosts), `backends.kubernetes` (the pods of a cluster).
`tests/contract/test_discovery.py` runs one suite over all of them.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """A key is new or has a new value.

    `is_confirmed` is false when discovery has lost the key, its owner did not remove it, and nobody knows whether the
    owner lives: ask it last.
    """

    key: str
    value: bytes
    is_confirmed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """A key is gone: its owner removed it, or its lease has ended."""

    key: str


Change = Put | Delete
OwnerCheck = Callable[[str, bytes], bool | None]
"""Tells whether the process that put this key and value answers us; None: unknown, ask again."""
UNCONFIRMED_S = 10.0  # for which a lost key is kept while it is not known whether its owner lives
REMOVED = b"\0removed"  # the last value of a key that its owner removes itself


class Discovery(Protocol):
    """Put under a lease, get a prefix, watch a prefix."""

    async def put(self, key: str, value: bytes) -> None:
        """Write a key under this process's lease; a second put replaces the value."""
        ...

    async def delete(self, *keys: str) -> None:
        """Remove keys of this process, in this order, within one time limit; a missing one is no error.

        Those that cannot be removed now are in the log, and go later, at the latest with the lease.
        """
        ...

    async def get_prefix(self, prefix: str) -> Mapping[str, bytes]:
        """Return all living keys that begin with `prefix`, with their values."""
        ...

    def watch(self, prefix: str) -> AsyncIterator[Change]:
        """Iterate over a Put for each living key under `prefix`, then every change in order; ends only by cancellation.

        A dead owner's keys are deleted within the backend's time to live. Intermediate values may be skipped.
        """
        ...

    async def close(self) -> None:
        """Give up the lease: the keys of this process vanish at once."""
        ...


class KeyView:
    """The living keys as one process knows them, and the watches on them; each backend feeds one. For one thread.

    A watch never falls behind without bound: its pending changes are kept by key, so a key that changes five times
    while the watcher is busy is reported once, and one that came and went unseen is not reported at all.
    """

    def __init__(self) -> None:
        self._value_by_key: dict[str, bytes] = {}
        self._unconfirmed: set[str] = set()
        self._watches: set[_Watch] = set()

    def get_prefix(self, prefix: str) -> dict[str, bytes]:
        """Return all keys that begin with `prefix`, with their values."""
        return {k: value for k, value in self._value_by_key.items() if k.startswith(prefix)}

    def __contains__(self, key: str) -> bool:
        return key in self._value_by_key

    def put(self, key: str, value: bytes) -> None:
        """Set the value of a key; the same value again is no change."""
        if self._value_by_key.get(key) == value and key not in self._unconfirmed:
            return
        self._value_by_key[key] = value
        self._unconfirmed.discard(key)
        self._report(Put(key=key, value=value))

    def doubt(self, key: str) -> None:
        """Report that it is unknown whether the owner of a key lives."""
        if key in self._value_by_key and key not in self._unconfirmed:
            self._unconfirmed.add(key)
            self._report(Put(key=key, value=self._value_by_key[key], is_confirmed=False))

    def remove(self, key: str) -> None:
        """Remove a key; one that is not there is no change."""
        self._unconfirmed.discard(key)
        if self._value_by_key.pop(key, None) is not None:
            self._report(Delete(key=key))

    def replace(self, living: Mapping[str, bytes]) -> None:
        """Make `living` all the keys there are; each that is new, changed or gone is reported."""
        for key in self._value_by_key.keys() - living.keys():
            self.remove(key)
        for key, value in living.items():
            self.put(key, value)

    async def watch(self, prefix: str) -> AsyncIterator[Change]:
        """Iterate over a Put for each key under `prefix`, then over every change; ends only by cancellation."""
        watch = _Watch(prefix)
        for key, value in self._value_by_key.items():
            watch.add_change(Put(key=key, value=value, is_confirmed=key not in self._unconfirmed))
        self._watches.add(watch)
        try:
            while True:
                yield await watch.next_change()
        finally:
            self._watches.discard(watch)

    def _report(self, change: Change) -> None:
        for watch in self._watches:
            watch.add_change(change)


class _Watch:
    """The keys that one watcher knows, and its pending changes."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._reported_keys: set[str] = set()
        self._pending: dict[str, Change] = {}  # in the order to be reported
        self._filled = asyncio.Event()

    def add_change(self, change: Change) -> None:
        if not change.key.startswith(self._prefix):
            return
        self._pending.pop(change.key, None)
        if isinstance(change, Put) or change.key in self._reported_keys:
            self._pending[change.key] = change
            self._filled.set()

    async def next_change(self) -> Change:
        while not self._pending:
            self._filled.clear()
            await self._filled.wait()
        change = self._pending.pop(next(iter(self._pending)))
        if isinstance(change, Put):
            self._reported_keys.add(change.key)
        else:
            self._reported_keys.discard(change.key)
        return change


class KeyRetention:
    """The decision which keys of a prefix to believe dead, without clock or network; it feeds a view.

    An owner that leaves writes `REMOVED` as the value of its key before it deletes it, and the key vanishes at once. A
    key that is missing without that has lost its lease: because its owner died, or because owner and discovery could
    not reach each other, while requests still reach it. A missing key is therefore shown

        while its owner answers                           as it was
        while nobody knows, for `unconfirmed_s` seconds   as unconfirmed: it is asked last

    and is removed when its owner is known to be gone. An etcd that comes back may have lost everything, and the owners
    put their keys back within moments: between `begin` and `end` every missing key is shown as it was.

    Kubernetes hides the pods that are not ready, and calls those so of which it hears nothing; the backend tells of
    keys that are removed on purpose by `REMOVED`, too.
    """

    def __init__(
        self,
        view: KeyView,
        is_alive: OwnerCheck,
        unconfirmed_s: float,
        on_missing: Callable[[], None] = lambda: None,
        *,
        is_answer_enough: bool = True,
    ) -> None:
        """With `is_answer_enough` false, the keys of owners that answer are unconfirmed, too."""
        self._view = view
        self._is_answer_enough = is_answer_enough
        self._is_alive = is_alive
        self._unconfirmed_s = unconfirmed_s
        self._missing_since: dict[str, float] = {}
        self._is_active = False
        self._on_missing = on_missing

    @property
    def is_judging(self) -> bool:
        """Whether keys are missing, so that `judge` is to be called again."""
        return bool(self._missing_since)

    def begin(self) -> None:
        """Keep missing keys from now on, since their owners may put them back."""
        self._is_active = True

    def end(self, now: float) -> None:
        """Judge the keys that are still missing."""
        self._is_active = False
        self._missing_since = dict.fromkeys(self._missing_since, now)
        self.judge(now)

    def replace(self, living: Mapping[str, bytes], now: float) -> None:
        """Take all keys of the prefix as discovery has them now."""
        shown = self._view.get_prefix("")
        self.apply([Delete(key=key) for key in shown.keys() - living.keys()], now)
        self.apply([Put(key=key, value=value) for key, value in living.items()], now)

    def apply(self, changes: Sequence[Change], now: float) -> None:
        """Take changes that discovery reports, in their order: one batch may bring a key and its end."""
        for change in changes:
            if isinstance(change, Put):
                self._missing_since.pop(change.key, None)
                if change.value == REMOVED:
                    self._view.remove(change.key)
                else:
                    self._view.put(change.key, change.value)
            elif change.key in self._view:
                self._missing_since.setdefault(change.key, now)
        self.judge(now)

    def judge(self, now: float) -> None:
        """Decide about each missing key by what is known of its owner now."""
        if self._is_active or not self._missing_since:
            return
        shown = self._view.get_prefix("")
        for key, since in list(self._missing_since.items()):
            is_alive = self._is_alive(key, shown[key]) if key in shown else False
            if is_alive is False or (is_alive is None and now - since >= self._unconfirmed_s):
                del self._missing_since[key]
                self._view.remove(key)
            elif is_alive is None:
                self._view.doubt(key)
            else:
                self._missing_since[key] = now
                if self._is_answer_enough:
                    self._view.put(key, shown[key])
                else:
                    self._view.doubt(key)
        if self._missing_since:
            self._on_missing()
