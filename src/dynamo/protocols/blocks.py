"""How a block of tokens is named. Router, engine and KV tiers agree on this to the bit.

Tokens are cut into exact blocks of `block_size`; a partial tail has no name.

- The *local hash* of a block depends on its own tokens only:
  xxh3_64 over the tokens as little-endian u32, seed 1337.
- The *sequence hash* names the block together with everything before it:
  s[0] = h[0], s[i] = xxh3_64(le_u64(s[i-1]) + le_u64(h[i]), seed 1337).

Tokens travel as the bytes of little-endian u32 (`pack`), from the tokenizer to this hash, because building
and walking Python lists costs as much as the hashing itself.
"""

import array
import struct
import sys
from collections.abc import Iterable, Sequence

import xxhash

SEED = 1337
TOKEN_BYTES = 4
_PAIR = struct.Struct("<QQ")
_SWAP = sys.byteorder == "big"


def pack(token_ids: Iterable[int]) -> bytes:
    """Token ids as little-endian u32 bytes. Raises OverflowError for an id outside 0..2**32-1."""
    tokens = array.array("I", token_ids)
    if _SWAP:
        tokens.byteswap()
    return tokens.tobytes()


def unpack(packed: bytes) -> list[int]:
    """The inverse of `pack`. Raises ValueError if the length is no multiple of four."""
    tokens = array.array("I")
    tokens.frombytes(packed)
    if _SWAP:
        tokens.byteswap()
    return tokens.tolist()


def count(packed: bytes) -> int:
    """How many tokens are packed."""
    return len(packed) // TOKEN_BYTES


def seed_of(lora_name: str | None) -> int:
    """The seed of local hashes for what this adapter computes (None: the model alone): other keys, other names."""
    return SEED if lora_name is None else xxhash.xxh3_64_intdigest(lora_name.encode(), SEED)


def local_hashes(packed: bytes, block_size: int, seed: int = SEED) -> list[int]:
    """One hash for each full block of `block_size` tokens."""
    step = block_size * TOKEN_BYTES
    end = len(packed) - len(packed) % step
    digest = xxhash.xxh3_64_intdigest
    blocks = struct.iter_unpack(
        f"{step}s", memoryview(packed)[:end]
    )  # a third of the time of slices
    return [digest(block, seed) for (block,) in blocks]


def next_sequence_hash(parent: int | None, local: int) -> int:
    """The name of the block with hash `local` after the block named `parent` (None: it is the first)."""
    if parent is None:
        return local
    return xxhash.xxh3_64_intdigest(_PAIR.pack(parent, local), SEED)


def sequence_hashes(local: Sequence[int], parent: int | None = None) -> list[int]:
    """Chain local hashes; `parent` continues an earlier chain."""
    pack_pair, digest = _PAIR.pack, xxhash.xxh3_64_intdigest
    names = []
    for block in local:  # `next_sequence_hash`, without a call per block
        parent = block if parent is None else digest(pack_pair(parent, block), SEED)
        names.append(parent)
    return names
