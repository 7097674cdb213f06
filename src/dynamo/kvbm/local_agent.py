"""The local transfer agent of an engine: how it is configured, made and started.

The agent is made before the engine starts if other engines are to read its blocks, else at the first import. Peers on
this host map the memory of the KV cache, so an engine that exports blocks takes that memory from its agent.
"""

import asyncio
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass

from dynamo.base import addresses, config, distribution, errors, membership
from dynamo.runtime import listening
from dynamo.transfer import agent as agents
from dynamo.transfer import api, descriptors
from dynamo.transfer.backends import local, shm, tcp

MakeAgent = Callable[[api.OnNotification], agents.TransferAgent]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig(membership.ClusterConfig):
    """Options of KV transfer, which the configuration of each engine inherits."""

    kv_transfer_backends: tuple[str, ...] = config.option(
        ("shm", "tcp"),
        help="ways to copy KV blocks between workers (shm, tcp, nixl), best first; the first that both have is used",
    )
    kv_transfer_host: str | None = config.setting(
        None,
        help="address on which this worker listens for workers that copy its KV blocks (default: --tcp-rpc-host)",
    )
    kv_transfer_port: addresses.PortRange = config.setting(  # noqa: RUF009 (a declaration)
        addresses.ANY_PORT,
        help="port at which workers on other hosts reach this worker's KV blocks, or a range of which the first free"
        " one is used; 0: any free one",
    )
    kv_transfer_advertise: str | None = config.setting(
        None,
        help="address or address:port at which others reach the KV blocks, if they reach it at another than it listens"
        " on, as behind a NAT (default: the host of --tcp-rpc-advertise, unless there is a --kv-transfer-host)",
    )
    kv_transfer_timeout_s: float = config.option(
        5.0,
        help="seconds that copying a prompt's KV blocks may take; after that the prompt is computed locally",
        least=0.01,
    )
    kv_hold_s: float = config.option(
        60.0,
        help="seconds that a prefill worker keeps a prompt's KV blocks for the decode worker;"
        " set it higher than the longest prefill",
        least=0.01,
    )


def make_agent(
    name: str,
    settings: TransferConfig,
    room: local.Room | None,
    on_notification: api.OnNotification,
) -> agents.TransferAgent:
    """Make an agent that is not started yet. Agents of one process that share a `room` copy directly.

    Raises ConfigError for an unknown backend or an unusable address.
    """
    listen_address = listening.choose_address(
        settings,
        settings.kv_transfer_host,
        settings.kv_transfer_port,
        settings.kv_transfer_advertise,
        setting="DYN_KV_TRANSFER_",
    )
    credentials = membership.read(settings, os.environ)
    backend_makers: dict[str, Callable[[], api.Backend]] = {
        "shm": lambda: shm.ShmBackend(credentials=credentials),
        "tcp": lambda: tcp.TcpBackend(listen_address=listen_address, credentials=credentials),
        "nixl": lambda: _make_nixl(listen_address.host, is_insecure=credentials.is_insecure),
    }
    names = settings.kv_transfer_backends
    if unknown := [each for each in names if each not in backend_makers]:
        raise errors.ConfigError(
            f"--kv-transfer-backends: expected some of {', '.join(backend_makers)}, got {unknown[0]!r}"
        )
    backends = [backend_makers[each]() for each in names]
    if room is not None:
        backends.append(local.LocalBackend(room))
    return agents.TransferAgent(name, backends=backends, on_notification=on_notification)


class LocalAgent:
    """The agent of one engine, started when it is first needed. Used on the event loop only."""

    def __init__(self, make: MakeAgent, on_notification: api.OnNotification) -> None:
        self._make, self._on_notification = make, on_notification
        self._agent: agents.TransferAgent | None = None
        self._start_lock = asyncio.Lock()
        self._region: descriptors.Region | None = None
        self.description: descriptors.Metadata | None = None  # while the agent runs

    def enable_export(self) -> None:
        """Make the agent now: peers on this host will map the memory, so it has to come from `allocate`. Idempotent."""
        self._agent = self._agent or self._make(self._on_notification)

    @property
    def allocate(self) -> Callable[[int], memoryview] | None:
        """The allocator of the KV cache's memory, if other engines are to map it."""
        return self._agent.allocate if self._agent is not None else None

    @property
    def metadata(self) -> bytes | None:
        """The running agent's metadata, for the `connect` of another engine."""
        if self._agent is None or self.description is None:
            return None
        return self._agent.export_metadata()

    async def set_region(self, region: descriptors.Region | None) -> None:
        """Register the engine's memory; None if it cannot be copied.

        Raises ConfigError if blocks are to be exported and cannot be.
        """
        self._region = region
        if self._agent is not None:
            await self._start(self._agent)

    async def get_started(self) -> agents.TransferAgent:
        """Return the agent, started. Raises ConfigError for memory that cannot be copied."""
        async with self._start_lock:
            if self._agent is None:
                agent = self._make(self._on_notification)
                await self._start(agent)
                self._agent = agent
            return self._agent

    async def close(self) -> None:
        """Close the agent. Idempotent."""
        agent, self._agent, self.description = self._agent, None, None
        if agent is not None:
            await agent.close()

    async def _start(self, agent: agents.TransferAgent) -> None:
        if self._region is None:
            raise errors.ConfigError(
                "blocks in a device's memory cannot be copied between workers yet: expected --device cpu"
            )
        agent.register(self._region)
        await agent.start()
        self.description = descriptors.decode(agent.export_metadata())


def _make_nixl(host: str, *, is_insecure: bool) -> api.Backend:
    try:
        module = importlib.import_module("dynamo.transfer.backends.nixl")  # an extra
    except ImportError as error:
        raise errors.ConfigError(
            "--kv-transfer-backends: nixl is not installed: "
            f"{distribution.install_command('nixl')}, or leave nixl out"
        ) from error
    backend: api.Backend = module.NixlBackend(host=host, is_insecure=is_insecure)
    return backend
