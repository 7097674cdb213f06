"""What a supervisor does when its children are ready, die, or are told to stop. These start small processes."""

import asyncio
import errno
import signal
import sys

import pytest

from dynamo.base import clock as clocks
from dynamo.launch import children, guard, supervisor
from waiting import PATIENT_S, until

FOREVER = "import signal; signal.pause()"


@pytest.fixture
async def started(monkeypatch):
    """A supervisor, what it reported, and a way to start a child."""
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.01)
    reports = []
    with guard.Guard() as guardian:
        owner = supervisor.Supervisor(
            guardian, clocks.SystemClock(), reports.append, stop_timeout_s=5
        )
        async with owner:

            async def start(name, script=FOREVER):
                argv = [sys.executable, "-S", "-c", script]
                await owner.start(children.ChildSpec(name=name, argv=argv, environ={}))

            yield owner, start, reports


async def test_child_that_dies_is_restarted_until_the_policy_gives_up(started):
    owner, start, reports = started
    await start("worker", "raise SystemExit(3)")
    owner.watch("worker")
    with pytest.raises(children.ChildDied, match="worker exited with 3"):
        await owner.run()

    assert len(reports) == supervisor.MAX_RESTARTS
    assert reports[1] == "worker exited with 3; starting it again in 0.02 s"


async def test_child_that_cannot_be_started_again_is_tried_later(started, monkeypatch):
    """Such as after a child that took all memory, or all processes that a container may have."""
    owner, start, reports = started
    await start("worker")
    first, start_child = owner.child_by_name["worker"], children.start

    async def refuse(*_):
        monkeypatch.setattr(children, "start", start_child)
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(children, "start", refuse)
    owner.watch("worker")
    serving = asyncio.ensure_future(owner.run())
    first.signal(signal.SIGKILL)
    while not serving.done() and owner.child_by_name["worker"] is first:
        await asyncio.sleep(0.01)

    assert not serving.done()
    assert [text.partition(";")[0] for text in reports] == [
        "worker was killed by SIGKILL",
        f"worker cannot be started: [Errno {errno.EAGAIN}] Resource temporarily unavailable",
    ]
    serving.cancel()


async def test_child_that_is_being_started_again_at_the_end_is_stopped_as_the_others(monkeypatch):
    """It may finish what it runs, and is not killed with the process."""
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.01)
    start_child, is_restarting, may_go_on = children.start, asyncio.Event(), asyncio.Event()
    restarted = []

    async def start_late(*args):
        is_restarting.set()
        await may_go_on.wait()
        restarted.append(await start_child(*args))
        return restarted[0]

    with guard.Guard() as guardian:
        async with asyncio.timeout(PATIENT_S):
            async with supervisor.Supervisor(
                guardian, clocks.SystemClock(), lambda text: None, stop_timeout_s=PATIENT_S
            ) as owner:
                argv = [sys.executable, "-S", "-c", FOREVER]
                await owner.start(children.ChildSpec(name="worker", argv=argv, environ={}))
                monkeypatch.setattr(children, "start", start_late)
                owner.watch("worker")
                owner.signal_all(signal.SIGKILL)
                await is_restarting.wait()
                asyncio.get_running_loop().call_later(0.05, may_go_on.set)

    assert [child.exit_code for child in restarted] == [-signal.SIGTERM]


async def test_death_with_a_fatal_exit_code_stops_all(started):
    owner, start, reports = started
    await start("frontend", "raise SystemExit(3)")
    await start("worker")
    owner.watch("frontend", fatal_codes=frozenset((3,)))
    with pytest.raises(children.ChildDied) as death:
        await owner.run()

    assert death.value.exit_code == 3
    assert not reports


async def test_error_of_the_work_beside_the_children_ends_the_command(started):
    owner, start, _ = started
    await start("frontend")

    async def fail():
        raise ZeroDivisionError

    owner.run_beside("load models", fail())
    with pytest.raises(ZeroDivisionError):
        await owner.run()


async def test_second_signal_kills_the_children(started):
    owner, start, _ = started
    await start("worker", "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()")
    announced = []
    owner.stop_on([signal.SIGUSR1], lambda: announced.append(1))
    for _ in range(2):
        signal.raise_signal(signal.SIGUSR1)
        await owner.run()
        await clocks.SystemClock().sleep(0.01)

    assert announced == [1]
    assert await owner.child_by_name["worker"].wait() == -9


async def test_second_signal_kills_what_another_part_has_started_too(started):
    owner, start, _ = started
    await start("worker")
    deaf = "import signal; signal.signal(15, signal.SIG_IGN); print(1, flush=True); signal.pause()"
    argv = [sys.executable, "-S", "-c", deaf]
    other = await children.start(
        children.ChildSpec(name="model", argv=argv, environ={}),
        owner._guard,
        owner._running,
        clocks.SystemClock(),
    )
    owner.adopt(other)
    await until(lambda: other.last_line)
    owner.signal_all(signal.SIGTERM)
    owner.signal_all(signal.SIGKILL)

    assert await other.wait() == -signal.SIGKILL


async def test_waiting_ends_when_the_probe_succeeds(started):
    owner, start, _ = started
    await start("worker")
    answers = [True, False, False]

    async def probe():
        return answers.pop()

    assert await owner.wait_until(probe, timeout_s=PATIENT_S)
    assert not answers


async def test_waiting_ends_with_the_death_of_a_child(started):
    owner, start, _ = started
    await start("worker", "raise SystemExit(1)")

    async def never():
        return False

    with pytest.raises(children.ChildDied):
        await owner.wait_until(never, timeout_s=PATIENT_S)


async def test_waiting_ends_after_its_limit(started):
    owner, start, _ = started
    await start("worker")

    async def never():
        return False

    with pytest.raises(TimeoutError):
        await owner.wait_until(never, timeout_s=0.05)


def test_pause_doubles_until_the_policy_gives_up():
    policy = supervisor.RestartPolicy()

    assert [policy.pause_s(1) for _ in range(6)] == [0.5, 1, 2, 4, 8, None]


def test_process_that_ran_long_starts_with_the_first_pause_again():
    policy = supervisor.RestartPolicy()
    for _ in range(supervisor.MAX_RESTARTS):
        policy.pause_s(1)

    assert policy.pause_s(supervisor.STABLE_S + 1) == 0.5


async def test_line_without_an_end_ends_nothing(started):
    """Such as the progress of a download, which a program redraws for hours without a line feed."""
    owner, start, reports = started
    redraw = f"import sys; sys.stdout.write('\\r' * {2 * children.LINE_BYTES + 1}); print('\\ndone', flush=True)"
    await start("worker", f"{redraw}; {FOREVER}")
    owner.watch("worker")
    serving = asyncio.ensure_future(owner.run())
    async with asyncio.timeout(PATIENT_S):
        while not serving.done() and owner.child_by_name["worker"].last_line != "done":
            await asyncio.sleep(0.01)

    assert not serving.done(), serving
    assert not reports
    serving.cancel()
