"""What a process publishes as its address where discovery runs on another host."""

import asyncio
import functools
import socket

import pytest

from dynamo.base import addresses, errors, membership, process_setup
from dynamo.disagg import config as disagg_config
from dynamo.frontend import __main__ as frontend
from dynamo.frontend import config as frontend_config
from dynamo.kvbm import agents
from dynamo.router import config as router_config
from dynamo.runtime import component, reachability
from dynamo.worker import main


@pytest.fixture
def far_etcd(monkeypatch):
    """Settings whose etcd is on another host, to which the interface 10.77.0.3 leads."""
    monkeypatch.setattr(addresses, "source_address", lambda _host, _port: "10.77.0.3")
    return functools.partial(
        component.RuntimeConfig,
        discovery_backend="etcd",
        etcd_endpoints=("http://10.77.0.7:2379",),
    )


def test_address_that_leads_to_etcd_is_published_where_a_token_protects_it(far_etcd):
    token = {membership.TOKEN_VARIABLE: "the token of this cluster"}

    assert reachability.with_reachable_host(far_etcd(), token).tcp_rpc_host == "10.77.0.3"


def test_loopback_address_is_refused_beside_an_etcd_of_another_host(far_etcd):
    with pytest.raises(errors.ConfigError, match=r"DYN_TCP_RPC_HOST \(it could be 10.77.0.3\)"):
        reachability.with_reachable_host(far_etcd(), {})


def test_loopback_address_is_refused_where_only_kv_blocks_do_not_go_over_nats(far_etcd):
    settings = far_etcd(request_plane="nats", event_plane="nats")

    with pytest.raises(errors.ConfigError, match="DYN_TCP_RPC_HOST"):
        reachability.with_reachable_host(settings, {}, exports_blocks=True)


@pytest.mark.parametrize(
    ("changes", "is_said"),
    [
        ({"event_host": "127.0.0.1"}, True),
        ({"event_host": "127.0.0.1", "event_advertise": "10.77.0.3"}, False),
        ({"event_host": "127.0.0.1", "event_plane": "nats"}, False),
        ({"event_host": "127.0.0.1", "discovery_backend": "file"}, False),
        ({"event_host": "10.77.0.3"}, False),
    ],
)
def test_address_of_events_that_other_hosts_cannot_reach_is_named(
    far_etcd, caplog, changes, is_said
):
    reachability.with_reachable_host(far_etcd(tcp_rpc_host="10.77.0.3", **changes), {})
    text = (
        "DYN_EVENT_HOST=127.0.0.1: only processes of this host reach it, but etcd at 10.77.0.7:2379"
    )

    assert (text in caplog.text) == is_said


@pytest.mark.parametrize(
    ("setting", "address"),
    [
        ("tcp_rpc_advertise", "127.0.0.1:17000"),
        ("event_advertise", "localhost"),
        ("event_advertise", "[::1]:7000"),
    ],
)
def test_advertised_address_that_other_hosts_cannot_reach_is_named(
    far_etcd, caplog, setting, address
):
    reachability.with_reachable_host(far_etcd(tcp_rpc_host="10.77.0.3", **{setting: address}), {})

    assert f"DYN_{setting.upper()}={address}: only processes of this host reach it" in caplog.text


@pytest.mark.parametrize("advertised", [None, "127.0.0.1"])
def test_address_of_kv_blocks_that_other_hosts_cannot_reach_is_named(
    far_etcd, caplog, monkeypatch, advertised
):
    worker = main.settings.WorkerConfig(
        discovery_backend="etcd",
        etcd_endpoints=("http://10.77.0.7:2379",),
        tcp_rpc_host="10.77.0.3",
    )
    transfer = agents.TransferConfig(kv_transfer_host="127.0.0.1", kv_transfer_advertise=advertised)
    main._with_reachable_hosts(worker, transfer)

    name = "ADVERTISE" if advertised else "HOST"
    assert f"DYN_KV_TRANSFER_{name}=127.0.0.1: only processes of this host" in caplog.text


def test_name_of_this_host_that_means_loopback_is_replaced(far_etcd, monkeypatch):
    """Debian's /etc/hosts gives the host's own name the address 127.0.1.1."""
    family = socket.AF_INET
    numbers = {"worker-7": "127.0.1.1", "10.77.0.7": "10.77.0.7"}
    monkeypatch.setattr(addresses, "resolve", lambda host: (family, numbers[host]))
    settings = far_etcd(tcp_rpc_host="worker-7", insecure=True)

    assert reachability.with_reachable_host(settings, {}).tcp_rpc_host == "10.77.0.3"


def test_loopback_address_is_refused_beside_a_cluster_of_another_host(far_etcd, tmp_path):
    (tmp_path / "config").write_text(
        "{kind: Config, current-context: a, contexts: [{name: a, context: {cluster: b}}],"
        " clusters: [{name: b, cluster: {server: 'https://10.77.0.7:6443'}}]}"
    )
    settings = far_etcd(discovery_backend="kubernetes")

    with pytest.raises(
        errors.ConfigError, match=r"kubernetes at 10.77.0.7:6443 .*DYN_TCP_RPC_HOST"
    ):
        reachability.with_reachable_host(settings, {"KUBECONFIG": f"{tmp_path}/config"})


@pytest.mark.parametrize(
    "changes",
    [
        {"tcp_rpc_host": "10.77.0.9"},
        {"discovery_backend": "file"},
        {"etcd_endpoints": ("http://localhost:2379",)},
        {"etcd_endpoints": ("http://10.77.0.3:2379",)},  # an address of this host
        {"request_plane": "nats", "event_plane": "nats"},
    ],
)
def test_address_stays_where_others_need_no_other(far_etcd, changes):
    settings = far_etcd(**changes)

    assert reachability.with_reachable_host(settings, {}) is settings


class Opened(Exception):
    """The runtime of a frontend would be opened now, with these settings."""


@pytest.mark.parametrize(
    ("changes", "has_replica_sync", "address"),
    [
        ({"semantic_router": "router.yaml"}, False, "10.77.0.3"),  # conversations are events
        ({}, True, "10.77.0.3"),
        ({}, False, "127.0.0.1"),
    ],
)
def test_frontend_that_tells_others_its_requests_is_reached_from_their_hosts(
    far_etcd, monkeypatch, changes, has_replica_sync, address
):
    def open_runtime(settings, **_):
        raise Opened(settings)

    monkeypatch.setenv(membership.TOKEN_VARIABLE, "the token of this cluster")
    monkeypatch.setattr(component.DistributedRuntime, "open", open_runtime)
    monkeypatch.setattr(process_setup, "collect_garbage_rarely", lambda: None)
    settings = frontend_config.FrontendConfig(**far_etcd.keywords, **changes)
    routing = router_config.RoutingConfig(router_replica_sync=has_replica_sync)

    with pytest.raises(Opened) as opened:
        asyncio.run(frontend.serve(settings, routing, disagg_config.PrefillRoutingConfig()))

    assert opened.value.args[0].tcp_rpc_host == address
