"""The agent that moves an engine's blocks, with the backends that were asked for."""

import importlib
import os
from collections.abc import Callable

from dynamo.base import distribution, errors, membership
from dynamo.engine.transfer_settings import TransferConfig
from dynamo.transfer import agent, api, routes
from dynamo.transfer.backends import local, shm, tcp


def make(
    name: str,
    settings: TransferConfig,
    room: local.Room | None,
    on_notification: api.OnNotification,
) -> agent.Agent:
    """Not yet started; it reaches those of its process directly with whom it shares a room.

    Raises ConfigError for a backend that is not known, or an address that is no good.
    """
    host = settings.kv_transfer_host or settings.tcp_rpc_host
    credentials = membership.read(settings, os.environ)
    kinds: dict[str, Callable[[], routes.Backend]] = {
        "shm": lambda: shm.ShmBackend(credentials=credentials),
        "tcp": lambda: tcp.TcpBackend(host=host, credentials=credentials),
        "nixl": lambda: _nixl(host, is_insecure=credentials.is_insecure),
    }
    wanted = settings.kv_transfer_backends
    if unknown := [kind for kind in wanted if kind not in kinds]:
        raise errors.ConfigError(
            f"--kv-transfer-backends: expected some of {', '.join(kinds)}, got {unknown[0]!r}"
        )
    backends = [kinds[kind]() for kind in wanted]
    if room is not None:
        backends.append(local.LocalBackend(room))
    return agent.Agent(name, backends=backends, on_notification=on_notification)


def _nixl(host: str, *, is_insecure: bool) -> routes.Backend:
    try:
        found = importlib.import_module("dynamo.transfer.backends.nixl.backend")  # an extra
    except ImportError as error:
        raise errors.ConfigError(
            "--kv-transfer-backends: nixl is not installed: "
            f"{distribution.install_command('nixl')}, or leave nixl out"
        ) from error
    made: routes.Backend = found.NixlBackend(host=host, is_insecure=is_insecure)
    return made
