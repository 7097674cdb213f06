"""A whole worker in virtual time: host, request plane and mock engine wait for a clock that the test moves."""

import asyncio
import time

import pytest

from dynamo.engine.mock import answers, engine
from dynamo.engine.mock.settings import MockConfig
from dynamo.protocols import blocks, generate, instances, model_card
from dynamo.runtime import component
from dynamo.testing.clock import VirtualClock
from dynamo.worker import host
from waiting import PATIENT_S

ENDPOINT = instances.EndpointName("dynamo", "backend", "generate")
NUM_TOKENS = 600
BLOCK_SIZE = 64


def make_card(facts):
    return model_card.ModelCard(
        display_name="m",
        source_path="/m",
        context_length=facts.context_length,
        kv_cache_block_size=facts.kv_block_size,
    )


class Receiver:
    """Counts the tokens of a response."""

    def __init__(self):
        self.num_tokens, self.ends = 0, []

    def receive(self, output):
        self.num_tokens += len(output.token_ids)

    def replied(self, body):
        raise AssertionError(body)

    def ended(self, error):
        self.ends.append(error)


@pytest.fixture
async def clock():
    return VirtualClock()


@pytest.fixture
async def client(clock):
    """A client of a worker whose GPU is fifty times slower than the simulated one: 287 ms or more per token."""
    cluster = component.MemoryCluster()
    settings = MockConfig(speedup_ratio=0.02, block_size=BLOCK_SIZE, num_gpu_blocks_override=4096)
    runtime = await component.DistributedRuntime.in_memory(cluster, item_type=generate.Output)
    worker = host.Host(
        engine.MockEngine(
            settings, cycle=answers.TokenCycle(range(100)), context_length=8192, clock=clock
        ),
        runtime,
        ENDPOINT,
        make_card=make_card,
        options=host.HostOptions(request_limit=8),
        clock=clock,
    )
    await worker.start()
    caller = await component.DistributedRuntime.in_memory(cluster, item_type=generate.Output)
    client = caller.client(ENDPOINT)
    await client.wait_for_instances(PATIENT_S)
    yield client
    await worker.stop(0.1)
    await caller.close()
    await runtime.close()


def request(request_id="r"):
    return generate.Request(
        id=request_id,
        model="m",
        token_ids=blocks.pack(range(200)),
        stop_conditions=generate.StopConditions(max_tokens=NUM_TOKENS, ignore_eos=True),
    )


async def test_minutes_of_a_worker_pass_within_seconds(clock, client):
    receiver, began_at = Receiver(), time.process_time()
    await client.open(request(), receiver)

    await clock.advance(60.0)
    num_after_a_minute = receiver.num_tokens
    await clock.advance(180.0)

    assert 150 < num_after_a_minute < 60.0 / 0.287
    assert receiver.num_tokens == NUM_TOKENS
    assert receiver.ends == [None]
    assert time.process_time() - began_at < 10.0


async def test_no_output_comes_while_the_clock_stands_still(clock, client):
    receiver = Receiver()
    await client.open(request(), receiver)
    for _ in range(100):
        await asyncio.sleep(0)

    assert receiver.num_tokens == 0
    await clock.advance(1.0)
    assert receiver.num_tokens > 0


async def test_requests_of_one_worker_share_its_simulated_time(clock, client):
    receivers = [Receiver(), Receiver()]
    for number, receiver in enumerate(receivers):
        await client.open(request(f"r{number}"), receiver)
    await clock.advance(300.0)

    assert [receiver.num_tokens for receiver in receivers] == [NUM_TOKENS, NUM_TOKENS]
