"""How a process is told to stop."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio
from dynamo.base import stopping

async def main():
    stop = stopping.stop_on_signals()
    print("ready", flush=True)
    await stop.wait()
    print("stopping", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_and_the_second_ends_at_once(number):
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == b"stopping\n"
        process.send_signal(number)

        assert process.wait(10) == 128 + number
