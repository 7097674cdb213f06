"""How busy vLLM is, by recorded statistics; without vLLM."""

from types import SimpleNamespace

from dynamo.engine import api
from dynamo.engine.adapters.vllm.translation import VllmLoad

FACTS = api.EngineFacts(
    context_length=512,
    kv_block_size=32,
    total_kv_blocks=40,
    max_num_seqs=8,
    max_num_batched_tokens=64,
)


def stats(running=0, waiting=0, skipped=0, usage=0.0, queries=0, hits=0):
    return SimpleNamespace(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_skipped_waiting_reqs=skipped,
        kv_cache_usage=usage,
        prefix_cache_stats=SimpleNamespace(queries=queries, hits=hits),
    )


def now(load, *, prefill=0, is_idle=False):
    return load.metrics(FACTS, num_prefill_tokens=prefill, is_idle=is_idle)


def test_load_is_of_the_last_step_and_hits_add_up():
    load = VllmLoad(1)
    load.record(0, stats(running=5, queries=100))
    load.record(0, stats(running=2, waiting=3, skipped=1, usage=0.25, queries=100, hits=50))
    (one,) = now(load, prefill=7)

    assert one.worker_stats.request_active_slots == 2
    assert one.worker_stats.num_requests_waiting == 4
    assert one.worker_stats.active_prefill_tokens == 7
    assert one.kv_stats.kv_active_blocks == 10
    assert one.kv_stats.gpu_prefix_cache_hit_rate == 0.25


def test_each_rank_has_its_own_load():
    load = VllmLoad(2)
    load.record(1, stats(running=3))
    zero, one = now(load, prefill=10)

    assert (zero.worker_stats.request_active_slots, one.worker_stats.request_active_slots) == (0, 3)
    assert [state.worker_stats.data_parallel_rank for state in (zero, one)] == [0, 1]
    assert zero.worker_stats.active_prefill_tokens == 5


def test_an_idle_engine_reports_no_load():
    load = VllmLoad(1)
    load.record(0, stats(running=1, waiting=1, usage=0.5))
    (one,) = now(load, is_idle=True)

    assert one.worker_stats.request_active_slots == one.worker_stats.num_requests_waiting == 0
    assert one.kv_stats.kv_active_blocks == 0
