"""Every fault of a network of several hosts, under load: no answer is wrong, none hangs, none fails.

`make test-hosts` runs all faults on all mixes, and prints a table; a run of the whole suite has two of them.
"""

import os
import time
from collections.abc import Callable
from concurrent import futures

import httpx
import pytest
from fault_cluster import FaultCluster, Mix, running
from fault_load import FaultLoad, completion
from network_faults import FAULTS, NetworkFault
from split import prompt, until_idle

from waiting import eventually

IS_WHOLE = "DYN_TEST_ALL_HOST_FAULTS" in os.environ
FOUND_S = 2.0  # promised: all that was cut is found again
MIXES = (
    Mix("tcp, token"),
    Mix("tcp, TLS, IPv6", has_tls=True, is_ipv6=True),
    Mix("nats, token", planes="nats"),
    Mix("nats, TLS, IPv6", planes="nats", has_tls=True, is_ipv6=True),
    Mix("native, tcp, token, IPv6", engine="native", is_ipv6=True),
    Mix("native, nats, TLS", engine="native", planes="nats", has_tls=True),
)


@pytest.fixture(scope="module", params=MIXES if IS_WHOLE else MIXES[:1], ids=str)
def cluster(request, tmp_path_factory):
    with running(request.param, tmp_path_factory.mktemp("hosts")) as cluster:
        yield cluster


def seconds_until_found(cluster: FaultCluster) -> float:
    """Wait until each frontend reaches each decode worker, and both the prefill worker; return the longest time."""
    began_at = time.monotonic()

    def until_found(path) -> float:
        frontend, worker = path
        number = [0]

        def is_found() -> bool:
            number[0] += 1
            ids = prompt(100, f"{began_at} {worker.pid} {frontend.pid} {number[0]}")
            headers = {"x-worker-instance-id": str(cluster.instances[worker])}
            try:
                answer = httpx.post(
                    f"{frontend.url}/v1/completions",
                    json=completion(ids, 3),  # the first may come from the prefill worker
                    headers=headers,
                    timeout=FOUND_S,  # a longer one would hide when the next would be answered
                )
            except httpx.TimeoutException:
                return False
            if answer.status_code != 200:
                return False
            ids_by_kind = answer.json()["nvext"]["worker_id"]
            return ids_by_kind["prefill_worker_id"] != ids_by_kind["decode_worker_id"]

        eventually(is_found, every_s=0.05, what=f"{worker.url} from {frontend.url}")
        return time.monotonic() - began_at

    paths = [(f, worker) for f in cluster.frontends for worker in (cluster.decode, cluster.steady)]
    with futures.ThreadPoolExecutor(len(paths)) as threads:
        found_s = max(threads.map(until_found, paths))
    cluster.await_whole()
    return max(found_s, time.monotonic() - began_at if found_s > FOUND_S else found_s)


@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if IS_WHOLE or fault.is_short], ids=str
)
def test_every_answer_is_right_through_a_fault(
    cluster: FaultCluster, fault: NetworkFault, show_row: Callable[[str], None]
):
    is_native = cluster.mix.engine == "native"
    size = (4, 100, 400) if is_native else (12, 150, 300)
    num_streams, num_tokens, prompt_len = size
    with FaultLoad(
        cluster.frontends,
        seed=f"{cluster.mix.name} {fault.name}",
        num_streams=num_streams,
        num_tokens=num_tokens,
        prompt_len=prompt_len,
    ) as load:
        eventually(lambda: load.num_begun >= 2 * num_streams, what="streams on every path")
        heal = fault.inject(cluster)
        try:
            time.sleep(fault.duration_s)  # the fault itself
        finally:
            heal()
        found_s = seconds_until_found(cluster)
    num_failed = sum(bool(answer.error) and answer.error != "hung" for answer in load.answers)
    num_hung = sum(answer.error == "hung" for answer in load.answers)
    num_wrong = load.num_wrong()
    pause_s = max(answer.pause_s for answer in load.answers)
    row = (
        f"| {cluster.mix.name} | {fault.name} | {len(load.answers)} | {num_wrong}, {num_hung}, {num_failed}"
        f" | {pause_s:.1f} | {found_s:.1f} | {load.longest_stall_s:.1f} |"
    )
    show_row(row)
    for worker in (cluster.decode, cluster.steady):
        until_idle(worker)
        assert worker.metric("inflight_requests") == 0
    errors = {answer.error for answer in load.answers if answer.error}

    assert (num_wrong, num_hung) == (0, 0)
    if fault.is_total:  # those that had begun go on; new ones are told to come again
        assert not any(answer.text for answer in load.answers if answer.error), errors
        assert all(error.startswith("503") for error in errors), errors
    else:
        assert not num_failed, errors
    # The machine's own stalls prolong every pause: that of the clients is measured, those of others are about as long.
    assert pause_s < fault.pause_s + 1 + 2 * load.longest_stall_s
    assert found_s < FOUND_S + 1 + 2 * load.longest_stall_s
