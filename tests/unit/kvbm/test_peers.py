"""The engines to engines from which blocks are copied, over an agent that only counts."""

import asyncio
from types import SimpleNamespace

import pytest

from dynamo.base import errors
from dynamo.kvbm import peers

LONG_S = 60


class Agent:
    """Metadata is the engine's id."""

    def __init__(self):
        self.made, self.closed, self.refusal = [], [], None

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


@pytest.fixture
def agent():
    return Agent()


@pytest.fixture
async def engines(agent):
    engines = peers.PeerEngines(agent, remember_s=LONG_S)
    yield engines
    engines.close()


async def test_a_way_is_made_ahead_and_used_by_all(agent, engines):
    assert await engines.connect(b"e", deadline_s=1) == "e"
    async with engines.use_connection("e") as first, engines.use_connection("e") as second:
        pass

    assert first is second is agent.made[0]
    assert len(agent.made) == 1
    assert agent.closed == []


async def test_an_engine_that_is_not_known_cannot_be_reached(engines):
    with pytest.raises(errors.TransferError, match="not connected"):
        async with engines.use_connection("e"):
            pass
    await engines.disconnect("e")


async def test_after_a_failure_the_next_one_goes_another_way(agent, engines):
    await engines.connect(b"e", deadline_s=1)
    async with engines.use_connection("e") as broken:
        await engines.discard_connection(broken)
        await engines.discard_connection(broken)
    async with engines.use_connection("e") as fresh:
        await engines.discard_connection(broken)  # somebody else was on it, and is late

    assert agent.made == [broken, fresh]
    assert agent.closed == [broken]


async def test_a_way_that_cannot_be_made_anew_is_tried_again(agent, engines):
    await engines.connect(b"e", deadline_s=1)
    await engines.discard_connection(agent.made[0])
    agent.refusal = errors.TransferError("no")
    with pytest.raises(errors.TransferError, match="no"):
        async with engines.use_connection("e"):
            pass
    agent.refusal = None

    async with engines.use_connection("e") as fresh:
        assert fresh is agent.made[1]


async def test_the_way_to_one_that_leaves_is_closed_when_nobody_is_on_it(agent, engines):
    await engines.connect(b"e", deadline_s=1)
    async with engines.use_connection("e"):
        await engines.disconnect("e")
        while_used = list(agent.closed)

    assert while_used == []
    assert agent.closed == agent.made


async def test_one_that_has_left_can_be_asked_for_what_it_still_holds(agent, engines):
    await engines.connect(b"e", deadline_s=1)
    await engines.disconnect("e")
    await engines.disconnect("e")
    async with engines.use_connection("e") as late:
        pass

    assert late is agent.made[1]
    assert agent.closed == agent.made


async def test_one_that_has_left_is_forgotten_with_time(agent):
    engines = peers.PeerEngines(agent, remember_s=0)
    await engines.connect(b"e", deadline_s=1)
    await engines.disconnect("e")
    async with asyncio.timeout(LONG_S):
        while True:
            try:
                async with engines.use_connection("e"):
                    await asyncio.sleep(0)
            except errors.TransferError:
                break

    assert agent.closed == agent.made


async def test_one_that_comes_back_stays(agent, engines):
    await engines.connect(b"e", deadline_s=1)
    await engines.disconnect("e")
    await engines.connect(b"e", deadline_s=1)
    async with engines.use_connection("e"):
        pass

    assert agent.closed == agent.made[:1]
