"""How the simulated engine lets time pass, on a clock that the test moves."""

import asyncio

import pytest

from dynamo.base import errors
from dynamo.engine.mock.answers import TokenCycle
from dynamo.engine.mock.engine import MockEngine
from dynamo.engine.mock.settings import MockConfig
from dynamo.protocols import blocks, generate, model_errors
from waiting import PATIENT_S


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
        MockConfig(**settings), cycle=TokenCycle([1, 2]), context_length=100, clock=clock
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
    async with asyncio.timeout(PATIENT_S):
        await sink.ended.wait()
    await engine.stop()
    return [round(at, 4) for at in sink.at]


async def test_first_token_takes_a_prefill_and_others_a_decode_step():
    assert await times_of_tokens(3) == [0.0167, 0.0224, 0.0281]


async def test_tick_ms_sets_the_time_of_every_step():
    assert await times_of_tokens(3, tick_ms=20) == [0.02, 0.04, 0.06]


async def test_zero_speedup_ratio_takes_no_time():
    assert await times_of_tokens(3, speedup_ratio=0) == [0, 0, 0]


async def test_loading_takes_the_startup_time():
    assert await times_of_tokens(1, startup_time=2.0, tick_ms=20) == [2.02]


async def test_prompt_longer_than_a_step_is_refused_without_chunking():
    settings = MockConfig(
        enable_chunked_prefill=False, max_num_batched_tokens=16, max_num_seqs=4, block_size=4
    )
    engine = MockEngine(settings, cycle=TokenCycle([1]), context_length=100, clock=FakeClock())

    with pytest.raises(model_errors.ContextTooLong, match="20 tokens; at most 15"):
        engine.submit(generate.Request(id="a", model="m", token_ids=blocks.pack(range(20))))


class Ranks:
    """A sink that notes of which rank blocks are told, and waits for requests to end."""

    def __init__(self):
        self.stored, self.cached, self.num_ended = {}, [], 0
        self.changed = asyncio.Event()

    def outputs(self, batch):
        for item in batch:
            if item.output.cached_tokens is not None:
                self.cached.append(item.output.cached_tokens)
            self.num_ended += item.output.finish_reason is not None
        self.changed.set()

    def kv_events(self, events, dp_rank):
        self.stored.setdefault(dp_rank, []).extend(events)
        self.changed.set()

    async def until_ended(self, num):
        async with asyncio.timeout(PATIENT_S):
            while self.num_ended < num:
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
async def two_ranks():
    settings = MockConfig(
        data_parallel_size=2, block_size=4, speedup_ratio=0, num_gpu_blocks_override=64
    )
    engine = MockEngine(settings, cycle=TokenCycle([1, 2]), context_length=100, clock=FakeClock())
    sink = Ranks()
    await engine.start(sink)
    yield engine, sink
    await engine.stop()


def submit(engine, request_id, rank=None):
    engine.submit(
        generate.Request(
            id=request_id,
            model="m",
            token_ids=blocks.pack(range(10)),
            stop_conditions=generate.StopConditions(max_tokens=2),
            data_parallel_rank=rank,
        )
    )


async def test_rank_has_a_cache_and_events_of_its_own(two_ranks):
    engine, sink = two_ranks
    for number, rank in enumerate((0, 1, 1)):
        submit(engine, str(number), rank)
        await sink.until_ended(number + 1)

    assert sink.cached == [0, 0, 8]
    assert {rank: len(events[0].blocks) for rank, events in sink.stored.items()} == {0: 2, 1: 2}


async def test_request_without_a_rank_goes_to_the_least_busy_one(two_ranks):
    engine, sink = two_ranks
    for number in range(4):
        submit(engine, str(number))
    waiting = [one.worker_stats.num_requests_waiting for one in engine.load()]
    await sink.until_ended(4)

    assert waiting == [2, 2]
    assert [one.worker_stats.data_parallel_rank for one in engine.load()] == [0, 1]


async def test_unknown_rank_is_refused(two_ranks):
    engine, _ = two_ranks

    with pytest.raises(errors.InvalidRequest, match="data_parallel_rank: expected below 2, got 2"):
        submit(engine, "a", 2)


async def test_request_id_is_unique_over_all_ranks(two_ranks):
    engine, _ = two_ranks
    submit(engine, "a", 0)

    with pytest.raises(errors.InvalidRequest, match="'a' runs already"):
        submit(engine, "a", 1)


async def test_disabled_prefix_cache_finds_and_publishes_nothing():
    settings = MockConfig(enable_prefix_caching=False, block_size=4, speedup_ratio=0)
    engine = MockEngine(settings, cycle=TokenCycle([1, 2]), context_length=100, clock=FakeClock())
    sink = Ranks()
    await engine.start(sink)
    for number in range(2):
        submit(engine, str(number))
        await sink.until_ended(number + 1)
    await engine.stop()

    assert sink.cached == [0, 0]
    assert sink.stored == {}


class Answers(Times):
    """A sink that notes tokens, and the names of blocks."""

    def __init__(self):
        super().__init__(FakeClock())
        self.tokens, self.names = [], []

    def outputs(self, batch):
        self.tokens += [token for one in batch for token in one.output.token_ids]
        super().outputs(batch)

    def kv_events(self, events, dp_rank):
        self.names += [block.block_hash for event in events for block in event.blocks]


async def answer_of(lora_name):
    settings = MockConfig(lora_names=("poet", "clerk"), block_size=4, speedup_ratio=0)
    engine = MockEngine(
        settings, cycle=TokenCycle(range(1000)), context_length=100, clock=FakeClock()
    )
    sink = Answers()
    facts = await engine.start(sink)
    prompt = blocks.pack(range(9))
    engine.submit(generate.Request(id="a", model="m", token_ids=prompt, lora_name=lora_name))
    async with asyncio.timeout(PATIENT_S):
        await sink.ended.wait()
    await engine.stop()
    assert facts.lora_names == ("poet", "clerk")
    return sink


async def test_lora_adapter_has_answers_and_block_hashes_of_its_own():
    plain, poet, clerk = [await answer_of(name) for name in (None, "poet", "clerk")]
    local = blocks.local_hashes(blocks.pack(range(9)), 4, blocks.seed_of("poet"))

    assert len({plain.tokens[0], poet.tokens[0], clerk.tokens[0]}) == 3
    assert poet.names[:2] == blocks.sequence_hashes(local)
    assert not {*plain.names} & {*poet.names}


async def test_request_for_an_unknown_adapter_is_sent_to_another_worker():
    engine = MockEngine(MockConfig(), cycle=TokenCycle([1]), context_length=100)
    with pytest.raises(errors.WorkerLost, match="adapters none; 'poet' was asked for"):
        engine.submit(
            generate.Request(id="a", model="m", token_ids=blocks.pack([1]), lora_name="poet")
        )


async def test_last_passes_of_each_rank_are_told(two_ranks):
    engine, sink = two_ranks
    before = engine.load()
    submit(engine, "a", 1)
    await sink.until_ended(1)
    zero, one = engine.load()

    assert [state.last_passes for state in (*before, zero)] == [()] * 3
    assert [(each.num_prompt_tokens, each.num_kv_tokens) for each in one.last_passes] == [
        (10, 0),
        (0, 12),  # three blocks
    ]
