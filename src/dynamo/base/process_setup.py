"""Settings that a process makes of itself when it starts: garbage collection, open files, signals.

By default Python looks for cycles of unused objects after every 700 new objects. With 64 requests in flight, each some
dozens of living objects, that finds nothing and took a sixth of a frontend's time. Reference counting frees what a
request leaves behind; only a few small cycles remain, which may wait for ten thousand new objects.

Each connection is an open file, and Linux allows 1,024 until a process asks for more. The low number protects programs
that use `select`; an event loop on epoll may ask for all that the system grants. Beyond the limit a server cannot even
accept a connection to refuse it, nor reach a worker.
"""

import asyncio
import gc
import os
import resource
import signal

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
