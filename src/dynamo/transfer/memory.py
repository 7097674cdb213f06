"""Memory that another process can map, and copies that let other threads run.

A pool lies in an anonymous memory file. It has no name, so nothing is left behind by a process that is killed; it
reaches a peer as a descriptor. It is sealed against changes of its size, because whoever maps a file that is cut
short dies of SIGBUS. Linux only, as is everything of `shm`.
"""

import ctypes
import fcntl
import mmap
import os
import sys
from collections.abc import Iterable

from dynamo.base import errors
from dynamo.transfer import api
from dynamo.transfer.limit import Limit
from dynamo.transfer.plan import Piece

CAN_SHARE = sys.platform == "linux"
_LONG_BYTES = 16 * 2**20  # a copy between two looks at the clock
_SMALL_BYTES = 32 * 1024  # up to here letting go of the interpreter costs more than the copy


class SharedMemory:
    """A pool's memory. The descriptor is ours; the mapping lives as long as somebody uses it."""

    def __init__(self, num_bytes: int) -> None:
        """Raises ConfigError if there is not so much."""
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
        """Nobody new can map it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def private(num_bytes: int) -> memoryview:
    """Zeroed memory of our own, provided by the system as it is first written."""
    return memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def map_peers(fd: int, num_bytes: int) -> mmap.mmap:
    """A peer's pool; takes the descriptor. Raises TransferError if it is not what a peer of ours sends."""
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
    """Flat memory, by address. While it is open the memory cannot be unmapped."""

    def __init__(self, memory: memoryview | mmap.mmap) -> None:
        self.view = memoryview(memory).cast("B")
        self._pin: ctypes.Array[ctypes.c_char] | None = (
            ctypes.c_char * len(self.view)
        ).from_buffer(self.view)
        self.address = ctypes.addressof(self._pin)

    def close(self) -> None:
        """Let go of the memory. Whoever copies from or to it must have stopped."""
        self._pin = None
        self.view.release()


def move(
    operation: api.Operation,
    ours: Window,
    theirs: Window,
    pieces: Iterable[Piece],
    limit: Limit,
) -> None:
    """Copy all pieces, from them to us or the other way. Raises TransferError when the limit ends it."""
    target, source = (ours, theirs) if operation is api.Operation.READ else (theirs, ours)
    for local, remote, length in pieces:
        target_at, source_at = (
            (local, remote) if operation is api.Operation.READ else (remote, local)
        )
        for done in range(0, length, _LONG_BYTES):
            limit.remaining_s()
            copy(
                target, target_at + done, source, source_at + done, min(_LONG_BYTES, length - done)
            )
    limit.remaining_s()  # late is too late: the owner may have given the blocks to others


def copy(target: Window, target_at: int, source: Window, source_at: int, length: int) -> None:
    """Long copies let other threads run meanwhile. Raises IndexError for what is not within both windows."""
    if target_at + length > len(target.view) or source_at + length > len(source.view):
        raise IndexError(f"{length} bytes at {source_at} and {target_at} are not within the pools")
    if length <= _SMALL_BYTES:
        target.view[target_at : target_at + length] = source.view[source_at : source_at + length]
    else:
        ctypes.memmove(target.address + target_at, source.address + source_at, length)
