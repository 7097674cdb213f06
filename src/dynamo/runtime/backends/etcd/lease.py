"""The lease of one process in etcd and its keys: held, lost, taken again.

etcd lets the client choose a lease's id, so it is the instance id. Hence a lease that was lost, because this process or
etcd slept for longer than its time to live, or because etcd was restarted with nothing, is taken again *under the same
id*, and the keys are put back as they were: to others it is the same instance as before.

The desired state of etcd is kept here, and written anew with each connection. So nothing has to be known of what etcd
lost; a watcher sees no change in a key that is written as it was.
"""

import asyncio
import logging

from dynamo.base import clock
from dynamo.runtime.backends.etcd import connection

_REFRESHES_PER_TTL = 3

log = logging.getLogger(__name__)


class EtcdLease:
    """The lease of one process. Methods that call etcd raise Unavailable if it is away, ConfigError if it refuses."""

    def __init__(self, lease_id: int, ttl_s: int, time: clock.Clock) -> None:
        self._clock = time
        self._id = lease_id
        self._ttl_s = ttl_s
        self._desired: dict[str, bytes | None] = {}  # None: to be removed
        self._writing = asyncio.Lock()
        self._check_requested = asyncio.Event()
        self._was_held = False
        self._is_over = False

    def set_key(self, key: str, value: bytes) -> None:
        """Make this key and value part of the desired state."""
        self._desired[key] = value

    def remove_key(self, key: str) -> bool:
        """Remove a key from the desired state; return False if it is not a key of this lease."""
        is_known = self._desired.get(key) is not None
        if is_known:
            self._desired[key] = None
        return is_known

    async def write(self, etcd: connection.EtcdConnection, key: str) -> None:
        """Write the desired state of one key to etcd."""
        async with self._writing:
            await self._write(etcd, key)

    async def attach(self, etcd: connection.EtcdConnection) -> None:
        """Hold the lease, taken again if it was lost, with all keys of the desired state."""
        async with self._writing:
            if self._is_over:
                return
            if not await etcd.refresh(self._id):
                await self._take(etcd)
            for key in list(self._desired):
                await self._write(etcd, key)

    async def keep(self, etcd: connection.EtcdConnection) -> None:
        """Refresh the lease for as long as etcd answers."""
        while True:
            if await self._wait_for_check():
                await etcd.check()
            if not await etcd.refresh(self._id):
                await self.attach(etcd)

    def check_now(self) -> None:
        """Check at once whether etcd is there, because a call got no answer."""
        self._check_requested.set()

    async def end(self, etcd: connection.EtcdConnection) -> None:
        """Revoke the lease: its keys vanish."""
        async with self._writing:
            self._is_over = True
            await etcd.revoke(self._id)

    async def _take(self, etcd: connection.EtcdConnection) -> None:
        await etcd.grant(self._id, self._ttl_s)
        if self._was_held:
            log.warning(
                "lease %x in etcd was lost: taken again, putting %d keys back",
                self._id,
                len(self._desired),
            )
        self._was_held = True

    async def _write(self, etcd: connection.EtcdConnection, key: str) -> None:
        value = self._desired.get(key)
        if value is not None:
            await etcd.put(key, value, self._id)
        elif key in self._desired:
            await etcd.delete(key, self._id)
            if self._desired[key] is None:  # and not set again meanwhile
                del self._desired[key]

    async def _wait_for_check(self) -> bool:
        """Wait until the next refresh is due; return True if `check_now` asked for it sooner."""
        try:
            async with self._clock.timeout(self._ttl_s / _REFRESHES_PER_TTL):
                await self._check_requested.wait()
        except TimeoutError:
            return False
        self._check_requested.clear()
        return True
