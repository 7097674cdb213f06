"""Six hosts: two frontends, a prefill worker, two decode workers, and one for etcd, NATS and an undisturbed worker.

The clients stand at the hub, from which no fault keeps them. The undisturbed worker serves the same engine under
another name and computes its prompts itself: its answers are those that all others must equal.
"""

import contextlib
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
from deployment import MODEL, Deployment, Frontend, Process, Worker, chat, newly_asked
from hosts import Network
from split import ALONE, CONNECTED

import members
from etcd_server import EtcdServer
from nats_server import NatsServer
from waiting import PATIENT_S, eventually

KV_HOLD_S = 10
BY_TCP = ("--kv-transfer-backends", "tcp")  # as between hosts that share no memory
PREFILL = ("--is-prefill-worker", "--kv-hold-s", str(KV_HOLD_S))
DECODE = ("--disaggregation-mode", "decode", "--max-local-prefill-length", "10")
UNLIMITED = ("--max-prefill-queue-size", "1000")
REFERENCE = ("--endpoint", "dyn://dynamo.alone.generate", "--model-name", ALONE)


@dataclass(frozen=True)
class Mix:
    """What a cluster is made of."""

    name: str
    planes: str = "tcp"  # the request plane; nats: the event plane, too
    engine: str = "mocker"
    has_tls: bool = False
    is_ipv6: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def worker_flags(self) -> tuple[str, ...]:
        return ("--tick-ms", "20") if self.engine == "mocker" else ()


class FaultCluster:
    """The processes of one mix, and their hosts by name."""

    def __init__(self, mix: Mix, network: Network, folder: pathlib.Path) -> None:
        self.mix = mix
        self.door, self.other_door, self.prefill_host = (network.add() for _ in range(3))
        self.decode_host = network.add(has_wire=True)
        self.steady_host, self.service_host = network.add(), network.add()
        self.hosts = network.hosts
        self.deployment = Deployment(folder)
        there = {"host": self.service_host.address, "before": self.service_host.argv}
        self.etcd = EtcdServer(folder / "etcd", **there)
        self.nats = NatsServer(folder / "nats", **there) if mix.planes == "nats" else None
        environ = self.deployment.environ
        environ |= {
            "DYN_DISCOVERY_BACKEND": "etcd",
            "ETCD_ENDPOINTS": self.etcd.url,
            "DYN_CLUSTER_TOKEN": members.TOKEN,
        }
        if self.nats is not None:
            environ |= {
                "DYN_REQUEST_PLANE": "nats",
                "DYN_EVENT_PLANE": "nats",
                "NATS_SERVER": self.nats.url,
            }
        if mix.has_tls:
            members.make_certificates(folder)
            paths = members.flags(folder)
            environ |= {f"DYN_{name.upper()}": path for name, path in paths.items()}

    def start(self) -> None:
        """Start everything, and return when each request can take every path."""
        self.etcd.start()
        if self.nats is not None:
            self.nats.start()
        start = getattr(self.deployment, self.mix.engine)
        flags = self.mix.worker_flags
        self.frontends: list[Frontend] = [
            self.deployment.frontend("--router-mode", mode, host=host)
            for mode, host in (("round-robin", self.door), ("kv", self.other_door))
        ]
        self.prefill: Worker = start(*BY_TCP, *flags, *PREFILL, host=self.prefill_host)
        self.decode: Worker = start(*BY_TCP, *flags, *DECODE, *UNLIMITED, host=self.decode_host)
        self.steady: Worker = start(*BY_TCP, *flags, *DECODE, *UNLIMITED, host=self.steady_host)
        quick = ("--speedup-ratio", "50") if self.mix.engine == "mocker" else ()
        self.reference: Worker = start(*quick, *REFERENCE, host=self.service_host)
        for frontend in self.frontends:
            frontend.others = [self.prefill, self.decode, self.steady, self.reference]
            frontend.await_models(sorted([MODEL, ALONE]))
        self.await_whole()
        for worker in (self.decode, self.steady):
            eventually(
                lambda worker=worker: CONNECTED.search(worker.log.read_text()),
                what="a connection to the prefill worker",
            )
        self.instances = dict(self._find_instances())

    def _find_instances(self) -> Iterator[tuple[Worker, int]]:
        """Ask each instance by its number, to see which decode worker it is."""
        rows = httpx.get(f"{self.frontends[0].url}/health", timeout=PATIENT_S).json()["instances"]
        for number in (row["instance_id"] for row in rows if row["component"] == "backend"):
            with newly_asked([self.decode, self.steady]) as asked:
                headers = {"x-worker-instance-id": str(number)}
                body = chat("Who are you?", max_tokens=1)
                url = f"{self.frontends[0].url}/v1/chat/completions"
                httpx.post(url, json=body, headers=headers, timeout=PATIENT_S)
                yield asked(), number

    def listed(self, frontend: Frontend) -> set[int]:
        """The ids of the instances that a frontend lists."""
        answer = httpx.get(f"{frontend.url}/health", timeout=PATIENT_S).json()
        return {row["instance_id"] for row in answer["instances"]}

    def await_whole(self, within_s: float = PATIENT_S) -> float:
        """Wait until both frontends list all workers but the prefill worker, which they do not show."""
        return eventually(
            lambda: all(len(self.listed(frontend)) == 3 for frontend in self.frontends),
            within_s=within_s,
            what="all workers at both frontends",
        )

    def processes(self) -> dict[str, Process]:
        """Those that live through every fault, by name."""
        return {
            "first frontend": self.frontends[0],
            "second frontend": self.frontends[1],
            "prefill worker": self.prefill,
            "decode worker": self.decode,
            "steady decode worker": self.steady,
        }

    def end(self) -> None:
        """End all processes and services."""
        self.deployment.end()
        self.etcd.stop()
        if self.nats is not None:
            self.nats.stop()


@contextlib.contextmanager
def running(mix: Mix, folder: pathlib.Path) -> Iterator[FaultCluster]:
    """A started cluster while the block runs."""
    with Network(is_ipv6=mix.is_ipv6).open() as network:
        cluster = FaultCluster(mix, network, folder)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.end()
