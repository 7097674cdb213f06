"""The engine around vLLM's that imports prompts, over one that does what the test says."""

import os

import pytest

import kv_params
from dynamo.base import errors
from dynamo.engine import api
from dynamo.engine.adapters.vllm import connectors, kv_transfer_engine
from dynamo.protocols import blocks, generate, kv_transfer
from dynamo.testing import clock as clocks

PLACE = connectors.decode_params({
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]], "remote_engine_id": "e_dp0",
    "remote_request_id": "r-1", "remote_host": "127.0.0.1", "remote_port": 5, "remote_prefill_cached_tokens": 5,
})  # fmt: skip
LOST = errors.EngineFailed("vLLM gave the request up")


class Engine:
    capabilities = api.EngineCapabilities()

    def __init__(self):
        self.done, self.refusal, self.environment = [], None, None

    async def start(self, sink):
        self.sink = sink
        self.environment = dict(os.environ)
        return "facts"

    def submit(self, request):
        if self.refusal is not None:
            raise self.refusal
        self.done.append(request)

    def abort(self, request_id):
        self.done.append(("abort", request_id))

    def abort_choice(self, request_id, index):
        self.done.append(("abort", request_id, index))

    def load(self):
        return ["load"]

    async def clear_kv_blocks(self):
        self.done.append("clear")

    async def stop(self):
        self.done.append("stop")


class Sink:
    def __init__(self):
        self.heard = []

    def outputs(self, batch):
        self.heard += batch

    def failed(self, request_id, error):
        self.heard.append((request_id, error))

    def kv_events(self, events, dp_rank=0):
        self.heard.append((events, dp_rank))

    def died(self, error):
        self.heard.append(error)


class World:
    def __init__(self, **options):
        self.inner, self.sink, self.reports = Engine(), Sink(), []
        self.clock = clocks.VirtualClock()
        options = {"engine_id": "me", "connector": connectors.NIXL} | options
        self.engine = kv_transfer_engine.KvTransferEngine(self.inner, self.clock, **options)
        self.engine.on_import(self.reports.append)

    async def start(self):
        assert await self.engine.start(self.sink) == "facts"
        return self


def made(params=PLACE, n=1):
    return generate.Request(
        id="a",
        model="m",
        token_ids=blocks.pack([1, 2, 3]),
        sampling_options=generate.SamplingOptions(n=n),
        kv_transfer_params=params,
    )


def output(token=7, params=None, cached=None):
    said = generate.Output((token,), kv_transfer_params=params, cached_tokens=cached)
    return api.EngineOutput("a", said)


@pytest.fixture
async def world():
    return await World().start()


def test_engine_has_the_capability_of_kv_transfer_for_one_choice():
    engine = World().engine

    assert engine.capabilities == api.EngineCapabilities(kv_transfer=engine, imports_choices=False)


@pytest.mark.parametrize("params", [None, kv_transfer.COMPUTE_LOCALLY, kv_transfer.PREFILL_ONLY])
async def test_request_without_an_import_passes_through_unchanged(world, params):
    request = made(params)

    world.engine.submit(request)
    world.inner.sink.outputs([output(params=PLACE)])
    world.inner.sink.failed("a", LOST)
    world.inner.sink.kv_events(["event"], 3)

    assert world.inner.done == [request]
    assert world.sink.heard == [output(params=PLACE), ("a", LOST), (["event"], 3)]
    assert world.reports == []


async def test_vllm_gets_only_the_parameters_that_it_supports(world):
    world.engine.submit(made(kv_transfer.PREFILL_WITH_TOKEN))

    assert world.inner.done == [made(kv_transfer.PREFILL_ONLY)]


async def test_first_output_reports_the_import(world):
    world.engine.submit(made())
    world.inner.sink.outputs([output(7)])
    world.inner.sink.outputs([output(8)])

    (report,) = world.reports
    assert (report.request_id, report.engine_id, report.num_blocks, report.error) == ("a", "e", 2, None)  # fmt: skip
    assert world.sink.heard == [output(7, cached=5), output(8)]


async def test_cached_tokens_are_those_of_the_prefill_engine(world):
    """vLLM 0.32 says so itself; older ones count what they have fetched."""
    world.engine.submit(made(kv_transfer.PREFILL_ONLY))
    world.inner.sink.outputs(
        [output(params=kv_params.of_connector(remote_engine_id="x"), cached=32)]
    )
    ((_, told),) = world.sink.heard

    assert told.kv_transfer_params.connector == {
        "remote_engine_id": "x", "remote_prefill_cached_tokens": 32,
    }  # fmt: skip


async def test_request_of_a_failed_import_is_submitted_again_without_parameters(world, caplog):
    world.engine.submit(made())
    world.inner.sink.failed("a", LOST)
    world.inner.sink.outputs([output()])

    assert world.inner.done == [made(), made(None)]
    assert [report.error for report in world.reports] == [LOST]
    assert world.sink.heard == [output()]
    assert "a: its prompt is computed here" in caplog.text


async def test_request_that_fails_after_its_first_output_is_not_submitted_again(world):
    world.engine.submit(made())
    world.inner.sink.outputs([output()])
    world.inner.sink.failed("a", LOST)

    assert world.inner.done == [made()]
    assert world.sink.heard[-1] == ("a", LOST)


async def test_refused_request_is_not_submitted_again(world):
    refusal = errors.InvalidRequest("no")
    world.engine.submit(made())
    world.inner.sink.failed("a", refusal)

    assert world.inner.done == [made()]
    assert world.sink.heard == [("a", refusal)]


async def test_refusal_of_the_second_submission_reaches_the_sink(world):
    world.engine.submit(made())
    world.inner.refusal = errors.EngineFailed("dead")
    world.inner.sink.failed("a", LOST)

    assert world.sink.heard == [("a", world.inner.refusal)]


async def test_import_fails_after_its_time_limit(world):
    world.engine.submit(made())
    await world.clock.advance(kv_transfer_engine.FIRST_TOKEN_S - 0.01)
    assert world.reports == []
    await world.clock.advance(0.01)

    assert world.inner.done == [made(), ("abort", "a"), made(None)]
    assert isinstance(world.reports[0].error, errors.DeadlineExceeded)


async def test_aborted_request_ends_its_import(world):
    world.engine.submit(made())
    world.engine.abort("a")
    world.engine.submit(made())
    world.engine.abort_choice("a", 0)
    world.engine.submit(made())
    await world.engine.stop()
    await world.clock.advance(kv_transfer_engine.FIRST_TOKEN_S)

    assert world.inner.done[1::2] == [("abort", "a"), ("abort", "a", 0), "stop"]
    assert world.reports == []


async def test_request_with_several_choices_does_not_import(world):
    world.engine.submit(made(n=2))

    assert world.inner.done == [made(None, n=2)]


async def test_parameters_without_an_engine_are_refused(world):
    with pytest.raises(errors.RemoteProtocolError, match=r"got \['remote_port'\]"):
        world.engine.submit(made(kv_params.of_connector(remote_port=1)))

    assert world.inner.done == []


async def test_metadata_is_published_only_if_export_is_enabled(world):
    before = world.engine.transfer_metadata
    world.engine.enable_export()

    assert before is None
    assert await world.engine.connect_peer(world.engine.transfer_metadata, deadline_s=1) == "me"
    await world.engine.disconnect_peer("me")


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        (b"\x00", "expected the metadata of a vLLM"),
        (b'{"vllm_engine_id":"x","connector":"LMCacheConnectorV1"}', "moves blocks by LMCache"),
    ],
)
async def test_engine_of_another_kind_is_not_connected(world, metadata, says):
    with pytest.raises(errors.TransferError, match=says):
        await world.engine.connect_peer(metadata, deadline_s=1)


async def test_vllms_processes_inherit_variables_that_this_process_does_not_keep(monkeypatch):
    monkeypatch.setenv("KEPT", "before")
    monkeypatch.delenv("NEW", raising=False)

    world = await World(environment=lambda _: {"KEPT": "while", "NEW": "1"}).start()

    assert (world.inner.environment["KEPT"], world.inner.environment["NEW"]) == ("while", "1")
    assert (os.environ["KEPT"], os.environ.get("NEW")) == ("before", None)


async def test_ports_that_the_variables_name_are_kept_until_the_engine_has_started():
    had_started = []

    def environment(reservations):
        reservations.callback(lambda: had_started.append(world.inner.environment is not None))
        return {}

    world = World(environment=environment)
    await world.start()

    assert had_started == [True]


async def test_other_methods_are_those_of_the_inner_engine(world):
    await world.engine.clear_kv_blocks()
    world.inner.sink.died(LOST)

    assert world.engine.load() == ["load"]
    assert world.inner.done == ["clear"]
    assert world.sink.heard == [LOST]
