"""The hashes of blocks of tokens, on which router, engine and KV tiers agree to the bit.

Tokens are cut into blocks of exactly `block_size`; a partial block at the end has no hash.

- The *local hash* h of a block depends on its own tokens only:
  xxh3_64 over the tokens as little-endian u32, seed 1337.
- The *sequence hash* s identifies the block together with all blocks before it:
  s[0] = h[0], s[i] = xxh3_64(le_u64(s[i-1]) + le_u64(h[i]), seed 1337).

Tokens travel as the bytes of little-endian u32 (`pack`), from the tokenizer to this hash, because building
and walking Python lists costs as much as the hashing itself.
"""  # decider

import array
import struct
import sys
from collections.abc import Iterable, Sequence

import xxhash

SEED = 1337
_SALTED = 0x73616C74  # sets the seeds of salts apart from those of adapters: both are names that others choose
TOKEN_BYTES = 4
_PAIR = struct.Struct("<QQ")
_SWAP = sys.byteorder == "big"


def pack(token_ids: Iterable[int]) -> bytes:
    """Return token ids as little-endian u32 bytes. Raises OverflowError for an id outside 0..2**32-1."""
    tokens = array.array("I", token_ids)
    if _SWAP:
        tokens.byteswap()
    return tokens.tobytes()


def unpack(packed: bytes) -> list[int]:
    """Return the token ids of packed bytes. Raises ValueError if the length is no multiple of four."""
    tokens = array.array("I")
    tokens.frombytes(packed)
    if _SWAP:
        tokens.byteswap()
    return tokens.tolist()


def count(packed: bytes) -> int:
    """Return the number of packed tokens."""
    return len(packed) // TOKEN_BYTES


def seed_of(lora_name: str | None, cache_salt: str | None = None) -> int:
    """Return the seed of the local hashes under a LoRA adapter (None: the base model) and a salt (None: without).

    Blocks under different salts have different hashes, so that no request finds another tenant's blocks; and none
    under a salt has those of an adapter of the same name.
    """
    seed = SEED if lora_name is None else xxhash.xxh3_64_intdigest(lora_name.encode(), SEED)
    if cache_salt is None:
        return seed
    return xxhash.xxh3_64_intdigest(cache_salt.encode(), seed ^ _SALTED)


def local_hashes(packed: bytes, block_size: int, seed: int = SEED) -> list[int]:
    """Return the local hash of each full block of `block_size` tokens."""
    step = block_size * TOKEN_BYTES
    end = len(packed) - len(packed) % step
    digest = xxhash.xxh3_64_intdigest
    # a third of the time of slices
    blocks = struct.iter_unpack(f"{step}s", memoryview(packed)[:end])
    return [digest(block, seed) for (block,) in blocks]


def next_sequence_hash(parent: int | None, local: int) -> int:
    """Return the sequence hash of a block, from its local hash and its predecessor's sequence hash (None: first)."""
    if parent is None:
        return local
    return xxhash.xxh3_64_intdigest(_PAIR.pack(parent, local), SEED)


def sequence_hashes(local: Sequence[int], parent: int | None = None) -> list[int]:
    """Return the sequence hash of each of consecutive blocks; `parent` is the sequence hash before the first."""
    pack_pair, digest = _PAIR.pack, xxhash.xxh3_64_intdigest
    hashes = []
    for block in local:  # `next_sequence_hash`, without a call per block
        parent = block if parent is None else digest(pack_pair(parent, block), SEED)
        hashes.append(parent)
    return hashes
