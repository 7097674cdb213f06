"""How the simulated engine lets time pass, on a clock that the test moves."""

import asyncio

import pytest

from dynamo.base import errors
from dynamo.engine.mock.answers import Cycle
from dynamo.engine.mock.engine import MockEngine
from dynamo.engine.mock.settings import MockConfig
from dynamo.protocols import blocks, generate


class FakeClock:
    def __init__(self):
        self.time = 0.0

    def now(self):
        return self.time

    def wall(self):
        return self.time

    async def sleep(self, duration_s):
        await asyncio.sleep(0)
        self.time += duration_s


class Times:
    """A sink that notes when tokens come."""

    def __init__(self, clock):
        self.clock, self.at, self.ended = clock, [], asyncio.Event()

    def outputs(self, batch):
        self.at.append(self.clock.time)
        if batch[-1].output.finish_reason:
            self.ended.set()

    def kv_events(self, events, dp_rank):
        pass


async def times_of_tokens(num_tokens, **settings):
    clock = FakeClock()
    engine = MockEngine(
        MockConfig(**settings), cycle=Cycle([1, 2]), context_length=100, clock=clock
    )
    sink = Times(clock)
    await engine.start(sink)
    engine.submit(
        generate.Request(
            id="a",
            model="m",
            token_ids=blocks.pack(range(10)),
            stop_conditions=generate.StopConditions(max_tokens=num_tokens),
        )
    )
    async with asyncio.timeout(10):
        await sink.ended.wait()
    await engine.stop()
    return [round(at, 4) for at in sink.at]


async def test_the_first_token_takes_the_prefill_and_others_a_decoding_step():
    assert await times_of_tokens(3) == [0.0167, 0.0224, 0.0281]


async def test_a_tick_paces_every_step():
    assert await times_of_tokens(3, tick_ms=20) == [0.02, 0.04, 0.06]


async def test_at_once_is_at_once():
    assert await times_of_tokens(3, speedup_ratio=0) == [0, 0, 0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_batched_tokens": 100}, "100 is less than --max-num-seqs 256"),
        ({"block_size": 0}, "--block-size: expected at least 1, got 0"),
        ({"speedup_ratio": -1.0}, "--speedup-ratio: expected 0 or more, got -1.0"),
        ({"tick_ms": float("nan")}, "--tick-ms: expected 0 or more, got nan"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(errors.ConfigError, match=message):
        MockEngine(MockConfig(**settings), cycle=Cycle([1]), context_length=100)
