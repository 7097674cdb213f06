"""The native engine with cache tiers: answers are those of an engine without, whatever was evicted, lost or damaged."""

import asyncio
import contextlib
import errno
import functools
import os
import random
import shutil
import threading
import time
from collections import Counter

import pytest

from checkpoints import make_checkpoint
from devices import DEVICE
from dynamo.base import errors
from dynamo.engine.native import device_memory
from dynamo.engine.native.engine import NativeEngine
from dynamo.engine.native.settings import NativeConfig
from dynamo.kvbm import storage, tier_copies, tier_policy, tiered_cache
from dynamo.observability import tracing
from dynamo.protocols import blocks, generate, kv_events
from dynamo.transfer import api as transfer
from waiting import PATIENT_S, eventually, until

BLOCK = 4  # tokens
VOCABULARY = 100
NUM_USERS, NUM_TURNS = 4, 4


class Sink:
    def __init__(self):
        self.ends, self.tokens, self.cached, self.by_tier = {}, {}, {}, {}
        self.held = {tier: {} for tier in kv_events.TIERS}
        self.faults = []  # of events

    def outputs(self, batch):
        for request_id, output in batch:
            self.tokens.setdefault(request_id, []).extend(output.token_ids)
            if output.cached_tokens is not None:
                self.cached[request_id] = output.cached_tokens
                self.by_tier[request_id] = dict(output.tier_tokens or ())
            if output.finish_reason is not None:
                self.ends[request_id].set_result(None)

    def failed(self, request_id, error):
        self.ends[request_id].set_exception(error)

    def kv_events(self, events, dp_rank=0):
        try:
            self.apply(events)
        except (AssertionError, KeyError) as error:
            self.faults.append(error)

    def apply(self, events):
        for event in events:
            match event:
                case kv_events.Stored(blocks=stored, tier=tier):
                    for block in stored:
                        assert block.block_hash not in self.held[tier]
                        self.held[tier][block.block_hash] = block.tokens_hash
                case kv_events.Removed(block_hashes=names, tier=tier):
                    for name in names:
                        del self.held[tier][name]
                case kv_events.Cleared():
                    for held in self.held.values():
                        held.clear()

    def died(self, error):
        for end in self.ends.values():
            if not end.done():
                end.set_exception(error)


class Served:
    def __init__(self, engine, sink):
        self.engine, self.sink = engine, sink
        self.num_requests = 0

    def submit(self, prompt, max_tokens=6, hint=None, salt=None, **sampling):
        self.num_requests += 1
        request_id = str(self.num_requests)
        self.sink.ends[request_id] = asyncio.get_running_loop().create_future()
        self.engine.submit(
            generate.Request(
                id=request_id,
                model="m",
                token_ids=blocks.pack(prompt),
                cache_hint=hint,
                cache_salt=salt,
                stop_conditions=generate.StopConditions(max_tokens=max_tokens),
                sampling_options=generate.SamplingOptions(**({"temperature": 0.0} | sampling)),
            )
        )
        return request_id

    async def answer(self, prompt, **options):
        request_id = self.submit(prompt, **options)
        async with asyncio.timeout(PATIENT_S):
            await self.sink.ends[request_id]
        return self.sink.tokens[request_id]

    async def settle(self):
        """Return the report when no copy runs or waits, and the load says so too."""
        is_settled = False
        async with asyncio.timeout(PATIENT_S):
            while not is_settled:
                await asyncio.sleep(0.005)
                is_settled = await self.look(self._is_settled)
        return self.engine.report_tiers()

    async def look(self, see):
        """Return what `see` returns in the engine's thread, between two steps."""
        seen = asyncio.get_running_loop().create_future()

        def command():
            seen.get_loop().call_soon_threadsafe(seen.set_result, see())

        self.engine._started.loop._commands.put(command)
        return await seen

    def _is_settled(self):
        loop = self.engine._started.loop
        tiers = loop._scheduler.tiers
        questions = tiers.asks_store and tiers._preparations.questions._running
        runs = any(tiers._copies.num_running.values()) or any(tiers.num_queued.values())
        return not (runs or questions) and loop.load == loop._scheduler.load()


@contextlib.asynccontextmanager
async def serving(path, **options):
    shape = {
        "block_size": BLOCK,
        "threads": 1,
        "num_gpu_blocks_override": 512,
        "max_num_batched_tokens": 64,
    }
    shape |= {"max_num_seqs": 8}
    engine, sink = NativeEngine(path, NativeConfig(**(shape | options))), Sink()
    await engine.start(sink)
    try:
        yield Served(engine, sink)
    finally:
        await engine.stop()
    assert not sink.faults


def tiers(host=None, disk=None, path=None, **options):
    """Options for tiers of so many blocks."""
    return {
        "connector": "kvbm",
        "kvbm_cpu_cache_override_num_blocks": host,
        "kvbm_disk_cache_override_num_blocks": disk,
        "kvbm_nvme_path": None if path is None else str(path),
    } | options


max_wait_s = tier_policy.LoadCost.max_wait_s


@pytest.fixture(autouse=True)
def loading_pays(monkeypatch):
    """The decision is by measured times, and on a busy machine a copy may take longer than this small model."""
    monkeypatch.setattr(tier_policy.LoadCost, "pays", lambda *_: True)
    monkeypatch.setattr(tier_policy.LoadCost, "max_wait_s", lambda *_: PATIENT_S)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiers"), "qwen3", vocab_size=VOCABULARY)


def text(seed, length):
    draw = random.Random(seed)
    return [draw.randrange(3, VOCABULARY) for _ in range(length)]


async def converse(served, *, sampling=({},), at_once=True):
    """Answers of users that resend their history, turn by turn."""
    histories = [text(user, 17) for user in range(NUM_USERS)]
    answers = []
    for turn in range(NUM_TURNS):
        jobs = [
            served.answer(history, **sampling[user % len(sampling)])
            for user, history in enumerate(histories)
        ]
        if at_once:
            said = await asyncio.gather(*jobs)
        else:
            said = [await job for job in jobs]
        answers.append(said)
        for user, history in enumerate(histories):
            history += said[user] + text(100 * turn + user, 9)
    return answers


SAMPLINGS = ({}, {"temperature": 1.0, "seed": 7}, {"temperature": 0.7, "seed": 8, "top_p": 0.9})


@pytest.fixture(scope="module")
def expected(model):
    async def run():
        async with serving(model) as served:
            return await converse(served, sampling=SAMPLINGS)

    return asyncio.run(run())


@pytest.mark.parametrize("num_device", [34, 512])
@pytest.mark.parametrize(
    ("num_host", "num_disk"), [(200, None), (12, None), (200, 400), (12, 400), (12, 30)]
)
async def test_answers_are_equal_with_every_combination_of_tiers(
    model, expected, tmp_path, num_device, num_host, num_disk
):
    path = tmp_path if num_disk else None
    options = tiers(num_host, num_disk, path)
    async with serving(model, num_gpu_blocks_override=num_device, **options) as served:
        assert await converse(served, sampling=SAMPLINGS) == expected
        report = await served.settle()
        assert await converse(served, sampling=SAMPLINGS) == expected

    assert report.copied["offload_blocks_d2h"] > 0
    assert (report.copied["offload_blocks_h2d"] > 0) == (num_disk is not None)
    assert report.counts["failed_blocks"] == 0


async def test_second_turn_is_loaded_from_host_memory_when_the_engine_has_evicted_it(model):
    prompt = text(1, 80)
    async with serving(model, num_gpu_blocks_override=34, **tiers(200)) as served:
        first = await served.answer(prompt)
        for seed in range(2, 6):
            await served.settle()
            await served.answer(text(seed, 100))
        again = await served.answer(prompt)
        report = served.engine.report_tiers()
        last = str(served.num_requests)

    assert again == first
    assert served.sink.cached[last] == 76
    num_loaded = served.sink.by_tier[last]["host"]
    assert report.counts["matched_tokens"] == num_loaded > 0


@pytest.mark.parametrize(
    ("hint", "num_cached"), [(None, 0), (generate.CacheHint(ttl_s=3600, is_pinned=True), 76)]
)
async def test_pinned_prompt_stays_in_host_memory_that_others_overrun(model, hint, num_cached):
    prompt = text(1, 80)
    async with serving(model, num_gpu_blocks_override=34, **tiers(50)) as served:
        first = await served.answer(prompt, hint=hint)
        await served.settle()
        for seed in range(2, 6):
            await served.answer(text(seed, 100))
            report = await served.settle()
        assert await served.answer(prompt) == first
        assert served.sink.cached["6"] == num_cached

    assert (report.tiers[1].kept_blocks > 0) == (hint is not None)


async def test_prompt_for_memory_only_is_not_found_on_disk_after_a_restart(model, tmp_path):
    prompt, hint = text(1, 80), generate.CacheHint(is_memory_only=True)
    async with serving(model, **tiers(100, 400, tmp_path)) as served:
        await served.answer(prompt, hint=hint)
        report = await served.settle()
    async with serving(model, **tiers(100, 400, tmp_path)) as served:
        await served.answer(prompt)
        assert served.sink.cached["1"] == 0

    assert report.tiers[2].used_blocks == 0
    assert report.counts["kept_off_disk"] > 0


async def test_prompt_is_loaded_from_disk_after_a_restart(model, tmp_path):
    prompt = text(1, 80)
    async with serving(model, **tiers(100, 400, tmp_path)) as served:
        first = await served.answer(prompt)
        await served.settle()
    async with serving(model, **tiers(100, 400, tmp_path)) as served:
        again = await served.answer(prompt)

        assert again == first
        assert served.sink.by_tier["1"] == {"disk": 76}
        assert len(served.sink.held[kv_events.DISK]) >= 20


@contextlib.contextmanager
def traced():
    """Handle a call whose spans are exported."""
    record = tracing.StageRecord()
    token = tracing.stage_record.set(record)
    try:
        yield record
    finally:
        tracing.stage_record.reset(token)


async def test_reads_from_tiers_are_stages_of_a_traced_call(model, tmp_path):
    prompt = text(1, 80)
    async with serving(model, **tiers(100, 400, tmp_path)) as served:
        await served.answer(prompt)
        await served.settle()
    async with serving(model, **tiers(100, 400, tmp_path)) as served:
        began_at = time.monotonic()
        with traced() as record:
            await served.answer(prompt)
        ended_at = time.monotonic()
        await served.answer(prompt)
        num_bytes = served.engine._started.loop._scheduler.tiers.block_bytes

    *from_disk, from_host = [dict(stage.attributes) for stage in record.stages]
    assert {stage.name for stage in record.stages} == {"read_tier"}
    assert {(read["tier"], read["to"]) for read in from_disk} == {("disk", "host")}
    assert sum(read["blocks"] for read in from_disk) == 19
    assert sum(read["bytes"] for read in from_disk) == 19 * num_bytes
    assert from_host == {
        "tier": "host", "to": "device", "blocks": 19, "bytes": 19 * num_bytes,
    }  # fmt: skip
    assert began_at <= min(stage.began_at for stage in record.stages)
    assert all(stage.began_at < stage.ended_at for stage in record.stages)
    assert max(stage.ended_at for stage in record.stages) <= ended_at


async def test_wrong_byte_on_disk_is_computed_and_counted(model, tmp_path):
    prompt = text(1, 80)
    async with serving(model, **tiers(100, 400, tmp_path)) as served:
        first = await served.answer(prompt)
        await served.settle()
    path = tmp_path / storage.FILE_NAME
    with path.open("r+b") as file:
        file.seek(-(400 - 5) * 2 * storage.PAGE_BYTES + 100, os.SEEK_END)  # in the sixth slot
        file.write(b"damaged")
    async with serving(model, **tiers(100, 400, tmp_path)) as served:
        assert await served.answer(prompt) == first
        report = await served.settle()

        assert served.sink.cached["1"] == report.counts["matched_tokens"] == 5 * BLOCK
        assert report.counts["failed_blocks"] == 1


async def test_prompt_is_loaded_from_the_object_store_that_another_worker_has_filled(
    model, tmp_path
):
    pytest.importorskip("obstore")
    prompt, options = text(1, 80), {"kvbm_object_store": tmp_path.as_uri()}
    async with serving(model, **tiers(100, **options)) as served:
        first = await served.answer(prompt)
        await served.settle()
        async with serving(model, **tiers(100, **options)) as other:
            assert await other.answer(prompt) == first
            assert other.sink.by_tier["1"] == {"remote": 64}  # the rest is less than an object
            assert len(other.sink.held[kv_events.REMOTE]) == 16


async def test_prompt_is_loaded_from_the_object_store_that_another_worker_fills_meanwhile(
    model, tmp_path, monkeypatch
):
    pytest.importorskip("obstore")
    monkeypatch.setattr(tier_policy, "_MIN_YES_RATE", 1)  # so that a busy machine answers in time
    prompt, options = text(1, 300), {"kvbm_object_store": tmp_path.as_uri()}
    async with (
        serving(model, **tiers(200, **options)) as served,
        serving(model, **tiers(200, **options)) as other,
    ):
        first = await served.answer(prompt)
        await served.settle()
        assert await other.answer(prompt) == first
        report = await other.settle()

        assert other.sink.by_tier["1"] == {"remote": 256}
        assert report.counts["store_finds"] == 4
        assert report.tiers[2].shared_blocks == 4 * 16
        assert not other.sink.faults


async def test_prompt_that_no_worker_has_stored_is_computed_after_one_question(model, tmp_path):
    pytest.importorskip("obstore")
    async with serving(model, **tiers(100, kvbm_object_store=tmp_path.as_uri())) as served:
        await served.answer(text(1, 200))
        report = await served.settle()

        assert (report.counts["store_questions"], report.counts["store_finds"]) == (1, 0)
        assert served.sink.cached["1"] == 0


async def test_requests_to_the_object_store_move_256_tokens_each(model, tmp_path, monkeypatch):
    obstore = pytest.importorskip("obstore")
    requests = Counter()

    def count(name, real, *args, **options):
        requests[name] += 1
        return real(*args, **options)

    for name in ("put", "get_range", "get", "get_ranges", "head"):
        monkeypatch.setattr(obstore, name, functools.partial(count, name, getattr(obstore, name)))
    prompts = [text(seed, 1_000) for seed in (1, 2)]
    options = tiers(
        300,
        block_size=16,
        max_num_batched_tokens=256,
        kvbm_object_store=tmp_path.as_uri(),
        kvbm_object_num_blocks=1_000,
    )
    for _ in range(2):
        async with serving(model, **options) as served:
            for prompt in prompts:
                await served.answer(prompt)
            await served.settle()

    assert served.sink.by_tier == {"1": {"remote": 768}, "2": {"remote": 768}}
    assert requests.pop("head") <= 2  # for the first object of each prompt, in the first run
    assert requests == {"put": 6, "get_range": 6}


async def test_object_store_that_is_taken_away_leaves_answers_as_they_are(model, tmp_path):
    pytest.importorskip("obstore")
    prompt, options = text(1, 80), {"kvbm_object_store": (tmp_path / "store").as_uri()}
    async with serving(model, **tiers(100, **options)) as served:
        first = await served.answer(prompt)
        await served.settle()
    async with serving(model, **tiers(100, **options)) as served:
        shutil.rmtree(tmp_path / "store")
        assert await served.answer(prompt) == first
        report = await served.settle()

        assert report.counts["failed_blocks"] > 0
        assert report.counts["matched_tokens"] == 0


async def test_clear_reaches_every_tier(model, tmp_path):
    prompt = text(1, 80)
    async with serving(model, **tiers(100, 400, tmp_path)) as served:
        await served.answer(prompt)
        await served.settle()
        await served.engine.clear_kv_blocks()
        report = served.engine.report_tiers()
        assert [tier.used_blocks for tier in report.tiers] == [0, 0, 0]
        assert not any(served.sink.held.values())
        await served.answer(prompt)
        assert served.sink.cached["2"] == 0
        await served.engine.clear_kv_blocks()
    async with serving(model, **tiers(100, 400, tmp_path)) as served:
        await served.answer(prompt)
        assert served.sink.cached["1"] == 0


async def test_writes_that_hang_while_all_is_cleared_are_not_found_after_a_restart(
    model, tmp_path, monkeypatch
):
    stuck, prompt = StuckFile(monkeypatch, "write"), text(1, 160)  # 40 blocks: some writes wait
    async with serving(model, **tiers(100, 400, tmp_path)) as served:
        await served.answer(prompt)
        async with asyncio.timeout(PATIENT_S):
            while stuck.num_calls < storage.DiskFile.num_threads:
                await asyncio.sleep(0.005)
        await served.engine.clear_kv_blocks()
        stuck.may_go_on.set()
        await served.settle()
    assert stuck.num_calls > storage.DiskFile.num_threads
    async with serving(model, **tiers(100, 400, tmp_path)) as served:
        await served.answer(prompt)
        assert served.sink.cached["1"] == 0


async def test_answers_go_on_while_the_storage_below_is_being_emptied(model, tmp_path, monkeypatch):
    may_go_on = threading.Event()
    monkeypatch.setattr(storage.DiskFile, "purge", lambda _: may_go_on.wait(PATIENT_S))
    async with serving(model, **tiers(100, 400, tmp_path)) as served:
        clearing = asyncio.ensure_future(served.engine.clear_kv_blocks())
        assert await served.answer(text(1, 20))
        is_clearing = not clearing.done()
        may_go_on.set()
        await clearing

    assert is_clearing


async def test_clearing_fails_if_blocks_are_left_in_the_storage_below(model, tmp_path, monkeypatch):
    def refuse(_):
        raise OSError("AccessDenied")

    monkeypatch.setattr(storage.DiskFile, "purge", refuse)
    async with serving(model, **tiers(100, 400, tmp_path)) as served:
        with pytest.raises(errors.EngineFailed, match=r"not removed from .*: AccessDenied"):
            await served.engine.clear_kv_blocks()
        assert await served.answer(text(1, 20))


def shared(directory, num_host=200, num_disk=None, **options):
    """Options for two engines that share their tiers."""
    path = directory / "disk" if num_disk else None
    return tiers(
        num_host, num_disk, path,
        kvbm_sharing_workers=2, kvbm_shared_memory_dir=str(directory / "memory"), **options,
    )  # fmt: skip


async def test_prompt_that_another_worker_of_the_host_computed_is_loaded(model, tmp_path):
    prompt = text(1, 80)
    async with (
        serving(model, **shared(tmp_path)) as first,
        serving(model, **shared(tmp_path)) as second,
    ):
        said = await first.answer(prompt)
        await first.settle()
        assert await second.answer(prompt) == said
        report = await second.settle()

        assert second.sink.by_tier["1"] == {"host": 76}
        assert report.counts["shared_blocks"] == 19
        assert report.tiers[1].shared_blocks >= 19
        assert report.copied["offload_blocks_d2h"] <= 2  # what the other has is not copied again
        assert len(second.sink.held[kv_events.HOST]) >= 19  # so routers know


async def test_clear_of_one_worker_empties_the_tiers_of_both(model, tmp_path):
    prompt = text(1, 80)
    async with (
        serving(model, **shared(tmp_path, num_disk=400)) as first,
        serving(model, **shared(tmp_path, num_disk=400)) as second,
    ):
        await first.answer(prompt)
        await first.settle()
        await second.answer(prompt)
        await second.settle()
        await first.engine.clear_kv_blocks()
        await second.answer(text(2, 20))
        report = await second.settle()

        assert report.tiers[1].shared_blocks == report.tiers[2].shared_blocks == 0
        await first.answer(prompt)
        assert first.sink.cached["2"] == 0


async def test_disk_tier_of_a_stopped_worker_serves_another(model, tmp_path):
    prompt = text(1, 80)
    async with serving(model, **shared(tmp_path, num_host=60, num_disk=400)) as second:
        async with serving(model, **shared(tmp_path, num_host=60, num_disk=400)) as first:
            said = await first.answer(prompt)
            await first.settle()
            for seed in range(2, 6):  # its part of host memory holds these now
                await first.answer(text(seed, 100))
                await first.settle()
        assert await second.answer(prompt) == said

        assert second.sink.by_tier["1"].get("disk", 0) > 0


@pytest.mark.parametrize("num_disk", [None, 30])
async def test_answers_are_equal_while_two_workers_overrun_their_shared_tiers(
    model, expected, tmp_path, monkeypatch, num_disk
):
    monkeypatch.setattr(tier_policy.ChurnGuard, "record_evictions", lambda *_: False)
    options = shared(tmp_path, 24, num_disk, num_gpu_blocks_override=34)
    async with serving(model, **options) as first, serving(model, **options) as second:
        answers = await asyncio.gather(
            converse(first, sampling=SAMPLINGS), converse(second, sampling=SAMPLINGS)
        )
        assert answers == [expected, expected]
        prompt = text(1000, 20)  # on a busy machine both may have computed all others
        said = await first.answer(prompt)
        await first.settle()
        assert await second.answer(prompt) == said
        report = await second.settle()

    assert report.counts["shared_blocks"] > 0


async def test_events_say_what_each_tier_holds(model, tmp_path):
    async with serving(model, num_gpu_blocks_override=34, **tiers(12, 30, tmp_path)) as served:
        await converse(served)
        report = await served.settle()
        num_used = [tier.used_blocks for tier in report.tiers[1:]]
        assert all(num_used)  # the disk is not always full: offloading turns itself down at a time
        held = served.sink.held
        async with asyncio.timeout(PATIENT_S):  # the last events are behind the report
            while [len(held[tier]) for tier in (kv_events.HOST, kv_events.DISK)] != num_used:
                await asyncio.sleep(0.01)


async def test_aborted_requests_leave_no_block_in_use(model, tmp_path):
    async with serving(model, num_gpu_blocks_override=64, **tiers(24, 60, tmp_path)) as served:
        for round_number in range(6):
            ids = [served.submit(text(seed, 60), max_tokens=30) for seed in range(8)]
            await asyncio.sleep(0.003 * round_number)
            for request_id in ids[::2]:
                served.engine.abort(request_id)
            await asyncio.gather(*(served.sink.ends[request_id] for request_id in ids[1::2]))
        report = await served.settle()
        (load,) = served.engine.load()

        assert load.kv_stats.kv_active_blocks == 0
        assert load.worker_stats.num_requests_waiting == 0
        assert report.tiers[1].used_blocks <= 24


async def test_answers_are_equal_where_blocks_move_between_a_device_and_the_tiers(model, tmp_path):
    async with serving(model, device=DEVICE) as served:
        expected = await converse(served, sampling=SAMPLINGS)
    options = {"num_gpu_blocks_override": 34} | tiers(12, 400, tmp_path)
    for _ in range(2):  # the second engine finds the first one's file
        async with serving(model, device=DEVICE, **options) as served:
            assert await converse(served, sampling=SAMPLINGS) == expected
            report = await served.settle()

    assert report.copied["onboard_blocks_h2d"] > 0
    assert report.copied["onboard_blocks_d2d"] > 0
    assert report.counts["failed_blocks"] == 0


class StuckFile:
    """Hold all reads of the disk, or all writes, until `may_go_on` is set."""

    def __init__(self, monkeypatch, method="read"):
        self.may_go_on, self.num_calls = threading.Event(), 0
        real = getattr(storage.DiskFile, method)

        def wait_and_call(file, *args):
            self.num_calls += 1
            assert self.may_go_on.wait(PATIENT_S)
            return real(file, *args)

        monkeypatch.setattr(storage.DiskFile, method, wait_and_call)


async def test_disk_that_hangs_delays_a_prompt_by_a_bounded_time(model, tmp_path, monkeypatch):
    prompt = text(1, 80)
    async with serving(model, **tiers(100, 400, tmp_path)) as served:
        first = await served.answer(prompt)
        await served.settle()
    stuck = StuckFile(monkeypatch)
    monkeypatch.setattr(tier_policy.LoadCost, "max_wait_s", max_wait_s)
    async with serving(model, **tiers(100, 400, tmp_path)) as served:
        with traced() as record:
            assert await served.answer(prompt) == first
        assert await served.answer(text(9, 20))
        report = served.engine.report_tiers()
        stuck.may_go_on.set()
        await served.settle()

    assert stuck.num_calls > 0
    assert report.counts["late_loads"] == 1
    assert report.counts["matched_tokens"] == 0
    assert {(read.attributes["tier"], read.attributes["late"]) for read in record.stages} == {
        ("disk", True)
    }


async def test_request_that_is_aborted_while_its_blocks_are_read_leaves_nothing(
    model, tmp_path, monkeypatch
):
    prompt = text(1, 80)
    async with serving(model, **tiers(100, 400, tmp_path)) as served:
        await served.answer(prompt)
        await served.settle()
    stuck = StuckFile(monkeypatch)
    async with serving(model, **tiers(100, 400, tmp_path)) as served:
        request_id = served.submit(prompt)
        async with asyncio.timeout(PATIENT_S):
            while not stuck.num_calls:
                await asyncio.sleep(0.005)
        served.engine.abort(request_id)
        stuck.may_go_on.set()
        await served.settle()
        (load,) = served.engine.load()

        assert load.kv_stats.kv_active_blocks == 0
        assert load.worker_stats.num_requests_waiting == 0
        assert await served.answer(prompt)


async def test_engine_stops_while_copies_hang_and_the_next_one_uses_its_disk(
    model, tmp_path, monkeypatch
):
    prompt = text(1, 80)
    async with serving(model, **tiers(100, 400, tmp_path)) as served:
        first = await served.answer(prompt)
        await served.settle()
    monkeypatch.setattr(tier_copies, "_CLOSE_S", 0.01)  # of the one whose copies hang
    reads, writes = StuckFile(monkeypatch), StuckFile(monkeypatch, "write")
    async with serving(model, **tiers(100, 400, tmp_path)) as served:
        served.submit(prompt)
        await served.answer(text(2, 80))
        await until(lambda: reads.num_calls and writes.num_calls)
    for stuck in (reads, writes):
        stuck.may_go_on.set()
    await until(lambda: is_closed(tmp_path))
    async with serving(model, **tiers(100, 400, tmp_path)) as served:
        assert await served.answer(prompt) == first
        assert served.sink.by_tier["1"] == {"disk": 76}


def is_closed(directory):
    try:
        storage.open_stored(directory).close()
    except errors.ConfigError:
        return False
    return True


async def test_full_disk_leaves_answers_as_they_are(model, tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(storage.DiskFile, "write", refuse)
    prompt = text(1, 80)
    async with serving(model, num_gpu_blocks_override=34, **tiers(100, 400, tmp_path)) as served:
        first = await served.answer(prompt)
        await served.settle()
        await served.answer(text(2, 100))
        assert await served.answer(prompt) == first
        report = await served.settle()

    assert report.tiers[2].used_blocks == 0
    assert report.counts["failed_blocks"] > 0
    assert "no space left" in caplog.text


async def test_disk_that_is_taken_away_leaves_answers_as_they_are(model, tmp_path, monkeypatch):
    prompt = text(1, 80)
    async with serving(model, **tiers(100, 400, tmp_path)) as served:
        first = await served.answer(prompt)
        await served.settle()

    def fail(*_):
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(os, "preadv", fail)
    monkeypatch.setattr(os, "pwritev", fail)
    async with serving(model, **tiers(100, 400, tmp_path)) as served:
        assert await served.answer(prompt) == first
        assert await served.answer(text(2, 40))
        report = await served.settle()

    assert report.counts["matched_tokens"] == 0
    assert report.counts["failed_blocks"] > 0


async def test_blocks_of_another_tenant_are_not_loaded_even_from_a_shared_tier(model, tmp_path):
    prompt = text(1, 80)
    async with (
        serving(model, **shared(tmp_path)) as first,
        serving(model, **shared(tmp_path)) as second,
    ):
        await first.answer(prompt, salt="alice")
        await first.settle()
        await second.answer(prompt, salt="bob")
        await second.answer(prompt, salt="alice")

        assert second.sink.cached == {"1": 0, "2": 76}


async def test_prompt_is_loaded_before_the_step_that_computes_its_rest(model, monkeypatch):
    monkeypatch.setattr(tiered_cache, "QUICK_BYTES", 0)
    monkeypatch.setattr(
        tier_policy.LoadCost, "least_step_s", lambda _, num_tokens: 1e6 * num_tokens
    )
    threads, real = [], tier_copies.TierCopies.run

    def run(copies, copy, *rest):
        if copy.path[1] is kv_events.DEVICE:
            threads.append(threading.current_thread().name)
        return real(copies, copy, *rest)

    monkeypatch.setattr(tier_copies.TierCopies, "run", run)
    prompt, rest = text(1, 80), text(2, 40)
    async with serving(model) as served:
        expected = await served.answer(prompt + rest)
    async with serving(model, num_gpu_blocks_override=64, **tiers(200)) as served:
        await served.answer(prompt)
        for seed in range(3, 6):
            await served.settle()
            await served.answer(text(seed, 120))
        await served.settle()
        decoding = asyncio.ensure_future(served.answer(text(9, 8), max_tokens=100))
        answered = await served.answer(prompt + rest)
        await decoding

    assert threads == ["engine"]
    assert answered == expected


class StuckLoads:
    """Hold all loads from host memory, which the engine's own thread never makes, until `may_go_on` is set."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(tiered_cache, "QUICK_BYTES", 0)
        monkeypatch.setattr(tiered_cache, "QUICK_SHARE", 0)
        self.may_go_on, self.has_begun = threading.Event(), threading.Event()
        real = device_memory.RegionCopies.move

        def wait_and_move(copies, operation, *rest):
            if operation is transfer.TransferOperation.READ:
                self.has_begun.set()
                assert self.may_go_on.wait(PATIENT_S)
            real(copies, operation, *rest)

        monkeypatch.setattr(device_memory.RegionCopies, "move", wait_and_move)


PROMPT, OTHER = text(1, 80), text(11, 80)


@contextlib.asynccontextmanager
async def serving_from_host_memory(model):
    """Serve two prompts that only host memory has. Yield what was answered to them, too."""
    async with serving(model, num_gpu_blocks_override=64, **tiers(200)) as served:
        first = [await served.answer(prompt) for prompt in (PROMPT, OTHER)]
        for seed in range(2, 5):
            await served.settle()
            await served.answer(text(seed, 120))
        await served.settle()
        yield served, first


async def test_decoding_goes_on_while_a_prompt_is_loaded(model, monkeypatch):
    async with serving_from_host_memory(model) as (served, first):
        stuck = StuckLoads(monkeypatch)
        loading = asyncio.ensure_future(served.answer(PROMPT))
        answered = await served.answer(text(9, 8), max_tokens=20)
        is_loading = not loading.done()
        stuck.may_go_on.set()

        assert len(answered) == 20
        assert is_loading
        assert await loading == first[0]


async def test_loads_of_aborted_requests_free_their_blocks_whether_begun_or_queued(
    model, monkeypatch
):
    async with serving_from_host_memory(model) as (served, first):
        stuck = StuckLoads(monkeypatch)
        ids = [served.submit(PROMPT), served.submit(OTHER)]
        await asyncio.to_thread(stuck.has_begun.wait, PATIENT_S)
        await until(lambda: served.engine.load()[0].worker_stats.num_requests_waiting == 2)
        for request_id in ids * 2:
            served.engine.abort(request_id)
        held = await served.look(served.engine._started.loop._scheduler.load)
        stuck.may_go_on.set()
        await served.settle()
        free = served.engine.load()[0]

        assert held.kv_stats.kv_active_blocks == 2 * 20  # loads write to them
        assert free.kv_stats.kv_active_blocks == free.worker_stats.num_requests_waiting == 0
        assert [await served.answer(prompt) for prompt in (PROMPT, OTHER)] == first


async def test_load_ends_and_its_prompt_is_computed_while_the_event_loop_stands_still(
    model, monkeypatch
):
    async with serving_from_host_memory(model) as (served, first):
        stuck = StuckLoads(monkeypatch)
        answering = asyncio.ensure_future(served.answer(PROMPT))
        await asyncio.to_thread(stuck.has_begun.wait, PATIENT_S)
        stuck.may_go_on.set()
        eventually(  # which stops the event loop
            lambda: served.engine.report_tiers().counts["matched_tokens"] == 76, what="it is loaded"
        )
        eventually(
            lambda: not served.engine.load()[0].kv_stats.kv_active_blocks, what="it is answered"
        )

        assert await answering == first[0]


async def test_blocks_that_are_loaded_while_all_is_cleared_are_not_found_again(model, monkeypatch):
    async with serving_from_host_memory(model) as (served, first):
        stuck = StuckLoads(monkeypatch)
        answering = asyncio.ensure_future(served.answer(PROMPT))
        await asyncio.to_thread(stuck.has_begun.wait, PATIENT_S)
        await served.engine.clear_kv_blocks()
        stuck.may_go_on.set()
        await answering
        await served.settle()

        assert await served.answer(PROMPT) == first[0]
        assert served.sink.cached[str(served.num_requests)] == 0
