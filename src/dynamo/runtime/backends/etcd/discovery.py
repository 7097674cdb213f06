"""Discovery for several hosts over etcd: the state that stays the same while connections to etcd come and go.

One task keeps one connection at a time, to the first of the endpoints that answers, and on it the lease and the watches
live side by side. When one of them gets no answer, the connection ends for all, and the next endpoint is tried.

While etcd is away, watchers keep the keys that they know, for as long as it takes: which owners died is unknown, and
the request plane finds out a dead one with the first request. Only when etcd has been back for a whole time to live are
the keys removed that have not come back with it (`prefix_watcher.OutageGrace`). The process goes on serving, and its
lease is taken again (`lease`).
"""

import asyncio
import itertools
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar

from dynamo.base import clock, errors, tasks
from dynamo.runtime.backends.etcd import access, connection, lease, prefix_watcher
from dynamo.runtime.discovery import Change

T = TypeVar("T")
LEASE_TTL_S = 10
START_TIMEOUT_S = 120.0
PUT_TIMEOUT_S = 60.0
READ_TIMEOUT_S = 10.0
LEAVE_TIMEOUT_S = 2.0  # if etcd cannot be told in time, the lease ends by itself
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0  # so that a living process is back long before its lease ends
_STABLE_S = 5.0  # a connection that lasted so long is watcher by a quick attempt
_RETRY_S = 0.05

log = logging.getLogger(__name__)


class EtcdDiscovery:
    """One process's lease, keys and watches in an etcd that processes of many hosts share."""

    def __init__(
        self, settings: access.EtcdAccess, instance_id: int, *, lease_ttl_s: int, time: clock.Clock
    ) -> None:
        self._access = settings
        self._clock = time
        self._lease = lease.EtcdLease(instance_id, lease_ttl_s, time)
        self._lease_ttl_s = lease_ttl_s
        self._tasks = tasks.Tasks()
        self._task_by_watcher: dict[prefix_watcher.PrefixWatcher, asyncio.Task[None] | None] = {}
        self._watcher_added = asyncio.Event()
        self._etcd: connection.EtcdConnection | None = None  # while it answers
        self._is_answering = asyncio.Event()
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outage: errors.DynamoError | None = None  # its cause, while etcd is away
        self._is_open = True

    @classmethod
    async def open(
        cls,
        settings: access.EtcdAccess,
        instance_id: int,
        *,
        lease_ttl_s: int = LEASE_TTL_S,
        start_timeout_s: float = START_TIMEOUT_S,
        time: clock.Clock | None = None,
    ) -> "EtcdDiscovery":
        """Take a lease as soon as etcd answers. Raises ConfigError if it refuses, or does not answer in time."""
        self = cls(settings, instance_id, lease_ttl_s=lease_ttl_s, time=time or clock.SystemClock())
        self._tasks.start("etcd discovery", self._stay_connected(start_timeout_s))
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
        self._lease.set_key(key, value)
        try:
            await self._call(lambda etcd: self._lease.write(etcd, key), PUT_TIMEOUT_S)
        except errors.ConfigError:
            self._lease.remove_key(key)
            raise

    async def delete(self, key: str) -> None:
        if not self._is_open or not self._lease.remove_key(key) or self._etcd is None:
            return  # while etcd is away this does not wait: the key is removed when it is back
        try:
            await self._call(lambda etcd: self._lease.write(etcd, key), LEAVE_TIMEOUT_S)
        except errors.Unavailable as error:
            log.info("%s is removed when etcd is back, or when our lease ends: %s", key, error)

    async def get_prefix(self, prefix: str) -> Mapping[str, bytes]:
        """Return all living keys that begin with `prefix`. Raises Unavailable."""
        living, _ = await self._call(lambda etcd: etcd.read(prefix), READ_TIMEOUT_S)
        return living

    async def watch(self, prefix: str) -> AsyncIterator[Change]:
        watcher = prefix_watcher.PrefixWatcher(prefix, self._lease_ttl_s, self._clock)
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
            if self._etcd is not None:
                async with self._clock.timeout(LEAVE_TIMEOUT_S):
                    await self._lease.end(self._etcd)
        except (TimeoutError, errors.DynamoError) as error:
            log.info("our keys leave etcd when our lease ends: %r", error)
        finally:
            await self._tasks.close()

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
        self._etcd, self._outage = etcd, None
        self._is_answering.set()
        if not self._started.done():
            self._started.set_result(None)

    def _report_outage(self, error: errors.DynamoError, start_timeout_s: float) -> None:
        """Log an outage once; at the start, a refusal is final."""
        is_new, self._outage = self._outage is None, error
        if not self._started.done() and isinstance(error, errors.ConfigError):
            self._started.set_exception(error)
        elif not self._started.done() and is_new:
            log.warning("%s; trying for %g s. %s", error, start_timeout_s, _ADVICE)
        elif is_new:
            log.warning("%s; serving goes on with what is known, trying to come back", error)

    async def _call(
        self, act: Callable[[connection.EtcdConnection], Awaitable[T]], within_s: float
    ) -> T:
        """Make a call on the first connection that answers. Raises Unavailable if none does within `within_s`."""
        cause = self._outage
        try:
            async with self._clock.timeout(within_s):
                while True:
                    await self._is_answering.wait()
                    try:
                        if self._etcd is not None:
                            return await act(self._etcd)
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
