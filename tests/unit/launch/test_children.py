"""Children: their output is relayed, their end is described, their group is emptied. These start small processes."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from dynamo.base import clock as clocks
from dynamo.base import tasks
from dynamo.launch import allocation, children, guard
from waiting import PATIENT_S


@pytest.fixture
async def start():
    with guard.Guard() as guardian:
        async with tasks.Tasks() as running:

            async def start(script, program=sys.executable, **fields):
                argv = [program, "-S", "-c", script]
                spec = children.ChildSpec(name="child", argv=argv, environ={}, **fields)
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


async def test_end_is_known_though_a_process_in_another_session_keeps_the_output(
    start, monkeypatch
):
    """It is none of the group, and may run on; the guard ends it with all others."""
    monkeypatch.setattr(children, "_OUTPUT_S", 0.05)
    child = await start(
        "import os, signal\n"
        "if os.fork() == 0: os.setsid(); print('ready', flush=True); signal.pause()\n"
        "signal.pause()"
    )
    await until_said(child, "ready")
    child.signal(9)
    async with asyncio.timeout(PATIENT_S):
        await child.wait()

    assert child.exit_code == -9


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
async def test_child_runs_on_its_cores_and_sees_its_devices(start):
    core = min(os.sched_getaffinity(0))
    child = await start(
        "import os; print(sorted(os.sched_getaffinity(0)), os.environ['CUDA_VISIBLE_DEVICES'])",
        resources=allocation.Allocation((core,), ("3",)),
    )
    await child.wait()

    assert child.last_line == f"[{core}] 3"


async def test_child_starts_without_the_fork_handlers_of_libraries(start):
    """They would run in a copy of this process whose other threads may have held locks."""
    calls = []
    os.register_at_fork(before=lambda: calls.append("before"))
    await (await start("pass")).wait()

    assert calls == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_child_inherits_no_descriptor_of_the_guard_and_only_the_ignored_signals_of_its_parent(
    start,
):
    child = await start(
        "import os; from pathlib import Path; status = Path('/proc/self/status').read_text()\n"
        "print([n for n in os.listdir('/proc/self/fd') if int(n) > 2][1:], status.split('SigIgn:')[1].split()[0])"
    )
    await child.wait()
    descriptors, _, ignored = child.last_line.rpartition(" ")
    own = Path("/proc/self/status").read_text().split("SigIgn:")[1].split()[0]
    of_python = 1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1  # which each Python ignores

    assert descriptors == "[]"
    assert int(ignored, 16) & ~(int(own, 16) | of_python) == 0


async def test_program_that_does_not_exist_is_an_error_of_the_start(start):
    with pytest.raises(FileNotFoundError, match="no such program: '/nowhere/python'"):
        await start("pass", program="/nowhere/python")


async def test_child_that_cannot_become_its_program_says_so(start, tmp_path):
    program = tmp_path / "program"
    program.write_text("#!/nowhere/shell\n")
    program.chmod(0o755)
    death = await (await start("pass", program=str(program))).death()

    assert str(death) == (
        f"child exited with 126; its last words: {program} cannot be started: No such file or directory"
    )
