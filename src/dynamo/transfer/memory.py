"""Memory that another process can map, and copies that let other threads run.

A pool lies in an anonymous memory file. It has no name, so nothing is left behind by a process that is killed; it
reaches a peer as a descriptor. It is sealed against changes of its size, because a process that maps a file dies of
SIGBUS when the file is cut short. Linux only, like the shm backend.
"""

import ctypes
import fcntl
import mmap
import os
import platform
import sys
from pathlib import Path

from dynamo.base import errors
from dynamo.transfer.api import TimeLimit
from dynamo.transfer.plan import Pattern

CAN_SHARE = sys.platform == "linux"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")  # abstract sockets end at its border, as in a container
# Slices keep other threads from running, but cost half of a call. So they take turns with calls: to hold so many bytes
# (some 0.1 ms), then to let go for as many. A thread that waits needs some 10 µs to wake: where one call in eight let
# it go for 4, it came too late every time, and the event loop stood still for as long as a transfer took.
_HELD_BYTES = 2 * 2**20
_STRETCH_BYTES = 16 * 2**20  # of one call: between two looks at the clock

_NOTHING = memoryview(b"")
# The C library's own: `ctypes.memmove` also makes a number of the address, which costs time.
_memmove = ctypes.CDLL(None).memmove
_memmove.restype = None
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class SharedMemory:
    """A pool's memory. This object owns the descriptor; the mapping lives as long as it is referenced."""

    def __init__(self, num_bytes: int) -> None:
        """Raises ConfigError if there is too little memory."""
        try:
            self.fd = os.memfd_create("dynamo-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, num_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self.memory = memoryview(mmap.mmap(self.fd, num_bytes))
        except (OSError, ValueError) as error:
            raise errors.ConfigError(
                f"cannot allocate {num_bytes / 2**20:.0f} MiB of shared memory: {error}"
            ) from error

    def close(self) -> None:
        """Close the descriptor, so that no further process can map the memory."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def identify_host() -> str:
    """Return an id that is equal for two processes between which `backends.shm` works.

    They belong to one boot of one machine, to one user, and see the same sockets.
    """
    if not _BOOT_ID.exists() or not _NETWORK.is_symlink():
        return f"{platform.node()}/{os.getpid()}"  # not Linux: no sharing
    return f"{_BOOT_ID.read_text().strip()}/{os.getuid()}/{os.readlink(_NETWORK)}"


def private(num_bytes: int) -> memoryview:
    """Return zeroed private memory, provided by the system as it is first written."""
    return memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def map_peers(fd: int, num_bytes: int) -> mmap.mmap:
    """Map a peer's pool, and close the descriptor. Raises TransferError if it is not a sealed file of that size."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size < num_bytes:
            raise errors.TransferError(
                f"expected a sealed memory file of {num_bytes} bytes, got {os.fstat(fd).st_size}"
            )
        return mmap.mmap(fd, num_bytes)
    except (OSError, ValueError) as error:
        raise errors.TransferError(f"cannot map the peer's memory: {error}") from error
    finally:
        os.close(fd)


class Window:
    """Flat memory with its address. While the window is open the memory cannot be unmapped."""

    def __init__(self, memory: memoryview | mmap.mmap) -> None:
        self.view = memoryview(memory).cast("B")
        self._pin: ctypes.Array[ctypes.c_char] | None = (
            ctypes.c_char * len(self.view)
        ).from_buffer(self.view)
        self.address = ctypes.addressof(self._pin)

    def close(self) -> None:
        """Release the memory. All copies from or to it must have ended."""
        self._pin = None
        self.view.release()


def move(target: Window, source: Window, pattern: Pattern, limit: TimeLimit) -> None:
    """Copy all pieces of the pattern, of which `source` is the remote pool. Raises TransferError at the time limit.

    Nothing is checked per piece: a plan has no block outside its pools, and no window is shorter than its pool.
    """
    cuts = [(slice(to, to + n), slice(of, of + n), n) for to, of, n in pattern.stencil]
    num_copied = 0
    into = out_of = _NOTHING
    try:
        for target_at, source_at in pattern.origins:
            into, out_of = target.view[target_at:], source.view[source_at:]
            to_address, of_address = target.address + target_at, source.address + source_at
            for to, of, length in cuts:
                num_copied += length
                if num_copied <= _HELD_BYTES:
                    into[to] = out_of[of]
                elif num_copied < 2 * _HELD_BYTES:
                    _memmove(to_address + to.start, of_address + of.start, length)
                else:
                    _copy(to_address + to.start, of_address + of.start, length, limit)
                    num_copied = 0
    finally:
        into = out_of = _NOTHING  # an error that is kept would keep the peer's pool mapped
    limit.remaining_s()  # late is too late: the owner may have given the blocks to others


def _copy(target: int, source: int, length: int, limit: TimeLimit) -> None:
    """Copy bytes while other threads run."""
    for offset in range(0, length, _STRETCH_BYTES):
        limit.remaining_s()
        _memmove(target + offset, source + offset, min(_STRETCH_BYTES, length - offset))
