"""Two engines of one process: a prompt that one has computed is answered by the other as if it had computed it itself.

The engine under test is the native one, with the built-in model and both ways of moving blocks.
"""

import asyncio
import contextlib
import random

import pytest

from dynamo.engine import api
from dynamo.engine.native import engine as engines
from dynamo.engine.native.settings import NativeConfig
from dynamo.protocols import blocks, generate, kv_transfer
from dynamo.worker import model_source

DEADLINE_S = 30
CONTEXT = 500


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

    @classmethod
    async def start(cls, *, is_open=True, **settings):
        side = cls()
        settings = {"num_gpu_blocks_override": 200, "threads": 1} | settings
        path = model_source.resolve(None, with_weights=True)
        side.engine, side.sink, side.reports = (
            engines.NativeEngine(path, NativeConfig(**settings)),
            Sink(),
            [],
        )
        assert isinstance(side.engine, api.RemotePrefill)
        if is_open:
            side.engine.open_blocks()
        side.engine.on_pull(side.reports.append)
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
        async with asyncio.timeout(DEADLINE_S):
            await self.sink.ends[request_id]
        return self.sink.answers[request_id]

    async def prefill(self, request_id, prompt):
        await self.answer(request_id, prompt, params=kv_transfer.ASK, max_tokens=1)
        return self.sink.params[request_id]

    async def until_idle(self, num_active=0):
        async with asyncio.timeout(DEADLINE_S):
            while self.engine.load().kv_stats.kv_active_blocks != num_active:
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def pair(*, is_open=True, prefill=None, **settings):
    left = await Side.start(**(settings | (prefill or {})))
    right = await Side.start(is_open=is_open, **settings)
    right.source = await right.engine.connect(left.engine.transfer_metadata, deadline_s=5)
    try:
        yield left, right
    finally:
        await right.engine.stop()
        await left.engine.stop()


def prompt(length, seed=0):
    return random.Random(seed).choices(range(5, 500), k=length)


@pytest.mark.parametrize("backends", [("shm",), ("tcp",)])
async def test_an_answer_is_the_same_wherever_its_prompt_was_computed(backends):
    async with pair(kv_transfer_backends=backends) as (left, right):
        lengths = [1, 2, 15, 16, 17, 18, 31, 32, 33, 100, 257, 480]
        for length in lengths:
            here = await left.answer(f"here {length}", prompt(length, length))
            params = await left.prefill(f"p {length}", prompt(length, length))
            there = await right.answer(f"there {length}", prompt(length, length), params=params)

            assert there == here

        assert all(report.error is None for report in right.reports)
        assert sum(report.num_blocks for report in right.reports) == sum(
            -(-(n - 1) // 16) for n in lengths
        )
        await left.until_idle()
        await right.until_idle()
