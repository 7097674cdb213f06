"""The faults of a network of several hosts: what each does, for how long, and what is promised meanwhile.

They are those of an operator's life: hosts that are cut off, one direction that is lost, services that are away, and
wires that delay, lose, reorder, repeat and damage frames.
"""

from collections.abc import Callable
from dataclasses import dataclass

from fault_cluster import FaultCluster, Mix
from hosts import Host

SILENCE_S = 3.0  # promised: a silent peer is given up after so long
KNOWN_PATH_S = 1.0  # promised: where another path is known
Heal = Callable[[], None]


@dataclass(frozen=True)
class NetworkFault:
    """One fault. `inject` causes it and returns its end."""

    name: str
    inject: Callable[[FaultCluster], Heal]
    duration_s: float
    pause_s: float = SILENCE_S  # the longest that is promised
    is_short: bool = False  # one of those that every run of the suite has
    is_total: bool = (
        False  # no path is left meanwhile: new requests may be refused, by the rule of waiting
    )
    engines: tuple[str, ...] = ("mocker", "native")
    planes: tuple[str, ...] = ("tcp", "nats")

    def __str__(self) -> str:
        return self.name

    def is_for(self, mix: Mix) -> bool:
        """Return whether the fault is one of this mix."""
        return mix.engine in self.engines and mix.planes in self.planes


def _cut(host: str) -> Callable[[FaultCluster], Heal]:
    def inject(cluster: FaultCluster) -> Heal:
        getattr(cluster, host).cut_off()
        return getattr(cluster, host).join

    return inject


def _link_down(cluster: FaultCluster) -> Heal:
    cluster.steady_host.link_down()
    return cluster.steady_host.link_up


def _lose(*directions: tuple[str, str]) -> Callable[[FaultCluster], Heal]:
    """Return a fault that loses what each first host sends to the second."""

    def inject(cluster: FaultCluster) -> Heal:
        pairs: list[tuple[Host, Host]] = [
            (getattr(cluster, source), getattr(cluster, target)) for source, target in directions
        ]
        for source, target in pairs:
            source.lose_to(target)

        def heal() -> None:
            for source, target in pairs:
                source.reach(target)

        return heal

    return inject


def _between(*hosts: str) -> Callable[[FaultCluster], Heal]:
    """Return a fault that cuts each of these hosts off from the last one."""
    last = hosts[-1]
    return _lose(*(pair for host in hosts[:-1] for pair in ((host, last), (last, host))))


def _wire(**faults: float) -> Callable[[FaultCluster], Heal]:
    def inject(cluster: FaultCluster) -> Heal:
        cluster.decode_host.set_wire(**faults)
        return cluster.decode_host.set_wire

    return inject


def _etcd_killed(cluster: FaultCluster) -> Heal:
    cluster.etcd.stop()
    return cluster.etcd.start


def _nats_killed(cluster: FaultCluster) -> Heal:
    assert cluster.nats is not None
    cluster.nats.stop()
    return cluster.nats.start


WORKERS = ("prefill_host", "decode_host", "steady_host")
MOCKER, TCP, NATS = ("mocker",), ("tcp",), ("nats",)
FAULTS = (
    NetworkFault("decode host cut off for 2 s", _cut("decode_host"), 2),
    NetworkFault("decode host cut off", _cut("decode_host"), 6, is_short=True),
    NetworkFault("decode host cut off for 60 s", _cut("decode_host"), 60, engines=MOCKER),
    NetworkFault("decode host's device down", _link_down, 10),
    NetworkFault("prefill host cut off for 2 s", _cut("prefill_host"), 2),
    NetworkFault("prefill host cut off", _cut("prefill_host"), 10),
    NetworkFault("decode and prefill hosts cut", _between("decode_host", "prefill_host"), 15, planes=TCP),
    NetworkFault("decode host and etcd cut", _between("decode_host", "service_host"), 20, KNOWN_PATH_S, planes=TCP),
    NetworkFault("decode host and services cut", _between("decode_host", "service_host"), 20, planes=NATS),
    NetworkFault("prefill host and etcd cut", _between("prefill_host", "service_host"), 20, KNOWN_PATH_S, planes=TCP),
    NetworkFault("first frontend and etcd cut", _between("door", "service_host"), 20, KNOWN_PATH_S, planes=TCP),
    NetworkFault("all workers and etcd cut", _between(*WORKERS, "service_host"), 12, KNOWN_PATH_S, True, planes=TCP),
    NetworkFault("decode host to first frontend lost", _lose(("decode_host", "door")), 10, planes=TCP),
    NetworkFault("first frontend to decode host lost", _lose(("door", "decode_host")), 10, planes=TCP),
    NetworkFault("decode host to prefill host lost", _lose(("decode_host", "prefill_host")), 10, planes=TCP),
    NetworkFault("prefill host to decode host lost", _lose(("prefill_host", "decode_host")), 10, planes=TCP),
    NetworkFault("decode host to services lost", _lose(("decode_host", "service_host")), 20),
    NetworkFault("services to decode host lost", _lose(("service_host", "decode_host")), 20),
    NetworkFault("second frontend and decode host cut", _between("other_door", "decode_host"), 30, planes=TCP),
    NetworkFault("50 ms delay", _wire(delay_s=0.05), 8),
    NetworkFault("1 % loss", _wire(loss=0.01), 8),
    NetworkFault("5 % loss", _wire(loss=0.05), 8),
    NetworkFault("20 % loss", _wire(loss=0.2), 8),
    NetworkFault("25 % reordered", _wire(delay_s=0.01, reordered=0.25), 8),
    NetworkFault("20 to 80 ms jitter", _wire(delay_s=0.02, jitter_s=0.06), 8),
    NetworkFault("5 % repeated", _wire(duplicated=0.05), 8),
    NetworkFault("1 % of frames with a wrong bit", _wire(flipped=0.01), 8),
    NetworkFault("1 Mbit/s", _wire(bytes_per_s=125_000), 10),
    NetworkFault("packets above 1280 vanish", _wire(mtu=1280), 10),
    NetworkFault("etcd killed", _etcd_killed, 20, KNOWN_PATH_S),
    NetworkFault("NATS killed for 60 s", _nats_killed, 60, 63, planes=NATS, is_total=True),
)  # fmt: skip
