"""The agent that moves the native engine's blocks, with the backends that were asked for."""

import os
from collections.abc import Callable

from dynamo.base import errors, membership
from dynamo.engine.native.settings import NativeConfig
from dynamo.transfer import agent, api, routes
from dynamo.transfer.backends import shm, tcp


def make(settings: NativeConfig, on_notification: api.OnNotification) -> agent.Agent:
    """Not yet started. Raises ConfigError for a backend that is not known, or an address that is no good."""
    credentials = membership.read(settings, os.environ)
    kinds: dict[str, Callable[[], routes.Backend]] = {
        "shm": lambda: shm.ShmBackend(credentials=credentials),
        "tcp": lambda: tcp.TcpBackend(host=settings.kv_transfer_host, credentials=credentials),
    }
    for name in settings.kv_transfer_backends:
        if name not in kinds:
            raise errors.ConfigError(
                f"--kv-transfer-backends: expected some of {', '.join(kinds)}, got {name!r}"
            )
    backends = [kinds[name]() for name in settings.kv_transfer_backends]
    return agent.Agent("native", backends=backends, on_notification=on_notification)
