"""The simulated tiers: real decisions about blocks, in virtual time."""

import asyncio

import pytest

from dynamo.base import errors
from dynamo.engine.mock.answers import TokenCycle
from dynamo.engine.mock.engine import MockEngine
from dynamo.engine.mock.settings import MockConfig
from dynamo.protocols import blocks, generate, kv_events
from dynamo.testing import clock as clocks

BLOCK = 16
PROMPT_LEN = 1000


class Sink:
    def __init__(self, clock):
        self.clock, self.first, self.ends = clock, {}, {}
        self.held = {tier: set() for tier in kv_events.TIERS}

    def outputs(self, batch):
        for request_id, output in batch:
            self.first.setdefault(request_id, (self.clock.now(), output))
            if output.finish_reason is not None:
                self.ends[request_id].set()

    def kv_events(self, events, dp_rank):
        for event in events:
            match event:
                case kv_events.Stored(blocks=stored, tier=tier):
                    self.held[tier] |= {block.block_hash for block in stored}
                case kv_events.Removed(block_hashes=names, tier=tier):
                    self.held[tier] -= set(names)
                case kv_events.Cleared():
                    self.held = {tier: set() for tier in self.held}


class World:
    def __init__(self, **settings):
        self.clock = clocks.VirtualClock()
        shape = {"block_size": BLOCK, "num_gpu_blocks_override": 100, "kv_bytes_per_token": 100_000}
        self.engine = MockEngine(
            MockConfig(**(shape | settings)),
            cycle=TokenCycle([1, 2]),
            context_length=1500,
            clock=self.clock,
        )
        self.sink, self.number = Sink(self.clock), 0

    async def ask(self, seed):
        """Answer a prompt. Return the virtual seconds to its first token, and that output."""
        self.number += 1
        request_id, began_at = str(self.number), self.clock.now()
        self.sink.ends[request_id] = asyncio.Event()
        self.engine.submit(
            generate.Request(
                id=request_id,
                model="m",
                token_ids=blocks.pack([seed] * PROMPT_LEN),
                stop_conditions=generate.StopConditions(max_tokens=2),
            )
        )
        for _ in range(4000):
            if self.sink.ends[request_id].is_set():
                break
            await self.clock.advance(0.001)
        await self.clock.advance(0.5)  # copies that run beside end
        at, output = self.sink.first[request_id]
        return at - began_at, output


@pytest.fixture
async def worlds():
    made = []

    async def make(**settings):
        world = World(**settings)
        await world.engine.start(world.sink)
        made.append(world)
        return world

    yield make
    for world in made:
        await world.engine.stop()


async def test_evicted_prompt_is_loaded_in_less_time_than_it_is_computed(worlds):
    world = await worlds(kvbm_host_blocks=400)
    computed_s, first = await world.ask(1)
    for seed in (2, 3, 4):
        await world.ask(seed)
    loaded_s, output = await world.ask(1)

    assert (first.cached_tokens, first.tier_tokens) == (0, None)
    assert output.cached_tokens > 900
    assert dict(output.tier_tokens)["host"] > 300
    assert loaded_s < computed_s


async def test_without_tiers_it_is_computed_again(worlds):
    world = await worlds()
    for seed in (1, 2, 3, 4):
        await world.ask(seed)
    _, output = await world.ask(1)

    assert output.tier_tokens is None
    assert output.cached_tokens < 900


async def test_disk_holds_what_host_memory_has_evicted(worlds):
    world = await worlds(kvbm_host_blocks=130, kvbm_disk_blocks=600, kvbm_disk_bandwidth=100.0)
    for seed in range(1, 7):
        await world.ask(seed)
    _, output = await world.ask(1)

    assert dict(output.tier_tokens)["disk"] > 0
    assert len(world.sink.held[kv_events.HOST]) <= 130
    assert len(world.sink.held[kv_events.DISK]) > 300


async def test_slow_tier_is_not_waited_for(worlds):
    world = await worlds(kvbm_host_blocks=400, kvbm_host_bandwidth=0.01)
    for seed in (1, 2, 3, 4):
        await world.ask(seed)
    await world.clock.advance(100)
    _, output = await world.ask(1)

    assert output.tier_tokens is None


async def test_cleared_tiers_hold_nothing(worlds):
    world = await worlds(kvbm_host_blocks=400)
    await world.ask(1)
    await world.engine.clear_kv_blocks()

    assert not any(world.sink.held.values())
    assert (await world.ask(1))[1].cached_tokens == 0


def test_disk_without_host_memory_is_refused():
    with pytest.raises(errors.ConfigError, match="needs --kvbm-host-blocks"):
        MockConfig(kvbm_disk_blocks=10).check()
