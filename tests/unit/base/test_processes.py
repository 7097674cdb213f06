"""Children: what they say is passed on, and how they end is told. These start small real processes."""

import sys

import pytest

from dynamo.base import processes, tasks


@pytest.fixture
async def start():
    async with tasks.Tasks() as running:

        async def start(script):
            return await processes.start("child", [sys.executable, "-S", "-c", script], {}, running)

        yield start


async def test_the_last_words_of_a_child_are_part_of_its_death(start, capfd):
    child = await start("print('first'); print('port 80 is in use'); raise SystemExit(2)")
    death = await child.death()

    assert str(death) == "child exited with 2; its last words: port 80 is in use"
    assert death.exit_code == 2
    assert "[child] first\n" in capfd.readouterr().err


async def test_a_killed_child_is_told_by_the_signal(start):
    child = await start("import signal; signal.pause()")
    child.kill()
    death = await child.death()

    assert "was killed by SIGKILL" in str(death)
    assert death.exit_code == 1


async def test_a_child_that_does_not_stop_when_asked_is_made_to(start):
    child = await start(
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)\n"
        "while True: signal.pause()"
    )
    while child.last_words != "deaf":
        await processes.asyncio.sleep(0)
    await child.stop(timeout_s=0.05)

    assert child.exit_code == -9
