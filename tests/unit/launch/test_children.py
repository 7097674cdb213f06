"""Children: their output is relayed, their end is described, their group is emptied. These start small processes."""

import asyncio
import os
import sys

import pytest

from dynamo.base import clock as clocks
from dynamo.base import tasks
from dynamo.launch import allocation, children, guard


@pytest.fixture
async def start():
    with guard.Guard() as guardian:
        async with tasks.Tasks() as running:

            async def start(script, **fields):
                spec = children.ChildSpec(
                    name="child", argv=[sys.executable, "-S", "-c", script], environ={}, **fields
                )
                return await children.start(spec, guardian, running, clocks.SystemClock())

            yield start


async def until_said(child, line):
    while child.last_line != line:
        await asyncio.sleep(0.01)


async def test_last_line_of_a_child_is_part_of_its_death(start, capfd):
    child = await start("print('first'); print('port 80 is in use'); raise SystemExit(2)")
    death = await child.death()

    assert str(death) == "child exited with 2; its last words: port 80 is in use"
    assert death.exit_code == 2
    assert "[child] first\n" in capfd.readouterr().err


async def test_death_by_a_signal_names_the_signal(start):
    child = await start("import signal; signal.pause()")
    child.signal(9)
    death = await child.death()

    assert "was killed by SIGKILL" in str(death)
    assert death.exit_code == 1


async def test_child_that_ignores_the_request_to_stop_is_killed(start):
    child = await start(
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)\n"
        "while True: signal.pause()"
    )
    await until_said(child, "deaf")
    await child.stop(timeout_s=0.05)

    assert child.exit_code == -9


async def test_rest_of_a_dead_child_s_group_is_killed_before_its_end_is_known(start, monkeypatch):
    monkeypatch.setattr(children, "_GROUP_S", 0.05)
    child = await start(
        "import os, signal\n"
        "if os.fork() == 0: signal.pause()\n"
        "print('ready', flush=True); signal.pause()"
    )
    await until_said(child, "ready")

    assert len(guard.live_processes((child.pid,))) == 2

    child.signal(9)
    await child.wait()

    assert not guard.live_processes((child.pid,))


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
async def test_child_runs_on_its_cores_and_sees_its_devices(start):
    core = min(os.sched_getaffinity(0))
    child = await start(
        "import os; print(sorted(os.sched_getaffinity(0)), os.environ['CUDA_VISIBLE_DEVICES'])",
        resources=allocation.Allocation((core,), ("3",)),
    )
    await child.wait()

    assert child.last_line == f"[{core}] 3"
