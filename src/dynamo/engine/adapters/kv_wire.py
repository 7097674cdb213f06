"""KV events as vLLM's publisher writes them (`vllm.distributed.kv_events`, and the same in SGLang).

A batch is `[time, [events], data-parallel rank]` in msgpack; an event is a map with its kind under "type", or in older
releases an array with its kind in front. Both are read, and what we do not know is passed over: so we follow the
schema, which grows at its end, and not the Python classes of one release.
"""

from typing import Any

import msgspec

Name = int | bytes  # what they call a block
_MAP, _MAP16 = 0x80, 0xDE  # the first byte of a small map in msgpack, and of larger ones


class BlockStored(msgspec.Struct, frozen=True, tag="BlockStored"):
    """Consecutive blocks are full. `token_ids` are those of all of them."""

    block_hashes: list[Name]
    parent_block_hash: Name | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None  # for each block, what its hash depends on too
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag="BlockRemoved"):
    """One copy of each of these blocks is gone."""

    block_hashes: list[Name]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag="AllBlocksCleared"):
    """All blocks are gone."""


class _StoredRow(BlockStored, frozen=True, array_like=True, tag="BlockStored"):
    pass


class _RemovedRow(BlockRemoved, frozen=True, array_like=True, tag="BlockRemoved"):
    pass


class _ClearedRow(AllBlocksCleared, frozen=True, array_like=True, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    at: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


Event = BlockStored | BlockRemoved | AllBlocksCleared
_decode_batch = msgspec.msgpack.Decoder(_Batch).decode
_decode_map = msgspec.msgpack.Decoder(Event).decode
_decode_row = msgspec.msgpack.Decoder(_StoredRow | _RemovedRow | _ClearedRow).decode


def decode(payload: bytes) -> tuple[int, list[Event]]:
    """The rank and the events of a batch. Raises msgspec.DecodeError."""
    batch = _decode_batch(payload)
    return batch.data_parallel_rank or 0, [_decode_event(event) for event in batch.events]


def _decode_event(event: msgspec.Raw) -> Event:
    first = memoryview(event)[0]
    is_map = first & 0xF0 == _MAP or first >= _MAP16
    decoded: Event = _decode_map(event) if is_map else _decode_row(event)
    return decoded
