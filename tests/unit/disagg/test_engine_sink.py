"""The cached prefixes of an engine, as its KV events tell them."""

from hypothesis import given
from hypothesis import strategies as st

from dynamo.disagg import engine_sink
from dynamo.kvbm import pool
from dynamo.protocols import blocks, kv_events

SIZE = 4


@given(chains=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), max_size=20))
def test_cached_prefixes_are_those_that_the_pool_would_find(chains):
    memory, cached = pool.BlockPool(8), engine_sink.CachedPrefixes()
    for chain in chains:
        packed = blocks.pack([token for token in chain for _ in range(SIZE)])
        local = blocks.local_hashes(packed, SIZE)
        names = blocks.sequence_hashes(local)
        held = memory.match_prefix(names)
        expected = len(held) * SIZE
        assert cached.count_tokens(packed, SIZE) == expected
        held += memory.allocate(len(chain) - len(held))
        memory.commit_chain(held, names, local, range(len(held)))
        memory.release(held)
        cached.apply_events(memory.take_events())


def test_cleared_cache_has_no_prefixes():
    cached, packed = engine_sink.CachedPrefixes(), blocks.pack(range(SIZE))
    (name,) = blocks.local_hashes(packed, SIZE)
    cached.apply_events(
        [kv_events.Stored(parent_hash=None, blocks=(kv_events.StoredBlock(name, name),))]
    )
    before = cached.count_tokens(packed, SIZE)
    cached.apply_events([kv_events.Cleared()])

    assert (before, cached.count_tokens(packed, SIZE)) == (SIZE, 0)


def test_blocks_of_an_adapter_are_cached_for_it_alone():
    cached, packed, seed = (
        engine_sink.CachedPrefixes(),
        blocks.pack(range(SIZE)),
        blocks.seed_of("a"),
    )
    (name,) = blocks.local_hashes(packed, SIZE, seed)
    cached.apply_events(
        [kv_events.Stored(parent_hash=None, blocks=(kv_events.StoredBlock(name, name),))]
    )

    assert cached.count_tokens(packed, SIZE, seed) == SIZE
    assert cached.count_tokens(packed, SIZE) == 0
