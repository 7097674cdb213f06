"""Two engines of one process: a prompt that one has computed is answered by the other as if it had computed it itself.

The engines under test are the native one, with the built-in model, also in the memory of a device, and the simulated
one, whose blocks hold their names; with both ways of moving blocks.
"""

import asyncio
import contextlib
import random

import pytest

import kv_params
from devices import DEVICE
from dynamo.base import errors
from dynamo.protocols import blocks, generate, kv_transfer
from dynamo.worker import engines, model_source
from transfer_peer import NIXL
from waiting import PATIENT_S

OF_KIND = {
    "native": {"threads": 1},
    "native on a device": {"threads": 1, "device": DEVICE},
    "mocker": {"block_size": 16, "speedup_ratio": 20, "kv_transfer_bandwidth": 0.5},
}


@pytest.fixture(autouse=True, params=OF_KIND)
def kind(request, monkeypatch):
    monkeypatch.setattr(Side, "kind", request.param)
    return request.param


class Sink:
    """Answers by request id."""

    def __init__(self):
        self.answers, self.ends, self.params, self.stored = {}, {}, {}, []

    def begin(self, request_id):
        self.answers[request_id] = []
        self.ends[request_id] = asyncio.get_running_loop().create_future()

    def outputs(self, batch):
        for request_id, output in batch:
            self.answers[request_id] += output.token_ids
            if output.finish_reason is not None:
                self.params[request_id] = output.kv_transfer_params
                self.ends[request_id].set_result(output.finish_reason)

    def failed(self, request_id, error):
        self.ends[request_id].set_exception(error)

    def kv_events(self, events, dp_rank=0):
        self.stored += events

    def died(self, error):
        for end in self.ends.values():
            if not end.done():
                end.set_exception(error)


class Side:
    """One engine, started."""

    kind = "native"

    @classmethod
    async def start(cls, *, is_open=True, **settings):
        side = cls()
        settings = {"num_gpu_blocks_override": 400} | OF_KIND[cls.kind] | settings
        path = model_source.resolve(None, with_weights=True)
        kind = cls.kind.partition(" ")[0]
        engine = engines.build(kind, path, engines.settings_of(kind)(**settings))
        side.engine, side.sink, side.reports = engine, Sink(), []
        assert side.engine.capabilities.kv_transfer is side.engine
        if is_open:
            side.engine.enable_export()
        side.engine.on_import(side.reports.append)
        await side.engine.start(side.sink)
        return side

    def submit(self, request_id, prompt, *, params=None, max_tokens=8, **fields):
        self.sink.begin(request_id)
        self.engine.submit(
            generate.Request(
                id=request_id,
                model="m",
                token_ids=blocks.pack(prompt),
                stop_conditions=generate.StopConditions(max_tokens=max_tokens, ignore_eos=True),
                sampling_options=generate.SamplingOptions(temperature=0.0, **fields),
                kv_transfer_params=params,
            )
        )

    async def answer(self, request_id, prompt, **fields):
        self.submit(request_id, prompt, **fields)
        async with asyncio.timeout(PATIENT_S):
            await self.sink.ends[request_id]
        return self.sink.answers[request_id]

    async def prefill(self, request_id, prompt):
        await self.answer(request_id, prompt, params=kv_transfer.PREFILL_ONLY, max_tokens=1)
        return self.sink.params[request_id]

    async def until_idle(self, num_active=0):
        async with asyncio.timeout(PATIENT_S):
            while self.engine.load()[0].kv_stats.kv_active_blocks != num_active:
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def pair(*, is_open=True, prefill=None, **settings):
    left = await Side.start(**(settings | (prefill or {})))
    right = await Side.start(is_open=is_open, **settings)
    right.source = await right.engine.connect_peer(
        left.engine.transfer_metadata, deadline_s=PATIENT_S
    )
    try:
        yield left, right
    finally:
        await right.engine.stop()
        await left.engine.stop()


def prompt(length, seed=0):
    return random.Random(seed).choices(range(5, 500), k=length)


@pytest.mark.parametrize("backend", ["shm", "tcp", NIXL])
async def test_answer_is_the_same_wherever_its_prompt_was_computed(backend):
    async with pair(kv_transfer_backends=(backend,)) as (left, right):
        lengths = [1, 2, 15, 16, 17, 18, 31, 32, 33, 100, 257, 513, 1000, 2000]
        for length in lengths:
            here = await left.answer(f"here {length}", prompt(length, length))
            params = await left.prefill(f"p {length}", prompt(length, length))
            there = await right.answer(f"there {length}", prompt(length, length), params=params)

            assert there == here

        assert all(report.error is None for report in right.reports)
        assert sum(r.num_blocks for r in right.reports) == sum(-(-(n - 1) // 16) for n in lengths)
        await left.until_idle()
        await right.until_idle()


async def test_many_answers_at_once_with_cached_prefixes_on_both_sides():
    prompts = [prompt(64, i % 4) + prompt(i * 13 % 200 + 1, 100 + i) for i in range(32)]
    async with pair() as (left, right):
        alone = await Side.start(is_open=False)
        expected = [await alone.answer(str(i), one) for i, one in enumerate(prompts)]
        await alone.engine.stop()
        await right.answer("warm", prompts[0])  # its first blocks are known where it is decoded

        async def elsewhere(i):
            params = await left.prefill(f"p {i}", prompts[i])
            return await right.answer(str(i), prompts[i], params=params)

        answers = await asyncio.gather(*map(elsewhere, range(32)))

        assert answers == expected
        assert not any(report.error for report in right.reports)
        await left.until_idle()
        await right.until_idle()


async def test_only_uncached_blocks_are_copied():
    async with pair() as (left, right):
        await right.answer("first", prompt(100)[:50])
        params = await left.prefill("p", prompt(100))
        await right.answer("second", prompt(100), params=params)

        assert [report.num_blocks for report in right.reports] == [7 - 3]


async def test_imported_blocks_are_reused_by_other_requests():
    async with pair() as (left, right):
        params = await left.prefill("p", prompt(100))
        await right.answer("first", prompt(100), params=params, max_tokens=1)
        right.sink.stored.clear()
        params = await left.prefill("p", prompt(100))
        await right.answer("second", prompt(100), params=params, max_tokens=1)

        assert [report.num_blocks for report in right.reports] == [7, 1]
        assert right.sink.stored == []


async def test_choices_share_the_imported_prompt():
    fields = {"n": 3, "seed": 7}
    async with pair() as (left, right):
        params = await left.prefill("p", prompt(70))
        right.submit("r", prompt(70), params=params, **fields)
        left.submit("r", prompt(70), **fields)
        await asyncio.wait_for(right.sink.ends["r"], PATIENT_S)
        await asyncio.wait_for(left.sink.ends["r"], PATIENT_S)

        assert len(right.reports) == 1
        await left.until_idle()
        await right.until_idle()


async def test_engine_without_export_can_import():
    async with pair(is_open=False) as (left, right):
        params = await left.prefill("p", prompt(200))

        assert right.engine.transfer_metadata is not None  # made when it was connected
        assert await right.answer("r", prompt(200), params=params) == await left.answer(
            "r", prompt(200)
        )
        assert [report.error for report in right.reports] == [None]


async def test_blocks_stay_leased_until_they_are_copied():
    async with pair() as (left, right):
        params = await left.prefill("p", prompt(100))
        await left.until_idle(num_active=7)
        await right.answer("r", prompt(100), params=params)

        await left.until_idle()


async def test_blocks_are_free_when_their_lease_expires():
    async with pair(prefill={"kv_hold_s": 0.05}) as (left, right):
        params = await left.prefill("p", prompt(100))
        await left.until_idle()
        await asyncio.sleep(0)

        here = await left.answer("here", prompt(100))
        assert (
            await right.answer(
                "there", prompt(100), params=kv_params.with_remote(params, remote_hold_s=0)
            )
            == here
        )
        assert "held no more" in str(right.reports[0].error)


async def test_blocks_are_free_when_a_request_is_aborted_at_any_point():
    async with pair() as (left, right):
        for i in range(20):
            params = await left.prefill(f"p {i}", prompt(300, i))
            right.submit(f"r {i}", prompt(300, i), params=params)
            for _ in range(i):
                await asyncio.sleep(0.0005)
            right.engine.abort(f"r {i}")

        await left.until_idle()
        await right.until_idle()


async def test_blocks_of_a_refused_request_are_free_at_once():
    async with pair() as (left, right):
        params = await left.prefill("p", prompt(100))
        await left.until_idle(num_active=7)
        right.engine.release_remote(params)

        await left.until_idle()


async def test_blocks_are_free_when_the_prefill_is_aborted():
    async with pair(prefill={"kv_hold_s": 0.1}) as (left, _):
        for i in range(20):
            left.submit(f"p {i}", prompt(300, i), params=kv_transfer.PREFILL_ONLY, max_tokens=1)
            await asyncio.sleep(0.002 * i)
            left.engine.abort(f"p {i}")

        await left.until_idle()


async def test_prompt_is_computed_locally_if_its_exporter_is_gone():
    async with pair(kv_transfer_backends=("tcp",)) as (left, right):
        expected = await left.answer("here", prompt(100))
        params = await left.prefill("p", prompt(100))
        await left.engine.stop()

        assert await right.answer("there", prompt(100), params=params) == expected
        assert right.reports[0].error is not None
        await right.until_idle()


async def test_mapped_memory_outlives_its_exporter():
    async with pair(kv_transfer_backends=("shm",)) as (left, right):
        expected = await left.answer("here", prompt(100))
        params = await left.prefill("p", prompt(100))
        await left.engine.stop()

        assert await right.answer("there", prompt(100), params=params) == expected
        assert right.reports[0].error is None
        await right.until_idle()


@pytest.mark.parametrize(
    "wrong",
    [
        {"remote_engine_id": "nobody"},
        {"remote_block_ids": (10**6,) * 7},
        {"remote_block_ids": (-1,) * 7},
        {"remote_block_ids": ()},
        {"remote_hold_id": 10**9},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
async def test_wrong_parameters_change_no_answer(wrong):
    async with pair() as (left, right):
        expected = await left.answer("here", prompt(100))
        params = await left.prefill("p", prompt(100))

        changed = kv_params.with_remote(params, **wrong)

        assert await right.answer("there", prompt(100), params=changed) == expected
        await right.until_idle()


async def test_parameters_of_a_foreign_connector_are_refused():
    async with pair() as (_, right):
        with pytest.raises(errors.RemoteProtocolError, match="the blocks of an engine of ours"):
            right.submit("r", prompt(5), params=kv_params.of_connector(remote_engine_id="x"))


async def test_engine_without_export_refuses_prefill_requests():
    side = await Side.start(is_open=False)

    with pytest.raises(errors.InvalidRequest, match="--is-prefill-worker"):
        side.submit("p", prompt(5), params=kv_transfer.PREFILL_ONLY)
    await side.engine.stop()


async def test_pool_too_small_for_all_requests_delays_and_loses_nothing():
    async with pair(num_gpu_blocks_override=40, max_num_seqs=8) as (left, right):

        async def elsewhere(i):
            params = await left.prefill(f"p {i}", prompt(200, i))
            return await right.answer(str(i), prompt(200, i), params=params, max_tokens=30)

        answers = await asyncio.gather(*map(elsewhere, range(12)))
        expected = [await left.answer(f"e {i}", prompt(200, i), max_tokens=30) for i in range(12)]

        assert answers == expected
        await left.until_idle()
        await right.until_idle()
