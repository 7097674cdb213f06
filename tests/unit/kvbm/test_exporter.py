"""Leases of blocks for another engine, over an owner that records which were released."""

import asyncio

import pytest

from dynamo.kvbm import exchange, sharing
from dynamo.protocols import generate, kv_transfer
from dynamo.testing import clock as clocks
from dynamo.transfer import descriptors
from waiting import PATIENT_S

LONG_S = 60
LAYOUT = descriptors.Layout(
    num_blocks=8, block_size=16, num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32"
)
ME = descriptors.Metadata(
    name="n", epoch="e", host="h", layout=LAYOUT, addresses={"tcp": "10.0.0.1:77"}
)


class Owner:
    def __init__(self):
        self.released = []

    def end_import(self, import_id, *, is_copied):
        raise AssertionError

    def release_lease(self, lease_id):
        self.released.append(lease_id)


@pytest.fixture
def owner():
    return Owner()


@pytest.fixture
async def exporter(owner):
    exporter = made(owner)
    yield exporter
    exporter.close()


def made(owner, clock=None):
    exporter = exchange.KvExporter(clock or clocks.VirtualClock(), lease_s=LONG_S)
    exporter.set_owner(owner)
    return exporter


def output():
    logprobs = (generate.TokenLogprobs(-1.0),)
    return generate.Output((5,), generate.FinishReason.LENGTH, logprobs=logprobs, cached_tokens=16)


def hold(exporter, number=3, ask=kv_transfer.PREFILL_ONLY):
    request = generate.Request(id="r", model="m", token_ids=b"", kv_transfer_params=ask)
    told = exporter.publish_lease(request, output(), sharing.BlockLease(number, (1, 2)), ME)
    return kv_transfer.remote_blocks(told.kv_transfer_params)


async def test_published_lease_says_where_the_blocks_are_and_for_how_long(exporter):
    remote = hold(exporter)

    assert (remote.remote_block_ids, remote.remote_engine_id) == ((1, 2), "e")
    assert (remote.remote_host, remote.remote_port) == ("10.0.0.1", 77)
    assert (remote.remote_hold_id, remote.remote_hold_s) == (3, LONG_S)


async def test_first_token_comes_along_if_it_was_requested(exporter):
    first = kv_transfer.FirstToken(5, generate.TokenLogprobs(-1.0), 16)

    assert hold(exporter, 1).first_token is None
    assert hold(exporter, 2, kv_transfer.PREFILL_WITH_TOKEN).first_token == first


async def test_released_leases_free_their_blocks_and_end_the_wait(exporter, owner):
    for number in (1, 2):
        hold(exporter, number)
    waiting = asyncio.create_task(exporter.wait_until_released())
    exporter.handle_notification("peer", b"release 2")
    await asyncio.sleep(0)
    was_done = waiting.done()
    exporter.handle_notification("peer", exchange.release_message(hold(exporter, 1)))
    await asyncio.wait_for(waiting, PATIENT_S)

    assert not was_done
    assert owner.released == [2, 1]


async def test_expired_lease_frees_its_blocks(owner, caplog):
    clock = clocks.VirtualClock()
    exporter = made(owner, clock)
    hold(exporter)
    await clock.advance(LONG_S - 0.01)
    assert owner.released == []
    await clock.advance(0.01)
    await asyncio.wait_for(exporter.wait_until_released(), PATIENT_S)

    assert owner.released == [3]
    assert "no engine read the blocks of lease 3 in time" in caplog.text


async def test_cancelled_lease_frees_its_blocks_at_once(exporter, owner):
    exporter.cancel_lease(sharing.BlockLease(3, (1, 2)))
    await asyncio.wait_for(exporter.wait_until_released(), PATIENT_S)

    assert owner.released == [3]


@pytest.mark.parametrize("message", [b"", b"release", b"release x", b"keep 3", b"\xff"])
async def test_malformed_notification_releases_nothing(exporter, owner, caplog, message):
    exporter.handle_notification("peer", message)

    assert owner.released == []
    assert "peer said" in caplog.text
