"""Transfers within one process: `dynamo run` with prefill and decode side by side, and tests."""

import secrets

from dynamo.base import errors
from dynamo.transfer import api, memory
from dynamo.transfer.api import TimeLimit
from dynamo.transfer.plan import Pattern


class Room:
    """The registry in which the agents of a process find each other; all of them are made with it."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(16)
        self.present: dict[str, api.Exposed] = {}  # by epoch


class LocalBackend:
    """Copies between two pools of this process."""

    name = "local"
    is_same_host = True

    def __init__(self, room: Room) -> None:
        self._room = room
        self._exposed: api.Exposed | None = None

    def listen(self, exposed: api.Exposed) -> str:
        self._exposed = exposed
        self._room.present[exposed.epoch] = exposed
        return f"{self._room.id}/{exposed.epoch}"

    def connect(self, target: api.PeerTarget, limit: TimeLimit) -> "LocalRoute":
        assert self._exposed is not None, "connect before listen"
        limit.remaining_s()
        return LocalRoute(self._room, self._exposed, target)

    def close(self) -> None:
        if self._exposed is not None:
            self._room.present.pop(self._exposed.epoch, None)


class LocalRoute:
    """A route that looks its peer up for each operation, so that a closed one is noticed."""

    def __init__(self, room: Room, own: api.Exposed, target: api.PeerTarget) -> None:
        self._room, self._own, self._target = room, own, target
        self._local = memory.Window(own.region.memory)
        self._remote = memory.Window(self._peer().region.memory)

    def move(self, operation: api.TransferOperation, pattern: Pattern, limit: TimeLimit) -> None:
        self._peer()
        memory.move(operation, self._local, self._remote, pattern, limit)

    def probe(self, num_bytes: int, limit: TimeLimit) -> None:
        """Do nothing: no byte crosses a network."""

    def notify(self, message: bytes, limit: TimeLimit) -> None:
        self._peer().deliver(self._own.name, message, limit)

    def close(self) -> None:
        self._local.close()
        self._remote.close()

    def _peer(self) -> api.Exposed:
        peer = self._room.present.get(self._target.epoch)
        if peer is None:
            raise errors.TransferError(f"{self._target.name} has closed")
        return peer
