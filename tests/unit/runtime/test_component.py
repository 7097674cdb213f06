"""Runtimes of one process find, ask and leave each other; settings that are not supported are refused."""

import asyncio
import dataclasses
import functools
import socket

import msgspec
import pytest

from dynamo.base import addresses, config, errors, membership
from dynamo.protocols import generate, instances, model_card
from dynamo.runtime import component
from dynamo.runtime.component import DistributedRuntime, MemoryCluster, RuntimeConfig

NAME = instances.EndpointName("dynamo", "backend", "generate")
OTHER = instances.EndpointName("dynamo", "backend", "other")
CARD = model_card.ModelCard(
    display_name="m", source_path="/m", context_length=9, kv_cache_block_size=4
)


class Receiver:
    """Notes replies, and how it ended."""

    def __init__(self):
        self.replies, self.over = [], asyncio.get_running_loop().create_future()

    def replied(self, body):
        self.replies.append(msgspec.msgpack.decode(body))

    def receive(self, output):
        raise AssertionError

    def ended(self, error):
        self.over.set_result(error)


def echo(call):
    call.reply(msgspec.msgpack.decode(call.body))
    call.finish()


@pytest.fixture
async def pair():
    cluster = MemoryCluster()
    async with (
        await DistributedRuntime.in_memory(cluster, item_type=generate.Output) as worker,
        await DistributedRuntime.in_memory(cluster, item_type=generate.Output) as frontend,
    ):
        yield worker, frontend


async def test_registered_instance_answers_another_runtime(pair):
    worker, frontend = pair
    instance = await worker.register(NAME, echo, CARD.record_for)
    client, receiver = frontend.client(NAME), Receiver()
    await client.wait_for_instances(5)
    await client.open("hello", receiver)

    assert await receiver.over is None
    assert receiver.replies == ["hello"]
    assert client.instances == {worker.instance_id: instance}


async def test_withdrawn_instance_is_hidden_until_it_is_restored(pair):
    worker, frontend = pair
    await worker.register(NAME, echo, CARD.record_for)
    before = await frontend.discovery.get_prefix("v1/")

    await worker.withdraw()
    meanwhile = await frontend.discovery.get_prefix("v1/")
    await worker.restore()
    after = await frontend.discovery.get_prefix("v1/")
    await worker.withdraw()
    await worker.deregister()
    await worker.restore()

    assert len(before) == 2
    assert (meanwhile, after) == ({}, before)
    assert await frontend.discovery.get_prefix("v1/") == {}


async def test_model_card_is_registered_with_its_instance(pair):
    worker, frontend = pair
    instance = await worker.register(NAME, echo, CARD.record_for)
    records = await frontend.discovery.get_prefix(instances.CARDS)
    record = msgspec.json.decode(records[instance.card_key], type=model_card.CardRecord)

    assert record.card_json == CARD
    assert record.instance_id == worker.instance_id


async def test_registered_model_card_can_be_replaced_unless_withdrawn(pair):
    worker, frontend = pair
    instance = await worker.register(NAME, echo, CARD.record_for)
    poetic = msgspec.structs.replace(CARD, lora_names=("poet",))

    async def found():
        records = await frontend.discovery.get_prefix(instances.CARDS)
        cards = [msgspec.json.decode(one, type=model_card.CardRecord) for one in records.values()]
        return [one.card_json for one in cards]

    await worker.change_record(instance.card_key, lambda _: poetic.record_for(instance)[1])
    changed = await found()
    await worker.withdraw()
    with pytest.raises(errors.Conflict, match="nobody is to find us now"):
        await worker.change_record(instance.card_key, lambda _: CARD.record_for(instance)[1])
    meanwhile = await found()
    await worker.restore()

    assert (changed, meanwhile) == ([poetic], [])
    assert await found() == [poetic]


async def test_replaced_card_does_not_register_a_deregistered_instance(pair):
    worker, frontend = pair
    instance = await worker.register(NAME, echo, CARD.record_for)
    await worker.deregister()

    with pytest.raises(errors.Conflict, match="nobody is to find us now"):
        await worker.change_record(instance.card_key, lambda _: CARD.record_for(instance)[1])
    assert await frontend.discovery.get_prefix("v1/") == {}


async def test_deregistered_instance_has_no_keys_but_still_answers(pair):
    worker, frontend = pair
    await worker.register(NAME, echo, CARD.record_for)
    instance = await worker.register(OTHER, echo)
    await worker.deregister()
    receiver = Receiver()
    await frontend.requests.open(instance.transport["memory"], NAME.path, 1, receiver)

    assert await frontend.discovery.get_prefix("v1/") == {}
    assert await receiver.over is None


async def test_draining_instance_deregisters_before_it_waits(pair):
    worker, frontend = pair
    calls = []
    await worker.register(NAME, calls.append, CARD.record_for)
    client, receiver = frontend.client(NAME), Receiver()
    await client.wait_for_instances(5)
    await client.open(None, receiver)
    while not calls:
        await asyncio.sleep(0)
    draining = asyncio.ensure_future(worker.drain(5))
    while client.instances:
        await asyncio.sleep(0)
    with pytest.raises(errors.NoWorkers):
        await client.open(None, Receiver())
    calls[0].finish()

    assert await draining
    assert await receiver.over is None


async def test_draining_instance_accepts_requests_during_its_grace_period(pair):
    worker, frontend = pair
    instance = await worker.register(NAME, echo, CARD.record_for)
    draining = asyncio.ensure_future(worker.drain(5, grace_s=60))
    while await frontend.discovery.get_prefix("v1/"):
        await asyncio.sleep(0)
    receiver = Receiver()
    await frontend.requests.open(instance.transport["memory"], NAME.path, 1, receiver)

    assert await receiver.over is None
    draining.cancel()


async def test_closed_runtime_leaves_no_keys_or_tasks():
    cluster = MemoryCluster()
    runtime = await DistributedRuntime.in_memory(cluster, item_type=generate.Output)
    await runtime.register(NAME, echo, CARD.record_for)
    runtime.client(NAME)
    await runtime.close()
    other = await DistributedRuntime.in_memory(cluster, item_type=generate.Output)

    assert await other.discovery.get_prefix("") == {}
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await other.close()


async def test_default_backends_are_file_discovery_and_tcp(tmp_path):
    settings = RuntimeConfig(file_kv=str(tmp_path))
    async with (
        await DistributedRuntime.open(settings, item_type=generate.Output) as worker,
        await DistributedRuntime.open(settings, item_type=generate.Output) as frontend,
    ):
        instance = await worker.register(NAME, echo)
        client, receiver = frontend.client(NAME), Receiver()
        await client.wait_for_instances(10)
        await client.open("hello", receiver)
        await receiver.over

    assert receiver.replies == ["hello"]
    assert instance.transport["tcp"].startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        (
            {"DYN_DISCOVERY_BACKEND": "zoo"},
            "DYN_DISCOVERY_BACKEND.*file, etcd, kubernetes, mem.*zoo",
        ),
        ({"DYN_REQUEST_PLANE": "http"}, "DYN_REQUEST_PLANE.*tcp, nats, memory.*http"),
        ({"DYN_EVENT_PLANE": "tcp"}, "DYN_EVENT_PLANE.*zmq, nats, memory.*tcp"),
        ({"DYN_TCP_RPC_PORT": "any"}, "DYN_TCP_RPC_PORT.*whole number"),
    ],
)
def test_unsupported_backend_is_refused_with_the_supported_ones(environ, says):
    with pytest.raises(errors.ConfigError, match=says):
        config.load(RuntimeConfig, prog="test", argv=[], environ=environ)


def test_a_process_inherits_the_flags():
    @dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
    class Config(component.RuntimeConfig):
        """A process."""

        model: str = config.option("m", help="model")

    argv = ["--model", "x", "--discovery-backend", "mem", "--tcp-rpc-port", "5"]
    settings = config.load(Config, prog="test", argv=argv, environ={"DYN_NAMESPACE": "n"})

    assert (settings.model, settings.discovery_backend) == ("x", "mem")
    assert (str(settings.tcp_rpc_port), settings.namespace) == ("5", "n")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
async def test_unreachable_advertised_host_is_refused(host):
    with pytest.raises(errors.ConfigError, match="DYN_TCP_RPC_HOST"):
        await DistributedRuntime.open(
            RuntimeConfig(tcp_rpc_host=host, discovery_backend="mem"), item_type=generate.Output
        )


async def test_sibling_runtime_registers_a_separate_instance(pair):
    worker, frontend = pair
    sibling = worker.sibling()
    both = [await one.register(NAME, echo) for one in (worker, sibling)]
    client = frontend.client(NAME)
    await client.wait_for_instances(5)
    receivers = [Receiver(), Receiver()]
    for instance, receiver in zip(both, receivers, strict=True):
        await client.open("hello", receiver, instance_id=instance.instance_id)

    assert len({instance.instance_id for instance in both}) == 2
    assert [await receiver.over for receiver in receivers] == [None, None]
    await sibling.close()
    assert list(await frontend.discovery.get_prefix("v1/instances/")) == [both[0].key]


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

    assert component.with_reachable_host(far_etcd(), token).tcp_rpc_host == "10.77.0.3"


def test_loopback_address_is_refused_beside_an_etcd_of_another_host(far_etcd):
    with pytest.raises(errors.ConfigError, match=r"DYN_TCP_RPC_HOST \(it could be 10.77.0.3\)"):
        component.with_reachable_host(far_etcd(), {})


def test_loopback_address_is_refused_where_only_kv_blocks_do_not_go_over_nats(far_etcd):
    settings = far_etcd(request_plane="nats", event_plane="nats")

    with pytest.raises(errors.ConfigError, match="DYN_TCP_RPC_HOST"):
        component.with_reachable_host(settings, {}, exports_blocks=True)


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
    component.with_reachable_host(far_etcd(tcp_rpc_host="10.77.0.3", **changes), {})
    text = (
        "DYN_EVENT_HOST=127.0.0.1: only processes of this host reach it, but etcd at 10.77.0.7:2379"
    )

    assert (text in caplog.text) == is_said


def test_name_of_this_host_that_means_loopback_is_replaced(far_etcd, monkeypatch):
    """Debian's /etc/hosts gives the host's own name the address 127.0.1.1."""
    family = socket.AF_INET
    numbers = {"worker-7": "127.0.1.1", "10.77.0.7": "10.77.0.7"}
    monkeypatch.setattr(addresses, "resolve", lambda host: (family, numbers[host]))
    settings = far_etcd(tcp_rpc_host="worker-7", insecure=True)

    assert component.with_reachable_host(settings, {}).tcp_rpc_host == "10.77.0.3"


def test_loopback_address_is_refused_beside_a_cluster_of_another_host(far_etcd, tmp_path):
    (tmp_path / "config").write_text(
        "{kind: Config, current-context: a, contexts: [{name: a, context: {cluster: b}}],"
        " clusters: [{name: b, cluster: {server: 'https://10.77.0.7:6443'}}]}"
    )
    settings = far_etcd(discovery_backend="kubernetes")

    with pytest.raises(
        errors.ConfigError, match=r"kubernetes at 10.77.0.7:6443 .*DYN_TCP_RPC_HOST"
    ):
        component.with_reachable_host(settings, {"KUBECONFIG": f"{tmp_path}/config"})


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

    assert component.with_reachable_host(settings, {}) is settings
