"""Frontend, workers and services on hosts of their own: what is advertised is reached, nothing listens elsewhere."""

import signal

import httpx
import pytest
from deployment import MODEL
from hosts import Network, listening

from etcd_server import EtcdServer
from nats_server import NatsServer
from waiting import PATIENT_S, eventually

BY_ETCD = {"DYN_DISCOVERY_BACKEND": "etcd"}
OVER_NATS = {"DYN_REQUEST_PLANE": "nats", "DYN_EVENT_PLANE": "nats"}
MIXES = {
    "file+tcp+zmq": {},  # a directory that the hosts share
    "etcd+tcp+zmq": BY_ETCD,
    "etcd+nats+nats": BY_ETCD | OVER_NATS,
    "etcd+tcp+zmq, IPv6 only": BY_ETCD,
}
TOKEN = "the token of this test, which all its hosts have"
FAST = ("--speedup-ratio", "50", "--block-size", "16")


class Cluster:
    """A frontend and two workers, each on a host; on a fourth the services, if the mix has any."""

    def __init__(self, network, deployment, mix, folder):
        self.door, self.one, self.two, self.services = (network.add() for _ in range(4))
        self.deployment, self.servers = deployment, []
        deployment.environ |= MIXES[mix] | {"DYN_CLUSTER_TOKEN": TOKEN}
        for name, kind, variable in (
            ("nats", NatsServer, "NATS_SERVER"),
            ("etcd", EtcdServer, "ETCD_ENDPOINTS"),
        ):
            if name in mix:
                there = self.services
                server = kind(folder / name, host=there.address, before=there.argv)
                server.start()
                self.servers.append(server)
                deployment.environ[variable] = server.url

    def start(self, *flags):
        """With these flags for the workers."""
        self.frontend = self.deployment.frontend("--router-mode", "kv", host=self.door)
        self.workers = [
            self.deployment.mocker(*FAST, *flags, host=host) for host in (self.one, self.two)
        ]
        self.frontend.others += self.workers
        self.frontend.await_models([MODEL])
        self.await_workers(2)

    def await_workers(self, number):
        return eventually(lambda: len(self.instances()) == number, what=f"{number} workers")

    def instances(self):
        return httpx.get(f"{self.frontend.url}/health", timeout=PATIENT_S).json()["instances"]

    def cached_tokens(self, text):
        body = {"model": MODEL, "prompt": text, "max_tokens": 4}
        answer = httpx.post(f"{self.frontend.url}/v1/completions", json=body, timeout=PATIENT_S)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(params=MIXES)
def cluster(request, deployment, tmp_path):
    with Network(is_ipv6="IPv6" in request.param).open() as network:
        made = Cluster(network, deployment, request.param, tmp_path)
        yield made
        deployment.end()
        for server in made.servers:
            server.stop()


def test_frontend_serves_workers_of_other_hosts(cluster):
    cluster.start()
    texts = [f"{number} once upon a time " * 60 for number in range(4)]
    for text in texts:
        cluster.cached_tokens(text)

    def are_all_found():  # so the workers' events arrive
        return all(cluster.cached_tokens(text) > 100 for text in texts)

    eventually(are_all_found, what="each prefix at its worker")

    assert all(worker.metric("requests_total") for worker in cluster.workers)
    assert listening(cluster.frontend.pid) <= {cluster.door.address}
    for worker, host in zip(cluster.workers, (cluster.one, cluster.two), strict=True):
        assert listening(worker.pid) == {host.address}


def test_unreachable_host_is_unlisted_at_once_and_returns(cluster):
    cluster.start("--speedup-ratio", "1")
    with cluster.frontend.stream(max_tokens=400, ignore_eos=True) as first:
        next(first)
        with cluster.frontend.stream(max_tokens=400, ignore_eos=True) as second:
            next(second)
            cluster.one.cut_off()
            assert [*first][-1] == [*second][-1] == "[DONE]"
    for _ in range(4):
        assert cluster.frontend.chat(max_tokens=4).status_code == 200

    cluster.one.join()
    cluster.workers[1].signal(signal.SIGTERM)
    cluster.workers[1].exit_code()

    def answers_again():
        return cluster.frontend.chat(max_tokens=4).status_code == 200

    eventually(answers_again, what="answers from the host that was cut off")


@pytest.mark.parametrize("cluster", ["etcd+nats+nats", "etcd+tcp+zmq, IPv6 only"], indirect=True)
def test_blocks_are_transferred_between_hosts(cluster):
    deployment = cluster.deployment
    frontend = deployment.frontend(host=cluster.door)
    prefill = deployment.native("--is-prefill-worker", host=cluster.one)
    flags = ("--disaggregation-mode", "decode", "--max-local-prefill-length", "10")
    decode = deployment.native(*flags, host=cluster.two)
    frontend.others += [prefill, decode]
    frontend.await_models([MODEL])
    eventually(lambda: " is connected" in decode.log.read_text(), what="a prefill worker")
    answer = frontend.chat("Tell me a story about a brave cat and a timid dog", max_tokens=4)

    assert answer.status_code == 200
    assert decode.metric('prefills_total{where="remote"}') == 1
    assert listening(prefill.pid) == {cluster.one.address}


@pytest.mark.parametrize("cluster", ["etcd+tcp+zmq", "etcd+nats+nats"], indirect=True)
def test_processes_without_an_address_are_reached_at_the_one_that_leads_to_etcd(cluster):
    unset = ("--tcp-rpc-host", "127.0.0.1")  # the default
    deployment = cluster.deployment
    routing = ("--router-mode", "kv", "--router-replica-sync")
    frontend = deployment.frontend(*routing, *unset, host=cluster.door)
    blocks = ("--kv-transfer-backends", "tcp")
    prefill = deployment.mocker("--is-prefill-worker", *blocks, *unset, host=cluster.one)
    flags = ("--disaggregation-mode", "decode", "--max-local-prefill-length", "10")
    decode = deployment.mocker(*flags, *blocks, *unset, host=cluster.two)
    frontend.others += [prefill, decode]
    frontend.await_models([MODEL])
    eventually(lambda: " is connected" in decode.log.read_text(), what="a prefill worker")
    answer = frontend.chat("Tell me a story about a brave cat and a timid dog", max_tokens=4)

    assert answer.status_code == 200
    assert decode.metric("kv_transfer_seconds_count") == 1
    assert listening(prefill.pid) == {cluster.one.address}
    assert listening(frontend.pid) == {cluster.door.address}
