"""The mixes of planes that a deployment may run on, and the real servers that they need."""

import contextlib
import pathlib
from collections.abc import Iterator

from deployment import Deployment

from etcd_server import EtcdServer
from nats_server import NatsServer

OVER_NATS = {"DYN_REQUEST_PLANE": "nats", "DYN_EVENT_PLANE": "nats"}
BY_ETCD = {"DYN_DISCOVERY_BACKEND": "etcd"}
MIXES = {
    "file+tcp+zmq": {},
    "etcd+tcp+zmq": BY_ETCD,
    "file+tcp+nats": {"DYN_EVENT_PLANE": "nats"},
    "file+nats+nats": OVER_NATS,
    "etcd+nats+nats": BY_ETCD | OVER_NATS,
}
_KINDS = {"nats": (NatsServer, "NATS_SERVER"), "etcd": (EtcdServer, "ETCD_ENDPOINTS")}


@contextlib.contextmanager
def running(
    mix: str, deployment: Deployment, folder: pathlib.Path
) -> Iterator[list[EtcdServer | NatsServer]]:
    """The servers of a mix, and a deployment whose processes are told to use them."""
    servers: list[EtcdServer | NatsServer] = []
    deployment.environ |= MIXES[mix]
    try:
        for name in set(mix.split("+")) & _KINDS.keys():
            kind, variable = _KINDS[name]
            servers.append(kind(folder / name))
            servers[-1].start()
            deployment.environ[variable] = servers[-1].url
        yield servers
    finally:
        deployment.end()
        for server in servers:
            server.stop()
