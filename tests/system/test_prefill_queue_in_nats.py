"""Prompts that prefill workers take from a queue in NATS: over TCP and ZeroMQ, and over NATS alone with etcd."""

import concurrent.futures
import re
import signal

import pytest
from deployment import MODEL
from test_prefill_elsewhere import ALONE, SHORT_HOLD, Split, prefills, prompt, until_idle

from etcd_server import EtcdServer
from nats_server import NatsServer
from waiting import eventually

BY_QUEUE = ("--prefill-queue", "queue", "--prefill-timeout-s", "60")
ONLY_THE_QUEUE = {"DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq"}
ALL_OVER_NATS = {
    "DYN_REQUEST_PLANE": "nats",
    "DYN_EVENT_PLANE": "nats",
    "DYN_DISCOVERY_BACKEND": "etcd",
}


@pytest.fixture
def nats(deployment, tmp_path):
    server = NatsServer(tmp_path / "nats")
    server.start()
    deployment.environ |= ONLY_THE_QUEUE | {"NATS_SERVER": server.url}
    yield server
    deployment.end()
    server.stop()


@pytest.fixture
def split(nats, deployment):
    return Split(deployment)


@pytest.fixture(params=[ONLY_THE_QUEUE, ALL_OVER_NATS], ids=["file+tcp+zmq", "etcd+nats+nats"])
def mixed(request, nats, deployment, tmp_path):
    etcd = None
    if request.param is ALL_OVER_NATS:
        etcd = EtcdServer(tmp_path / "etcd")
        etcd.start()
        deployment.environ["ETCD_ENDPOINTS"] = etcd.url
    deployment.environ.update(request.param)
    yield Split(deployment)
    deployment.end()
    if etcd is not None:
        etcd.stop()


def has_taken(worker):
    return worker.metric("kvstats_active_blocks") > 0


def test_job_of_a_killed_worker_goes_to_another(mixed):
    decode, _ = mixed.decode(*BY_QUEUE), mixed.alone()
    workers = mixed.prefill(*BY_QUEUE), mixed.prefill(*BY_QUEUE)
    mixed.frontend.await_models([ALONE, MODEL])
    mixed.ready(decode, num_prefill=2, models=[ALONE, MODEL])
    prompts = [prompt(600, i) for i in range(16)]  # a few are computed, the others wait
    expected = mixed.ask_all(prompts, model=ALONE)
    with concurrent.futures.ThreadPoolExecutor(32) as threads:
        asked = [threads.submit(mixed.ask, one) for one in prompts]
        taking = []
        eventually(lambda: taking.extend(filter(has_taken, workers)) or taking, what="one computes")
        doomed = taking[0]
        doomed.kill()
        answers = [one.result() for one in asked]

    assert answers == expected
    assert decode.metric("prefill_retries_total") + decode.metric("prefill_redelivered_total") > 0
    assert prefills(decode, "remote") > 0
    (other,) = {*workers} - {doomed}
    assert other.metric("prefill_tickets_total") > 0
    until_idle(decode, other)


def test_terminated_worker_returns_its_jobs_and_finishes(split):
    decode, leaving, other = split.decode(*BY_QUEUE), split.prefill(*BY_QUEUE), split.prefill(*BY_QUEUE)  # fmt: skip
    split.ready(decode, num_prefill=2)
    with concurrent.futures.ThreadPoolExecutor(24) as threads:
        answers = threads.map(split.ask, [prompt(500, i) for i in range(24)])
        eventually(lambda: has_taken(leaving), what="it computes")
        leaving.signal(signal.SIGTERM)

        assert len(list(answers)) == 24
    assert leaving.exit_code() == 0
    assert "Traceback" not in leaving.log.read_text() + decode.log.read_text()
    until_idle(decode, other)


def test_prompts_are_computed_locally_during_an_outage_of_nats(split, nats):
    decode, prefill = split.decode(*BY_QUEUE), split.prefill(*BY_QUEUE)
    split.ready(decode)
    split.ask(prompt(300))
    assert prefills(decode, "remote") == 1
    nats.stop()
    for i in range(3):
        split.ask(prompt(300, i + 1))

    assert prefills(decode, "remote") == 1

    nats.start()

    def is_elsewhere():
        before = prefills(decode, "remote")
        split.ask(prompt(300, 100 + int(before * 1000) + is_elsewhere.num))
        is_elsewhere.num += 1
        return prefills(decode, "remote") > before

    is_elsewhere.num = 0
    eventually(is_elsewhere, what="the queue is used again")
    until_idle(decode, prefill)


def test_lost_clients_and_decode_workers_leave_nothing_behind(split):
    decode, prefill = split.decode(*BY_QUEUE), split.prefill(*BY_QUEUE, *SHORT_HOLD)
    split.ready(decode)
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        asked = [threads.submit(split.ask, prompt(700, i)) for i in range(16)]
        eventually(lambda: has_taken(prefill), what="it computes")
        decode.kill()
        concurrent.futures.wait(asked)
    until_idle(prefill)
    newborn = split.decode(*BY_QUEUE)
    split.ready(newborn)
    split.ask(prompt(300, 99))

    assert prefills(newborn, "remote") == 1


def test_queue_without_a_server_is_one_sentence(deployment):
    deployment.environ |= ONLY_THE_QUEUE
    deployment.environ |= {"NATS_SERVER": "nats://127.0.0.1:1", "DYN_NATS_START_TIMEOUT_SECS": "1"}
    worker = deployment.native("--is-prefill-worker", *BY_QUEUE)
    worker.may_end = True

    assert worker.exit_code() == 2
    last = worker.log.read_text().splitlines()[-1]
    assert re.search(r"no NATS server at 127\.0\.0\.1:1 .*DYN_PREFILL_QUEUE=direct", last)
