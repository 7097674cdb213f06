"""Runtimes of one process find, ask and leave each other; settings that are not supported are refused."""

import asyncio
import dataclasses

import msgspec
import pytest

from dynamo.base import config, errors
from dynamo.protocols import generate, instances, model_card
from dynamo.runtime import component, decorators
from dynamo.runtime.component import DistributedRuntime, MemoryCluster, RuntimeConfig
from waiting import PATIENT_S

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
    await client.wait_for_instances(PATIENT_S)
    await client.open("hello", receiver)

    assert await receiver.over is None
    assert receiver.replies == ["hello"]
    assert client.instances == {worker.instance_id: instance}


async def test_withdrawn_instance_is_hidden_until_it_is_restored(pair):
    worker, frontend = pair
    await worker.register(NAME, echo, CARD.record_for)
    before = await frontend.discovery.get_prefix("v1/")

    await worker.records.withdraw()
    meanwhile = await frontend.discovery.get_prefix("v1/")
    await worker.records.restore()
    after = await frontend.discovery.get_prefix("v1/")
    await worker.records.withdraw()
    await worker.records.deregister()
    await worker.records.restore()

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

    await worker.records.change(instance.card_key, lambda _: poetic.record_for(instance)[1])
    changed = await found()
    await worker.records.withdraw()
    with pytest.raises(errors.Conflict, match="not in discovery now: try again"):
        await worker.records.change(instance.card_key, lambda _: CARD.record_for(instance)[1])
    meanwhile = await found()
    await worker.records.restore()

    assert (changed, meanwhile) == ([poetic], [])
    assert await found() == [poetic]


async def test_instance_is_restored_while_discovery_is_away(pair, monkeypatch, caplog):
    worker, _ = pair
    await worker.register(NAME, lambda call: None, CARD.record_for)
    await worker.records.withdraw()
    put = worker.discovery.put

    async def put_while_away(key, value):
        await put(key, value)  # when it is back
        raise errors.Unavailable("etcd is away")

    monkeypatch.setattr(worker.discovery, "put", put_while_away)
    await worker.records.restore()

    assert len(await worker.discovery.get_prefix("v1/")) == 2
    assert caplog.text.count("is published when discovery is back: etcd is away") == 2


async def test_instance_leaves_while_discovery_takes_long_to_publish_a_change(pair, monkeypatch):
    """Else a drain would wait for as long as etcd is away before it begins."""
    worker, frontend = pair
    instance = await worker.register(NAME, lambda call: None, CARD.record_for)
    put, begins, ends = worker.discovery.put, asyncio.Event(), asyncio.Event()

    async def put_slowly(key, value):
        begins.set()
        await ends.wait()
        await put(key, value)

    monkeypatch.setattr(worker.discovery, "put", put_slowly)
    record = CARD.record_for(instance)[1]
    changing = asyncio.create_task(worker.records.change(instance.card_key, lambda _: record))
    async with asyncio.timeout(PATIENT_S):
        await begins.wait()
        await worker.records.withdraw()
    ends.set()
    await changing

    assert await frontend.discovery.get_prefix("v1/") == {}


async def test_replaced_card_does_not_register_a_deregistered_instance(pair):
    worker, frontend = pair
    instance = await worker.register(NAME, echo, CARD.record_for)
    await worker.records.deregister()

    with pytest.raises(errors.Conflict, match="not in discovery now: try again"):
        await worker.records.change(instance.card_key, lambda _: CARD.record_for(instance)[1])
    assert await frontend.discovery.get_prefix("v1/") == {}


async def test_endpoint_that_is_registered_while_its_process_drains_is_not_published(pair):
    """A service may still be at its start when SIGTERM comes."""
    worker, frontend = pair
    await worker.register(NAME, echo)
    await worker.drain(0)
    await worker.register(OTHER, echo, CARD.record_for)

    assert await frontend.discovery.get_prefix("v1/") == {}


async def test_deregistered_instance_has_no_keys_but_still_answers(pair):
    worker, frontend = pair
    await worker.register(NAME, echo, CARD.record_for)
    instance = await worker.register(OTHER, echo)
    await worker.records.deregister()
    receiver = Receiver()
    await frontend.requests.open(instance.transport["memory"], NAME.path, 1, receiver)

    assert await frontend.discovery.get_prefix("v1/") == {}
    assert await receiver.over is None


async def test_draining_instance_deregisters_before_it_waits(pair):
    worker, frontend = pair
    calls = []
    await worker.register(NAME, calls.append, CARD.record_for)
    client, receiver = frontend.client(NAME), Receiver()
    await client.wait_for_instances(PATIENT_S)
    await client.open(None, receiver)
    while not calls:
        await asyncio.sleep(0)
    draining = asyncio.ensure_future(worker.drain(PATIENT_S))
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
    draining = asyncio.ensure_future(worker.drain(PATIENT_S, grace_s=60))
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
        await client.wait_for_instances(PATIENT_S)
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
    await client.wait_for_instances(PATIENT_S)
    receivers = [Receiver(), Receiver()]
    for instance, receiver in zip(both, receivers, strict=True):
        await client.open("hello", receiver, instance_id=instance.instance_id)

    assert len({instance.instance_id for instance in both}) == 2
    assert [await receiver.over for receiver in receivers] == [None, None]
    await sibling.close()
    assert list(await frontend.discovery.get_prefix("v1/instances/")) == [both[0].key]


async def test_handler_of_an_endpoint_gets_its_request_as_a_model_of_pydantic():
    pydantic = pytest.importorskip("pydantic", reason="pydantic is not installed")

    class Text(pydantic.BaseModel):
        text: str

    @decorators.dynamo_endpoint(Text, Text)
    async def shout(request):
        yield Text(text=request.text.upper())
        yield "as it is"

    assert [item async for item in shout({"text": "hi"})] == [{"text": "HI"}, "as it is"]
    with pytest.raises(errors.InvalidRequest, match=r"does not fit: 1 validation error for Text"):
        await anext(shout({"text": 1}))


@pytest.mark.parametrize("namespace", ["a b", "Upper", "a..b", "a/b", "ä"])
async def test_namespace_that_no_endpoint_could_have_is_refused(namespace):
    """A frontend took it, and waited for workers that could never come."""
    settings = RuntimeConfig(namespace=namespace, discovery_backend="memory")

    with pytest.raises(errors.ConfigError, match=r"^--namespace .*: expected a-z, 0-9, - and _"):
        await DistributedRuntime.open(settings)
