"""Settings that a process makes of itself when it starts: garbage collection, open files, signals.

By default Python looks for cycles of unused objects after every 700 new objects. With 64 requests in flight, each some
dozens of living objects, that finds nothing and took a sixth of a frontend's time. Reference counting frees what a
request leaves behind; only a few small cycles remain, which may wait for ten thousand new objects.

Each connection is an open file, and Linux allows 1,024 until a process asks for more. The low number protects programs
that use `select`; an event loop on epoll may ask for all that the system grants. Beyond the limit a server cannot even
accept a connection to refuse it, nor reach a worker.
"""

import asyncio
import atexit
import ctypes
import gc
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from dynamo.base import errors

RESERVED_FILES = 200  # for connections to workers, the planes, logs and libraries
_YOUNG_OBJECTS = 10_000  # some MB, until they are looked through
_OLDER_EVERY = 20
_OLDEST_EVERY = 50


def collect_garbage_rarely() -> None:
    """Tune garbage collection for many requests in flight.

    Call it when the modules of the process are loaded: objects that exist then are never looked at again.
    """
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _OLDER_EVERY, _OLDEST_EVERY)


def reserve_open_files(num_connections: int) -> int:
    """Raise this process's limit of open files as far as needed and allowed; return how many connections fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_connections + RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return num_connections
    return max(1, min(num_connections, soft - RESERVED_FILES))


def stop_on_signals() -> asyncio.Event:
    """Return an event that the first SIGTERM or SIGINT sets; the second one ends the process at once."""
    stop = asyncio.Event()

    def handle_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, handle_signal, number)
    return stop


def run_command(
    prog: str,
    action: Callable[[], int | None],
    *,
    expected: type[errors.DynamoError] = errors.ConfigError,
) -> int:
    """Do what a command is for, and return its exit status: that of `action`, or 0.

    An error of the type `expected` is one sentence on standard error, with status 2 for wrong settings and 1 for the
    rest; Ctrl-C ends with 130. Any other error is a bug and leaves with its trace.
    """
    try:
        return action() or 0
    except expected as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 2 if isinstance(error, errors.ConfigError) else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def end_now(exit_code: int) -> NoReturn:
    """End this process with its exit handlers, but without Python's last look at every object.

    After a large library such as torch was imported, that look takes seconds.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


_PR_SET_PDEATHSIG = 1


def dies_with(parent: int) -> Callable[[], None] | None:
    """Return what a new child calls to be killed with its parent; None where the kernel does not offer it."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)

    def bind() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died in between
            os.kill(os.getpid(), signal.SIGKILL)

    return bind
