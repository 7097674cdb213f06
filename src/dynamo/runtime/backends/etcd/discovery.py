"""Discovery for several hosts over etcd: the state that stays the same while connections to etcd come and go.

One task keeps one connection at a time, to the first of the endpoints that answers, and on it the lease and the watches
live side by side. When one of them gets no answer, the connection ends for all, and the next endpoint is tried.

While etcd is away, watchers keep the keys that they know, for as long as it takes: which owners died is unknown, and
the request plane finds out a dead one with the first request. Only when etcd has been back for a whole time to live are
the keys removed that have not come back with it, and a key that etcd loses while its owner answers stays in use
(`KeyRetention`). The process goes on serving, and its lease is taken again (`EtcdLease`).
"""

import asyncio
import contextlib
import itertools
import logging
import math
import random
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar

from dynamo.base import clock, errors, tasks
from dynamo.runtime.backends.etcd import access, connection
from dynamo.runtime.discovery import (
    REMOVED,
    UNCONFIRMED_S,
    Change,
    KeyRetention,
    KeyView,
    OwnerCheck,
)

T = TypeVar("T")
LEASE_TTL_S = 10
START_TIMEOUT_S = 120.0
PUT_TIMEOUT_S = 60.0
READ_TIMEOUT_S = 10.0
LEAVE_TIMEOUT_S = 2.0  # if etcd cannot be told in time, the lease ends by itself
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0  # so that a living process is back long before its lease ends
_STABLE_S = 5.0  # a connection that lasted so long is followed by a quick attempt
_RETRY_S = 0.05
_JUDGE_EVERY_S = 0.5
_REFUSED_PAUSE_S = 10.0  # then a prefix that etcd refused is tried again: its role may have changed


class EtcdDiscovery:
    """One process's lease, keys and watches in an etcd that processes of many hosts share."""

    def __init__(
        self,
        settings: access.EtcdAccess,
        instance_id: int,
        *,
        lease_ttl_s: int,
        is_alive: OwnerCheck,
        time: clock.Clock,
    ) -> None:
        self._access = settings
        self._is_alive = is_alive
        self._clock = time
        self._lease = EtcdLease(instance_id, lease_ttl_s, time)
        self._lease_ttl_s = lease_ttl_s
        self._tasks = tasks.Tasks()
        self._task_by_watcher: dict[PrefixWatcher, asyncio.Task[None] | None] = {}
        self._watcher_added = asyncio.Event()
        self._key_missing = asyncio.Event()
        self._etcd: connection.EtcdConnection | None = None  # while it answers
        self._is_answering = asyncio.Event()
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outage: errors.DynamoError | None = None  # its cause, while etcd is away
        self._is_refused = False  # since etcd answered last
        self._has_hung = False  # at a removal of keys
        self._is_open = True

    @classmethod
    async def open(
        cls,
        settings: access.EtcdAccess,
        instance_id: int,
        *,
        lease_ttl_s: int = LEASE_TTL_S,
        start_timeout_s: float = START_TIMEOUT_S,
        is_alive: OwnerCheck = lambda _key, _value: False,
        time: clock.Clock | None = None,
    ) -> "EtcdDiscovery":
        """Take a lease as soon as etcd answers. Raises ConfigError if it refuses, or does not answer in time.

        A key stays after the end of its lease while `is_alive` says that its owner answers (`KeyRetention`).
        """
        self = cls(
            settings,
            instance_id,
            lease_ttl_s=lease_ttl_s,
            is_alive=is_alive,
            time=time or clock.SystemClock(),
        )
        self._tasks.start("etcd discovery", self._stay_connected(start_timeout_s))
        self._tasks.start("judge keys that etcd has lost", self._judge_missing_keys())
        try:
            async with self._clock.timeout(start_timeout_s):
                await self._started
        except TimeoutError:
            await self.close()
            raise errors.ConfigError(
                f"no etcd within {start_timeout_s:g} s: {self._outage}; {_ADVICE}"
            ) from None
        except BaseException:
            await self.close()
            raise
        return self

    async def put(self, key: str, value: bytes) -> None:
        if not self._is_open:
            raise errors.LocalProtocolError(f"put {key!r}: this discovery is closed")
        former = self._lease.set_key(key, value)
        try:
            await self._call(lambda etcd: self._lease.write(etcd, key), PUT_TIMEOUT_S)
        except errors.ConfigError:  # etcd has the former value still
            if former is None:
                self._lease.remove_key(key)
            else:
                self._lease.set_key(key, former)
            raise

    async def delete(self, *keys: str) -> None:
        is_away = self._etcd is None or self._is_hanging
        removed = [key for key in keys if self._is_open and self._lease.remove_key(key)]
        if not removed or is_away:  # then this does not wait: they are removed when etcd is back
            return
        try:
            await self._call(lambda etcd: self._lease.write(etcd, *removed), LEAVE_TIMEOUT_S)
        except (errors.Unavailable, errors.ConfigError) as error:
            self._has_hung = isinstance(error, errors.Unavailable)
            names = ", ".join(removed)
            log.info("%s: removed when etcd is back, or when our lease ends: %s", names, error)

    async def get_prefix(self, prefix: str) -> Mapping[str, bytes]:
        """Return all living keys that begin with `prefix`. Raises Unavailable."""
        living, _ = await self._call(lambda etcd: etcd.read(prefix), READ_TIMEOUT_S)
        return {key: value for key, value in living.items() if value != REMOVED}

    async def watch(self, prefix: str) -> AsyncIterator[Change]:
        watcher = PrefixWatcher(
            prefix, self._lease_ttl_s, self._is_alive, self._clock, self._key_missing.set
        )
        self._task_by_watcher[watcher] = None
        self._watcher_added.set()
        try:
            async for change in watcher.watch():
                yield change
        finally:
            task = self._task_by_watcher.pop(watcher)
            if task is not None:
                task.cancel()

    async def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        try:
            if self._etcd is not None and not self._is_hanging:
                async with self._clock.timeout(LEAVE_TIMEOUT_S):
                    await self._lease.end(self._etcd)
        except (TimeoutError, errors.DynamoError) as error:
            log.info("our keys leave etcd when our lease ends: %r", error)
        finally:
            await self._tasks.close()

    @property
    def _is_hanging(self) -> bool:
        """Return whether etcd was waited for in vain to remove keys, and has not removed them since."""
        return self._has_hung and bool(self._lease.unanswered_removals)

    async def _judge_missing_keys(self) -> None:
        while True:
            await self._key_missing.wait()
            await self._clock.sleep(_JUDGE_EVERY_S)
            self._key_missing.clear()
            for watcher in self._task_by_watcher:
                watcher.judge()

    async def _stay_connected(self, start_timeout_s: float) -> None:
        pause_s = _FIRST_PAUSE_S
        for address in itertools.cycle(self._access.addresses):
            began_at = self._clock.now()
            try:
                async with connection.connect(self._access, address) as etcd:
                    await self._use_connection(etcd)
            except* (errors.Unavailable, errors.ConfigError) as group:
                self._report_outage(_first_error(group), start_timeout_s)
            was_stable = self._clock.now() - began_at > _STABLE_S
            pause_s = _FIRST_PAUSE_S if was_stable else min(2 * pause_s, _LONGEST_PAUSE_S)
            await self._clock.sleep(pause_s * random.uniform(0.5, 1.0))

    async def _use_connection(self, etcd: connection.EtcdConnection) -> None:
        """Hold lease and watches on one connection until it breaks. Raises Unavailable, ConfigError, or a group."""
        await self._lease.attach(etcd)
        self._report_answer(etcd)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._lease.keep(etcd), name="keep the etcd lease")
                group.create_task(self._follow_all(etcd, group), name="follow etcd")
        finally:
            self._etcd = None
            self._is_answering.clear()

    async def _follow_all(self, etcd: connection.EtcdConnection, group: asyncio.TaskGroup) -> None:
        """Run a task for each watcher, those too that are added later."""
        self._task_by_watcher = dict.fromkeys(self._task_by_watcher)
        while True:
            self._watcher_added.clear()
            for watcher, task in self._task_by_watcher.items():
                if task is None:
                    self._task_by_watcher[watcher] = group.create_task(watcher.follow(etcd))
            await self._watcher_added.wait()

    def _report_answer(self, etcd: connection.EtcdConnection) -> None:
        if self._outage is not None:
            log.info("etcd at %s answers", etcd.address)
        self._etcd, self._outage, self._is_refused = etcd, None, False
        self._is_answering.set()
        if not self._started.done():
            self._started.set_result(None)

    def _report_outage(self, error: errors.DynamoError, start_timeout_s: float) -> None:
        """Log an outage once, and once that etcd answers with a refusal; at the start, that is final."""
        is_refusal = isinstance(error, errors.ConfigError)
        is_new = self._outage is None or (is_refusal and not self._is_refused)
        self._outage, self._is_refused = error, self._is_refused or is_refusal
        if not self._started.done() and is_refusal:
            self._started.set_exception(error)
        elif not self._started.done() and is_new:
            log.warning("%s; trying for %g s. %s", error, start_timeout_s, _ADVICE)
        elif is_new:
            log.warning("%s; serving goes on with what is known, trying to come back", error)

    async def _call(
        self, act: Callable[[connection.EtcdConnection], Awaitable[T]], within_s: float
    ) -> T:
        """Make a call on the first connection that answers. Raises Unavailable if none does within `within_s`."""
        cause: Exception | None = self._outage
        try:
            async with self._clock.timeout(within_s):
                while True:
                    await self._is_answering.wait()
                    try:
                        if self._etcd is not None:
                            return await act(self._etcd)
                    except connection.HistoryLost as error:  # between two pages: read anew
                        cause = error
                    except errors.Unavailable as error:
                        cause = error
                        self._lease.check_now()
                    await self._clock.sleep(_RETRY_S)
        except TimeoutError:
            cause = self._outage or cause
            raise errors.Unavailable(f"not done within {within_s:g} s: {cause}") from None


_ADVICE = "Start etcd, or set ETCD_ENDPOINTS; without etcd, on one host: --discovery-backend file"


def _first_error(group: BaseExceptionGroup[errors.DynamoError]) -> errors.DynamoError:
    """Return any error of a group: all have the same cause."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, errors.DynamoError)
    return error


_OF_ONE_KEY = (errors.ConfigError, errors.Overloaded)  # what hinders no other key
_REFRESHES_PER_TTL = 3
_MOST_WRITING = 32  # keys at once, which etcd stores in one go


class EtcdLease:
    """The lease of one process in etcd and its keys: held, lost, taken again.

    etcd lets the client choose a lease's id, so it is the instance id. A lease that was lost, because this process or
    etcd slept for longer than its time to live, or etcd was restarted with nothing, is taken again *under the same id*,
    and the keys are put back: to others it is the same instance as before. The desired state of etcd is kept here and
    written anew with each connection, so nothing has to be known of what etcd lost; a watcher sees no change in a key
    that is written as it was. A key that etcd does not take then is named and set aside, and the others go on. Methods
    that call etcd raise Unavailable if it is away, Overloaded if it has no room, ConfigError if it refuses.
    """

    def __init__(self, lease_id: int, ttl_s: int, time: clock.Clock) -> None:
        self._clock = time
        self._id = lease_id
        self._ttl_s = ttl_s
        self._desired: dict[str, bytes | None] = {}  # None: to be removed
        self._refused: set[str] = set()  # keys that etcd did not take, which `keep` tries again
        self._revisions: dict[str, int] = {}  # of etcd, at which we wrote each key last
        self._refresh_at = math.inf  # then a refresh is due
        self._attaching = asyncio.Lock()
        self._places = asyncio.Semaphore(_MOST_WRITING)
        self._lock_by_key = weakref.WeakValueDictionary[str, asyncio.Lock]()  # while it is written
        self._check_requested = asyncio.Event()
        self._was_held = False
        self._is_over = False

    def set_key(self, key: str, value: bytes) -> bytes | None:
        """Make this key and value part of the desired state; return the value that it had there, None if none."""
        former, self._desired[key] = self._desired.get(key), value
        return former

    def remove_key(self, key: str) -> bool:
        """Remove a key from the desired state; return False if it is not a key of this lease."""
        is_known = self._desired.get(key) is not None
        if is_known:
            self._desired[key] = None
        return is_known

    @property
    def unanswered_removals(self) -> list[str]:
        """Return the keys that etcd has not said to be removed yet."""
        return [key for key, value in self._desired.items() if value is None]

    async def write(self, etcd: connection.EtcdConnection, *keys: str) -> None:
        """Write the desired state of some keys to etcd, one after the other."""
        for key in keys:
            await self._write(etcd, key)

    async def attach(self, etcd: connection.EtcdConnection) -> None:
        """Hold the lease, taken again if it was lost, with all keys of the desired state that etcd takes."""
        async with self._attaching, asyncio.TaskGroup() as group:
            if not self._is_over and not await self._refresh(etcd):
                await self._take(etcd)
            for key in self._desired:
                group.create_task(self._write_or_set_aside(etcd, key))

    async def keep(self, etcd: connection.EtcdConnection) -> None:
        """Refresh the lease for as long as etcd answers."""
        while True:
            if await self._wait_for_check():
                await etcd.check()
            if not await self._refresh(etcd):
                await self.attach(etcd)
            for key in self._refused.union(self.unanswered_removals):  # no caller waits for them
                await self._write_or_set_aside(etcd, key)

    def check_now(self) -> None:
        """Check at once whether etcd is there, because a call got no answer."""
        self._check_requested.set()

    async def end(self, etcd: connection.EtcdConnection) -> None:
        """Revoke the lease: its keys vanish."""
        async with self._attaching:
            self._is_over = True
            for key in list(self._desired):  # removals that are being written take theirs out
                async with self._lock_of(key):
                    if self._desired.get(key) is not None:
                        with contextlib.suppress(*_OF_ONE_KEY):
                            await self._put(etcd, key, REMOVED)
            await etcd.revoke(self._id)

    async def _refresh(self, etcd: connection.EtcdConnection) -> bool:
        self._refresh_at = self._clock.now() + self._ttl_s / _REFRESHES_PER_TTL
        return await etcd.refresh(self._id)

    async def _take(self, etcd: connection.EtcdConnection) -> None:
        await etcd.grant(self._id, self._ttl_s)
        if self._was_held:
            log.warning(
                "lease %x in etcd was lost: taken again, putting %d keys back",
                self._id,
                len(self._desired),
            )
        self._was_held = True

    def _lock_of(self, key: str) -> asyncio.Lock:
        return self._lock_by_key.setdefault(key, asyncio.Lock())

    async def _write(self, etcd: connection.EtcdConnection, key: str) -> None:
        async with self._places, self._lock_of(key):
            if self._is_over:
                return
            if (
                self._clock.now() >= self._refresh_at
            ):  # to write all may take longer than the lease lives
                await self._refresh(etcd)
            value = self._desired.get(key)
            if value is not None:
                await self._put(etcd, key, value)
            elif key in self._desired:
                # others see by this value that the lease did not just end
                with contextlib.suppress(errors.Overloaded):  # removals need no room
                    await self._put(etcd, key, REMOVED)
                await etcd.delete(key, after=self._revisions.get(key, 0))
                self._revisions.pop(key, None)
                if self._desired[key] is None:  # and not set again meanwhile
                    del self._desired[key]

    async def _write_or_set_aside(self, etcd: connection.EtcdConnection, key: str) -> None:
        try:
            await self._write(etcd, key)
        except _OF_ONE_KEY as error:
            if key not in self._refused:
                log.warning("%r is not written: %s; trying again", key, error)
            self._refused.add(key)
        else:
            self._refused.discard(key)

    async def _put(self, etcd: connection.EtcdConnection, key: str, value: bytes) -> int:
        """Write a key, whose revision another of our writes may have changed; return its revision now."""
        is_written = False
        while not is_written:
            after = self._revisions.get(key, 0)
            is_written, self._revisions[key] = await etcd.put(key, value, self._id, after=after)
        return self._revisions[key]

    async def _wait_for_check(self) -> bool:
        """Wait until the next refresh is due; return True if `check_now` asked for it sooner."""
        try:
            async with self._clock.timeout(self._ttl_s / _REFRESHES_PER_TTL):
                await self._check_requested.wait()
        except TimeoutError:
            return False
        self._check_requested.clear()
        return True


log = logging.getLogger(__name__)


class PrefixWatcher:
    """One watched prefix: read, then followed, over any number of connections.

    After each break the prefix is read anew, and the view tells its watchers the difference. To go on from the last
    revision would save that reading (some 30 ms for 4,000 keys), but would go wrong in silence with an etcd that was
    restarted empty: it waits for a revision that is far in its future, and reports nothing until then.
    """

    def __init__(
        self,
        prefix: str,
        grace_s: float,
        is_alive: OwnerCheck,
        time: clock.Clock,
        on_missing: Callable[[], None],
    ) -> None:
        """`grace_s`: seconds after an outage for which a missing key is believed alive.

        `on_missing` is called for as long as keys are missing, of which `judge` is to decide.
        """
        self._prefix = prefix
        self._grace_s = grace_s
        self._clock = time
        self._view = KeyView()
        self._retention = KeyRetention(self._view, is_alive, UNCONFIRMED_S, on_missing)
        self._has_read = False
        self._is_refused = False

    def watch(self) -> AsyncIterator[Change]:
        """Iterate over the known keys, then over every change; ends only by cancellation."""
        return self._view.watch("")

    async def follow(self, etcd: connection.EtcdConnection) -> None:
        """Keep the view as etcd has it, for as long as it answers. Raises Unavailable.

        A refusal is of this prefix only: the lease and the other watches go on.
        """
        if self._has_read:
            self._retention.begin()
        timer = self._clock.call_later(self._grace_s, self._end_grace)
        try:
            while True:
                try:
                    await self._read_and_watch(etcd)
                except errors.ConfigError as error:
                    self._report_refusal(error)
                    await self._clock.sleep(_REFUSED_PAUSE_S)
        finally:
            timer.cancel()  # the grace begins anew if this connection did not last for the whole time

    def judge(self) -> None:
        """Remove the missing keys of owners that are gone."""
        self._retention.judge(self._clock.now())

    def _end_grace(self) -> None:
        self._retention.end(self._clock.now())

    def _report_refusal(self, error: errors.ConfigError) -> None:
        if not self._is_refused:
            advice = "let this user's role read that prefix"
            log.warning("what is below %r stays unknown: %s; %s", self._prefix, error, advice)
        self._is_refused = True

    async def _read_and_watch(self, etcd: connection.EtcdConnection) -> None:
        try:
            living, revision = await etcd.read(self._prefix)
            self._is_refused = False
            self._retention.replace(living, self._clock.now())
            self._has_read = True
            async for changes in etcd.watch(self._prefix, revision + 1):
                self._retention.apply(changes, self._clock.now())
        except connection.HistoryLost as error:
            log.info("reading %r anew: %s", self._prefix, error)
