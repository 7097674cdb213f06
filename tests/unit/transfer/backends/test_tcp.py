"""Where TCP listens, and whom it calls."""

import pytest

import members
import transfer_peer
from dynamo.base import addresses, errors, membership
from dynamo.runtime import listening
from dynamo.transfer.backends import tcp


def at(host="127.0.0.1", port=0):
    ports = addresses.PortRange(port, port)
    return listening.ListenAddress(host=host, ports=ports, setting="DYN_KV_TRANSFER_")


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_wildcard_address_is_refused(host):
    with pytest.raises(errors.ConfigError, match="by which other processes reach"):
        tcp.TcpBackend(listen_address=at(host), credentials=members.with_token())


@pytest.mark.parametrize("host", ["10.1.2.3", "worker-0.example", "fd77::3"])
def test_tcp_serves_other_hosts_with_a_token_or_if_insecure(host):
    with pytest.raises(errors.ConfigError, match="give all processes a cluster token"):
        tcp.TcpBackend(listen_address=at(host))

    tcp.TcpBackend(listen_address=at(host), credentials=members.with_token())
    tcp.TcpBackend(listen_address=at(host), credentials=membership.Credentials(is_insecure=True))


async def test_used_address_is_a_config_error():
    worker = await transfer_peer.Worker("prefill-0", tcp.TcpBackend(), seed=1).start()
    port = int(worker.metadata.rpartition(b"127.0.0.1:")[2])
    other = transfer_peer.Worker("prefill-1", tcp.TcpBackend(listen_address=at(port=port)), seed=1)

    with pytest.raises(
        errors.ConfigError, match=f"cannot listen on 127.0.0.1:{port}.*DYN_KV_TRANSFER_PORT"
    ):
        await other.start()
    await other.close()
    await worker.close()


@pytest.mark.parametrize(
    ("address", "why"),
    [(b"10.20.30.40:1234", "needs a cluster token"), (b"127.0.0.1:123456", "expected host:port")],
)
async def test_malformed_address_of_a_peer_is_refused(address, why):
    worker = await transfer_peer.Worker("prefill-0", tcp.TcpBackend(), seed=1).start()
    own = worker.metadata
    start = own.rindex(b"127.0.0.1:") - 1
    metadata = own[:start] + bytes([0xA0 + len(address)]) + address

    with pytest.raises(errors.TransferError, match=why):
        await worker.agent.connect(metadata, deadline_s=1)
    await worker.close()
