"""The best way that both sides have."""

import msgspec
import pytest

from dynamo.base import errors
from dynamo.transfer import choice
from dynamo.transfer.descriptors import Layout, Metadata

LAYOUT = Layout(
    num_blocks=1, block_size=1, num_layers=1, num_kv_heads=1, head_dim=1, dtype="float16"
)


def agent(host, **addresses):
    return Metadata(name="prefill-0", epoch="e", host=host, layout=LAYOUT, addresses=addresses)


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
def test_the_best_way_that_reaches_is_taken(ours, theirs, chosen):
    assert choice.choose_backend(ours, theirs) == chosen


def test_without_a_way_in_common_both_offers_are_named():
    with pytest.raises(errors.TransferError, match="offers shm on another host, we have shm, tcp"):
        choice.choose_backend(agent("h", shm="a", tcp="t"), agent("other", shm="b"))


def test_an_agent_without_addresses_is_not_reached():
    nowhere = msgspec.structs.replace(agent("h"), addresses={})

    with pytest.raises(errors.TransferError, match="offers nothing on this host, we have nothing"):
        choice.choose_backend(nowhere, nowhere)
