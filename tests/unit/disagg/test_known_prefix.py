"""The mirror of what an engine could find again."""

from hypothesis import given
from hypothesis import strategies as st

from dynamo.disagg import known_prefix
from dynamo.kvbm import pool
from dynamo.protocols import blocks, kv_events

SIZE = 4


@given(chains=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), max_size=20))
def test_it_knows_what_the_pool_would_find(chains):
    memory, known = pool.BlockPool(8), known_prefix.KnownPrefix()
    for chain in chains:
        packed = blocks.pack([token for token in chain for _ in range(SIZE)])
        local = blocks.local_hashes(packed, SIZE)
        names = blocks.sequence_hashes(local)
        held = memory.match_prefix(names)
        expected = len(held) * SIZE
        assert known.num_tokens(packed, SIZE) == expected
        held += memory.allocate(len(chain) - len(held))
        memory.commit_chain(held, names, local, range(len(held)))
        memory.release(held)
        known.apply(memory.take_events())


def test_a_cleared_cache_is_forgotten():
    known, packed = known_prefix.KnownPrefix(), blocks.pack(range(SIZE))
    (name,) = blocks.local_hashes(packed, SIZE)
    known.apply([kv_events.Stored(parent_hash=None, blocks=(kv_events.StoredBlock(name, name),))])
    before = known.num_tokens(packed, SIZE)
    known.apply([kv_events.Cleared()])

    assert (before, known.num_tokens(packed, SIZE)) == (SIZE, 0)


def test_what_an_adapter_has_computed_is_of_no_use_to_others():
    known, packed, seed = known_prefix.KnownPrefix(), blocks.pack(range(SIZE)), blocks.seed_of("a")
    (name,) = blocks.local_hashes(packed, SIZE, seed)
    known.apply([kv_events.Stored(parent_hash=None, blocks=(kv_events.StoredBlock(name, name),))])

    assert known.num_tokens(packed, SIZE, seed) == SIZE
    assert known.num_tokens(packed, SIZE) == 0
