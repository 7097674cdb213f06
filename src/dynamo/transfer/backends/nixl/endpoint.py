"""One agent of the NIXL library with its own UCX worker, used by one thread at a time. The only door to `nixl`.

Why one *per peer* and not one for all: a transfer that has been begun cannot be taken back. Measured with nixl 1.5.1
over TCP: after `release`, and after the peer was removed, the bytes of a stalled READ still came as soon as the peer
went on, into blocks that were somebody else's by then. Only the end of the UCX worker stops it for certain, so the
worker of a peer must not be that of another.

NIXL's own progress thread is left off: it spins, and costs a core that has nothing to do (0.5 to 0.9 CPU seconds a
second). Who waits makes the progress, and the service looks every millisecond.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import nixl._api as nixl

from dynamo.base import errors
from dynamo.transfer import api, memory
from dynamo.transfer.limit import Limit
from dynamo.transfer.plan import Piece

_FAULTS: tuple[type[Exception], ...] = tuple(
    kind for name, kind in vars(nixl.nixlBind).items() if name.endswith("Error")
)
_EAGER_S = 0.02  # of waiting, in which we look without a pause
_PAUSE_S = 0.0001
T = TypeVar("T")


class Endpoint:
    """Knows one region, ours, and whom it has met. Every method raises TransferError if NIXL fails."""

    def __init__(self, name: str, window: memory.Window) -> None:
        _hush()
        self._window = window
        self._handle: Any = None  # here and in no frame, because a traceback would keep it alive
        self._agent: Any = None
        self._call(lambda: self._open(name))

    @property
    def contact(self) -> bytes:
        """Where to connect, with the keys of our region."""
        return bytes(self._call(lambda: self._agent.get_agent_metadata()))

    @property
    def answer_contact(self) -> bytes:
        """Where to connect, and nothing that opens memory."""
        nothing = self._call(lambda: nixl.nixlBind.nixlRegDList(nixl.nixlBind.DRAM_SEG))
        partial = self._call(
            lambda: self._agent.get_partial_agent_metadata(nothing, inc_conn_info=True)
        )
        return bytes(partial)

    def meet(self, contact: bytes) -> str:
        """Learn how to reach a peer; gives its name."""
        named = self._call(lambda: self._agent.add_remote_agent(contact))
        return named.decode() if isinstance(named, bytes) else str(named)

    def forget(self, peer: str) -> None:
        """Close what leads to it."""
        self._call(lambda: self._agent.remove_remote_agent(peer))

    def say(self, peer: str, word: bytes) -> None:
        """Without waiting until it has been heard."""
        self._call(lambda: self._agent.send_notif(peer, word))

    def hear(self) -> list[tuple[str, bytes]]:
        """What peers have said since, and some progress of everything else."""
        said = self._call(lambda: self._agent.get_new_notifs())
        return [(peer, bytes(word)) for peer, words in said.items() for word in words]

    def move(
        self,
        operation: api.Operation,
        peer: str,
        pool_at: int,
        pieces: Sequence[Piece],
        limit: Limit,
    ) -> None:
        """Copy these. After any error, or at the limit, `close` alone makes the memory quiet."""
        ours = [(self._window.address + local, length, 0) for local, _, length in pieces]
        theirs = [(pool_at + remote, length, 0) for _, remote, length in pieces]
        self._handle = self._call(lambda: self._begin(operation, peer, ours, theirs))
        state = self._call(lambda: self._agent.transfer(self._handle))
        wait = Wait(limit)
        while state == "PROC":
            wait.pause()
            state = self._call(lambda: self._agent.check_xfer_state(self._handle))
        if state != "DONE":
            raise errors.TransferError(f"NIXL could not move the bytes: {state}")
        self._call(self._handle.release)
        self._handle = None

    def close(self) -> None:
        """End the UCX worker, and with it whatever still moves. Idempotent; never raises."""
        if self._handle is not None:
            self._handle._released = True  # its release would wait for nothing, and says so loudly
            self._handle._agent = None
            self._handle = None
        if self._agent is not None:
            self._agent.agent = None  # whatever frames hold of Python's side, NIXL's ends here
            self._agent = None

    def _open(self, name: str) -> None:
        told = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent = nixl.nixl_agent(name, told)
        self._agent.create_backend("UCX")
        whole = [(self._window.address, len(self._window.view), 0, "")]
        self._agent.register_memory(self._agent.get_reg_descs(whole, "DRAM"))

    def _begin(
        self,
        operation: api.Operation,
        peer: str,
        ours: list[tuple[int, int, int]],
        theirs: list[tuple[int, int, int]],
    ) -> Any:
        local, remote = (self._agent.get_xfer_descs(side, "DRAM") for side in (ours, theirs))
        return self._agent.initialize_xfer(operation.name, local, remote, peer)

    @staticmethod
    def _call(ask: Callable[[], T]) -> T:
        try:
            return ask()
        except _FAULTS as error:
            raise errors.TransferError(f"NIXL: {error}") from error


class Wait:
    """Looks again and again under a limit: at once for a while, then with pauses."""

    def __init__(self, limit: Limit) -> None:
        self._limit, self._is_eager_until = limit, time.monotonic() + _EAGER_S

    def pause(self) -> None:
        """Raises TransferError at the limit."""
        self._limit.remaining_s()
        time.sleep(_PAUSE_S if time.monotonic() > self._is_eager_until else 0)


def _hush() -> None:
    """NIXL writes to standard output by itself; let it speak as all of us do."""
    log = logging.getLogger("nixl")
    log.handlers.clear()
    log.propagate = True
    log.setLevel(logging.WARNING)
