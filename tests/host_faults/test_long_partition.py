"""A partition that lasts longer than the kernel keeps connections: nothing is deaf after it, and nothing is left over.

The kernel's settings shorten fifteen minutes to less than one: a connection ends after a few repetitions of what was
not acknowledged, as it does after a quarter of an hour by default.
"""

import collections
import contextlib
import os
import pathlib
import time

import pytest
from fault_cluster import Mix, running
from fault_load import FaultLoad
from split import until_idle
from test_network_faults import IS_WHOLE, seconds_until_found

from waiting import eventually

KERNEL = {
    "net.ipv4.tcp_retries2": 5,
    "net.ipv4.tcp_keepalive_time": 5,
    "net.ipv4.tcp_keepalive_intvl": 1,
    "net.ipv4.tcp_keepalive_probes": 3,
}
PARTITION_S = 45  # longer than any connection of ours lives without a sign of its peer's host
FRESH_S = 3  # events are heard once a second


def belongings(process) -> collections.Counter:
    """Count the established connections and the threads of a process."""
    folder = pathlib.Path(f"/proc/{process.pid}")
    sockets = {os.readlink(path) for path in (folder / "fd").iterdir()}
    tables = [(folder / "net" / name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [row.split() for table in tables for row in table]
    states = [row[3] for row in rows if f"socket:[{row[9]}]" in sockets]
    threads = len(list((folder / "task").iterdir()))
    return collections.Counter(connections=states.count("01"), threads=threads)


def load_of(cluster, seed, num_streams=12):
    frontends = cluster.frontends
    return FaultLoad(frontends, seed=seed, num_streams=num_streams, num_tokens=60, prompt_len=300)


@pytest.mark.skipif(not IS_WHOLE, reason="it takes two minutes: make test-hosts")
@pytest.mark.parametrize("mix", [Mix("tcp"), Mix("nats", planes="nats")], ids=str)
def test_partition_leaves_nothing_deaf_and_nothing_behind(mix, tmp_path):
    with running(mix, tmp_path) as cluster:
        for host in cluster.hosts:
            for name, value in KERNEL.items():
                host.sysctl(name, value)
        # So many that each pool of connections for copies, and of threads, has all that it ever gets.
        with load_of(cluster, "warm", num_streams=48) as load:
            eventually(lambda: load.num_begun >= 192, what="connections on every path")
        processes = cluster.processes()
        until_idle(cluster.decode, cluster.steady)
        before = {name: belongings(process) for name, process in processes.items()}
        cluster.decode_host.cut_off()
        with load_of(cluster, "cut") as load:
            time.sleep(PARTITION_S)  # the fault itself
        cluster.decode_host.join()
        found_s = seconds_until_found(cluster)
        with load_of(cluster, "healed") as healed:
            eventually(lambda: healed.num_begun >= 60, what="answers as before")
        until_idle(cluster.decode, cluster.steady, cluster.prefill)

        def leftovers():
            now = {name: belongings(process) for name, process in processes.items()}
            return {name: now[name] - before[name] for name in now if now[name] - before[name]}

        with contextlib.suppress(AssertionError):  # the comparison below says what is left
            eventually(lambda: not leftovers(), what="no more connections and threads")
        row = 'dynamo_router_seconds_since_kv_event{worker_id="%x"}'
        ages = [cluster.frontends[1].metric(row % number) for number in cluster.instances.values()]

        assert leftovers() == {}
        assert not [answer.error for answer in (*load.answers, *healed.answers) if answer.error]
        assert load.num_wrong() == healed.num_wrong() == 0
        assert found_s < FRESH_S
        assert max(ages) < FRESH_S
