"""Tiers under real vLLM: answers are those of computing, whatever was evicted, lost, aborted or restarted.

One engine of 24 blocks serves all tests; two of them start another one that shares its host and disk tier.
"""

import importlib.util
import itertools
import json
import os
import time
import zlib
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: make test-vllm", allow_module_level=True)

import prometheus_client
import pytest_asyncio

import vllm_engine
import vllm_models
import vllm_tier_faults
from dynamo.engine.adapters.settings import VllmConfig
from dynamo.observability import tracing
from dynamo.protocols import kv_events
from engine_suite import Host, Sink
from foreign_engine import shared  # noqa: F401 (a fixture)
from vllm_engine import adapter, host  # noqa: F401 (a fixture)

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
]
BLOCK = 32
OPTIONS = {"kvbm_cpu_cache_override_num_blocks": 128, "kvbm_disk_cache_override_num_blocks": 400}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("tiers")


@pytest.fixture(scope="module")
def make_engine(directory):
    """With our connector by its published name, or by a module with faults."""
    model = vllm_models.make(directory / "model")
    options = OPTIONS | {
        "kvbm_nvme_path": str(directory / "disk"),
        "kvbm_sharing_workers": 2,
        "kvbm_shared_memory_dir": str(directory / "memory"),
    }
    transfer = {
        "kv_connector": "DynamoConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_module_path": "vllm_tier_faults", "kv_connector_extra_config": options,
    }  # fmt: skip

    def make(*, is_faulty=True):
        flags = vllm_engine.FLAGS.split()
        if is_faulty:
            flags += ["--kv-transfer-config", json.dumps(transfer)]
            return adapter.build(model, VllmConfig(engine_args=tuple(flags)), "m")
        settings = VllmConfig(engine_args=tuple(flags), connector=("kvbm",), **options)
        return adapter.build(model, settings, "m")

    with pytest.MonkeyPatch.context() as patch:
        for name, value in vllm_engine.ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv(vllm_tier_faults.FAULTS, str(directory))
        paths = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        yield make


@pytest_asyncio.fixture(loop_scope="module")
async def worker(host):  # noqa: F811 (a fixture)
    """The engine, which has computed enough to know that a load is worth its time."""
    await host.answer("warm", prompt(999, 200), max_tokens=2)
    await host.engine.clear_kv_blocks()
    return host


def prompt(seed, length):
    return [(i * 37 + seed * 101) % 4000 + 5 for i in range(length)]


async def evict(host, name):  # noqa: F811
    """Fill vLLM's 24 blocks with other prompts."""
    for i in range(2):
        await host.answer(
            f"{name} {i}", prompt(zlib.crc32(f"{name} {i}".encode()) % 500 + 500, 380), max_tokens=2
        )


def num_preemptions():
    return prometheus_client.REGISTRY.get_sample_value(
        "vllm:num_preemptions_total", {"model_name": "m", "engine": "0"}
    )


def counts(host):  # noqa: F811
    return host.engine.capabilities.kv_tiers.report_tiers().counts


def loaded(host, request_id, index=0):  # noqa: F811
    return dict(host.sink.of(request_id, index)[-1].tier_tokens or ())


async def test_evicted_prompt_is_loaded_from_host_memory_with_the_same_answer(worker):
    for length in (100, 300):  # before the step, and beside it
        first = await worker.answer(f"a{length}", prompt(length, length), max_tokens=12)
        await evict(worker, f"other{length}")
        again = await worker.answer(f"b{length}", prompt(length, length), max_tokens=12)

        assert again == first
        assert loaded(worker, f"b{length}") == {"host": length // BLOCK * BLOCK}
        assert worker.sink.of(f"b{length}")[0].cached_tokens == length // BLOCK * BLOCK
    held = [e for e in worker.sink.events if isinstance(e, kv_events.Stored)]
    assert {event.tier for event in held} >= {kv_events.DEVICE, kv_events.HOST, kv_events.DISK}
    assert worker.engine.capabilities.kv_tiers.report_tiers().host_hit_rate > 0


async def test_reads_from_tiers_are_stages_of_a_traced_call(worker):
    await worker.answer("t1", prompt(70, 300), max_tokens=2)
    await evict(worker, "untraced")
    record = tracing.StageRecord()
    began_at = time.monotonic()
    token = tracing.stage_record.set(record)
    await worker.answer("t2", prompt(70, 300), max_tokens=4)
    tracing.stage_record.reset(token)

    num_blocks = 300 // BLOCK
    (read,) = record.stages
    assert (read.attributes["tier"], read.attributes["to"]) == ("host", "device")
    assert read.attributes["blocks"] == num_blocks
    assert read.attributes["bytes"] % num_blocks == 0
    assert began_at <= read.began_at < read.ended_at <= time.monotonic()
    assert record.attributes == {"cached_tokens.host": num_blocks * BLOCK}


async def test_many_at_once_with_choices_answer_as_if_each_were_alone(worker):
    prompts = {f"m{i}": prompt(i % 8, 100 + 20 * (i % 8)) for i in range(32)}
    alone = {}
    for i in range(8):
        alone[i] = await worker.answer(f"alone{i}", prompts[f"m{i}"], max_tokens=6)
    for name, tokens in prompts.items():
        worker.submit(name, tokens, max_tokens=6, n=2 if name == "m3" else 1)
    for i, name in enumerate(prompts):
        await worker.sink.until_ended(name, n=2 if name == "m3" else 1)
        assert worker.sink.tokens(name) == alone[i % 8]
    assert worker.sink.tokens("m3", 1) == alone[3]
    assert counts(worker)["matched_tokens"] > 0


async def test_failed_load_is_computed_and_is_no_hit(worker, directory):
    first = await worker.answer("f1", prompt(71, 300), max_tokens=12)
    await evict(worker, "other")
    before = counts(worker)
    (directory / "fail").touch()
    again = await worker.answer("f2", prompt(71, 300), max_tokens=12)
    short = await worker.answer("f3", prompt(71, 300)[:100], max_tokens=12)
    (directory / "fail").unlink()

    assert again == first
    assert len(short) == 12
    assert loaded(worker, "f2") == {}
    assert counts(worker)["matched_tokens"] == before["matched_tokens"]
    assert counts(worker)["failed_blocks"] > before["failed_blocks"]


async def test_request_that_is_aborted_while_it_loads_frees_everything(worker, directory):
    first = await worker.answer("g1", prompt(81, 300), max_tokens=12)
    await evict(worker, "other")
    (directory / "slow").touch()
    worker.submit("g2", prompt(81, 300), max_tokens=12)
    other = await worker.answer("g3", prompt(82, 20), max_tokens=6)  # goes on meanwhile
    worker.engine.abort("g2")
    (directory / "slow").unlink()
    await worker.engine.clear_kv_blocks()  # raises if blocks are held for longer

    assert len(other) == 6
    assert worker.sink.tokens("g2") == []
    assert await worker.answer("g4", prompt(81, 300), max_tokens=12) == first
    assert loaded(worker, "g4") == {}


async def test_preempted_requests_answer_as_if_each_were_alone(worker):
    prompts = {f"p{i}": prompt(40 + i, 160) for i in range(4)}  # 24 blocks; with answers 36
    alone = {}
    for name, tokens in prompts.items():
        alone[name] = await worker.answer(f"{name} alone", tokens, max_tokens=120)
    before = num_preemptions()
    for name, tokens in prompts.items():
        worker.submit(name, tokens, max_tokens=120)
    for name in prompts:
        await worker.sink.until_ended(name)

    assert num_preemptions() > before
    assert {name: worker.sink.tokens(name) for name in prompts} == alone
    await worker.engine.clear_kv_blocks()  # raises if blocks are held for longer


@pytest.mark.parametrize("fault", ["fail", "slow", "full"])
async def test_faulty_copies_under_32_requests_change_no_answer_and_hold_no_block(
    worker, directory, fault
):
    """Some requests are preempted, and every fifth is aborted."""
    prompts = [prompt(700 + i, 160) for i in range(8)]
    alone = [
        await worker.answer(f"{fault} {i} alone", tokens, max_tokens=60)
        for i, tokens in enumerate(prompts)
    ]
    before, rounds = num_preemptions(), itertools.count()
    (directory / fault).touch()
    try:
        while num_preemptions() == before:  # where copies hold up many, those that run have room
            number = next(rounds)
            names = [f"{fault} {number} {i}" for i in range(32)]
            for i, name in enumerate(names):
                worker.submit(name, prompts[i % 8], max_tokens=60)
            await worker.sink.until_ended(names[0])
            aborted = names[9::5]
            for name in aborted:
                worker.engine.abort(name)
            for i, name in enumerate(names):
                if name not in aborted:
                    await worker.sink.until_ended(name)
                    assert worker.sink.tokens(name) == alone[i % 8]
    finally:
        (directory / fault).unlink()

    await worker.engine.clear_kv_blocks()  # raises if blocks are held for longer


async def test_engine_loads_what_another_one_of_the_host_has_computed(worker, make_engine):
    first = await worker.answer("s1", prompt(95, 300), max_tokens=12)
    sink = Sink()
    engine = make_engine(is_faulty=False)
    other = Host(engine, sink, await engine.start(sink))
    try:
        again = await other.answer("s2", prompt(95, 300), max_tokens=12)

        assert again == first
        assert loaded(other, "s2") == {"host": 288}
        assert counts(other)["shared_blocks"] == 9
    finally:
        await engine.stop()


async def test_restarted_engine_loads_its_first_prompt_from_disk(worker, shared, make_engine):  # noqa: F811
    first = await worker.answer("r1", prompt(91, 300), max_tokens=12)
    reporter = worker.engine.capabilities.kv_tiers
    for i in range(100):  # the report comes with a step
        if reporter.report_tiers().tiers[2].used_blocks >= 9:
            break
        await worker.answer(f"r1 {i}", prompt(92, 10), max_tokens=1)
    await shared[0].stop()
    sink = Sink()
    engine = make_engine(is_faulty=False)
    restarted = Host(engine, sink, await engine.start(sink))
    try:
        again = await restarted.answer("r2", prompt(91, 300), max_tokens=12)

        assert again == first
        assert loaded(restarted, "r2") == {"disk": 288}
    finally:
        await engine.stop()


async def test_engine_that_is_cleared_before_its_first_step_finds_nothing_on_its_disk(make_engine):
    loaded_tokens = []
    for is_cleared in (False, True):  # the first one loads what the tests before have left
        sink = Sink()
        engine = make_engine(is_faulty=False)
        started = Host(engine, sink, await engine.start(sink))
        try:
            if is_cleared:
                await engine.clear_kv_blocks()
            await started.answer("c", prompt(91, 300), max_tokens=2)
            loaded_tokens.append(loaded(started, "c"))
        finally:
            await engine.stop()

    assert loaded_tokens == [{"disk": 288}, {}]
