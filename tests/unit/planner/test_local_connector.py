import asyncio
import sys

import pytest

from dynamo.base import clock as clocks
from dynamo.launch import allocation, children, guard
from dynamo.planner.local_connector import LocalConnector
from dynamo.planner.observation import Replicas
from dynamo.planner.scaling_pipeline import Decision
from waiting import PATIENT_S


class Registered:
    """The registered workers of a pool, as a test says."""

    def __init__(self):
        self.ids = frozenset()

    async def read_ids(self):
        return self.ids


def decide(*replicas, withdrawals=(0, 0)):
    return Decision(
        at=0.0,
        present=Replicas(0, 0),
        replicas=Replicas(*replicas),
        outcome="",
        reason="",
        withdrawals=Replicas(*withdrawals),
    )


@pytest.fixture
async def make():
    made = []
    with guard.Guard() as guardian:

        def make_connector(code="import time; time.sleep(60)", num_cores=0, **more):
            def make_spec(pool, number, resources):
                argv = [sys.executable, "-S", "-c", code]
                return children.ChildSpec(
                    name=f"{pool} {number}", argv=argv, environ={}, resources=resources
                )

            registered = (Registered(), Registered())
            made.append(
                LocalConnector(
                    make_spec,
                    guardian,
                    clocks.SystemClock(),
                    registered=registered,
                    allocator=allocation.Allocator(allocation.Allocation(tuple(range(num_cores)))),
                    stop_timeout_s=5.0,
                    **more,
                )
            )
            return made[-1], registered[1]

        yield make_connector
        for connector in made:
            await connector.close()


async def decode_state(connector):
    return (await connector.observe())[1]


async def until(check):
    async with asyncio.timeout(PATIENT_S):
        while not await check():
            await asyncio.sleep(0.01)


async def test_worker_is_starting_until_it_is_registered(make):
    connector, registered = make()
    await connector.scale(decide(0, 1))
    before = await decode_state(connector)
    registered.ids = frozenset({"a"})
    after = await decode_state(connector)

    assert (before.num_ready, before.num_starting) == (0, 1)
    assert (after.num_ready, after.num_starting) == (1, 0)
    assert after.startup_s > 0


async def test_worker_that_dies_leaves_its_reason(make):
    connector, _ = make("import sys; sys.exit('no GPU here')")
    await connector.scale(decide(0, 1))

    async def has_died():
        return not (await decode_state(connector)).num_billed

    await until(has_died)
    assert "no GPU here" in (await decode_state(connector)).failure


async def test_cores_are_handed_out_and_come_back(make):
    connector, _ = make(num_cores=2, cores_per_worker=1)
    await connector.scale(decide(0, 3))
    state = await decode_state(connector)

    assert state.num_starting == 2
    assert "free cores" in state.failure
    await connector.scale(decide(0, 0))

    async def has_ended():
        return not (await decode_state(connector)).num_billed

    await until(has_ended)
    await connector.scale(decide(0, 2))
    assert (await decode_state(connector)).num_starting == 2


async def test_worker_that_has_not_served_goes_first(make):
    connector, registered = make()
    await connector.scale(decide(0, 1))
    registered.ids = frozenset({"a"})
    await decode_state(connector)
    await connector.scale(decide(0, 2))
    await connector.scale(decide(0, 1))

    state = await decode_state(connector)
    assert (state.num_ready, state.num_starting) == (1, 0)


async def test_withdrawn_start_is_drained(make):
    connector, _ = make()
    await connector.scale(decide(0, 1))
    await connector.scale(decide(0, 0, withdrawals=(0, 1)))

    assert (await decode_state(connector)).num_starting == 0
