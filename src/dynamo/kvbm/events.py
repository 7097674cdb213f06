"""The KV events of one worker's tiers, in the order in which blocks became reusable and were evicted."""

from dynamo.protocols import kv_events


class EventLog:
    """Collects events; neighbours that continue one another in one tier become one event.

    All tiers of a rank write to one log, so that a block which moves down is stored there before it is removed here.
    """

    def __init__(self) -> None:
        self._events: list[kv_events.KvEvent] = []
        self._tier = kv_events.DEVICE  # of the open event
        self._parent: int | None = None
        self._stored: list[kv_events.StoredBlock] = []
        self._removed: list[int] = []

    def add_stored(
        self, block: kv_events.StoredBlock, parent_hash: int | None, tier: kv_events.Tier
    ) -> None:
        """Record that a block became reusable in a tier."""
        if (
            self._removed
            or tier != self._tier
            or (self._stored and self._stored[-1].block_hash != parent_hash)
        ):
            self._close_event()
        if not self._stored:
            self._parent, self._tier = parent_hash, tier
        self._stored.append(block)

    def add_removed(self, sequence_hash: int, tier: kv_events.Tier) -> None:
        """Record that a block was evicted from a tier."""
        if self._stored or tier != self._tier:
            self._close_event()
            self._tier = tier
        self._removed.append(sequence_hash)

    def add_cleared(self) -> None:
        """Record that all blocks of the worker are gone."""
        self._close_event()
        self._events.append(kv_events.Cleared())

    def take_events(self) -> list[kv_events.KvEvent]:
        """Return the events since the last call."""
        self._close_event()
        events, self._events = self._events, []
        return events

    def _close_event(self) -> None:
        if self._stored:
            self._events.append(
                kv_events.Stored(
                    parent_hash=self._parent, blocks=tuple(self._stored), tier=self._tier
                )
            )
        if self._removed:
            self._events.append(
                kv_events.Removed(block_hashes=tuple(self._removed), tier=self._tier)
            )
        self._stored, self._removed = [], []
