"""Metadata crosses whole, and what cannot be is refused."""

import msgspec
import pytest

from dynamo.base import errors
from dynamo.transfer import descriptors
from dynamo.transfer.descriptors import Layout, Metadata, Order

LAYOUT = Layout(
    num_blocks=10, block_size=16, num_layers=3, num_kv_heads=8, head_dim=64, dtype="bfloat16"
)
METADATA = Metadata(
    name="prefill-0", epoch="e", host="h", layout=LAYOUT, addresses={"tcp": "127.0.0.1:1"}
)


def test_metadata_is_unchanged_by_encoding_and_decoding():
    body = descriptors.encode(METADATA)

    assert descriptors.decode(body) == METADATA
    assert len(body) < 300


def test_later_versions_extra_fields_of_the_same_version_are_ignored():
    body = msgspec.msgpack.encode(msgspec.structs.asdict(METADATA) | {"more": 1})

    assert descriptors.decode(body) == METADATA


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "expected a transfer agent's metadata"),
        (b"\xff\xff", "expected a transfer agent's metadata"),
        (bytes(20000), "at most 16384 bytes, got 20000"),
        (
            descriptors.encode(msgspec.structs.replace(METADATA, version=2)),
            "speaks version 2 .* we speak 1",
        ),
    ],
)
def test_malformed_metadata_is_refused(body, why):
    with pytest.raises(errors.TransferError, match=why):
        descriptors.decode(body)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"head_dim": 2**32}, "head_dim is"),
        ({"dtype": "int3"}, "dtype is int3"),
        ({"tp_size": 3}, "8 heads cannot be shared equally by 3"),
        ({"tp_size": 2, "tp_rank": 2}, "tp_rank is 2 of 2"),
    ],
)
def test_impossible_layout_is_refused(change, why):
    layout = msgspec.structs.replace(LAYOUT, **change)

    assert why in descriptors.find_fault(layout)
    with pytest.raises(errors.TransferError, match=why):
        descriptors.decode(descriptors.encode(msgspec.structs.replace(METADATA, layout=layout)))


@pytest.mark.parametrize("order", Order)
def test_slabs_fill_a_pool_without_gap_or_overlap(order):
    layout = msgspec.structs.replace(LAYOUT, order=order)

    slabs = sorted(
        layer * layout.layer_stride + block * layout.block_stride
        for layer in range(layout.num_layers)
        for block in range(layout.num_blocks)
    )

    assert slabs == list(range(0, layout.num_bytes, layout.slab_bytes))


def test_ranks_share_the_heads_in_order():
    ranks = [msgspec.structs.replace(LAYOUT, tp_size=4, tp_rank=rank) for rank in range(4)]

    assert [head for rank in ranks for head in rank.heads] == list(range(8))


CHOICE_LAYOUT = Layout(
    num_blocks=1, block_size=1, num_layers=1, num_kv_heads=1, head_dim=1, dtype="float16"
)


def agent(host, **addresses):
    return Metadata(
        name="prefill-0", epoch="e", host=host, layout=CHOICE_LAYOUT, addresses=addresses
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "chosen"),
    [
        (agent("h", shm="a", tcp="t"), agent("h", shm="b", tcp="t"), "shm"),
        (agent("h", shm="a", tcp="t"), agent("other", shm="b", tcp="t"), "tcp"),
        (agent("h", tcp="t"), agent("h", shm="b", tcp="t"), "tcp"),
        (agent("h", nixl="n", tcp="t"), agent("other", nixl="n", tcp="t"), "nixl"),
        (agent("h", shm="a", nixl="n"), agent("h", shm="b", nixl="n"), "shm"),
        (agent("h", local="p/1", shm="a"), agent("h", local="p/2", shm="b"), "local"),
        (agent("h", local="p/1", shm="a"), agent("h", local="q/2", shm="b"), "shm"),
    ],
)
def test_best_backend_that_reaches_the_peer_is_chosen(ours, theirs, chosen):
    assert descriptors.choose_backend(ours, theirs) == chosen


def test_error_without_a_common_backend_names_both_offers():
    with pytest.raises(errors.TransferError, match="offers shm on another host, we have shm, tcp"):
        descriptors.choose_backend(agent("h", shm="a", tcp="t"), agent("other", shm="b"))


def test_agent_without_addresses_is_not_reached():
    nowhere = msgspec.structs.replace(agent("h"), addresses={})

    with pytest.raises(errors.TransferError, match="offers nothing on this host, we have nothing"):
        descriptors.choose_backend(nowhere, nowhere)
