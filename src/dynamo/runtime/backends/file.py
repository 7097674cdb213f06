"""Discovery for one host, the default: a directory, and nothing to install or start.

`lease_directory` knows the disk and finds dead owners. This module decides when to look at it, and reports to watches:

- the file system's notifications (`watchfiles`, a thread) report keys that come, change and go, within about 50 ms;
- every `POLL_S` all leases are tried, because a lock that the kernel drops causes no notification: so all living
  processes notice within that time that one was killed;
- every `KEYS_EVERY` polls (each, where there are no notifications) the keys are listed as well.

A look at the disk is a *round*; it runs on a worker thread, one at a time, and is shared by all watches of the process.
While the disk cannot be read, the watches keep their keys: a full disk must not look like the death of all workers.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import watchfiles

from dynamo.base import clock, errors, tasks
from dynamo.runtime.backends import lease_directory
from dynamo.runtime.discovery import Change, KeyView

POLL_S = 0.5
KEYS_EVERY = 10
POLLS_TO_SETTLE = 3  # until a new notifier has surely begun, each poll lists the keys
_STEP_MS = 50  # how often the notifying thread checks for changes and for its stop
_DEBOUNCE_MS = 200  # how long a storm of changes may delay the notification

log = logging.getLogger(__name__)
T = TypeVar("T")


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
        self._is_replaced = False  # the directory that the notifier watches, by another
        self._polls = 0  # since the notifier began
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
        await _run_apart(leases.acquire)
        self = cls(leases, time or clock.SystemClock())
        self._tasks.start(f"file discovery in {directory}", self._follow())
        return self

    async def put(self, key: str, value: bytes) -> None:
        await _run_apart(self._directory.write, key, value)
        self._changed.set()

    async def delete(self, *keys: str) -> None:
        for key in keys:
            try:
                await _run_apart(self._directory.remove, key)
            except errors.ConfigError as error:  # each look at the disk tries again
                log.warning("%s stays for now: %s", key, error)
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
        await _run_apart(self._notifier.stop)
        await _run_apart(self._directory.release)

    async def _follow(self) -> None:
        """Scan the directory whenever it may have changed."""
        while True:
            is_notified = await self._wait_for_change()
            self._polls += 1
            is_due = self._polls <= POLLS_TO_SETTLE or self._polls % KEYS_EVERY == 0
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
            if with_keys:  # a look at the leases does not show whether the keys can be read again
                self._last_error = ""
        except errors.ConfigError as error:
            if str(error) != self._last_error:
                self._last_error = str(error)
                log.warning("%s", error)

    async def _look(self, *, with_keys: bool) -> None:
        """Scan once. Raises ConfigError if the disk does not allow it."""
        async with self._round:
            await _run_apart(self._restore)
            if self._is_replaced:
                await self._notify_anew()
            self._view.replace(await _run_apart(self._directory.scan, with_keys=with_keys))

    def _restore(self) -> None:
        """Put back what is missing on the disk; what a cancelled caller leaves, the next one does."""
        if self._directory.restore():
            self._is_replaced = True

    async def _notify_anew(self) -> None:
        """Start a notifier for the directory that took the place of the watched one."""
        await _run_apart(self._notifier.stop)
        self._notifier = _Notifier(self._directory.keys, self._changed)
        self._is_replaced, self._polls = False, 0


async def _run_apart(function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Run a function of the disk in a thread. Raises ConfigError, as the function does, if none can be started."""
    try:
        return await tasks.run_in_thread(function, *arguments, **options)
    except OSError as error:
        raise errors.ConfigError(f"discovery cannot look at its files: {error}") from error


class _Notifier:
    """A thread that sets `changed` when something in a directory changes; without it, polling does."""

    def __init__(self, directory: Path, changed: asyncio.Event) -> None:
        self.is_working = True
        self._directory = directory
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"notifier of {directory}", daemon=True
        )
        try:
            with tasks.map_missing_thread():
                self._thread.start()
        except OSError as error:
            self._give_up(error)

    def stop(self) -> None:
        """Stop the thread and wait for it, a few hundredths of a second."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            for _ in watchfiles.watch(
                self._directory,
                watch_filter=None,
                stop_event=self._stop,
                step=_STEP_MS,
                debounce=_DEBOUNCE_MS,
                raise_interrupt=False,
                force_polling=False,
                recursive=False,
            ):
                self._loop.call_soon_threadsafe(self._changed.set)
        except (OSError, RuntimeError) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.is_working = False
        log.warning(
            "no notifications for %s, polling every %s s: %s", self._directory, POLL_S, error
        )
