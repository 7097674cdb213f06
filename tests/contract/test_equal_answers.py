"""Greedy answers of two engines that divide the work are those of one that does all, token for token: prompts of 1 to
8,000 tokens, 32 at once, whatever either side knows already, by each way that blocks can go.

The model has random weights that are drawn wide, so that each answer wanders, and one wrong key changes it.
"""

import asyncio
import contextlib
import random

import pytest

from checkpoints import make_checkpoint
from dynamo.engine.native import engine as engines
from dynamo.engine.native.settings import NativeConfig
from dynamo.protocols import blocks, generate, kv_transfer
from dynamo.transfer.backends import local
from waiting import PATIENT_S

LENGTHS = [
    1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 128, 200, 257, 300, 400, 511, 512, 513,
    600, 777, 1000, 1024, 1500, 2047, 2049, 3000, 4096, 6001, 8000,
]  # fmt: skip
NUM_TOKENS = 12
SETTINGS = {"max_num_seqs": 32, "num_gpu_blocks_override": 5000, "threads": 1}


def prompt(length):
    return random.Random(length).choices(range(5, 500), k=length)


class Sink:
    """Answers by request id, and where blocks are held."""

    def __init__(self):
        self.answers, self.ends, self.params = {}, {}, {}

    def outputs(self, batch):
        for request_id, output in batch:
            self.answers[request_id] += output.token_ids
            if output.finish_reason is not None:
                self.params[request_id] = output.kv_transfer_params
                self.ends[request_id].set_result(None)

    def failed(self, request_id, error):
        self.ends[request_id].set_exception(error)

    def kv_events(self, events, dp_rank=0):
        """Of no interest."""

    def died(self, error):
        raise error


class Side:
    """An engine, to be asked."""

    def __init__(self, engine):
        self.engine, self.sink, self.reports = engine, Sink(), []
        engine.on_import(self.reports.append)

    async def answer(self, request_id, token_ids, *, max_tokens=NUM_TOKENS, params=None):
        self.sink.answers[request_id] = []
        self.sink.ends[request_id] = asyncio.get_running_loop().create_future()
        self.engine.submit(
            generate.Request(
                id=request_id,
                model="m",
                token_ids=blocks.pack(token_ids),
                stop_conditions=generate.StopConditions(max_tokens=max_tokens, ignore_eos=True),
                sampling_options=generate.SamplingOptions(temperature=0.0),
                kv_transfer_params=params,
            )
        )
        await self.sink.ends[request_id]
        return self.sink.answers[request_id]

    async def know(self, prompts):
        """From now on the beginnings of these are known here."""
        halves = (one[: len(one) // 2] for one in prompts if len(one) > 1)
        warm = (self.answer(f"w {i}", one, max_tokens=1) for i, one in enumerate(halves))
        await asyncio.gather(*warm)


@contextlib.asynccontextmanager
async def started(model, *, is_open=False, backends=("shm",), room=None):
    settings = NativeConfig(kv_transfer_backends=backends, **SETTINGS)
    engine = engines.NativeEngine(model, settings, room)
    if is_open:
        engine.enable_export()
    side = Side(engine)
    await engine.start(side.sink)
    try:
        yield side
    finally:
        await engine.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    shape = {"num_hidden_layers": 2, "num_key_value_heads": 1, "max_position_embeddings": 8192}
    return make_checkpoint(tmp_path_factory.mktemp("long"), "qwen3", **shape)


@pytest.fixture(scope="module")
def expected(model):
    """What one engine answers that does all."""

    async def ask_one():
        async with started(model) as alone:
            asked = (alone.answer(str(n), prompt(n)) for n in LENGTHS)
            return await asyncio.gather(*asked)

    return asyncio.run(ask_one())


def test_different_prompts_have_different_answers(expected):
    assert len({tuple(answer) for answer in expected}) > len(LENGTHS) - 3


@pytest.mark.parametrize(
    ("way", "knowing"),
    [
        ("shm", ()),
        ("shm", ("prefill",)),
        ("shm", ("decode",)),
        ("tcp", ()),
        ("tcp", ("prefill", "decode")),
        ("local", ()),
        ("local", ("decode",)),
    ],
)
async def test_split_prefill_gives_the_same_answers(model, expected, way, knowing):
    prompts = [prompt(n) for n in LENGTHS]
    room = local.Room() if way == "local" else None
    backends = () if way == "local" else (way,)
    opened = {"is_open": True, "backends": backends, "room": room}
    async with started(model, **opened) as prefill, started(model, **opened) as decode:
        await decode.engine.connect_peer(prefill.engine.transfer_metadata, deadline_s=PATIENT_S)
        sides = {"prefill": prefill, "decode": decode}
        await asyncio.gather(*(sides[name].know(prompts) for name in knowing))

        async def ask_both(token_ids):
            name = str(len(token_ids))
            await prefill.answer(name, token_ids, max_tokens=1, params=kv_transfer.PREFILL_ONLY)
            return await decode.answer(name, token_ids, params=prefill.sink.params[name])

        answers = await asyncio.gather(*map(ask_both, prompts))

        assert answers == expected
        assert not any(report.error for report in decode.reports)
        assert sum(report.num_blocks for report in decode.reports) > sum(LENGTHS) / 16 / 3
