"""Discovery for several hosts: what stays the same while connections to etcd come and go.

One task keeps one connection at a time, to the first of the endpoints that answers, and on it the lease and the watches
live side by side. Whichever of them gets no answer ends the connection for all, and the next endpoint is tried.

While etcd is away, watchers keep what they know, for as long as it takes: nobody can say who died, and whoever is asked
and does not live is found out by the request plane. Only when etcd is back for a whole time to live are those forgotten
who have not come back with it (see `grace`). We go on serving, and our lease is taken again (see `lease`).
"""

import asyncio
import itertools
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar

from dynamo.base import errors, tasks
from dynamo.runtime.backends.etcd import access, connection, follower, lease
from dynamo.runtime.discovery import Change

T = TypeVar("T")
LEASE_TTL_S = 10
START_TIMEOUT_S = 120.0
PUT_TIMEOUT_S = 60.0
READ_TIMEOUT_S = 10.0
LEAVE_TIMEOUT_S = 2.0  # what etcd cannot be told in time it finds out when the lease ends
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0  # so that who lives is back long before anybody thinks him dead
_GOOD_S = 5.0  # a connection that lasted so long is followed by a quick attempt
_RETRY_S = 0.05

log = logging.getLogger(__name__)


class EtcdDiscovery:
    """One process's lease, keys and watches in an etcd that processes of many hosts share."""

    def __init__(self, whereto: access.Access, instance_id: int, *, lease_ttl_s: int) -> None:
        self._access = whereto
        self._lease = lease.Lease(instance_id, lease_ttl_s)
        self._lease_ttl_s = lease_ttl_s
        self._tasks = tasks.Tasks()
        self._task_by_follower: dict[follower.Follower, asyncio.Task[None] | None] = {}
        self._joined = asyncio.Event()  # a follower that has no task yet
        self._etcd: connection.Connection | None = None  # while it answers
        self._answers = asyncio.Event()
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._trouble: errors.DynamoError | None = None  # since it last answered
        self._is_open = True

    @classmethod
    async def open(
        cls,
        whereto: access.Access,
        instance_id: int,
        *,
        lease_ttl_s: int = LEASE_TTL_S,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> "EtcdDiscovery":
        """Take a lease, as soon as there is an etcd. Raises ConfigError if none answers in time, or it refuses us."""
        self = cls(whereto, instance_id, lease_ttl_s=lease_ttl_s)
        self._tasks.start("etcd discovery", self._stay_connected(start_timeout_s))
        try:
            async with asyncio.timeout(start_timeout_s):
                await self._started
        except TimeoutError:
            await self.close()
            raise errors.ConfigError(
                f"no etcd within {start_timeout_s:g} s: {self._trouble}; {_ADVICE}"
            ) from None
        except BaseException:
            await self.close()
            raise
        return self

    async def put(self, key: str, value: bytes) -> None:
        if not self._is_open:
            raise errors.LocalProtocolError(f"put {key!r}: this discovery is closed")
        self._lease.want(key, value)
        try:
            await self._ask(lambda etcd: self._lease.write(etcd, key), PUT_TIMEOUT_S)
        except errors.ConfigError:
            self._lease.forget(key)
            raise

    async def delete(self, key: str) -> None:
        if not self._is_open or not self._lease.forget(key) or self._etcd is None:
            return  # while etcd is away nobody waits: it is done when it is back
        try:
            await self._ask(lambda etcd: self._lease.write(etcd, key), LEAVE_TIMEOUT_S)
        except errors.Unavailable as error:
            log.info("%s is removed when etcd is back, or when our lease ends: %s", key, error)

    async def get_prefix(self, prefix: str) -> Mapping[str, bytes]:
        """All living keys that begin with `prefix`. Raises Unavailable."""
        living, _ = await self._ask(lambda etcd: etcd.read(prefix), READ_TIMEOUT_S)
        return living

    async def watch(self, prefix: str) -> AsyncIterator[Change]:
        followed = follower.Follower(prefix, self._lease_ttl_s)
        self._task_by_follower[followed] = None
        self._joined.set()
        try:
            async for change in followed.watch():
                yield change
        finally:
            task = self._task_by_follower.pop(followed)
            if task is not None:
                task.cancel()

    async def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        try:
            if self._etcd is not None:
                async with asyncio.timeout(LEAVE_TIMEOUT_S):
                    await self._lease.end(self._etcd)
        except (TimeoutError, errors.DynamoError) as error:
            log.info("our keys leave etcd when our lease ends: %r", error)
        finally:
            await self._tasks.close()

    async def _stay_connected(self, start_timeout_s: float) -> None:
        loop, pause_s = asyncio.get_running_loop(), _FIRST_PAUSE_S
        for address in itertools.cycle(self._access.addresses):
            began_at = loop.time()
            try:
                async with connection.connect(self._access, address) as etcd:
                    await self._live_on(etcd)
            except* (errors.Unavailable, errors.ConfigError) as group:
                self._lost(_first(group), start_timeout_s)
            was_good = loop.time() - began_at > _GOOD_S
            pause_s = _FIRST_PAUSE_S if was_good else min(2 * pause_s, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    async def _live_on(self, etcd: connection.Connection) -> None:
        """All that we do with one connection, until it breaks. Raises Unavailable, ConfigError, or a group of them."""
        await self._lease.attach(etcd)
        self._found(etcd)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._lease.keep(etcd), name="keep the etcd lease")
                group.create_task(self._follow_all(etcd, group), name="follow etcd")
        finally:
            self._etcd = None
            self._answers.clear()

    async def _follow_all(self, etcd: connection.Connection, group: asyncio.TaskGroup) -> None:
        """A task for each follower, those too that join later."""
        self._task_by_follower = dict.fromkeys(self._task_by_follower)
        while True:
            self._joined.clear()
            for followed, task in self._task_by_follower.items():
                if task is None:
                    self._task_by_follower[followed] = group.create_task(followed.follow(etcd))
            await self._joined.wait()

    def _found(self, etcd: connection.Connection) -> None:
        if self._trouble is not None:
            log.info("etcd at %s answers", etcd.address)
        self._etcd, self._trouble = etcd, None
        self._answers.set()
        if not self._started.done():
            self._started.set_result(None)

    def _lost(self, error: errors.DynamoError, start_timeout_s: float) -> None:
        """Say it once; at the start, a refusal is final."""
        is_news, self._trouble = self._trouble is None, error
        if not self._started.done() and isinstance(error, errors.ConfigError):
            self._started.set_exception(error)
        elif not self._started.done() and is_news:
            log.warning("%s; trying for %g s. %s", error, start_timeout_s, _ADVICE)
        elif is_news:
            log.warning("%s; serving goes on with what is known, trying to come back", error)

    async def _ask(
        self, act: Callable[[connection.Connection], Awaitable[T]], within_s: float
    ) -> T:
        """Do it on whichever connection answers. Raises Unavailable if none does in time."""
        trouble = self._trouble
        try:
            async with asyncio.timeout(within_s):
                while True:
                    await self._answers.wait()
                    try:
                        if self._etcd is not None:
                            return await act(self._etcd)
                    except errors.Unavailable as error:
                        trouble = error
                        self._lease.look_now()
                    await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            trouble = self._trouble or trouble
            raise errors.Unavailable(f"not done within {within_s:g} s: {trouble}") from None


_ADVICE = "Start etcd, or set ETCD_ENDPOINTS; without etcd, on one host: --discovery-backend file"


def _first(group: BaseExceptionGroup[errors.DynamoError]) -> errors.DynamoError:
    """Any one of them: they have the same cause."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, errors.DynamoError)
    return error
