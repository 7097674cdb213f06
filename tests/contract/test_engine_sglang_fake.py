"""What every engine promises its host, by the SGLang adapter over a fake of what it uses of SGLang.

It shows that the adapter keeps requests, choices and faults apart; whether SGLang is as its sources say, only
`make test-sglang` shows, which needs a GPU.
"""

import os
import signal

import pytest

import fake_sglang
from dynamo.engine.adapters.settings import SglangConfig
from engine_suite import *  # noqa: F403 (the suite's tests, which pytest finds here)

del test_kv_events_never_store_more_blocks_than_the_pool_has  # noqa: F821 (the fake's memory has no end)


@pytest.fixture
def make_engine(tmp_path):
    with fake_sglang.adapter() as adapter:
        yield lambda: adapter.build(tmp_path, SglangConfig(load_tokenizer=True), "m")


@pytest.fixture
def break_down():
    def fail_a_process(engine):
        engine._library._engine.model.is_dead = True
        os.kill(os.getpid(), signal.SIGQUIT)
        return "engine process died"

    return fail_a_process


async def test_start_returns_the_facts_of_sglangs_configuration(host):
    facts = host.facts

    assert (facts.context_length, facts.kv_block_size, facts.total_kv_blocks) == (512, 16, 24)
    assert (facts.max_num_seqs, facts.max_num_batched_tokens) == (8, 64)
    assert facts.supports_guided
    assert not facts.supports_thinking_limit


async def test_requests_that_sglang_refuses_fail_through_the_sink(host):
    request = generate.Request(  # noqa: F405
        id="a",
        model="m",
        token_ids=blocks.pack([5]),  # noqa: F405
        sampling_options=generate.SamplingOptions(frequency_penalty=3.0),  # noqa: F405
    )
    host.engine.submit(request)
    await host.sink.until(lambda: host.sink.errors)

    assert isinstance(host.sink.errors["a"], errors.InvalidRequest)  # noqa: F405
    assert "frequency_penalty" in str(host.sink.errors["a"])


async def test_load_is_of_the_schedulers_last_snapshot(host):
    host.submit("a", PROMPT, max_tokens=50)  # noqa: F405
    await host.sink.until(lambda: host.sink.of("a"))
    (told,) = host.engine.load()

    assert (told.worker_stats.request_active_slots, told.kv_stats.kv_active_blocks) == (1, 2)
