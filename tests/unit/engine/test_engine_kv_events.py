"""Translated KV events of vLLM: random histories of a block pool against the blocks that it holds."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.engine.adapters import kv_events as engine_events
from dynamo.protocols import blocks, kv_events

BLOCK = 2


def tokens(*block_numbers):
    return [token for number in block_numbers for token in (10 * number, 10 * number + 1)]


def names(*block_numbers, seed=blocks.SEED):
    packed = blocks.pack(tokens(*block_numbers))
    return blocks.sequence_hashes(blocks.local_hashes(packed, BLOCK, seed))


def stored(theirs, parent, *block_numbers, **fields):
    return engine_events.BlockStored(
        block_hashes=theirs,
        parent_block_hash=parent,
        token_ids=tokens(*block_numbers),
        block_size=BLOCK,
        **fields,
    )


def removed(*theirs, **fields):
    return engine_events.BlockRemoved(block_hashes=list(theirs), **fields)


def payload(*events, rank=0):
    return msgspec.msgpack.encode([0.5, list(events), rank])


class StoredHashes:
    """A listener: the hashes that are stored according to the events."""

    def __init__(self):
        self.names = set()

    def hear(self, events):
        for event in events:
            match event:
                case kv_events.Stored(blocks=told):
                    self.names |= {block.block_hash for block in told}
                case kv_events.Removed(block_hashes=gone):
                    self.names -= set(gone)
                case _:
                    self.names.clear()


class Pool:
    """A block pool as vLLM's: identical blocks may be there several times, each has its own event."""

    def __init__(self):
        self.copies = []  # of chains of block numbers; a chain names its last block

    def theirs(self, chain):
        return hash(chain) % 2**64 if len(chain) % 2 else repr(chain).encode()

    def store(self, chain, num_again):
        """Blocks beyond those that are found, and the last `num_again` of the found computed anew."""
        num_found = 0
        while num_found < len(chain) and chain[: num_found + 1] in self.copies:
            num_found += 1
        start = max(0, min(num_found - num_again, len(chain) - 1))
        new = [chain[: i + 1] for i in range(start, len(chain))]
        self.copies += new
        parent = self.theirs(chain[:start]) if start else None
        return stored([self.theirs(each) for each in new], parent, *chain[start:])

    def evict(self, number):
        return removed(self.theirs(self.copies.pop(number % len(self.copies))))

    @property
    def names(self):
        return {names(*chain)[-1] for chain in self.copies}


CHAINS = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)
STEPS = st.one_of(
    st.tuples(st.just("store"), CHAINS, st.integers(0, 2)),
    st.tuples(st.just("evict"), st.integers(0, 50)),
    st.tuples(st.just("clear")),
)


@given(st.lists(STEPS, max_size=40))
@settings(deadline=None)
def test_translated_events_follow_the_pools_blocks(steps):
    pool, listener = Pool(), StoredHashes()
    translator = engine_events.EventTranslator(BLOCK)

    for step in steps:
        match step:
            case ("store", chain, num_again):
                told = [pool.store(chain, num_again)]
            case ("evict", number) if pool.copies:
                told = [pool.evict(number)]
            case ("clear",):
                pool.copies.clear()
                told = [engine_events.AllBlocksCleared()]
            case _:
                told = []
        listener.hear(translator.translate(told))

        assert listener.names == pool.names
    assert translator.num_dropped == 0


def test_a_block_continues_a_parent_of_an_earlier_event():
    translator = engine_events.EventTranslator(BLOCK)

    first = translator.translate([stored([7, b"x"], None, 1, 2)])
    second = translator.translate([stored([9], b"x", 3)])

    assert [block.block_hash for block in first[0].blocks] == names(1, 2)
    assert first[0].parent_hash is None
    assert second[0].parent_hash == names(1, 2)[-1]
    assert second[0].blocks[0].block_hash == names(1, 2, 3)[-1]


@pytest.mark.parametrize(
    "event",
    [
        stored([8], 7, 1),  # its parent was never told
        msgspec.structs.replace(stored([8], None, 1), block_size=4),
        msgspec.structs.replace(stored([8], None, 1), token_ids=[1]),
        stored([8], None, 1, extra_keys=[["an image", 3]]),
        msgspec.structs.replace(stored([8], None, 1), token_ids=[-1] * BLOCK),
        msgspec.structs.replace(stored([8], None, 1), token_ids=[2**32] * BLOCK),
    ],
)
def test_blocks_without_a_computable_hash_are_dropped_and_counted(event):
    translator = engine_events.EventTranslator(BLOCK)

    told = translator.translate([event, removed(8)])

    assert told == []
    assert translator.num_dropped == 1


def test_blocks_before_the_first_image_are_told():
    translator = engine_events.EventTranslator(BLOCK)
    image = [["an image", 3]]
    first = stored([1, 2, 3], None, 1, 2, 3, extra_keys=[None, None, image])
    behind = stored([4], 3, 4)

    told = translator.translate([first, behind, removed(3), removed(2)])

    assert [block.block_hash for block in told[0].blocks] == names(1, 2)
    assert told[1:] == [kv_events.Removed(block_hashes=(names(1, 2)[-1],))]
    assert translator.num_dropped == 2


def test_blocks_of_a_lora_adapter_have_their_own_hashes():
    translator = engine_events.EventTranslator(BLOCK)
    event = stored([1], None, 1, lora_name="poet", extra_keys=[["poet"]])

    told = translator.translate([event])

    assert told[0].blocks[0].block_hash == names(1, seed=blocks.seed_of("poet"))[0]
    assert told[0].blocks[0].block_hash != names(1)[0]


def test_salt_of_the_first_block_is_that_of_all_behind_it():
    translator = engine_events.EventTranslator(BLOCK)
    first = stored([1, 2], None, 1, 2, extra_keys=[["salt"], None])
    next_one = stored([3], 2, 3)
    adapted = stored([4], None, 1, lora_name="poet", extra_keys=[["poet", "salt"]])

    told = translator.translate([first, next_one, adapted])

    salted = names(1, 2, 3, seed=blocks.seed_of(None, "salt"))
    assert [block.block_hash for event in told[:2] for block in event.blocks] == salted
    assert told[2].blocks[0].block_hash == names(1, seed=blocks.seed_of("poet", "salt"))[0]
    assert translator.num_dropped == 0


def test_each_medium_is_a_tier_of_its_own():
    translator = engine_events.EventTranslator(BLOCK)
    events = [stored([1], None, 1, medium=medium) for medium in ("GPU", "CPU", "STORAGE")]

    told = translator.translate([*events, removed(1, medium="CPU")])

    assert [event.tier for event in told] == ["device", "host", "disk", "host"]
    assert told[-1] == kv_events.Removed(block_hashes=tuple(names(1)), tier=kv_events.HOST)


def test_only_attention_with_whole_prefixes_counts():
    translator = engine_events.EventTranslator(BLOCK)
    windowed = stored([1], None, 1, group_idx=0, kv_cache_spec_kind="sliding_window")
    whole = stored([1], None, 1, group_idx=1, kv_cache_spec_kind="full_attention")
    another = stored([1], None, 1, group_idx=2, kv_cache_spec_kind="full_attention")

    told = translator.translate([windowed, whole, another, removed(1, group_idx=0)])
    gone = translator.translate([removed(1, group_idx=1)])

    assert [event.blocks[0].block_hash for event in told] == names(1)
    assert gone == [kv_events.Removed(block_hashes=tuple(names(1)))]


def test_blocks_over_the_limit_are_published_as_removed():
    translator = engine_events.EventTranslator(BLOCK, max_blocks=2)

    told = translator.translate([stored([1, 2, 3], None, 1, 2, 3)])

    assert told[1] == kv_events.Removed(block_hashes=(names(1)[0],))


def test_events_are_decoded_from_maps_and_arrays_with_unknown_fields():
    as_map = {
        "type": "BlockStored", "block_hashes": [2**64 - 1], "parent_block_hash": None, "token_ids": tokens(1),
        "block_size": BLOCK, "lora_id": None, "medium": "GPU", "lora_name": None, "of the future": 1,
    }  # fmt: skip
    as_array = [
        "BlockStored",
        [b"x"],
        2**64 - 1,
        tokens(2),
        BLOCK,
        None,
        "GPU",
        None,
        None,
        None,
        None,
        1,
        2,
    ]

    rank, events = engine_events.decode_batch(
        payload(as_map, as_array, ["BlockRemoved", [b"x"]], {"type": "AllBlocksCleared"}, rank=3)
    )

    told = engine_events.EventTranslator(BLOCK).translate(events)
    assert rank == 3
    assert [block.block_hash for event in told[:2] for block in event.blocks] == names(1, 2)
    assert told[2:] == [kv_events.Removed(block_hashes=(names(1, 2)[1],)), kv_events.Cleared()]


def numbered(number):
    """The batch of this number: one block after the one of the batch before."""
    parent = number - 1 if number else None
    return payload(msgspec.to_builtins(stored([number], parent, number)), rank=1)


def listen(events, numbers):
    listener = StoredHashes()
    for number in numbers:
        listener.hear(events.receive(number, numbered(number)))
    return listener.names


def test_missed_batches_are_replayed_once():
    asked = []

    def replay(first):
        asked.append(first)
        return [(n, numbered(n)) for n in range(first, 5)]

    events = engine_events.RankBatches(engine_events.EventTranslator(BLOCK), replay)

    held = listen(events, [1, 3, 4, 5])

    assert held == set(names(0, 1, 2, 3, 4, 5))
    assert asked == [0]
    assert (events.num_gaps, events.num_dropped, events.dp_rank) == (0, 0, 1)


@pytest.mark.parametrize("replay", [None, lambda first: [], lambda first: [(first + 1, b"late")]])
def test_lost_batches_clear_all_blocks(replay):
    events = engine_events.RankBatches(engine_events.EventTranslator(BLOCK), replay)

    held = listen(events, [0, 1, 3])

    assert held == set()
    assert (events.num_gaps, events.num_dropped) == (1, 1)


@pytest.mark.parametrize("replay", [None, lambda first: []])
@pytest.mark.parametrize(("numbers", "kept"), [([0, 1], (0, 1)), ([2], ())])
def test_publisher_that_was_started_anew_is_heard(replay, numbers, kept):
    events = engine_events.RankBatches(engine_events.EventTranslator(BLOCK), replay)
    listener = StoredHashes()
    for number in (0, 1, 2, 3, *numbers):
        listener.hear(events.receive(number, numbered(number)))

    assert listener.names == set(names(*kept))


def test_an_unreadable_batch_clears_all_blocks():
    events = engine_events.RankBatches(engine_events.EventTranslator(BLOCK))
    listen(events, [0])

    told = events.receive(1, b"nonsense")

    assert told == [kv_events.Cleared()]
    assert events.num_gaps == 1


def test_oldest_of_very_many_blocks_are_dropped_several_at_a_time():
    """To find the first entry of a dictionary takes the longer, the more were removed before it."""
    max_blocks = 4 * 4096
    translator = engine_events.EventTranslator(1, max_blocks=max_blocks)

    def store(first, num_blocks):
        hashes = list(range(first, first + num_blocks))
        return engine_events.BlockStored(
            block_hashes=hashes, parent_block_hash=None, token_ids=hashes, block_size=1
        )

    translator.translate([store(0, max_blocks)])
    events = translator.translate([store(max_blocks + i, 1) for i in range(1000)])
    removals = [len(each.block_hashes) for each in events if isinstance(each, kv_events.Removed)]

    assert set(removals) == {5}
    assert 995 <= sum(removals) <= 1005
