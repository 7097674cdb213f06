"""KV events of vLLM and SGLang, decoded and translated to ours.

Wire format (`vllm.distributed.kv_events`, the same in SGLang): a batch is `[time, [events], data-parallel rank]` in
msgpack; an event is a map with its kind under "type", or in older releases an array that begins with its kind. Both are
read, and unknown fields are ignored: so we follow the schema, which grows at its end, and not the Python classes of one
release.

Translation: a library names a block by a hash that we cannot compute, but a stored event brings the tokens. From these,
and from our hash of the parent, we compute the hash that router and disaggregation use (`protocols.blocks`), and
remember it under the library's for as long as the library holds the block. A block without a computable hash is dropped
and counted: its parent is unknown, its size is not the model card's, or its content depends on more than tokens, LoRA
adapter and salt. Only the first block of a prompt names its salt; the others have that of their parent.

A library may hold a block several times (two prompts that were computed at once), and publishes each copy: a block is
removed with its last copy. Where a model has several kinds of attention, the first that caches whole prefixes counts.
"""  # decider

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo.protocols import blocks, kv_events, wire

MAX_BLOCKS = 1 << 20  # remembered per rank and tier; the oldest are dropped first
_DROPPED_SHARE = 4096  # one in so many is dropped at a time
_TIERS = {
    "CPU": kv_events.HOST,
    "CPU_PINNED": kv_events.HOST,  # SGLang's
    "STORAGE": kv_events.DISK,
    "DISK": kv_events.DISK,
    "EXTERNAL": kv_events.DISK,
    "REMOTE": kv_events.REMOTE,
}  # any other medium is the device
_WHOLE_PREFIX_KINDS = (None, "full_attention", "mla_attention", "sink_full_attention")
_MAP, _MAP16 = 0x80, 0xDE  # first byte of a small map in msgpack, and of larger ones
EngineHash = int | bytes  # the library's name of a block
Replay = Callable[[int], Iterable[tuple[int, bytes]]]  # first number → numbered payloads


class BlockStored(msgspec.Struct, frozen=True, tag="BlockStored"):
    """Consecutive blocks were stored; `token_ids` are those of all of them."""

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None  # for each block, what else its hash covers
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag="BlockRemoved"):
    """One copy of each of these blocks was removed."""

    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag="AllBlocksCleared"):
    """All blocks were removed."""


class _StoredRow(BlockStored, frozen=True, array_like=True, tag="BlockStored"):
    pass


class _RemovedRow(BlockRemoved, frozen=True, array_like=True, tag="BlockRemoved"):
    pass


class _ClearedRow(AllBlocksCleared, frozen=True, array_like=True, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    published_at: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


EngineEvent = BlockStored | BlockRemoved | AllBlocksCleared
_decode_batch = msgspec.msgpack.Decoder(_Batch).decode
_decode_map = msgspec.msgpack.Decoder(EngineEvent).decode
_decode_row = msgspec.msgpack.Decoder(_StoredRow | _RemovedRow | _ClearedRow).decode


def decode_batch(payload: bytes) -> tuple[int, list[EngineEvent]]:
    """Return the data-parallel rank and the events of a batch. Raises msgspec.DecodeError."""
    batch = _decode_batch(payload)
    return batch.data_parallel_rank or 0, [_decode_event(event) for event in batch.events]


def _decode_event(event: msgspec.Raw) -> EngineEvent:
    first = memoryview(event)[0]
    is_map = first & 0xF0 == _MAP or first >= _MAP16
    decoded: EngineEvent = _decode_map(event) if is_map else _decode_row(event)
    return decoded


@dataclass(slots=True)
class _CachedBlock:
    """A block that the library holds, under our hash."""

    block_hash: int
    num_copies: int
    cache_salt: str | None


class EventTranslator:
    """Translates the events of one rank; the results are to be published in order."""

    def __init__(self, block_size: int, *, max_blocks: int = MAX_BLOCKS) -> None:
        self.num_dropped = 0  # stored blocks without a computable hash
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._cached: dict[kv_events.Tier, dict[EngineHash, _CachedBlock]] = {
            tier: {} for tier in kv_events.TIERS
        }
        self._group: int | None = None  # the kind of attention that counts

    def translate(self, events: Iterable[EngineEvent]) -> list[kv_events.KvEvent]:
        """Translate the events of one batch."""
        translated: list[kv_events.KvEvent] = []
        for event in events:
            match event:
                case BlockStored():
                    translated += self._store(event)
                case BlockRemoved():
                    translated += self._remove(event)
                case _:
                    translated += self.clear()
        return translated

    def clear(self) -> list[kv_events.KvEvent]:
        """Drop all blocks, because the library did or because events were lost."""
        for cached in self._cached.values():
            cached.clear()
        return [kv_events.Cleared()]

    def _store(self, event: BlockStored) -> Sequence[kv_events.KvEvent]:
        if self._group is None and event.kv_cache_spec_kind in _WHOLE_PREFIX_KINDS:
            self._group = event.group_idx
        if event.group_idx not in (None, self._group) or not event.block_hashes:
            return ()
        parent_id = event.parent_block_hash
        copies = (tier.get(parent_id) for tier in self._cached.values() if parent_id is not None)
        parent_block = next((cached for cached in copies if cached is not None), None)
        is_orphan = parent_block is None and parent_id is not None
        first_salt = None if parent_id is not None else _find_salt(event)
        num_hashable = 0 if is_orphan else self._count_hashable(event, first_salt)
        self.num_dropped += len(event.block_hashes) - num_hashable
        if not num_hashable:
            return ()
        parent = parent_block.block_hash if parent_block is not None else None
        salt = parent_block.cache_salt if parent_block is not None else first_salt
        seed = blocks.seed_of(event.lora_name, salt)
        token_ids = event.token_ids[: num_hashable * self._block_size]
        try:
            packed = blocks.pack(token_ids)
        except OverflowError:  # ids that are none would end the thread that receives events
            self.num_dropped += num_hashable
            return ()
        local = blocks.local_hashes(packed, self._block_size, seed)
        hashes = blocks.sequence_hashes(local, parent)
        tier = _tier(event.medium)
        cached = self._cached[tier]
        known = event.block_hashes[:num_hashable]
        for engine_hash, block_hash in zip(known, hashes, strict=True):
            cached.setdefault(engine_hash, _CachedBlock(block_hash, 0, salt)).num_copies += 1
        stored = tuple(map(kv_events.StoredBlock, hashes, local))
        event_stored = kv_events.Stored(parent_hash=parent, blocks=stored, tier=tier)
        num_excess = len(cached) - self._max_blocks
        if num_excess <= 0:
            return (event_stored,)
        # some more: a dictionary finds its first entries the more slowly, the more were removed before them
        oldest = list(itertools.islice(cached, num_excess + self._max_blocks // _DROPPED_SHARE))
        removed = tuple(cached.pop(engine_hash).block_hash for engine_hash in oldest)
        return event_stored, kv_events.Removed(block_hashes=removed, tier=tier)

    def _remove(self, event: BlockRemoved) -> Sequence[kv_events.KvEvent]:
        if event.group_idx not in (None, self._group):
            return ()
        tier = _tier(event.medium)
        dropped = (self._drop_copy(tier, engine_hash) for engine_hash in event.block_hashes)
        removed = tuple(block_hash for block_hash in dropped if block_hash is not None)
        return (kv_events.Removed(block_hashes=removed, tier=tier),) if removed else ()

    def _count_hashable(self, event: BlockStored, first_salt: str | None) -> int:
        """Count the blocks, from the first on, of which the hashes cover tokens, adapter and the prompt's salt only.

        A block that has a part of an image covers the image, too, and all blocks behind it do by their parents.
        """
        num_blocks = len(event.block_hashes)
        is_whole = len(event.token_ids) == num_blocks * self._block_size
        if event.block_size != self._block_size or not is_whole:
            return 0
        covered: list[Any] = [] if event.lora_name is None else [event.lora_name]
        covered_first = covered if first_salt is None else [*covered, first_salt]
        for number, keys in enumerate(event.extra_keys or ()):
            expected = covered if number else covered_first
            if (keys or expected) != expected:
                return number
        return num_blocks

    def _drop_copy(self, tier: kv_events.Tier, engine_hash: EngineHash) -> int | None:
        """Count a removed copy; return our hash of the block if that was the last one."""
        cached = self._cached[tier].get(engine_hash)
        if cached is None:
            return None
        cached.num_copies -= 1
        return None if cached.num_copies else self._cached[tier].pop(engine_hash).block_hash


class RankBatches:
    """The numbered batches of one rank, in order: replays missing ones, and clears all blocks if that fails."""

    def __init__(self, translator: EventTranslator, replay: Replay | None = None) -> None:
        """`replay` yields the batches that the publisher still has, from a number on; it may yield none."""
        self.dp_rank = 0
        self.num_gaps = 0  # that could not be filled
        self._translator = translator
        self._replay = replay
        self._next_number = 0
        self._last_number = -1  # that came, other than by a replay

    @property
    def num_dropped(self) -> int:
        """Return the number of stored blocks without a computable hash."""
        return self._translator.num_dropped

    def receive(self, number: int, payload: bytes) -> list[kv_events.KvEvent]:
        """Translate a batch, after those that were missed before it; one that was replayed already yields nothing.

        The numbers of a publisher only rise: one that does not is that of a publisher that was started anew.
        """
        translated: list[kv_events.KvEvent] = []
        if number <= self._last_number:
            translated += self._record_gap()
            self._next_number = 0
        self._last_number = number
        if number > self._next_number and self._replay is not None:
            for replayed, replayed_payload in self._replay(self._next_number):
                if replayed == self._next_number:
                    translated += self._decode(replayed, replayed_payload)
        if number > self._next_number:
            translated += self._record_gap()
        if number < self._next_number:
            return translated
        return translated + self._decode(number, payload)

    def _decode(self, number: int, payload: bytes) -> list[kv_events.KvEvent]:
        self._next_number = number + 1
        try:
            self.dp_rank, events = decode_batch(payload)
        except wire.DECODE_ERRORS:
            return self._record_gap()
        return self._translator.translate(events)

    def _record_gap(self) -> list[kv_events.KvEvent]:
        self.num_gaps += 1
        return self._translator.clear()


def _find_salt(event: BlockStored) -> str | None:
    """Return the salt of the prompt that begins with these blocks: the last key of the first, behind the adapter."""
    match event.extra_keys:
        case [[str(salt)], *_] if event.lora_name is None:
            return salt
        case [[adapter, str(salt)], *_] if adapter == event.lora_name:
            return salt
        case _:
            return None


def _tier(medium: str | None) -> kv_events.Tier:
    return _TIERS.get(medium or "", kv_events.DEVICE)
