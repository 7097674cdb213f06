"""`--http-workers N`: a parent that holds the port, and N frontends that listen at it.

The parent binds the port alone, so that a second start fails with a sentence, and only then marks it as shared. It
never listens. The children listen, and the kernel distributes connections over them by a hash of the address, which
spreads a burst evenly; with one socket that all accept from, the first process to wake would take most of it. The
children share nothing but discovery, and ask each other for what only one knows (`peers`).

A child that dies is restarted, each time after a longer pause and not for ever. One that finds a wrong setting ends
all.
"""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.frontend import config
from dynamo.launch import children, guard, supervisor

_CONFIG_EXIT = 2
_MARGIN_S = 5.0  # beyond the time that a child takes to drain
_logger = logging.getLogger(__name__)


def serve(settings: config.FrontendConfig, argv: Sequence[str]) -> int:
    """Serve until a signal comes, and return the exit code; `argv` are our own flags. Raises ConfigError."""
    settings.check()
    with (
        _bind_port(settings.http_host, settings.http_port) as port,
        guard.Guard() as guardian,
    ):
        return asyncio.run(_serve(settings, argv, port, guardian))


@contextlib.contextmanager
def _bind_port(host: str, port: int) -> Iterator[int]:
    """Bind the port, which only our children can share until the block ends. Raises ConfigError."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise errors.ConfigError(f"{host!r} is no address of this machine: {error}") from error
    with socket.socket(family, kind) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise errors.ConfigError(f"cannot listen on {host}:{port}: {error}") from error
            raise errors.ConfigError(
                f"port {port} is in use: stop the other process or choose --http-port"
            ) from error
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        yield int(bound.getsockname()[1])


async def _serve(
    settings: config.FrontendConfig, argv: Sequence[str], port: int, guardian: guard.Guard
) -> int:
    parent = supervisor.Supervisor(
        guardian, clocks.SystemClock(), _logger.warning, stop_timeout_s=_stop_timeout_s(settings)
    )
    folder = guardian.make_folder("dynamo-http-")
    try:
        async with parent:
            parent.stop_on((signal.SIGTERM, signal.SIGINT))
            asyncio.get_running_loop().add_signal_handler(
                signal.SIGHUP, parent.signal_all, signal.SIGHUP
            )
            for number in range(1, settings.http_workers + 1):
                spec = _spec(number, settings, argv, port, folder)
                await parent.start(spec)
                parent.watch(spec.name, fatal_codes=frozenset((_CONFIG_EXIT,)))
            pids = ", ".join(str(child.pid) for child in parent.child_by_name.values())
            _logger.info("%d processes for port %d: %s", settings.http_workers, port, pids)
            await parent.run()
    except children.ChildDied as death:
        _logger.error("%s: all stop", death)  # noqa: TRY400 - the sentence is all there is to say
        return death.exit_code
    return 0


def _stop_timeout_s(settings: config.FrontendConfig) -> float:
    """How long a child may take after SIGTERM: for new requests, then for running answers."""
    return settings.grace_period_s + settings.http_graceful_shutdown_timeout_secs + _MARGIN_S


def _spec(
    number: int, settings: config.FrontendConfig, argv: Sequence[str], port: int, folder: Path
) -> children.ChildSpec:
    flags = {
        "--http-port": str(port),
        "--http-workers": "1",
        "--http-worker-socket": str(folder / f"{number}.sock"),
    }
    if settings.usage_file and number > 1:  # each process writes its own sums
        flags["--usage-file"] = f"{settings.usage_file}.{number}"
    return children.ChildSpec(
        name=f"frontend {number}",
        argv=[
            *(sys.executable, "-m", "dynamo.frontend", *argv),
            *(word for flag in flags.items() for word in flag),
        ],
        environ=os.environ,
        is_relayed=False,
    )
