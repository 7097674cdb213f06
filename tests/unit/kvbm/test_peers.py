"""The engines to engines from which blocks are copied, over an agent that only counts."""

import asyncio
from types import SimpleNamespace

import pytest

from dynamo.base import errors
from dynamo.kvbm import agents, exchange, sharing
from dynamo.protocols import blocks, generate, kv_transfer
from dynamo.testing import clock as clocks
from dynamo.transfer import api
from waiting import PATIENT_S

LONG_S = 60


class Agent:
    """Metadata is the engine's id."""

    def __init__(self):
        self.made, self.closed, self.refusal = [], [], None
        self.probes, self.is_slow = [], False

    async def get_started(self):
        return self

    async def connect(self, metadata, *, deadline_s):
        if self.refusal is not None:
            raise self.refusal
        peer = SimpleNamespace(epoch=metadata.decode(), name="n", backend="b")
        self.made.append(peer)
        return peer

    async def disconnect(self, peer):
        self.closed.append(peer)

    async def notify(self, peer, message, *, deadline_s):
        pass

    async def probe(self, peer, num_bytes, *, deadline_s):
        self.probes.append((num_bytes, deadline_s))
        if self.is_slow:
            raise errors.TransferError("not complete")


@pytest.fixture
def agent():
    return Agent()


@pytest.fixture
def clock():
    return clocks.VirtualClock()


@pytest.fixture
async def engines(agent, clock):
    engines = agents.PeerEngines(agent, clock, remember_s=LONG_S)
    yield engines
    engines.close()


async def test_connection_is_made_ahead_of_need_and_shared(agent, engines):
    assert await engines.connect(b"e", deadline_s=1) == "e"
    async with engines.use_connection("e") as first, engines.use_connection("e") as second:
        pass

    assert first is second is agent.made[0]
    assert len(agent.made) == 1
    assert agent.closed == []


async def test_unknown_engine_cannot_be_reached(engines):
    with pytest.raises(errors.TransferError, match="not connected"):
        async with engines.use_connection("e"):
            pass
    await engines.disconnect("e")


async def test_discarded_connection_is_replaced_for_the_next_user(agent, engines):
    await engines.connect(b"e", deadline_s=1)
    async with engines.use_connection("e") as broken:
        await engines.discard_connection(broken)
        await engines.discard_connection(broken)
    async with engines.use_connection("e") as fresh:
        await engines.discard_connection(broken)  # somebody else was on it, and is late

    assert agent.made == [broken, fresh]
    assert agent.closed == [broken]


async def test_failed_reconnection_costs_one_copy_and_is_tried_again_later(agent, engines, clock):
    await engines.connect(b"e", deadline_s=1)
    await engines.discard_connection(agent.made[0])
    agent.refusal = errors.TransferError("no")
    with pytest.raises(errors.TransferError, match="no"):
        async with engines.use_connection("e"):
            pass
    agent.refusal = None
    with pytest.raises(errors.TransferError, match="a moment ago"):
        async with engines.use_connection("e"):
            pass
    num_made = len(agent.made)
    await clock.advance(agents.REST_S)

    async with engines.use_connection("e") as fresh:
        assert fresh is agent.made[1]
    assert num_made == 1


async def test_engine_that_was_connected_again_is_used_at_once(agent, engines):
    await engines.connect(b"e", deadline_s=1)
    await engines.discard_connection(agent.made[0])
    agent.refusal = errors.TransferError("no")
    with pytest.raises(errors.TransferError, match="no"):
        async with engines.use_connection("e"):
            pass
    agent.refusal = None
    await engines.connect(b"e", deadline_s=1)

    async with engines.use_connection("e") as fresh:
        assert fresh is agent.made[1]


async def test_engine_behind_a_slow_link_is_connected_again_when_a_probe_is_quick_enough(
    agent, engines
):
    await engines.connect(b"e", deadline_s=1)
    engines.check_link("e")
    engines.note_failed_copy("e", 2**20, 4.0)
    await engines.discard_connection(agent.made[0])
    agent.is_slow = True
    with pytest.raises(errors.TransferError, match="too slow to copy prompts"):
        await engines.connect(b"e", deadline_s=1)
    with pytest.raises(errors.TransferError, match="failed a moment ago"):
        engines.check_link("e")
    async with engines.use_connection("e"):  # to release what it holds
        pass
    agent.is_slow = False
    await engines.connect(b"e", deadline_s=1)
    engines.check_link("e")

    assert agent.probes == [(2**18, 1.0)] * 2
    assert (
        len(agent.made) == len(agent.closed) + 2
    )  # the agent would give the one for releases again


async def test_connection_of_a_leaving_engine_is_closed_when_it_is_idle(agent, engines):
    await engines.connect(b"e", deadline_s=1)
    async with engines.use_connection("e"):
        await engines.disconnect("e")
        while_used = list(agent.closed)

    assert while_used == []
    assert agent.closed == agent.made


async def test_engine_that_has_left_can_still_be_reached_for_its_leases(agent, engines):
    await engines.connect(b"e", deadline_s=1)
    await engines.disconnect("e")
    await engines.disconnect("e")
    async with engines.use_connection("e") as late:
        pass

    assert late is agent.made[1]
    assert agent.closed == agent.made


async def test_engine_that_has_left_is_forgotten_after_a_time(agent, engines, clock):
    await engines.connect(b"e", deadline_s=1)
    await engines.disconnect("e")
    await clock.advance(LONG_S)
    with pytest.raises(errors.TransferError, match="not connected"):
        async with engines.use_connection("e"):
            pass

    assert agent.closed == agent.made


async def test_engine_that_comes_back_is_not_forgotten(agent, engines, clock):
    await engines.connect(b"e", deadline_s=1)
    await engines.disconnect("e")
    await engines.connect(b"e", deadline_s=1)
    await clock.advance(2 * LONG_S)
    async with engines.use_connection("e"):
        pass

    assert agent.closed == agent.made[:1]


async def test_time_limit_beyond_the_longest_of_a_transfer_counts_as_that(agent, engines, clock):
    limits, has_ended = [], asyncio.Event()

    async def before_copy(kv_import, limit_s):
        limits.append(limit_s)
        raise errors.TransferError("enough")

    importer = exchange.KvImporter(
        agent, engines, clock, timeout_s=1e4, patience_s=1.0, before_copy=before_copy
    )
    importer.set_owner(SimpleNamespace(end_import=lambda *_, **__: None), None)
    importer.on_import(lambda report: has_ended.set())
    await engines.connect(b"e", deadline_s=1)
    request = generate.Request(id="r", model="m", token_ids=blocks.pack(range(8)))
    remote = kv_transfer.RemoteBlocks(remote_block_ids=(0,), remote_hold_id=1, remote_engine_id="e")
    importer.expect_import(request, remote)
    importer.begin_imports(
        [
            sharing.KvImport(
                import_id=1, request=request, remote=remote,
                local_blocks=(0,), remote_blocks=(0,), num_tokens=4,
            )
        ]
    )  # fmt: skip
    async with asyncio.timeout(PATIENT_S):
        await has_ended.wait()
    await importer.close()

    assert limits == [api.MAX_DEADLINE_S]
