"""The servers that tests start: none outlives a test run that is killed."""

import concurrent.futures
import pathlib
import subprocess
import sys

import pytest

import etcd_server
import nats_server
import processes
from waiting import PATIENT_S, eventually

START = """
import pathlib, sys, time
sys.path.insert(0, {tests!r})
import etcd_server, nats_server
server = {module}.{kind}(pathlib.Path({folder!r}))
server.start()
print(server._process.pid, flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize("kind", [nats_server.NatsServer, etcd_server.EtcdServer])
def test_server_ends_with_a_test_run_that_is_killed(tmp_path, kind):
    kind(tmp_path)  # skips where it is not installed
    tests = str(pathlib.Path(__file__).parents[1])
    program = START.format(
        tests=tests, module=kind.__module__, kind=kind.__name__, folder=str(tmp_path)
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as run:
        pid = int(run.stdout.readline())
        run.kill()
    try:
        eventually(lambda: not processes.command_line(pid), what="the server has ended")
    finally:
        processes.kill({pid})


def test_process_outlives_the_thread_that_starts_it():
    def start():
        argv = processes.bind([sys.executable, "-c", "print(flush=True); print(input())"])
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        process.stdout.readline()  # it runs
        return process

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        process = threads.submit(start).result()

    assert process.communicate("still there\n", PATIENT_S)[0] == "still there\n"
