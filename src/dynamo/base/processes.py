"""The kernel's help against orphans: on Linux a process can ask to be killed when its parent dies, however it dies."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def dies_with(parent: int) -> Callable[[], None] | None:
    """Return what a new child calls to be killed with its parent; None where the kernel does not offer it."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)

    def bind() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died in between
            os.kill(os.getpid(), signal.SIGKILL)

    return bind
