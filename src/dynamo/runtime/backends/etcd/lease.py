"""Our lease in etcd and the keys that hang on it: held, lost, taken again.

etcd lets the asking side choose a lease's id, so it is the instance id. Hence a lease that was lost, because we or etcd
slept for longer than its time to live, or because etcd was restarted with nothing, is taken again *under the same id*,
and the keys are put back as they were: to others we are the same instance as before.

What we want to stand in etcd is kept here, and written anew whenever we connect. So nothing has to be known of what
etcd lost; who watches sees no change in a key that is written as it was.
"""

import asyncio
import logging

from dynamo.runtime.backends.etcd import connection

_LOOKS_PER_TTL = 3

log = logging.getLogger(__name__)


class Lease:
    """One process's. Whatever talks to etcd raises Unavailable if it is not there, ConfigError if it refuses."""

    def __init__(self, lease_id: int, ttl_s: int) -> None:
        self._id = lease_id
        self._ttl_s = ttl_s
        self._wanted: dict[str, bytes | None] = {}  # None: to be removed
        self._writing = asyncio.Lock()
        self._hurry = asyncio.Event()
        self._was_held = False
        self._is_over = False

    def want(self, key: str, value: bytes) -> None:
        """From now on this stands in etcd, as soon as it can be written."""
        self._wanted[key] = value

    def forget(self, key: str) -> bool:
        """From now on this key of ours does not stand there; False if it is not ours."""
        is_ours = self._wanted.get(key) is not None
        if is_ours:
            self._wanted[key] = None
        return is_ours

    async def write(self, etcd: connection.Connection, key: str) -> None:
        """Make this key in etcd what it is wanted to be."""
        async with self._writing:
            await self._write(etcd, key)

    async def attach(self, etcd: connection.Connection) -> None:
        """Hold the lease, taken again if need be, with all keys that are wanted."""
        async with self._writing:
            if self._is_over:
                return
            if not await etcd.refresh(self._id):
                await self._take(etcd)
            for key in list(self._wanted):
                await self._write(etcd, key)

    async def keep(self, etcd: connection.Connection) -> None:
        """Hold the lease for as long as etcd answers."""
        while True:
            if await self._is_hurried():
                await etcd.check()
            if not await etcd.refresh(self._id):
                await self.attach(etcd)

    def look_now(self) -> None:
        """Somebody got no answer: do not wait to see whether etcd is there."""
        self._hurry.set()

    async def end(self, etcd: connection.Connection) -> None:
        """Give it up: the keys vanish."""
        async with self._writing:
            self._is_over = True
            await etcd.revoke(self._id)

    async def _take(self, etcd: connection.Connection) -> None:
        await etcd.grant(self._id, self._ttl_s)
        if self._was_held:
            log.warning(
                "lease %x in etcd was lost: taken again, putting %d keys back",
                self._id,
                len(self._wanted),
            )
        self._was_held = True

    async def _write(self, etcd: connection.Connection, key: str) -> None:
        value = self._wanted.get(key)
        if value is not None:
            await etcd.put(key, value, self._id)
        elif key in self._wanted:
            await etcd.delete(key, self._id)
            if self._wanted[key] is None:  # and not wanted again meanwhile
                del self._wanted[key]

    async def _is_hurried(self) -> bool:
        """Wait for the next look; True if somebody wants it sooner."""
        try:
            async with asyncio.timeout(self._ttl_s / _LOOKS_PER_TTL):
                await self._hurry.wait()
        except TimeoutError:
            return False
        self._hurry.clear()
        return True
