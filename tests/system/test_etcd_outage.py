"""Frontends and workers that find each other by a real etcd, and go on without it."""

import os
import signal
import subprocess
import sys
import time

import pytest
from deployment import MODEL

import ports
from dynamo.protocols import instances
from etcd_server import EtcdServer
from waiting import PATIENT_S, eventually

FAST = ("--speedup-ratio", "1000")
TTL_S = 10.0


@pytest.fixture
def etcd(tmp_path, deployment):
    server = EtcdServer(tmp_path / "etcd")
    server.start()
    deployment.environ |= {"DYN_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": server.url}
    yield server
    deployment.end()
    server.stop()


def num_workers(etcd):
    served = f"{instances.INSTANCES}dynamo/backend/generate/"
    return len([key for key in etcd.held() if key.startswith(served)])


def statuses(frontend, count):
    return {frontend.chat(max_tokens=2).status_code for _ in range(count)}


def test_killed_worker_loses_no_request_and_its_keys_expire(etcd, deployment):
    first, _, frontend = deployment.mocker(*FAST), deployment.mocker(*FAST), deployment.frontend()
    frontend.await_models([MODEL])
    eventually(lambda: num_workers(etcd) == 2, what="two workers in etcd")
    first.kill()

    assert statuses(frontend, 10) == {200}
    eventually(lambda: num_workers(etcd) == 1, what="one worker in etcd")
    assert statuses(frontend, 2) == {200}


def test_terminated_worker_deletes_its_keys_at_once(etcd, deployment):
    worker, frontend = deployment.mocker(*FAST), deployment.frontend()
    frontend.await_models([MODEL])
    worker.signal(signal.SIGTERM)
    frontend.await_models([])

    assert worker.exit_code() == 0
    assert num_workers(etcd) == 0


@pytest.mark.parametrize("is_empty", [False, True], ids=["with its data", "empty"])
def test_all_requests_are_served_during_and_after_an_outage_of_etcd(etcd, deployment, is_empty):
    deployment.mocker(*FAST)
    frontend = deployment.frontend()
    frontend.await_models([MODEL])
    etcd.stop()
    away_until = time.monotonic() + TTL_S + 2
    while time.monotonic() < away_until:  # the fault itself
        assert statuses(frontend, 1) == {200}
        assert frontend.models() == [MODEL]
        time.sleep(0.2)
    if is_empty:
        etcd.lose_data()
    etcd.start()
    back_until = time.monotonic() + TTL_S + 2  # longer than the missing are believed alive
    while time.monotonic() < back_until:
        assert statuses(frontend, 1) == {200}
        time.sleep(0.2)

    assert frontend.models() == [MODEL]
    eventually(lambda: num_workers(etcd) == 1, what="the worker in etcd again")
    deployment.mocker(*FAST)
    eventually(lambda: num_workers(etcd) == 2, what="a worker that came later")
    assert statuses(frontend, 4) == {200}


def test_worker_stopped_for_longer_than_its_lease_serves_again(etcd, deployment):
    worker, frontend = deployment.mocker(*FAST), deployment.frontend()
    frontend.await_models([MODEL])
    worker.signal(signal.SIGSTOP)
    frontend.await_models([])
    worker.signal(signal.SIGCONT)
    frontend.await_models([MODEL])

    assert statuses(frontend, 2) == {200}
    assert worker.is_running


def test_command_that_waits_for_etcd_says_so_and_ends_on_sigint(deployment):
    deployment.environ |= {
        "DYN_DISCOVERY_BACKEND": "etcd",
        "ETCD_ENDPOINTS": f"http://127.0.0.1:{ports.reserve()}",
    }
    for process in (deployment.frontend(), deployment.mocker(), deployment.run("dynamo.router")):
        said = process.log
        eventually(lambda said=said: "etcd" in said.read_text(), what="a word of etcd")
        process.signal(signal.SIGINT)
        process.exit_code()

        assert said.read_text().count("--discovery-backend file") == 1
        assert "Traceback" not in said.read_text()


@pytest.mark.parametrize(
    "command", ["dynamo.frontend", "dynamo.mocker", "dynamo.native", "dynamo.router"]
)
def test_help_does_not_wait_for_etcd(command):
    environ = dict(os.environ) | {
        "DYN_DISCOVERY_BACKEND": "etcd",
        "ETCD_ENDPOINTS": "http://127.0.0.1:1",
    }
    helped = subprocess.run(
        [sys.executable, "-m", command, "--help"],
        env=environ,
        capture_output=True,
        timeout=PATIENT_S,
    )

    assert helped.returncode == 0
    assert b"--etcd-endpoints" in helped.stdout
