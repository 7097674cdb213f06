"""What a library tells of its KV blocks, in our words.

A block's name there is a hash that we cannot compute; but a stored event brings the tokens. From these, and from
what the parent was called here, we give each block the name that router and disaggregation know (`protocols.blocks`),
and remember it under theirs for as long as they hold the block. What cannot be placed is left out and counted: a block
whose parent is not known, one of another size than the card says, one that depends on more than tokens and adapter.

A library may hold a block several times (two prompts that were computed at once), and tells each copy: a block is gone
with its last copy. Where a model has several kinds of attention, the first that keeps whole prefixes counts.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from dynamo.engine.adapters import kv_wire
from dynamo.protocols import blocks, kv_events

MAX_BLOCKS = 1 << 20  # of a rank in one tier; the oldest are forgotten
_TIERS = {
    "CPU": kv_events.HOST,
    "CPU_PINNED": kv_events.HOST,  # SGLang's
    "STORAGE": kv_events.DISK,
    "DISK": kv_events.DISK,
    "EXTERNAL": kv_events.DISK,
}  # all else is the device
_WHOLE_PREFIXES = (None, "full_attention", "mla_attention", "sink_full_attention")
Replay = Callable[[int], Iterable[tuple[int, bytes]]]


@dataclass(slots=True)
class _Held:
    """A block as the library has it."""

    name: int  # ours
    num_copies: int


class Translator:
    """Of one rank. What it gives is to be told on in this order."""

    def __init__(self, block_size: int, *, max_blocks: int = MAX_BLOCKS) -> None:
        self.num_dropped = 0  # blocks that were told of but could not be placed
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._held: dict[kv_events.Tier, dict[kv_wire.Name, _Held]] = {
            tier: {} for tier in kv_events.TIERS
        }
        self._group: int | None = None  # the kind of attention that counts

    def translate(self, events: Iterable[kv_wire.Event]) -> list[kv_events.KvEvent]:
        """What one batch says."""
        return list(itertools.chain.from_iterable(map(self._translate, events)))

    def forget(self) -> list[kv_events.KvEvent]:
        """All blocks are gone, or events were missed, so that nothing is certain any more."""
        for held in self._held.values():
            held.clear()
        return [kv_events.Cleared()]

    def _translate(self, event: kv_wire.Event) -> Sequence[kv_events.KvEvent]:
        match event:
            case kv_wire.BlockStored():
                return self._stored(event)
            case kv_wire.BlockRemoved():
                return self._removed(event)
            case _:
                return self.forget()

    def _stored(self, event: kv_wire.BlockStored) -> Sequence[kv_events.KvEvent]:
        if not self._is_counted(event):
            return ()
        parent = self._name_of(event.parent_block_hash)
        is_orphan = parent is None and event.parent_block_hash is not None
        if is_orphan or not self._can_place(event):
            self.num_dropped += len(event.block_hashes)
            return ()
        seed = blocks.seed_of(event.lora_name)
        local = blocks.local_hashes(blocks.pack(event.token_ids), self._block_size, seed)
        names = blocks.sequence_hashes(local, parent)
        tier = _tier(event.medium)
        for theirs, ours in zip(event.block_hashes, names, strict=True):
            self._hold(tier, theirs, ours)
        told = tuple(map(kv_events.StoredBlock, names, local))
        stored = kv_events.Stored(parent_hash=parent, blocks=told, tier=tier)
        return stored, *self._overflow(tier)

    def _removed(self, event: kv_wire.BlockRemoved) -> Sequence[kv_events.KvEvent]:
        if event.group_idx not in (None, self._group):
            return ()
        tier = _tier(event.medium)
        dropped = (self._drop(tier, theirs) for theirs in event.block_hashes)
        gone = tuple(name for name in dropped if name is not None)
        return (kv_events.Removed(block_hashes=gone, tier=tier),) if gone else ()

    def _is_counted(self, event: kv_wire.BlockStored) -> bool:
        if self._group is None and event.kv_cache_spec_kind in _WHOLE_PREFIXES:
            self._group = event.group_idx
        return event.group_idx in (None, self._group) and bool(event.block_hashes)

    def _can_place(self, event: kv_wire.BlockStored) -> bool:
        depends_on = [] if event.lora_name is None else [event.lora_name]
        return (
            event.block_size == self._block_size
            and len(event.token_ids) == len(event.block_hashes) * self._block_size
            and all((keys or depends_on) == depends_on for keys in event.extra_keys or ())
        )

    def _name_of(self, theirs: kv_wire.Name | None) -> int | None:
        if theirs is None:
            return None
        found = (held[theirs].name for held in self._held.values() if theirs in held)
        return next(found, None)

    def _hold(self, tier: kv_events.Tier, theirs: kv_wire.Name, ours: int) -> None:
        held = self._held[tier].setdefault(theirs, _Held(ours, 0))
        held.num_copies += 1

    def _drop(self, tier: kv_events.Tier, theirs: kv_wire.Name) -> int | None:
        """Our name of a block of which this was the last copy."""
        held = self._held[tier].get(theirs)
        if held is None:
            return None
        held.num_copies -= 1
        return None if held.num_copies else self._held[tier].pop(theirs).name

    def _overflow(self, tier: kv_events.Tier) -> Sequence[kv_events.KvEvent]:
        held = self._held[tier]
        oldest = list(itertools.islice(held, max(0, len(held) - self._max_blocks)))
        names = tuple(held.pop(theirs).name for theirs in oldest)
        return (kv_events.Removed(block_hashes=names, tier=tier),) if names else ()


class RankEvents:
    """The numbered batches of one rank, in order: asks for those that it has missed, and forgets all if it must."""

    def __init__(self, translator: Translator, replay: Replay | None = None) -> None:
        """`replay` gives the batches that the publisher still has, from a number on; it may give none."""
        self.dp_rank = 0
        self.num_holes = 0  # that could not be filled
        self._translator = translator
        self._replay = replay
        self._expected = 0

    @property
    def num_dropped(self) -> int:
        """Blocks that were told of but could not be placed."""
        return self._translator.num_dropped

    def take(self, number: int, payload: bytes) -> list[kv_events.KvEvent]:
        """What this batch says, and before it what was missed. One that has been here already says nothing."""
        told: list[kv_events.KvEvent] = []
        if number > self._expected and self._replay is not None:
            for missed, its_payload in self._replay(self._expected):
                if missed == self._expected:
                    told += self._take(missed, its_payload)
        if number > self._expected:
            told += self._lose()
        return told if number < self._expected else told + self._take(number, payload)

    def _take(self, number: int, payload: bytes) -> list[kv_events.KvEvent]:
        self._expected = number + 1
        try:
            self.dp_rank, events = kv_wire.decode(payload)
        except msgspec.DecodeError:
            return self._lose()
        return self._translator.translate(events)

    def _lose(self) -> list[kv_events.KvEvent]:
        self.num_holes += 1
        return self._translator.forget()


def _tier(medium: str | None) -> kv_events.Tier:
    return _TIERS.get(medium or "", kv_events.DEVICE)
