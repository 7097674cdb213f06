"""A wire between a host and the hub, made of two TAP devices, whose faults are set by lines of JSON on standard input.

    python tests/host_faults/faulty_wire.py HUB_NAMESPACE HUB_DEVICE HOST_NAMESPACE HOST_DEVICE

A process of its own, so that the load of a test does not delay frames. It is for kernels without `netem`: each frame
passes through here. A line of standard output confirms that a setting holds; the devices vanish with the process.
"""

import ctypes
import fcntl
import heapq
import json
import os
import random
import selectors
import struct
import sys
import time
from dataclasses import dataclass, replace

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_HEADER = 0x1002
_ETHERNET_BYTES = 14
_MOST_WAITING_S = 0.4  # what a router keeps for a slow wire; more is lost


@dataclass(frozen=True)
class WireFaults:
    """The faults of one wire, in both directions but where a name says otherwise."""

    delay_s: float = 0.0
    jitter_s: float = 0.0  # added to the delay, drawn for each frame
    loss: float = 0.0  # share of the frames, as those that follow
    reordered: float = 0.0  # these pass without any delay
    duplicated: float = 0.0
    flipped: float = 0.0  # with one wrong bit behind the Ethernet header
    bytes_per_s: float = 0.0  # 0: no limit
    mtu: int = 0  # longer packets vanish in silence; 0: no limit
    loses_from_host: bool = False
    loses_to_host: bool = False


class Direction:
    """The frames that wait on their way in one direction."""

    def __init__(self, sink: int) -> None:
        self._sink = sink
        self._waiting: list[tuple[float, int, bytes]] = []
        self._count = 0
        self._free_at = 0.0  # when the last frame has left a slow wire

    @property
    def next_at(self) -> float | None:
        """The time at which the next frame is due."""
        return self._waiting[0][0] if self._waiting else None

    def take(self, frame: bytes, faults: WireFaults) -> None:
        """Lose, damage, or queue a frame."""
        now = time.monotonic()
        is_long = faults.mtu and len(frame) > faults.mtu + _ETHERNET_BYTES
        if is_long or random.random() < faults.loss:
            return
        due_at = now + faults.delay_s + random.random() * faults.jitter_s
        if random.random() < faults.reordered:
            due_at = now
        if faults.bytes_per_s:
            leaves_at = max(now, self._free_at) + len(frame) / faults.bytes_per_s
            if leaves_at - now > _MOST_WAITING_S:
                return
            self._free_at = leaves_at
            due_at = max(due_at, leaves_at)
        if random.random() < faults.flipped and len(frame) > _ETHERNET_BYTES:
            damaged = bytearray(frame)
            damaged[random.randrange(_ETHERNET_BYTES, len(frame))] ^= 1 << random.randrange(8)
            frame = bytes(damaged)
        for _ in range(1 + (random.random() < faults.duplicated)):
            self._count += 1
            heapq.heappush(self._waiting, (due_at, self._count, frame))

    def deliver(self) -> None:
        """Write the frames that are due."""
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            frame = heapq.heappop(self._waiting)[2]
            try:
                os.write(self._sink, frame)
            except (BlockingIOError, OSError):  # the device is down, or full: the frame is lost
                continue


def _open_tap(namespace: str, device: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(there, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(there)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _TAP_WITHOUT_HEADER))
    return tap


def _answer(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(argv: list[str]) -> None:
    """Carry frames until standard input ends."""
    hub, host = _open_tap(*argv[:2]), _open_tap(*argv[2:])
    faults = WireFaults()
    to_host, from_host = Direction(host), Direction(hub)
    selector = selectors.DefaultSelector()
    for source in (hub, host, 0):
        selector.register(source, selectors.EVENT_READ)
    _answer("ready")
    while True:
        due = [at for at in (to_host.next_at, from_host.next_at) if at is not None]
        wait_s = max(0.0, min(due) - time.monotonic()) if due else None
        for key, _ in selector.select(wait_s):
            if key.fd == 0:
                line = os.read(0, 65536)
                if not line:
                    return
                faults = replace(WireFaults(), **json.loads(line))
                _answer("set")
                continue
            is_from_host = key.fd == host
            direction = from_host if is_from_host else to_host
            is_lost = faults.loses_from_host if is_from_host else faults.loses_to_host
            for _ in range(64):
                try:
                    frame = os.read(key.fd, 65536)
                except (BlockingIOError, OSError):  # none is left, or the device is down
                    break
                if not is_lost:
                    direction.take(frame, faults)
        to_host.deliver()
        from_host.deliver()


if __name__ == "__main__":
    main(sys.argv[1:])
