"""What every engine promises its host, by the TensorRT-LLM adapter over a fake of what it uses of TensorRT-LLM.

It shows that the adapter keeps requests, choices and faults apart; whether TensorRT-LLM is as its sources say, only
`make test-trtllm` shows, which needs a GPU.
"""

import asyncio
import json

import pytest

import fake_trtllm
from dynamo.engine.adapters.settings import TrtllmConfig
from engine_suite import *  # noqa: F403 (the suite's tests, which pytest finds here)
from waiting import PATIENT_S

# The adapter tells no KV events; TensorRT-LLM has no way to forget, gives no logprobs of the tokens that a prompt has,
# and holds back its one end token, not stop tokens.
del test_kv_events_store_the_blocks_of_prompt_and_answer  # noqa: F821
del test_kv_events_never_store_more_blocks_than_the_pool_has  # noqa: F821
del test_clearing_sends_a_cleared_event  # noqa: F821
del test_clearing_drops_prefixes_and_running_requests_go_on  # noqa: F821
del test_prompt_logprobs_are_reported_once_even_for_a_cached_prefix  # noqa: F821
del test_a_prompt_of_one_token_has_no_logprobs  # noqa: F821
del test_no_answer_ends_before_min_tokens  # noqa: F821


@pytest.fixture
def make_engine(tmp_path):
    model = {"max_position_embeddings": 512, "vocab_size": 200}
    (tmp_path / "config.json").write_text(json.dumps(model))
    settings = TrtllmConfig(max_batch_size=8, max_num_tokens=64, kv_block_size=16)
    with fake_trtllm.adapter() as adapter:
        yield lambda: adapter.build(tmp_path, settings)


@pytest.fixture
def break_down():
    def shut_down(engine):
        engine._library._llm.model.is_dead = True
        return "engine process died"

    return shut_down


async def test_start_returns_the_number_of_blocks(host):
    facts = host.facts

    assert (facts.context_length, facts.kv_block_size, facts.total_kv_blocks) == (512, 16, 24)
    assert (facts.max_num_seqs, facts.max_num_batched_tokens) == (8, 64)
    assert not facts.supports_thinking_limit


async def test_clearing_raises_engine_failed(host):
    with pytest.raises(errors.EngineFailed, match="no way to"):  # noqa: F405
        await host.engine.clear_kv_blocks()


async def test_answer_that_the_library_ends_without_a_reason_fails(host, monkeypatch):
    library = host.engine._library
    stream = library.stream

    async def end_early(request, plan, name):
        async for result in stream(request, plan, name):
            yield result
            return

    monkeypatch.setattr(library, "stream", end_early)
    host.submit("a", PROMPT, max_tokens=5)  # noqa: F405
    await host.sink.until(lambda: host.sink.errors)
    monkeypatch.undo()

    assert str(host.sink.errors["a"]) == "TensorRT-LLM ended an answer without a reason"
    await host.answer("a", PROMPT, max_tokens=1)  # noqa: F405


async def test_load_is_read_again_after_statistics_that_failed(host, monkeypatch, caplog):
    library = host.engine._library
    read, failures = library._llm.get_stats_async, [RuntimeError("no statistics")]

    async def fail_once(timeout):
        if failures:
            raise failures.pop()
        async for stats in read(timeout):
            yield stats | {"kvCacheStats": stats["kvCacheStats"] | {"cacheHitRate": 0.75}}

    monkeypatch.setattr(library._llm, "get_stats_async", fail_once)
    async with asyncio.timeout(PATIENT_S):
        while host.engine.load()[0].kv_stats.gpu_prefix_cache_hit_rate != 0.75:
            await asyncio.sleep(0.01)

    assert "no statistics of TensorRT-LLM, will ask again: RuntimeError" in caplog.text
