"""What a worker is told to be, and what its card says of it."""

import base64

import pytest
from worker_fakes import FakeEngine

from dynamo.base import errors
from dynamo.disagg import estimated, handoff, policy, ticket_queue, ticket_taker, tickets
from dynamo.engine import api
from dynamo.observability import metrics
from dynamo.protocols import kv_transfer, model_card
from dynamo.runtime import component
from dynamo.worker import disaggregated, settings

CARD = model_card.ModelCard(
    display_name="m", source_path="/m", context_length=8, kv_cache_block_size=4
)


class Lender(FakeEngine):
    """An engine that can lend blocks."""

    def __init__(self):
        super().__init__()
        self.is_open, self.transfer_metadata = False, None
        self.capabilities = api.EngineCapabilities(kv_transfer=self)

    def enable_export(self):
        self.is_open, self.transfer_metadata = True, b"here"

    def on_import(self, listener):
        pass

    async def connect_peer(self, metadata, *, deadline_s):
        return "e"

    async def disconnect_peer(self, engine_id):
        pass


async def prepare(engine, tmp_path, **fields):
    return (await role(engine, tmp_path, **fields)).engine


async def role(engine, tmp_path, **fields):
    worker = settings.WorkerConfig(**fields)
    async with await component.DistributedRuntime.in_memory(component.MemoryCluster()) as runtime:
        registry = metrics.Registry("x")
        return disaggregated.prepare(
            engine, worker, runtime, registry, model="m", directory=tmp_path
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
async def test_a_role_says_whose_blocks_are_open_and_who_asks(
    tmp_path, fields, is_open, asks_others
):
    engine = Lender()
    prepared = await prepare(engine, tmp_path, **fields)

    assert engine.is_open is is_open
    assert isinstance(prepared, handoff.Handoff) is asks_others
    assert asks_others or prepared is engine


@pytest.mark.parametrize(
    ("fields", "beside"),
    [
        ({"disaggregation_mode": "decode", "prefill_queue": "queue"}, ticket_queue.TicketQueue),
        ({"is_prefill_worker": True, "prefill_queue": "queue"}, ticket_taker.TicketTaker),
        ({"disaggregation_mode": "agg", "prefill_queue": "queue"}, None),
        ({"disaggregation_mode": "decode"}, None),
        ({"is_prefill_worker": True}, None),
    ],
)
async def test_who_shares_a_queue_lives_with_an_end_of_it(tmp_path, fields, beside):
    found = await role(Lender(), tmp_path, **fields)

    assert [type(one) for one in found.beside] == ([beside] if beside else [])


@pytest.mark.parametrize(
    ("ours", "theirs", "is_ours"),
    [
        ("direct", "direct", True),
        ("direct", "queue", True),
        ("queue", "queue", True),
        ("queue", "direct", False),
    ],
)
def test_who_gives_by_the_queue_counts_on_those_who_take_from_it(ours, theirs, is_ours):
    engine = Lender()
    engine.enable_export()
    taker = settings.WorkerConfig(is_prefill_worker=True, prefill_queue=theirs)
    giver = settings.WorkerConfig(prefill_queue=ours)
    recognizes = disaggregated._recognizer(giver, "m", {})

    assert recognizes(disaggregated.marked(CARD, taker, engine)) is is_ours


def test_models_that_differ_in_name_or_files_have_queues_of_their_own():
    place = settings.WorkerConfig().prefill_endpoint_name
    names = {
        tickets.queue_name(place, model, checksums)
        for model, checksums in (("m", {"a": "1"}), ("n", {"a": "1"}), ("m", {"a": "2"}))
    }

    assert len(names) == 3
    assert tickets.queue_name(place, "m", {"a": "1", "b": "2"}) == tickets.queue_name(
        place, "m", {"b": "2", "a": "1"}
    )


async def test_an_engine_that_lends_nothing_serves_alone(tmp_path):
    engine = FakeEngine()

    assert await prepare(engine, tmp_path) is engine
    with pytest.raises(errors.ConfigError, match="moves no KV blocks"):
        await prepare(engine, tmp_path, is_prefill_worker=True)


def test_the_card_of_a_prefill_worker_says_how_to_reach_its_blocks():
    engine = Lender()
    engine.enable_export()
    marked = disaggregated.marked(CARD, settings.WorkerConfig(is_prefill_worker=True), engine)

    assert marked.worker_type is model_card.WorkerType.PREFILL
    said = marked.runtime_config.runtime_data[kv_transfer.METADATA_KEY]
    assert base64.b64decode(said) == b"here"


def test_the_card_of_a_decode_worker_says_that_it_is_one_and_any_other_says_nothing():
    decode = settings.WorkerConfig(disaggregation_mode="decode")
    plain = settings.WorkerConfig()

    assert disaggregated.marked(CARD, decode, Lender()).worker_type is model_card.WorkerType.DECODE
    assert disaggregated.marked(CARD, plain, Lender()) is CARD


def test_a_prefill_worker_serves_at_a_place_of_its_own():
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


def test_two_roles_at_once_are_refused():
    worker = settings.WorkerConfig(is_prefill_worker=True, disaggregation_mode="decode")

    with pytest.raises(errors.ConfigError, match="one of the two"):
        worker.check()


async def test_a_policy_is_chosen_by_its_name(tmp_path):
    made = [
        await prepare(Lender(), tmp_path, disagg_policy=name) for name in ("lengths", "estimated")
    ]

    kinds = [policy.Lengths, estimated.Estimated]
    assert [type(one._policy) for one in made] == kinds
