"""One agent of the NIXL library with its own UCX worker, used by one thread at a time. The only door to `nixl`.

Each peer has an endpoint of its own, because a transfer that has begun cannot be cancelled. Measured with nixl 1.5.1
over TCP: after `release`, and after the peer was removed, the bytes of a stalled READ still came as soon as the peer
went on, into blocks that belonged to other sequences by then. Only the end of the UCX worker stops it for certain, so
the worker of a peer must not be that of another.

NIXL's own progress thread is left off: it spins, and costs a core that has nothing to do (0.5 to 0.9 CPU seconds a
second). A waiting thread makes the progress, and the server looks every millisecond.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import nixl._api as nixl

from dynamo.base import errors
from dynamo.transfer import api, memory
from dynamo.transfer.job import TimeLimit
from dynamo.transfer.plan import Piece

_FAULTS: tuple[type[Exception], ...] = tuple(
    kind for name, kind in vars(nixl.nixlBind).items() if name.endswith("Error")
)
_EAGER_S = 0.02  # of waiting, in which we look without a pause
_PAUSE_S = 0.0001
T = TypeVar("T")


class NixlEndpoint:
    """Opens one region of ours, and knows its peers. Every method raises TransferError if NIXL fails."""

    def __init__(self, name: str, window: memory.Window) -> None:
        log = logging.getLogger("nixl")  # by itself it writes to standard output
        log.handlers.clear()
        log.propagate = True
        log.setLevel(logging.WARNING)
        self._window = window
        self._handle: Any = None  # here and in no frame, because a traceback would keep it alive
        self._agent: Any = None
        self._call(lambda: self._open(name))

    @property
    def contact(self) -> bytes:
        """The address of this endpoint, with the keys of its region."""
        return bytes(self._call(lambda: self._agent.get_agent_metadata()))

    @property
    def answer_contact(self) -> bytes:
        """The address of this endpoint, without keys that open memory."""
        nothing = self._call(lambda: nixl.nixlBind.nixlRegDList(nixl.nixlBind.DRAM_SEG))
        partial = self._call(
            lambda: self._agent.get_partial_agent_metadata(nothing, inc_conn_info=True)
        )
        return bytes(partial)

    def add_peer(self, contact: bytes) -> str:
        """Add a peer by its address; return its name."""
        named = self._call(lambda: self._agent.add_remote_agent(contact))
        return named.decode() if isinstance(named, bytes) else str(named)

    def remove_peer(self, peer: str) -> None:
        """Close the connection to a peer."""
        self._call(lambda: self._agent.remove_remote_agent(peer))

    def send(self, peer: str, message: bytes) -> None:
        """Send a notification, without waiting for it to arrive."""
        self._call(lambda: self._agent.send_notif(peer, message))

    def receive(self) -> list[tuple[str, bytes]]:
        """Return the notifications since the last call, and let other operations progress."""
        by_peer = self._call(lambda: self._agent.get_new_notifs())
        return [(peer, bytes(each)) for peer, bodies in by_peer.items() for each in bodies]

    def move(
        self,
        operation: api.TransferOperation,
        peer: str,
        pool_at: int,
        pieces: Sequence[Piece],
        limit: TimeLimit,
    ) -> None:
        """Copy these pieces. After an error or at the time limit, bytes may still arrive until `close`."""
        local_parts = [(self._window.address + local, length, 0) for local, _, length in pieces]
        remote_parts = [(pool_at + remote, length, 0) for _, remote, length in pieces]
        self._handle = self._call(lambda: self._begin(operation, peer, local_parts, remote_parts))
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
            self._handle._released = True  # otherwise its release waits in vain, and logs that
            self._handle._agent = None
            self._handle = None
        if self._agent is not None:
            self._agent.agent = None  # whatever frames hold of Python's side, NIXL's ends here
            self._agent = None

    def _open(self, name: str) -> None:
        agent_config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent = nixl.nixl_agent(name, agent_config)
        self._agent.create_backend("UCX")
        region = [(self._window.address, len(self._window.view), 0, "")]
        self._agent.register_memory(self._agent.get_reg_descs(region, "DRAM"))

    def _begin(
        self,
        operation: api.TransferOperation,
        peer: str,
        local_parts: list[tuple[int, int, int]],
        remote_parts: list[tuple[int, int, int]],
    ) -> Any:
        local, remote = (
            self._agent.get_xfer_descs(side, "DRAM") for side in (local_parts, remote_parts)
        )
        return self._agent.initialize_xfer(operation.name, local, remote, peer)

    @staticmethod
    def _call(function: Callable[[], T]) -> T:
        try:
            return function()
        except _FAULTS as error:
            raise errors.TransferError(f"NIXL: {error}") from error


class Wait:
    """A polling loop under a time limit: without pauses for a while, then with them."""

    def __init__(self, limit: TimeLimit) -> None:
        self._limit, self._is_eager_until = limit, time.monotonic() + _EAGER_S

    def pause(self) -> None:
        """Pause before the next poll. Raises TransferError at the time limit."""
        self._limit.remaining_s()
        time.sleep(_PAUSE_S if time.monotonic() > self._is_eager_until else 0)
