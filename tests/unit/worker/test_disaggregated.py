"""The role of a worker: its engine, its hooks, its model card."""

import asyncio
import base64

import msgspec
import pytest
from worker_fakes import FakeEngine

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.disagg import policy, remote_prefill, shared_queue
from dynamo.engine import api
from dynamo.observability import metrics
from dynamo.protocols import generate, instances, kv_transfer, model_card
from dynamo.runtime import component
from dynamo.runtime.backends import memory
from dynamo.worker import disaggregated, settings
from waiting import PATIENT_S

DECODE = instances.EndpointName("n", "backend", "generate")
CARD = model_card.ModelCard(
    display_name="m", source_path="/m", context_length=8, kv_cache_block_size=4
)
FILE = model_card.ModelFile(path="/m/config.json", checksum="sha256:1", size=1)


class ExportingEngine(FakeEngine):
    """An engine that can export blocks."""

    def __init__(self, **capabilities):
        super().__init__()
        self.is_open, self.transfer_metadata = False, None
        self.capabilities = api.EngineCapabilities(kv_transfer=self, **capabilities)

    def enable_export(self):
        self.is_open, self.transfer_metadata = True, b"here"

    def on_import(self, listener):
        pass

    async def connect_peer(self, metadata, *, deadline_s):
        return "e"

    async def disconnect_peer(self, engine_id):
        pass

    def release_remote(self, params):
        pass


async def prepare(engine, tmp_path, **fields):
    return (await role(engine, tmp_path, **fields)).engine


async def role(engine, tmp_path, **fields):
    worker = settings.WorkerConfig(**fields)
    async with await component.DistributedRuntime.in_memory(
        component.MemoryCluster(), item_type=generate.Output
    ) as runtime:
        registry = metrics.Registry("x")
        return disaggregated.prepare_role(
            engine, worker, runtime, registry, clocks.SystemClock(), model="m", directory=tmp_path
        )


@pytest.mark.parametrize(
    ("fields", "is_open", "asks_others"),
    [
        ({}, False, True),
        ({"disaggregation_mode": "decode"}, True, True),
        ({"disaggregation_mode": "prefill"}, True, False),
        ({"is_prefill_worker": True}, True, False),
        ({"disaggregation_mode": "agg"}, False, False),
    ],
)
async def test_role_decides_whether_blocks_are_exported_and_prefills_are_remote(
    tmp_path, fields, is_open, asks_others
):
    engine = ExportingEngine()
    prepared = await prepare(engine, tmp_path, **fields)

    assert engine.is_open is is_open
    assert isinstance(prepared, remote_prefill.RemotePrefillEngine) is asks_others
    assert asks_others or prepared is engine


@pytest.mark.parametrize(
    ("fields", "beside"),
    [
        ({"disaggregation_mode": "decode", "prefill_queue": "queue"}, shared_queue.SharedQueue),
        ({"is_prefill_worker": True, "prefill_queue": "queue"}, shared_queue.PrefillJobConsumer),
        ({"disaggregation_mode": "agg", "prefill_queue": "queue"}, None),
        ({"disaggregation_mode": "decode"}, None),
        ({"is_prefill_worker": True}, None),
    ],
)
async def test_worker_with_a_shared_queue_has_a_hook_for_its_end(tmp_path, fields, beside):
    found = await role(ExportingEngine(), tmp_path, **fields)

    hooks = [type(one) for one in found.hooks]
    is_prefill = "is_prefill_worker" in fields
    assert hooks == [beside] * (beside is not None) + [disaggregated.DecodeWorkerCheck] * is_prefill


@pytest.mark.parametrize(
    ("own", "other", "is_usable"),
    [
        ("direct", "direct", True),
        ("direct", "queue", True),
        ("queue", "queue", True),
        ("queue", "direct", False),
    ],
)
def test_decode_worker_with_a_shared_queue_uses_workers_that_take_from_it(own, other, is_usable):
    engine = ExportingEngine()
    engine.enable_export()
    prefill = settings.WorkerConfig(is_prefill_worker=True, prefill_queue=other)
    decode = settings.WorkerConfig(prefill_queue=own)
    accepts = disaggregated._prefill_worker_filter(decode, CARD)

    assert accepts(disaggregated.add_role(CARD, prefill, engine)) is is_usable


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"weights": "2"}, "the weights"),
        ({"files": {"config.json": FILE}}, "config.json"),
        ({"weights": ""}, None),
        ({"weights": "1"}, None),
    ],
)
def test_prefill_worker_with_other_weights_or_files_is_not_used_and_named(
    changes, difference, caplog
):
    own = msgspec.structs.replace(CARD, weights="1")
    accepts = disaggregated._prefill_worker_filter(settings.WorkerConfig(), own)

    assert accepts(msgspec.structs.replace(own, **changes)) is (difference is None)
    assert (f": {difference} in /m differs" in caplog.text) is (difference is not None)


async def test_prefill_worker_names_decode_workers_with_other_weights(caplog):
    own = msgspec.structs.replace(CARD, weights="1")
    registry = memory.MemoryDiscovery(memory.MemoryRegistry())
    check = disaggregated.DecodeWorkerCheck(DECODE, registry, own)
    await check.start()
    await registry.put(
        f"{instances.CARDS}{DECODE.path}/9", b'{"type": "Model", "namespace": "\xff"}'
    )
    for number, change in enumerate(({"weights": "1"}, {"display_name": "n"}, {"weights": "2"}), 1):
        instance = instances.Instance(
            namespace="n",
            component="backend",
            endpoint="generate",
            instance_id=number,
            transport={},
        )
        key, record = msgspec.structs.replace(own, **change).record_for(instance)
        await registry.put(key, msgspec.json.encode(record))
    async with asyncio.timeout(PATIENT_S):
        while "does not use us" not in caplog.text:
            await asyncio.sleep(0)
    await check.close()

    assert [record.getMessage() for record in caplog.records] == [
        "a decode worker does not use us: the weights in /m differs from ours in /m"
    ]


def test_models_that_differ_in_name_or_files_have_queues_of_their_own():
    place = settings.WorkerConfig().prefill_endpoint_name
    names = {
        shared_queue.queue_name(place, model, checksums)
        for model, checksums in (("m", {"a": "1"}), ("n", {"a": "1"}), ("m", {"a": "2"}))
    }

    assert len(names) == 3
    assert shared_queue.queue_name(place, "m", {"a": "1", "b": "2"}) == shared_queue.queue_name(
        place, "m", {"b": "2", "a": "1"}
    )


async def test_engine_without_kv_transfer_serves_aggregated(tmp_path):
    engine = FakeEngine()

    assert await prepare(engine, tmp_path) is engine
    with pytest.raises(errors.ConfigError, match=r"moves no KV blocks.* with nixl among"):
        await prepare(engine, tmp_path, is_prefill_worker=True)


def test_card_of_a_prefill_worker_has_its_transfer_metadata():
    engine = ExportingEngine()
    engine.enable_export()
    marked = disaggregated.add_role(CARD, settings.WorkerConfig(is_prefill_worker=True), engine)

    assert marked.worker_type is model_card.WorkerType.PREFILL
    said = marked.runtime_config.runtime_data[kv_transfer.METADATA_KEY]
    assert base64.b64decode(said) == b"here"


@pytest.mark.parametrize(
    ("options", "kind", "data"),
    [
        ({"disaggregation_mode": "decode"}, model_card.WorkerType.DECODE, {}),
        ({}, model_card.WorkerType.AGGREGATED, {kv_transfer.IMPORTS_KEY: True}),
        ({"disaggregation_mode": "agg"}, model_card.WorkerType.AGGREGATED, {}),
    ],
)
def test_card_says_the_role_and_whether_a_worker_without_one_can_copy_blocks(options, kind, data):
    made = disaggregated.add_role(CARD, settings.WorkerConfig(**options), ExportingEngine())

    assert (made.worker_type, made.runtime_config.runtime_data) == (kind, data)


def test_card_says_that_no_blocks_are_copied_for_several_choices():
    engine = ExportingEngine(imports_choices=False)
    made = disaggregated.add_role(CARD, settings.WorkerConfig(disaggregation_mode="decode"), engine)

    assert made.runtime_config.runtime_data == {kv_transfer.CHOICES_KEY: False}


def test_card_says_up_to_which_length_the_worker_computes_prompts():
    worker = settings.WorkerConfig(max_local_prefill_length=0)
    made = disaggregated.add_role(CARD, worker, ExportingEngine())

    assert made.runtime_config.runtime_data[kv_transfer.LOCAL_LENGTH_KEY] == 0


def test_prefill_worker_serves_at_its_own_endpoint():
    places = [
        str(settings.WorkerConfig(**fields).endpoint_name)
        for fields in (
            {},
            {"is_prefill_worker": True},
            {"is_prefill_worker": True, "prefill_endpoint": "dyn://a.b.c"},
            {"is_prefill_worker": True, "endpoint": "dyn://d.e.f"},
        )
    ]

    assert places == [
        "dyn://dynamo.backend.generate",
        "dyn://dynamo.prefill.generate",
        "dyn://a.b.c",
        "dyn://d.e.f",
    ]


@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        (
            {"is_prefill_worker": True, "disaggregation_mode": "decode"},
            "--is-prefill-worker and --disaggregation-mode decode",
        ),
        (
            {"is_decode_worker": True, "disaggregation_mode": "agg"},
            "--is-decode-worker and --disaggregation-mode agg",
        ),
        (
            {"is_prefill_worker": True, "is_decode_worker": True},
            "--is-prefill-worker and --is-decode-worker",
        ),
    ],
)
def test_two_roles_at_once_are_refused(fields, flags):
    with pytest.raises(errors.ConfigError, match=f"^{flags}: expected one of them$"):
        settings.WorkerConfig(**fields).check()


def test_decode_worker_is_marked_by_either_flag():
    ways = ({"is_decode_worker": True}, {"disaggregation_mode": "decode"})
    workers = [settings.WorkerConfig(**fields) for fields in ways]
    cards = [disaggregated.add_role(CARD, worker, ExportingEngine()) for worker in workers]

    assert [card.worker_type for card in cards] == [model_card.WorkerType.DECODE] * 2


async def test_policy_is_selected_by_its_name(tmp_path):
    made = [
        await prepare(ExportingEngine(), tmp_path, disagg_policy=name)
        for name in ("lengths", "estimated")
    ]

    kinds = [policy.LengthPolicy, policy.EstimatePolicy]
    assert [type(one._policy) for one in made] == kinds


async def test_unreachable_prefill_workers_are_on_the_card_beside_what_was_there():
    async with await component.DistributedRuntime.in_memory(
        component.MemoryCluster(), item_type=generate.Output
    ) as runtime:
        with pytest.raises(errors.Conflict):
            await disaggregated.publish_unreachable(runtime, DECODE, frozenset({2}))
        facts = model_card.ModelRuntimeConfig(runtime_data={kv_transfer.IMPORTS_KEY: True})
        own = msgspec.structs.replace(CARD, runtime_config=facts, lora_names=("poet",))
        instance = await runtime.register(DECODE, lambda call: call.finish(), own.record_for)
        await disaggregated.publish_unreachable(runtime, DECODE, frozenset({2, 1}))
        records = await runtime.discovery.get_prefix(instance.card_key)
    found = msgspec.json.decode(records[instance.card_key], type=model_card.CardRecord).card_json

    assert found.lora_names == ("poet",)
    assert found.runtime_config.runtime_data == {
        kv_transfer.IMPORTS_KEY: True,
        kv_transfer.UNREACHABLE_KEY: [1, 2],
    }
