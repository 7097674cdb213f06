"""Ports for what vLLM listens on, one for each data-parallel rank: vLLM adds the rank to the first."""

import contextlib
import socket

from dynamo.base import errors

_TRIES = 20
_LOOPBACK = "127.0.0.1"


def free_run(num_ports: int) -> int:
    """The first of so many consecutive ports that nobody uses now. Raises ConfigError if there are none."""
    for _ in range(_TRIES):
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError, OverflowError):
            first = _bind(probes, 0)
            for port in range(first + 1, first + num_ports):
                _bind(probes, port)
            return first
    raise errors.ConfigError(f"found no {num_ports} consecutive free ports for vLLM: expected some")


def _bind(probes: contextlib.ExitStack, port: int) -> int:
    probe = probes.enter_context(socket.socket())
    probe.bind((_LOOPBACK, port))
    return int(probe.getsockname()[1])
