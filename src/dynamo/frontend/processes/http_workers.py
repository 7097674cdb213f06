"""`--http-workers N`: a parent that holds the port, and N frontends that answer at it.

The parent binds the port alone, so a second start fails with a sentence, and only then marks it as shared; it never
listens. The children listen, and the kernel deals connections out to them by a hash of the address, which spreads a
burst evenly; with one socket that all accept from, whoever wakes first would take most of it. They share nothing but
discovery, and ask each other for what only one knows (`siblings`).

A child that dies is started again, each time a little later and not for ever; one that finds a setting wrong ends all.
"""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence

from dynamo.base import clock as clocks
from dynamo.base import errors, processes, restarts, tasks
from dynamo.frontend import config

_CONFIG_EXIT = 2
_MARGIN_S = 5.0  # beyond the time that a child gives to running answers
_logger = logging.getLogger(__name__)


def serve(settings: config.FrontendConfig, argv: Sequence[str]) -> int:
    """Until told to stop; gives the exit code. `argv` are our own flags. Raises ConfigError."""
    settings.check()
    with (
        _held_port(settings.http_host, settings.http_port) as port,
        tempfile.TemporaryDirectory(prefix="dynamo-http-") as folder,
    ):
        return asyncio.run(_Parent(settings, argv, port, folder).run())


@contextlib.contextmanager
def _held_port(host: str, port: int) -> Iterator[int]:
    """The port, which is ours alone until children of ours listen at it. Raises ConfigError."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise errors.ConfigError(f"{host!r} is no address of this machine: {error}") from error
    with socket.socket(family, kind) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise errors.ConfigError(f"cannot listen on {host}:{port}: {error}") from error
            raise errors.ConfigError(
                f"port {port} is in use: stop the other process or choose --http-port"
            ) from error
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        yield int(held.getsockname()[1])


class _Parent:
    """Owns the children."""

    def __init__(
        self, settings: config.FrontendConfig, argv: Sequence[str], port: int, folder: str
    ) -> None:
        self._settings = settings
        self._argv = argv
        self._port = port
        self._folder = folder
        self._clock = clocks.SystemClock()
        self._running = tasks.Tasks()
        self._stop = asyncio.Event()
        self._exit_code = 0
        self._children: dict[str, processes.Child] = {}

    async def run(self) -> int:
        """Start, watch, stop; leave no process behind."""
        self._listen_to_signals()
        names = [f"frontend {number + 1}" for number in range(self._settings.http_workers)]
        async with self._running:
            try:
                for name in names:
                    await self._start(name)
                    self._running.start(f"watch over {name}", self._watch(name))
                pids = ", ".join(str(child.pid) for child in self._children.values())
                _logger.info("%d processes for port %d: %s", len(names), self._port, pids)
                await self._running.run_until(self._stop)
            finally:
                await self._stop_children()
        return self._exit_code

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._interrupted)
        loop.add_signal_handler(signal.SIGHUP, self._pass_on, signal.SIGHUP)

    def _interrupted(self) -> None:
        if self._stop.is_set():
            self._pass_on(signal.SIGKILL)
        self._stop.set()

    def _pass_on(self, number: int) -> None:
        for child in self._children.values():
            child.signal(number)

    async def _start(self, name: str) -> None:
        index = name.rpartition(" ")[2]
        flags = {
            "--http-port": str(self._port),
            "--http-workers": "1",
            "--http-worker-socket": os.path.join(self._folder, f"{index}.sock"),
        }
        argv = [sys.executable, "-m", "dynamo.frontend", *self._argv]
        argv += [word for flag in flags.items() for word in flag]
        self._children[name] = await processes.start(
            name, argv, os.environ, self._running, is_passed_on=False
        )

    async def _watch(self, name: str) -> None:
        policy = restarts.Restarts()
        while True:
            started_at = self._clock.now()
            death = await self._children[name].death()
            if self._stop.is_set():
                return
            pause_s = policy.pause_s(self._clock.now() - started_at)
            if pause_s is None or death.exit_code == _CONFIG_EXIT:
                _logger.error("%s: all stop", death)
                self._exit_code = death.exit_code
                self._stop.set()
                return
            _logger.warning("%s; starting it again in %g s", death, pause_s)
            await self._clock.sleep(pause_s)
            if self._stop.is_set():
                return
            await self._start(name)

    async def _stop_children(self) -> None:
        self._stop.set()
        limit_s = self._settings.http_graceful_shutdown_timeout_secs + _MARGIN_S
        await asyncio.gather(*(child.stop(limit_s) for child in self._children.values()))
