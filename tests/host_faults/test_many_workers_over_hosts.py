"""Sixty-four workers on three hosts: how soon all are listed, what the death of twenty costs, what idling takes."""

import datetime
import os
import pathlib
import re
import signal
import time

import pytest
from deployment import MODEL, Deployment, rss_bytes
from fault_load import FaultLoad
from hosts import Network
from split import ALONE, until_idle
from test_network_faults import IS_WHOLE

import members
from etcd_server import EtcdServer
from waiting import eventually

NUM_WORKERS, NUM_KILLED = 64, 20
LISTED_S = 2.0  # promised: after the last has started
NOTICED_S = 2.0  # promised: of workers whose connections end
IDLE_S = 20.0
IDLE_SHARE = 0.002  # of a core
SERVING = re.compile(r"^(\S+) +INFO dynamo.worker.host: serving", re.M)
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def time_of_start(worker):
    """Return the moment at which a worker said that it serves, since the epoch; None before that."""
    worker.check()
    found = SERVING.search(worker.log.read_text())
    return found and datetime.datetime.fromisoformat(found.group(1)).timestamp()


def processor_s(process):
    fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


@pytest.mark.skipif(not IS_WHOLE, reason="it takes minutes: make test-hosts")
@pytest.mark.timeout(1200)
def test_sixty_four_workers_on_three_hosts(tmp_path, show):
    with Network().open() as network:
        door, services, *worker_hosts = (network.add() for _ in range(5))
        etcd = EtcdServer(tmp_path / "etcd", host=services.address, before=services.argv)
        etcd.start()
        deployment = Deployment(tmp_path)
        deployment.environ |= {
            "DYN_DISCOVERY_BACKEND": "etcd",
            "ETCD_ENDPOINTS": etcd.url,
            "DYN_CLUSTER_TOKEN": members.TOKEN,
        }
        try:
            play(deployment, door, services, worker_hosts, show)
        finally:
            deployment.end()
            etcd.stop()


def play(deployment, door, services, worker_hosts, show):
    frontend = deployment.frontend("--router-mode", "kv", host=door)
    reference = ("--endpoint", "dyn://dynamo.alone.generate", "--model-name", ALONE)
    alone = deployment.mocker("--speedup-ratio", "50", *reference, host=services)
    frontend.await_models([ALONE])
    workers = [
        deployment.mocker("--tick-ms", "20", host=worker_hosts[number % len(worker_hosts)])
        for number in range(NUM_WORKERS)
    ]
    num_listed = f'dynamo_frontend_model_workers{{model="{MODEL}"}}'
    num_down = f'dynamo_frontend_model_workers_down{{model="{MODEL}"}}'
    is_noticed = lambda: (  # noqa: E731
        frontend.metric(num_listed) - frontend.metric(num_down) == NUM_WORKERS - NUM_KILLED
    )
    for worker in workers:
        eventually(lambda worker=worker: time_of_start(worker), what=f"{worker.log}")
    last_start = max(time_of_start(worker) for worker in workers)
    eventually(
        lambda: frontend.metric(num_listed) == NUM_WORKERS, every_s=0.05, what="all are listed"
    )
    listed_s = time.time() - last_start

    before, began_at = [processor_s(worker) for worker in workers], time.monotonic()
    time.sleep(IDLE_S)  # what is measured
    used_s = sum(processor_s(worker) for worker in workers) - sum(before)
    idle_share = used_s / NUM_WORKERS / (time.monotonic() - began_at)

    with FaultLoad([frontend], seed="many", num_streams=32, num_tokens=100, prompt_len=100) as load:
        for worker in workers[:NUM_KILLED]:  # so the frontend has a connection to each
            eventually(lambda worker=worker: worker.num_requests(), what="a stream at each")
        for worker in workers[:NUM_KILLED]:
            worker.signal(signal.SIGKILL)
        killed_at = time.monotonic()
        eventually(is_noticed, every_s=0.05, what="the killed are down, or not listed")
        noticed_s = time.monotonic() - killed_at
        num_before = load.num_begun
        eventually(lambda: load.num_begun >= num_before + 32, what="answers of the others")
    pause_s = max(answer.pause_s for answer in load.answers)
    errors = {answer.error for answer in load.answers if answer.error}
    show(
        f"{NUM_WORKERS} workers: all listed {listed_s:.1f} s after the last had started; idle {idle_share:.2%} of a"
        f" core each; {NUM_KILLED} killed at once: {len(load.answers)} answers, {len(errors)} errors, longest pause"
        f" {pause_s:.1f} s (stall {load.longest_stall_s:.1f}), noticed after {noticed_s:.1f} s;"
        f" frontend {rss_bytes(frontend.pid) / 1e6:.0f} MB"
    )

    assert not errors
    assert load.num_wrong() == 0
    until_idle(alone, *workers[NUM_KILLED:])
    assert listed_s < LISTED_S + 1
    assert pause_s < NOTICED_S + 2 * load.longest_stall_s
    assert noticed_s < NOTICED_S + 2 * load.longest_stall_s
    assert idle_share < IDLE_SHARE
