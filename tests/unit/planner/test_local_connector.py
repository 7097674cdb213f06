import asyncio
import signal
import sys

import pytest

from dynamo.base import clock as clocks
from dynamo.launch import allocation, children, guard
from dynamo.planner.connectors import LocalConnector, LocalWorkerOptions
from dynamo.planner.observation import Replicas
from dynamo.planner.scaling_pipeline import Decision
from waiting import PATIENT_S


class Registered:
    """The registered workers of a pool, as a test says."""

    def __init__(self):
        self.ids = frozenset()

    async def read_ids(self):
        return self.ids


def decide(*replicas, withdrawals=(0, 0), role_changes=0):
    return Decision(
        at=0.0,
        present=Replicas(0, 0),
        replicas=Replicas(*replicas),
        outcome="",
        reason="",
        withdrawals=Replicas(*withdrawals),
        role_changes=role_changes,
    )


@pytest.fixture
async def make():
    made = []
    with guard.Guard() as guardian:

        def make_connector(code="import signal; signal.pause()", num_cores=0, **more):
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
                    options=LocalWorkerOptions(stop_timeout_s=5.0, **more),
                )
            )
            made[-1].registered = registered
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


async def test_worker_is_starting_until_it_is_registered(make, caplog):
    caplog.set_level("INFO", "dynamo.planner.connectors")
    connector, registered = make()
    await connector.scale(decide(0, 1))
    assert f"started decode 1, in the planner's environment: {sys.executable} -S -c" in caplog.text
    before = await decode_state(connector)
    registered.ids = frozenset({"a"})
    after = await decode_state(connector)

    assert (before.num_ready, before.num_starting) == (0, 1)
    assert (after.num_ready, after.num_starting) == (1, 0)
    assert after.startup_s > 0


async def test_worker_of_another_owner_is_not_taken_for_one_that_starts(make):
    connector, registered = make()
    registered.ids = frozenset({"foreign"})
    await decode_state(connector)
    await connector.scale(decide(0, 1))
    before = await decode_state(connector)
    registered.ids |= {"own"}
    after = await decode_state(connector)

    assert (before.num_ready, before.num_starting) == (0, 1)
    assert (after.num_ready, after.num_starting) == (1, 0)


async def test_dead_worker_that_is_still_listed_is_not_taken_for_the_next_one(make):
    connector, registered = make()
    await connector.scale(decide(0, 1))
    registered.ids = frozenset({"dead"})
    await decode_state(connector)
    (worker,) = connector._pools["decode"].workers
    worker.child.signal(signal.SIGKILL)

    async def is_gone():
        return not (await decode_state(connector)).num_ready

    await until(is_gone)
    await connector.scale(decide(0, 1))

    assert (await decode_state(connector)).num_starting == 1


async def test_worker_that_dies_leaves_its_reason(make):
    connector, _ = make("import sys; sys.exit('no GPU here')")
    await connector.scale(decide(0, 1))

    async def has_died():
        return (await decode_state(connector)).num_failed

    await until(has_died)
    state = await decode_state(connector)
    assert (state.num_billed, state.num_failed) == (0, 0)
    assert "no GPU here" in state.failure


async def test_cores_are_handed_out_and_come_back(make):
    connector, _ = make(num_cores=2, cores=1)
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


OBEDIENT = """
import signal, sys
orders = {signal.SIGUSR1, signal.SIGUSR2}
signal.pthread_sigmask(signal.SIG_BLOCK, orders)
print("ready", flush=True)
print(signal.Signals(signal.sigwait(orders)).name, flush=True)
signal.pause()
"""


async def test_start_that_is_waited_for_longest_is_withdrawn(make):
    connector, registered = make()
    await connector.scale(decide(0, 1))
    registered.ids = frozenset({"a"})
    await decode_state(connector)
    await connector.scale(decide(0, 2))
    registered.ids = frozenset()  # the first one runs, and will be back
    await decode_state(connector)
    first, second = connector._pools["decode"].workers
    await connector.scale(decide(0, 1, withdrawals=(0, 1)))

    assert (first.is_draining, second.is_draining) == (False, True)


async def test_worker_that_changes_is_starting_in_its_new_pool_until_it_is_registered_there(make):
    connector, decode = make(OBEDIENT, can_change_roles=True)
    await connector.scale(decide(1, 2))
    connector.registered[0].ids, decode.ids = frozenset({"p"}), frozenset({"a", "b"})
    await connector.observe()
    await are_ready(connector)
    await connector.scale(decide(2, 1, role_changes=-1))
    during = await connector.observe()  # the key of the worker that leaves is still there
    connector.registered[0].ids, decode.ids = frozenset({"p", "q"}), frozenset({"a"})
    after = await connector.observe()

    assert [(s.num_ready, s.num_starting) for s in during] == [(1, 1), (1, 0)]
    assert [(s.num_ready, s.num_starting) for s in after] == [(2, 0), (1, 0)]
    assert after[0].role_change_s > 0
    assert after[1].role_change_s == 0.0


async def test_worker_that_changes_has_its_time_to_finish_its_answers(make):
    connector, decode = make(OBEDIENT, can_change_roles=True)
    await connector.scale(decide(0, 1))
    decode.ids = frozenset({"a"})
    await connector.observe()
    await are_ready(connector)
    await connector.scale(decide(1, 0, role_changes=-1))
    (worker,) = all_workers(connector)
    ((early,), (late,)) = [(await connector.observe())[0].starting_since for _ in range(2)]
    worker.ordered_at -= 6.0  # its time is 5 s
    (overdue,) = (await connector.observe())[0].starting_since

    assert worker.ordered_at + 6.0 < early < late
    assert overdue == worker.ordered_at + 5.0


def all_workers(connector):
    return [worker for pool in connector._pools.values() for worker in pool.workers]


async def are_ready(connector):
    async def have_spoken():
        return all(worker.child.last_line == "ready" for worker in all_workers(connector))

    await until(have_spoken)


@pytest.mark.parametrize(("role_changes", "name"), [(1, "SIGUSR2"), (-1, "SIGUSR1")])
async def test_change_is_ordered_by_a_signal(make, role_changes, name):
    connector, decode = make(OBEDIENT, can_change_roles=True)
    await connector.scale(decide(1, 1))
    connector.registered[0].ids, decode.ids = frozenset({"p"}), frozenset({"d"})
    await connector.observe()
    await are_ready(connector)
    await connector.scale(decide(1 - role_changes, 1 + role_changes, role_changes=role_changes))

    async def is_ordered():
        changing = [worker for worker in all_workers(connector) if worker.expected == "role change"]
        return [worker.child.last_line for worker in changing] == [name]

    await until(is_ordered)


async def test_worker_that_dies_while_it_changes_is_gone(make):
    connector, decode = make(can_change_roles=True)
    await connector.scale(decide(0, 1))
    decode.ids = frozenset({"a"})
    await connector.observe()
    await connector.scale(decide(1, 0, role_changes=-1))  # this child dies of the signal

    async def has_died():
        return not sum(state.num_billed for state in await connector.observe())

    await until(has_died)
    assert "SIGUSR1" in (await connector.observe())[0].failure


async def test_worker_that_has_left_discovery_does_not_count_as_ready_until_it_is_back(make):
    connector, registered = make()
    await connector.scale(decide(0, 1))
    registered.ids = frozenset({"a"})
    served = await decode_state(connector)
    registered.ids = frozenset()
    gone = await decode_state(connector)
    registered.ids = frozenset({"a"})
    back = await decode_state(connector)

    assert (served.num_ready, gone.num_ready, gone.num_starting, back.num_ready) == (1, 0, 1, 1)
    assert gone.failure == "decode 1 left discovery, but runs"
    assert back.startup_s == served.startup_s


PATIENT = """
import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
while True: signal.pause()
"""


async def leave_by_drain(connector):
    await connector.scale(decide(0, 1))


async def leave_by_change(connector):
    await connector.scale(decide(1, 1, role_changes=-1))


async def leave_by_death(connector):
    leaving = connector._pools["decode"].workers[-1]
    leaving.child.signal(signal.SIGKILL)

    async def is_gone():
        return leaving not in connector._pools["decode"].workers

    await until(is_gone)
    await connector.observe()  # its key is still there, until its lease ends


@pytest.mark.parametrize("leave", [leave_by_drain, leave_by_change, leave_by_death])
@pytest.mark.parametrize("left_key", ["a", "b"])
async def test_worker_that_stays_is_ready_whichever_key_goes(make, leave, left_key):
    """Discovery does not say which of two workers that started together has which key."""
    code = OBEDIENT if leave is leave_by_change else PATIENT
    connector, decode = make(code, can_change_roles=True)
    await connector.scale(decide(0, 2))
    decode.ids = frozenset({"a", "b"})
    await connector.observe()
    await are_ready(connector)
    await leave(connector)
    decode.ids -= {left_key}
    state = await decode_state(connector)
    for worker in all_workers(connector):
        worker.child.signal(signal.SIGKILL)

    assert (state.num_ready, state.num_starting) == (1, 0)
    assert "left discovery" not in state.failure
