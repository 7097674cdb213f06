"""Within one process: `dynamo run` with prefill and decode side by side, and tests that need no second process."""

import secrets

from dynamo.base import errors
from dynamo.transfer import api, memory, routes
from dynamo.transfer.limit import Limit
from dynamo.transfer.plan import Pattern


class Room:
    """Where the agents of a process find each other; whoever assembles the process passes it to all of them."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(16)
        self.present: dict[str, routes.Exposed] = {}  # by epoch


class LocalBackend:
    """Copies between memory that both sides see."""

    name = "local"
    capabilities = api.Capabilities(
        can_read=True, can_write=True, can_notify=True, is_same_host=True
    )

    def __init__(self, room: Room) -> None:
        self._room = room
        self._exposed: routes.Exposed | None = None

    def listen(self, exposed: routes.Exposed) -> str:
        self._exposed = exposed
        self._room.present[exposed.epoch] = exposed
        return f"{self._room.id}/{exposed.epoch}"

    def connect(self, target: routes.Target, limit: Limit) -> "LocalRoute":
        assert self._exposed is not None, "connect before listen"
        limit.remaining_s()
        return LocalRoute(self._room, self._exposed, target)

    def close(self) -> None:
        if self._exposed is not None:
            self._room.present.pop(self._exposed.epoch, None)


class LocalRoute:
    """Looks its peer up each time, so that one that has closed is gone."""

    def __init__(self, room: Room, mine: routes.Exposed, target: routes.Target) -> None:
        self._room, self._mine, self._target = room, mine, target
        self._ours = memory.Window(mine.region.memory)
        self._theirs = memory.Window(self._peer().region.memory)

    def move(self, operation: api.Operation, pattern: Pattern, limit: Limit) -> None:
        self._peer()
        memory.move(operation, self._ours, self._theirs, pattern, limit)

    def notify(self, message: bytes, limit: Limit) -> None:
        self._peer().deliver(self._mine.name, message, limit)

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()

    def _peer(self) -> routes.Exposed:
        peer = self._room.present.get(self._target.epoch)
        if peer is None:
            raise errors.TransferError(f"{self._target.name} has closed")
        return peer
