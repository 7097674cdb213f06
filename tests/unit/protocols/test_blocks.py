"""Hashes of blocks, compared with the specification's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.protocols import blocks

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=60)
sizes = st.integers(1, 20)


def test_hashes_are_those_of_the_specification():
    local = blocks.local_hashes(blocks.pack(range(1, 13)), 4)

    assert local == [14643705804678351452, 16777012769546811212, 483935686894639516]
    assert blocks.sequence_hashes(local) == [
        14643705804678351452,
        4945711292740353085,
        12583592247330656132,
    ]


@given(tokens)
def test_unpack_is_the_inverse_of_pack(ids):
    packed = blocks.pack(ids)

    assert blocks.unpack(packed) == ids
    assert blocks.count(packed) == len(ids)


def test_packed_tokens_are_little_endian():
    assert blocks.pack([1, 0x01020304]) == b"\1\0\0\0\4\3\2\1"


@pytest.mark.parametrize("token", [-1, 2**32])
def test_token_id_beyond_32_bits_is_an_error(token):
    with pytest.raises(OverflowError):
        blocks.pack([token])


def test_unpack_of_a_partial_token_is_an_error():
    with pytest.raises(ValueError, match="length"):
        blocks.unpack(b"\1\2\3")


@given(tokens, sizes)
def test_partial_last_block_has_no_hash(ids, size):
    full = len(ids) - len(ids) % size

    assert len(blocks.local_hashes(blocks.pack(ids), size)) == len(ids) // size
    assert blocks.local_hashes(blocks.pack(ids), size) == blocks.local_hashes(
        blocks.pack(ids[:full]), size
    )


@given(tokens, sizes, st.integers(0, 60))
def test_sequence_hashes_continue_from_their_parent(ids, size, place):
    local = blocks.local_hashes(blocks.pack(ids), size)
    head = blocks.sequence_hashes(local[:place])
    tail = blocks.sequence_hashes(local[place:], head[-1] if head else None)

    assert head + tail == blocks.sequence_hashes(local)


@given(tokens, st.integers(0, 59))
def test_sequence_hash_depends_on_all_earlier_blocks(ids, place):
    changed = list(ids)
    if place < len(ids):
        changed[place] ^= 1
    before = blocks.sequence_hashes(blocks.local_hashes(blocks.pack(ids), 4))
    after = blocks.sequence_hashes(blocks.local_hashes(blocks.pack(changed), 4))
    same = [a == b for a, b in zip(before, after, strict=True)]

    assert same == [block < place // 4 or place >= len(ids) for block in range(len(before))]


def test_salt_is_not_taken_for_an_adapter_of_its_name():
    """Else a prompt of the base model under a salt would find the blocks that an adapter has computed."""
    names = (None, "", "poet", "mine")
    seeds = {(lora, salt): blocks.seed_of(lora, salt) for lora in names for salt in names}

    assert len(set(seeds.values())) == len(seeds)
