"""Discovery for one host, the default: a directory, and nothing to install or start.

`lease_directory` knows the disk and finds dead owners. This module decides when to look at it, and reports to watches:

- Linux's notifications (inotify) report keys that come, change and go, at once, and in a storm every 50 ms;
- every `POLL_S` all leases are tried, because a lock that the kernel drops causes no notification: so all living
  processes notice within that time that one was killed;
- every `KEYS_EVERY` polls (each, where there are no notifications) the keys are listed as well.

A look at the disk is a *round*; it runs on a worker thread, one at a time, and is shared by all watches of the process.
While the disk cannot be read, the watches keep their keys: a full disk must not look like the death of all workers.
"""

import asyncio
import contextlib
import ctypes
import errno
import logging
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from dynamo.base import clock, errors, tasks
from dynamo.runtime.backends import lease_directory
from dynamo.runtime.discovery import Change, KeyView

POLL_S = 0.5
KEYS_EVERY = 10
_QUIET_S = 0.05  # after a notification, until the next
_IN_MOVED_FROM, _IN_MOVED_TO, _IN_DELETE = 0x40, 0x80, 0x200
# A key is written under another name and renamed, so a file that is only being written is none yet.
_EVENTS = _IN_MOVED_FROM | _IN_MOVED_TO | _IN_DELETE
_EVENTS_BYTES = 65_536
_libc = ctypes.CDLL(None, use_errno=True)

log = logging.getLogger(__name__)


class FileDiscovery:
    """One process's lease, keys and watches in a directory that the processes of a host share."""

    def __init__(self, directory: lease_directory.LeaseDirectory, time: clock.Clock) -> None:
        self._clock = time
        self._directory = directory
        self._view = KeyView()
        self._tasks = tasks.Tasks()
        self._round = asyncio.Lock()
        self._changed = asyncio.Event()
        self._notifier = _Notifier(directory.keys, self._changed)
        self._polls = 0
        self._last_error = ""  # the last logged error

    @classmethod
    async def open(
        cls,
        directory: Path,
        instance_id: int,
        *,
        local_token: bytes | None = None,
        time: clock.Clock | None = None,
    ) -> "FileDiscovery":
        """Take a lease in `directory`, which is created if it is missing. Raises ConfigError.

        `local_token` (`membership`) is put back with the other files if someone removes them.
        """
        leases = lease_directory.LeaseDirectory(directory, f"{instance_id:x}", local_token)
        await asyncio.to_thread(leases.acquire)
        self = cls(leases, time or clock.SystemClock())
        self._tasks.start(f"file discovery in {directory}", self._follow())
        return self

    async def put(self, key: str, value: bytes) -> None:
        await asyncio.to_thread(self._directory.write, key, value)
        self._changed.set()

    async def delete(self, key: str) -> None:
        await asyncio.to_thread(self._directory.remove, key)
        self._changed.set()

    async def get_prefix(self, prefix: str) -> Mapping[str, bytes]:
        await self._look(with_keys=True)
        return self._view.get_prefix(prefix)

    async def watch(self, prefix: str) -> AsyncIterator[Change]:
        await self._look_or_log(with_keys=True)
        async for change in self._view.watch(prefix):
            yield change

    async def close(self) -> None:
        await self._tasks.close()
        self._notifier.close()
        await asyncio.to_thread(self._directory.release)

    async def _follow(self) -> None:
        """Scan the directory whenever it may have changed."""
        while True:
            is_notified = await self._wait_for_change()
            self._polls += 1
            is_due = self._polls % KEYS_EVERY == 0
            with_keys = is_notified or is_due or not self._notifier.is_working
            await self._look_or_log(with_keys=with_keys)

    async def _wait_for_change(self) -> bool:
        try:
            async with self._clock.timeout(POLL_S):
                await self._changed.wait()
        except TimeoutError:
            return False
        self._changed.clear()
        return True

    async def _look_or_log(self, *, with_keys: bool) -> None:
        """Scan once; an error of the disk is logged, once for each kind."""
        try:
            await self._look(with_keys=with_keys)
            if with_keys:  # a look at the leases alone does not show that keys can be listed again
                self._last_error = ""
        except errors.ConfigError as error:
            if str(error) != self._last_error:
                self._last_error = str(error)
                log.warning("%s", error)

    async def _look(self, *, with_keys: bool) -> None:
        """Scan once. Raises ConfigError if the disk does not allow it."""
        async with self._round:
            if await asyncio.to_thread(self._directory.restore):  # another one took its place
                self._notifier.close()
                self._notifier = _Notifier(self._directory.keys, self._changed)
            self._view.replace(await asyncio.to_thread(self._directory.scan, with_keys=with_keys))


class _Notifier:
    """Sets `changed` when a file in a directory comes or goes; where it cannot, polling does.

    inotify is called through the C library: a package for it (watchfiles) took 1 MB and two threads of each process.
    """

    def __init__(self, directory: Path, changed: asyncio.Event) -> None:
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._quiet: asyncio.TimerHandle | None = None
        self._fd: int | None = None
        try:
            self._fd = _watch_directory(directory)
        except OSError as error:
            log.warning("no notifications for %s, polling every %s s: %s", directory, POLL_S, error)
        else:
            self._listen(self._fd)

    @property
    def is_working(self) -> bool:
        """Return whether changes are notified."""
        return self._fd is not None

    def close(self) -> None:
        if self._quiet is not None:
            self._quiet.cancel()
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None

    def _listen(self, fd: int) -> None:
        self._loop.add_reader(fd, self._notify, fd)

    def _notify(self, fd: int) -> None:
        """Drop the events, because the whole directory is listed, and gather those that follow for a moment."""
        with contextlib.suppress(BlockingIOError):
            os.read(fd, _EVENTS_BYTES)
        self._changed.set()
        self._loop.remove_reader(fd)
        self._quiet = self._loop.call_later(_QUIET_S, self._listen, fd)


def _watch_directory(directory: Path) -> int:
    """Return a file descriptor that can be read when a file in a directory comes or goes. Raises OSError."""
    if not hasattr(_libc, "inotify_init1"):
        raise OSError(errno.ENOSYS, "this system has no inotify")
    fd: int = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if _libc.inotify_add_watch(fd, os.fsencode(directory), _EVENTS) < 0:
        os.close(fd)
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(directory))
    return fd
