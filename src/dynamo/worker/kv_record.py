"""What one rank of a worker has told about its blocks: its latest events, and what it holds by now.

Whoever missed a few events gets these again (`since`); whoever missed more, or comes late, gets all that is held
(`held`), as events too. Both come in pieces, so that a large cache does not stop the worker's event loop.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from dynamo.protocols import kv_events

RECENT_EVENTS = 4096  # kept, if they have no more than so many blocks
RECENT_BLOCKS = 1 << 16
PART_BLOCKS = 2048  # of one event in `held`
_Origin = tuple[int | None, int]  # the parent's name, the hash of the tokens


class KvRecord:
    """Knows the events of one rank, numbered from 0."""

    def __init__(self) -> None:
        self.next_event_id = 0
        self._recent: deque[kv_events.KvEvent] = deque()
        self._num_recent_blocks = 0
        self._held: dict[kv_events.Tier, dict[int, _Origin]] = {t: {} for t in kv_events.TIERS}

    def add(self, events: Sequence[kv_events.KvEvent]) -> int:
        """Take new events; gives the number of the first."""
        first = self.next_event_id
        for event in events:
            self._recent.append(event)
            self._num_recent_blocks += num_blocks(event)
            self._apply(event)
        self.next_event_id += len(events)
        while len(self._recent) > RECENT_EVENTS or self._num_recent_blocks > RECENT_BLOCKS:
            self._num_recent_blocks -= num_blocks(self._recent.popleft())
        return first

    def since(self, event_id: int) -> list[kv_events.KvEvent] | None:
        """The events from this number on; None if they are not known any more, or never were."""
        first = self.next_event_id - len(self._recent)
        if not first <= event_id <= self.next_event_id:
            return None
        return [self._recent[i] for i in range(event_id - first, len(self._recent))]

    def held(self) -> Iterator[kv_events.Stored]:
        """All blocks held at the time of the call, parents before children; later events change nothing in it."""
        copies = [(tier, dict(origins)) for tier, origins in self._held.items() if origins]
        return (event for tier, origins in copies for event in _as_events(tier, origins))

    def _apply(self, event: kv_events.KvEvent) -> None:
        match event:
            case kv_events.Stored(parent_hash=parent, blocks=blocks, tier=tier):
                origins = self._held.setdefault(tier, {})
                for block in blocks:
                    origins[block.block_hash] = (parent, block.tokens_hash)
                    parent = block.block_hash
            case kv_events.Removed(block_hashes=names, tier=tier):
                origins = self._held.get(tier, {})
                for name in names:
                    origins.pop(name, None)
            case kv_events.Cleared():
                for origins in self._held.values():
                    origins.clear()


def num_blocks(event: kv_events.KvEvent) -> int:
    """How many blocks an event names."""
    match event:
        case kv_events.Stored(blocks=blocks):
            return len(blocks)
        case kv_events.Removed(block_hashes=names):
            return len(names)
        case _:
            return 0


def _as_events(tier: kv_events.Tier, origins: dict[int, _Origin]) -> Iterator[kv_events.Stored]:
    """Each chain in pieces; takes `origins` apart."""
    for name in reversed(list(origins)):  # the youngest, because a chain is told best from its end
        chain = _chain_to(name, origins)
        for start in range(0, len(chain), PART_BLOCKS):
            piece = chain[start : start + PART_BLOCKS]
            parent = origins[piece[0]][0]
            told = tuple(kv_events.StoredBlock(name, origins.pop(name)[1]) for name in piece)
            yield kv_events.Stored(parent_hash=parent, blocks=told, tier=tier)


def _chain_to(name: int | None, origins: dict[int, _Origin]) -> list[int]:
    """This block and those before it that are still to be told, first to last."""
    chain: dict[int, None] = {}
    while name is not None and name in origins and name not in chain:
        chain[name] = None
        name = origins[name][0]
    return list(reversed(chain))
