"""Ports for what a library listens on, one for each data-parallel rank: it adds the rank to the first.

It binds them some time after we have looked. So they are not taken from those that the system gives to anybody
(usually 32768 and above), and by chance, so that workers that start together look in different places.
"""

import contextlib
import random
import socket

from dynamo.base import errors

RANGE = range(20_000, 30_000)
_TRIES = 50


def free_run(num_ports: int) -> int:
    """The first of so many consecutive ports on loopback that nobody uses now. Raises ConfigError."""
    for _ in range(_TRIES):
        first = random.randrange(RANGE.start, RANGE.stop - num_ports)
        with contextlib.suppress(OSError), contextlib.ExitStack() as probes:
            for port in range(first, first + num_ports):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise errors.ConfigError(
        f"found no {num_ports} consecutive free ports from {RANGE.start} to {RANGE.stop}"
    )
