"""Where processes listen, and where others reach them: ranges of ports, and a proxy in front as a NAT is."""

import asyncio
import socket
import threading

import httpx
import pytest
from deployment import MODEL

import ports
from tcp_proxy import TcpProxy
from waiting import PATIENT_S, eventually


@pytest.fixture
def proxies():
    """Return a function that starts a proxy in front of a port, in a thread beside the test."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    started = []

    def run(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    def start(port):
        proxy = TcpProxy(port)
        started.append(proxy)
        return proxy, run(proxy.start())

    yield start
    for proxy in started:
        run(proxy.close())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_listeners_behind_a_nat_are_reached_at_their_advertised_addresses(deployment, proxies):
    used, flags = {}, []
    for listener in ("tcp-rpc", "event", "kv-transfer"):
        port = ports.reserve()
        used[listener], address = proxies(port)
        flags += [f"--{listener}-port", str(port), f"--{listener}-advertise", address]
    transfer = ("--kv-transfer-backends", "tcp")
    prefill = deployment.mocker("--is-prefill-worker", *transfer, *flags)
    remote = ("--disaggregation-mode", "decode", "--max-local-prefill-length", "10")
    decode = deployment.mocker(*remote, *transfer)
    frontend = deployment.frontend("--router-mode", "kv", "--max-local-prefill-length", "10")
    frontend.others = [prefill, decode]
    frontend.await_models([MODEL])
    eventually(lambda: " is connected" in decode.log.read_text(), what="a prefill worker")
    answer = frontend.chat("Tell me a story " * 40, max_tokens=4)

    assert answer.status_code == 200
    assert decode.metric("kv_transfer_seconds_count") == 1
    assert [name for name, proxy in used.items() if not proxy.num_accepted] == []


def test_workers_share_out_a_range_of_ports(deployment):
    first = ports.reserve()
    last = min(first + 40, 65535)
    flags = [
        part
        for listener in ("tcp-rpc", "event", "kv-transfer")
        for part in (f"--{listener}-port", f"{first}-{last}")
    ]
    worker = deployment.mocker("--num-workers", "3", *flags)
    frontend = deployment.frontend("--router-mode", "kv")
    frontend.others = [worker]
    frontend.await_models([MODEL])

    def addresses_of_instances():
        health = httpx.get(f"{frontend.url}/health", timeout=PATIENT_S).json()
        return {instance["transport"]["tcp"] for instance in health.get("instances", ())}

    eventually(lambda: len(addresses_of_instances()) == 3, what="three workers")
    addresses = addresses_of_instances()

    assert frontend.chat(max_tokens=4).status_code == 200
    assert len(addresses) == 3
    assert all(first <= int(address.rpartition(":")[2]) <= last for address in addresses)


@pytest.mark.parametrize("fault", ["host", "request port", "event port"])
def test_replica_sync_at_an_address_that_cannot_be_bound_refuses_to_start(deployment, fault):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        taken = str(listening.getsockname()[1])
        flags = {
            "host": ("--tcp-rpc-host", "192.0.2.1", "--insecure"),
            "request port": ("--tcp-rpc-port", taken),
            "event port": ("--event-port", taken),
        }[fault]
        frontend = deployment.frontend("--router-mode", "kv", "--router-replica-sync", *flags)
        frontend.may_end = True
        assert frontend.exit_code() == 2
    refusal = frontend.log.read_text().strip().splitlines()
    assert len(refusal) == 1
    assert "cannot listen on" in refusal[0]
    assert ("DYN_EVENT_PORT" if fault == "event port" else "DYN_TCP_RPC_HOST") in refusal[0]
