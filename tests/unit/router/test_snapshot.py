"""A snapshot brings back what was known, and says so when it cannot."""

import msgspec
import pytest

from dynamo.base import errors
from dynamo.protocols import blocks, kv_events
from dynamo.router import api, prefix_index, snapshot

ALICE, BOB, STRANGER = api.Worker(1), api.Worker(2, dp_rank=3), api.Worker(3)
POSITIONS = {worker: kv_events.Position(7, 42) for worker in (ALICE, BOB, STRANGER)}


def make_index():
    """Two workers in two tiers, and one with block names of its own."""
    index = prefix_index.PrefixIndex()
    index.add_blocks(ALICE, kv_events.DEVICE, blocks.sequence_hashes([1, 2, 3]))
    index.add_blocks(BOB, kv_events.DEVICE, blocks.sequence_hashes([1]))
    index.add_blocks(BOB, kv_events.HOST, blocks.sequence_hashes([1, 2]))
    own_name = kv_events.StoredBlock(block_hash=99, tokens_hash=1)
    index.apply(STRANGER, kv_events.Stored(parent_hash=None, blocks=(own_name,)))
    return index


def test_restored_index_equals_the_saved_one():
    restored, names = prefix_index.PrefixIndex(), blocks.sequence_hashes([1, 2, 3])
    ranks = snapshot.decode(snapshot.encode(make_index(), POSITIONS))
    for rank in ranks:
        rank.restore(restored)

    assert restored.find_matches(names) == api.OverlapScores(
        {kv_events.DEVICE: {ALICE: 3, BOB: 1}, kv_events.HOST: {BOB: 1}}
    )
    assert {(rank.instance_id, rank.dp_rank, rank.position) for rank in ranks} == {
        (1, 0, POSITIONS[ALICE]),
        (2, 3, POSITIONS[BOB]),
    }


def test_worker_without_a_position_is_left_out():
    ranks = snapshot.decode(snapshot.encode(make_index(), {ALICE: POSITIONS[ALICE]}))

    assert [rank.instance_id for rank in ranks] == [1]


DAMAGED = {
    "noise": b"noise",
    "another version": msgspec.msgpack.encode({"version": 2, "ranks": []}),
    "cut": msgspec.msgpack.encode({"version": 1, "ranks": [[1, 0, [7, 42], [["device", b"123"]]]]}),
}


@pytest.mark.parametrize("saved", DAMAGED.values(), ids=DAMAGED)
def test_damaged_snapshot_is_refused(saved):
    with pytest.raises(errors.ConfigError, match="snapshot"):
        snapshot.decode(saved)
