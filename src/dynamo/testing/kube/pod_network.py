"""A network for pods: each has a network namespace on a bridge, or else an address of its own in 127.0.0.0/8.

Bridges need root, or a user namespace of the cluster's, where its user is root: `enter_user_namespace`.

A namespace lives as long as the pod's first process, so nothing of it is left when that is killed, neither its network
nor the mounts of its temporary folders. The bridge is removed at the end; one that a killed cluster left is removed by
the next.
"""

import asyncio
import concurrent.futures
import contextlib
import ctypes
import itertools
import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Protocol

from dynamo.base import errors

SERVICE_NETWORK = "10.96.0.0/12"  # of the addresses of services
_BRIDGE = "dynkube"
_CLONE_NEWNET, _CLONE_NEWNS, _CLONE_NEWUSER = 0x40000000, 0x00020000, 0x10000000
_CONNECT_S = 5.0
_COMMANDS = ("ip", "nsenter", "unshare", "mount")


class PodNetwork(Protocol):
    """Gives pods their addresses."""

    host: str  # the address by which pods reach this host
    is_isolated: bool  # pods have namespaces, which their first process makes

    async def attach(self, pid: int) -> str:
        """Connect the namespace of a process; return the pod's address."""
        ...

    async def connect(
        self, pid: int, address: str, port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection to a port of a pod, as from inside of it. Raises OSError."""
        ...

    async def set_service_address(self, address: str, *, is_present: bool) -> None:
        """Let pods reach this host at the address of a service, or no longer. Raises ConfigError."""
        ...


class LoopbackNetwork:
    """Addresses of 127.0.0.0/8. Pods are told to listen on their own where they would on 0.0.0.0."""

    host = "127.0.0.1"
    is_isolated = False

    def __init__(self) -> None:
        self._prefix = f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(250) + 1}"
        self._numbers = itertools.count(2)

    async def attach(self, pid: int) -> str:
        """Return the next address."""
        return f"{self._prefix}.{next(self._numbers)}"

    async def connect(
        self, pid: int, address: str, port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the pod's address or, where nothing listens there, to 127.0.0.1, which all pods share."""
        try:
            return await asyncio.open_connection(address, port)
        except OSError:
            return await asyncio.open_connection("127.0.0.1", port)

    async def set_service_address(self, address: str, *, is_present: bool) -> None:
        """Do nothing: pods share the host's network, where services have no addresses."""


class BridgedNetwork:
    """Network namespaces with virtual cables that end in one bridge of the host."""

    is_isolated = True

    def __init__(self) -> None:
        self._bridge = f"{_BRIDGE}{os.getpid()}"
        self._numbers = itertools.count(2)
        self._prefix = f"10.{secrets.randbelow(50) + 200}"
        self.host = f"{self._prefix}.0.1"

    async def start(self) -> None:
        """Make the bridge. Raises ConfigError if the kernel refuses."""
        await _remove_stale_bridges()
        await _run("ip", "link", "add", self._bridge, "type", "bridge")
        await _run("ip", "addr", "add", f"{self.host}/16", "dev", self._bridge)
        await _run("ip", "link", "set", self._bridge, "up")

    async def attach(self, pid: int) -> str:
        """Lay a cable from the bridge to the namespace of a process."""
        number = next(self._numbers)
        cable, address = (
            f"dk{os.getpid() % 10**6}.{number}",
            f"{self._prefix}.{number // 250}.{number % 250 + 2}",
        )
        inside = ("nsenter", "-t", str(pid), "-n", "ip")
        await _run(
            "ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(pid)
        )
        await _run("ip", "link", "set", cable, "master", self._bridge, "up")
        await _run(*inside, "link", "set", "lo", "up")
        await _run(*inside, "addr", "add", f"{address}/16", "dev", "eth0")
        await _run(*inside, "link", "set", "eth0", "up")
        await _run(*inside, "route", "add", SERVICE_NETWORK, "via", self.host)
        return address

    async def connect(
        self, pid: int, address: str, port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to 127.0.0.1 of the pod's namespace, which a thread enters that then ends."""
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            opened = asyncio.get_running_loop().run_in_executor(thread, _connect_in, pid, port)
            return await asyncio.open_connection(sock=await opened)

    async def set_service_address(self, address: str, *, is_present: bool) -> None:
        """Give the address to the bridge, or take it away."""
        await _run(
            "ip", "addr", "add" if is_present else "del", f"{address}/32", "dev", self._bridge
        )

    async def close(self) -> None:
        with contextlib.suppress(errors.ConfigError):
            await _run("ip", "link", "del", self._bridge)


def _connect_in(pid: int, port: int) -> socket.socket:
    """Connect to a port in the network namespace of a process, into which this thread goes for good."""
    library = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as namespace:
        if library.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    connected = socket.create_connection(("127.0.0.1", port), _CONNECT_S)
    connected.setblocking(False)
    return connected


def enter_user_namespace(port: int) -> socket.socket | None:
    """Enter user, network and mount namespaces of this process, where its user is root, before it has other threads.

    Return a socket that listens in the network which it leaves, where the user's clients are; None, and stay, where
    the kernel refuses namespaces or the user is root already. Raises OSError if the port is taken.
    """
    probe = ("unshare", "--user", "--map-root-user", "--net", "--mount")
    if os.geteuid() == 0 or not all(map(shutil.which, _COMMANDS)):
        return None
    if subprocess.run([*probe, "ip", "link", "set", "lo", "up"], capture_output=True).returncode:
        return None
    listener = socket.create_server(("127.0.0.1", port))
    user, group = os.getuid(), os.getgid()
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWNS):
        listener.close()
        return None
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"0 {user} 1"),
        ("gid_map", f"0 {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    return listener


def private_folders(own: Path, shared: list[Path]) -> Iterator[str]:
    """Yield shell commands that give a pod folders of its own for temporary files, in which it sees the host's below.

    `own` is where it keeps what it writes. Where the kernel makes no overlay, the pod writes into the host's folders.
    """
    places = dict.fromkeys(
        Path(name).resolve() for name in ("/tmp", "/var/tmp", tempfile.gettempdir())
    )
    for number, place in enumerate(places):
        if not place.is_dir() or not places.keys().isdisjoint(place.parents):
            continue
        upper, work, stage = (own / f"{number}-{name}" for name in ("upper", "work", "stage"))
        layers = f"lowerdir={place},upperdir={upper},workdir={work}"
        as_root = f"mount -t overlay -o '{layers}' none '{stage}' 2>/dev/null"
        in_user_namespace = f"mount -t overlay -o '{layers},userxattr' none '{stage}'"
        inner = [folder for folder in shared if folder != place and folder.is_relative_to(place)]
        binds = [
            f"mount --rbind '{f}' '{stage / f.relative_to(place)}'" for f in inner if f.exists()
        ]
        steps = [
            f"{{ {as_root} || {in_user_namespace}; }}",
            *binds,
            f"mount --rbind '{stage}' '{place}'",
        ]
        yield f"mkdir -m 1777 '{upper}' && mkdir '{work}' '{stage}' && {{ {' && '.join(steps)} || true; }}"


@contextlib.asynccontextmanager
async def open_network() -> AsyncIterator[PodNetwork]:
    """Open the best network that this user may make."""
    network = BridgedNetwork()
    if os.geteuid() != 0 or not all(map(shutil.which, _COMMANDS)):
        yield LoopbackNetwork()
        return
    try:
        await network.start()
    except errors.ConfigError:
        await network.close()
        yield LoopbackNetwork()
        return
    try:
        yield network
    finally:
        await network.close()


async def _remove_stale_bridges() -> None:
    for device in await asyncio.to_thread(os.listdir, "/sys/class/net"):
        match = re.fullmatch(_BRIDGE + r"(\d+)", device)
        if match is not None and not os.path.isdir(f"/proc/{match[1]}"):  # noqa: ASYNC240 - in memory
            with contextlib.suppress(
                errors.ConfigError
            ):  # of another network: /sys shows the host's
                await _run("ip", "link", "del", device)


async def _run(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, message = await process.communicate()
    if process.returncode:
        raise errors.ConfigError(f"{' '.join(command)}: {message.decode().strip()}")
