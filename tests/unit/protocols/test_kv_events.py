"""KV events on the wire: tiers are an open set, and what was written before tiers were open still decodes."""

import msgspec
import pytest

from dynamo.protocols import kv_events


def decoded(encoded):
    return msgspec.msgpack.decode(encoded, type=kv_events.KvEvent)


@pytest.mark.parametrize("tier", [*kv_events.TIERS, "a-tier-of-tomorrow"])
def test_event_keeps_its_tier_over_the_wire(tier):
    event = kv_events.Removed(block_hashes=(1, 2), tier=tier)

    assert decoded(msgspec.msgpack.encode(event)) == event


def test_event_without_a_tier_is_about_device_memory():
    wire = {"type": "stored", "parent_hash": None, "blocks": [[7, 8]]}

    event = decoded(msgspec.msgpack.encode(wire))

    assert event == kv_events.Stored(
        parent_hash=None, blocks=(kv_events.StoredBlock(7, 8),), tier=kv_events.DEVICE
    )


def test_tier_of_device_memory_is_not_written():
    event = kv_events.Removed(block_hashes=(1,), tier=kv_events.DEVICE)

    assert "tier" not in msgspec.msgpack.decode(msgspec.msgpack.encode(event))


@pytest.mark.parametrize("name", ["device", "host", "disk"])
def test_names_of_tiers_stay(name):
    assert name in kv_events.TIERS
