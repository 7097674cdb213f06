"""Hosts of a small network, as network namespaces: each has its own loopback and one address that the others reach.

The test itself stands at the hub. All of it is gone with the last process in it, and nothing of this machine's own
network is touched.
"""

import contextlib
import ctypes
import ipaddress
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

_CLONE_NEWNET = 0x40000000
_OWN = pathlib.Path("/proc/thread-self/ns/net")
_WIRE = pathlib.Path(__file__).parents[1] / "host_faults/faulty_wire.py"
_NOBODY = "02:00:00:00:de:ad"


class Host:
    """One host. `argv` before a command lets it run there."""

    def __init__(self, network: "Network", number: int, *, has_wire: bool = False) -> None:
        """`has_wire`: frames pass through a process, which can lose, delay and damage them (`set_wire`)."""
        self.address = network.address(number)
        self.name = f"{network.name}-{number}"
        self.argv = ["ip", "netns", "exec", self.name]
        self._network = network
        self._number = number
        self._port = f"to{number}"
        _ip("netns", "add", self.name)
        _ip("-n", self.name, "link", "set", "lo", "up")
        hub = network.name
        self._wire = Wire(hub, self._port, self.name) if has_wire else None
        if self._wire is None:
            _ip("-n", hub, "link", "add", self._port, "type", "veth", "peer", "eth0", "netns", self.name)  # fmt: skip
        _ip("-n", hub, "link", "set", self._port, "master", "bridge", "up")
        network.give_address(self.name, "eth0", number)
        _ip("-n", self.name, "link", "set", "eth0", "up")

    def cut_off(self) -> None:
        """From everybody; connections stay open and say nothing.

        The hub's port stops forwarding. Its device stays up: Linux brings a device back as much as a second late.
        """
        self._set_port("disabled")

    def join(self) -> None:
        """Undo `cut_off`."""
        self._set_port("forwarding")

    def _set_port(self, state: str) -> None:
        argv = (
            "bridge",
            "-n",
            self._network.name,
            "link",
            "set",
            "dev",
            self._port,
            "state",
            state,
        )
        subprocess.run(argv, check=True, capture_output=True)

    def link_down(self) -> None:
        """Switch the host's own device off: its processes notice, but connections stay open."""
        _ip("-n", self.name, "link", "set", "eth0", "down")

    def link_up(self) -> None:
        """Undo `link_down`. IPv6 addresses are lost with the device, and given anew."""
        _ip("-n", self.name, "link", "set", "eth0", "up")
        self._network.give_address(self.name, "eth0", self._number, is_again=True)

    def lose_to(self, other: "Host") -> None:
        """Lose all that this host sends to the other; what the other sends arrives."""
        where = ("dev", "eth0", "nud", "permanent")
        _ip("-n", self.name, "neigh", "replace", other.address, "lladdr", _NOBODY, *where)

    def reach(self, other: "Host") -> None:
        """Undo `lose_to`."""
        _ip("-n", self.name, "neigh", "del", other.address, "dev", "eth0")

    def set_wire(self, **faults: object) -> None:
        """Set the wire's faults, by the names of `faulty_wire.WireFaults`; without any it is whole again."""
        assert self._wire is not None, "this host was added without a wire"
        self._wire.set(faults)

    def sysctl(self, name: str, value: int) -> None:
        """Set a variable of the kernel for this host."""
        path = f"/proc/sys/{name.replace('.', '/')}"
        text = str(value).encode()
        subprocess.run([*self.argv, "tee", path], input=text, check=True, capture_output=True)

    def remove(self) -> None:
        if self._wire is not None:
            self._wire.close()
        _ip("netns", "del", self.name)


class Wire:
    """The process that carries a host's frames."""

    def __init__(self, hub: str, port: str, host: str) -> None:
        argv = [sys.executable, _WIRE, hub, port, host, "eth0"]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        assert self._output.readline() == b"ready\n", "no TAP devices on this machine"

    def set(self, faults: dict[str, object]) -> None:
        self._input.write(json.dumps(faults).encode() + b"\n")
        self._input.flush()
        assert self._output.readline() == b"set\n"

    def close(self) -> None:
        self._input.close()
        self._process.wait()
        self._output.close()


class Network:
    """Hosts around a hub, at which the calling thread stands for as long as it is open."""

    def __init__(self, *, is_ipv6: bool = False) -> None:
        """`is_ipv6`: the hosts have IPv6 addresses only."""
        self._is_ipv6 = is_ipv6
        if os.geteuid() or shutil.which("ip") is None:
            pytest.skip("network namespaces need root and iproute2: tests/install_services.sh")
        self.name = f"pyd{os.getpid()}"
        self.hosts: list[Host] = []

    def address(self, number: int) -> str:
        return f"fd77::{number}" if self._is_ipv6 else f"10.77.0.{number}"

    def give_address(
        self, namespace: str, device: str, number: int, *, is_again: bool = False
    ) -> None:
        # an address that is checked for duplicates first cannot be used for a second
        options = ("/64", "nodad") if self._is_ipv6 else ("/24",)
        _ip(
            "-n",
            namespace,
            "addr",
            "replace" if is_again else "add",
            self.address(number) + options[0],
            "dev",
            device,
            *options[1:],
        )

    def add(self, *, has_wire: bool = False) -> Host:
        self.hosts.append(Host(self, len(self.hosts) + 2, has_wire=has_wire))
        return self.hosts[-1]

    @contextlib.contextmanager
    def open(self) -> Iterator["Network"]:
        made = subprocess.run(
            ["ip", "netns", "add", self.name], capture_output=True, text=True, check=False
        )
        if made.returncode:
            pytest.skip(f"no network namespaces on this machine: {made.stderr.strip()}")
        try:
            _ip("-n", self.name, "link", "set", "lo", "up")
            _ip("-n", self.name, "link", "add", "bridge", "type", "bridge", "stp_state", "0")
            self.give_address(self.name, "bridge", 1)
            _ip("-n", self.name, "link", "set", "bridge", "up")
            with standing_in(self.name):
                yield self
        finally:
            for host in self.hosts:
                host.remove()
            _ip("netns", "del", self.name)


def listening(pid: int) -> set[str]:
    """The addresses at which this process listens for TCP, without ports."""
    mine = {os.readlink(path) for path in pathlib.Path(f"/proc/{pid}/fd").iterdir()}
    rows = pathlib.Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    six = pathlib.Path(f"/proc/{pid}/net/tcp6").read_text().splitlines()[1:]
    found = [row.split() for row in (*rows, *six)]
    return {
        _dotted(row[1].partition(":")[0])
        for row in found
        if row[3] == "0A" and f"socket:[{row[9]}]" in mine
    }


def _dotted(text: str) -> str:
    if len(text) > 8:
        words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, 32, 8)]
        return str(ipaddress.IPv6Address(b"".join(words)))
    return ".".join(str(byte) for byte in bytes.fromhex(text)[::-1])


@contextlib.contextmanager
def standing_in(name: str) -> Iterator[None]:
    """The calling thread, and the processes that it starts, in this namespace (not those that a server forks)."""
    assert threading.current_thread() is threading.main_thread()
    before = os.open(_OWN, os.O_RDONLY)
    there = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        _enter(there)
        yield
    finally:
        _enter(before)
        os.close(there)
        os.close(before)


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def own_namespace() -> str:
    """The path of the calling thread's network namespace, for `move_into` of another process."""
    return f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net"


def move_into(namespace: str) -> None:
    """Move the calling thread into this network namespace, which needs root where it is another."""
    if not os.path.samefile(namespace, _OWN):
        there = os.open(namespace, os.O_RDONLY)
        _enter(there)
        os.close(there)


def _ip(*argv: str) -> None:
    subprocess.run(["ip", *argv], check=True, capture_output=True)
