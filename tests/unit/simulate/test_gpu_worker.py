"""The time of an iteration, against arithmetic done by hand, and the order in which a GPU worker runs its jobs."""

import math
from dataclasses import replace

import pytest

from dynamo.simulate.workers import Gpu, GpuGroup, GpuWorker, Job, ModelShape

GPU = Gpu(flops=1e12, bytes_per_s=1e10, memory_bytes=3e9, link_bytes_per_s=1e9, all_reduce_s=1e-5,
          overhead_s=0.001)  # fmt: skip
MODEL = ModelShape(
    num_parameters=1e9, weight_bytes=2e9, num_layers=10, hidden_size=100, kv_bytes=1e4
)


def group(size=1):
    return GpuGroup(gpu=GPU, model=MODEL, size=size)


def test_prompt_time_is_linear_layers_plus_attention():
    assert group().prompt_s(0, 1000) == pytest.approx((2e12 + 2 * 10 * 100 * 1e6) / 1e12)


@pytest.mark.parametrize("cut", [1, 500, 999])
def test_chunks_of_a_prompt_take_as_long_as_the_whole(cut):
    parts = group().prompt_s(0, cut) + group().prompt_s(cut, 1000)

    assert parts == pytest.approx(group().prompt_s(0, 1000))


def test_single_decode_waits_for_weights_and_kv_reads():
    took = group().iteration_s(prompts_s=0, num_prompt_tokens=0, num_decoding=1, num_read=500)

    assert took == pytest.approx(0.001 + 2e9 / 1e10 + 500 * 1e4 / 1e10)


def test_long_prompt_hides_the_weight_reads():
    took = group().iteration_s(prompts_s=7.0, num_prompt_tokens=9, num_decoding=10, num_read=0)

    assert took == pytest.approx(0.001 + 7.0 + 10 * 2e9 / 1e12)


def test_gpu_groups_pay_two_all_reduces_a_layer():
    took = group(4).iteration_s(prompts_s=3.0, num_prompt_tokens=1000, num_decoding=0, num_read=0)

    over_links = 2 * 3 / 4 * 1000 * 100 * 2 / 1e9
    assert took == pytest.approx(0.001 + 3.0 + 2 * 10 * (1e-5 + over_links))
    assert group(4).prompt_s(0, 100) == pytest.approx(group(1).prompt_s(0, 100) / 4)


@pytest.mark.parametrize(("size", "num_tokens"), [(1, 100_000), (2, 400_000)])
def test_kv_cache_fills_the_memory_beside_the_weights(size, num_tokens):
    assert group(size).num_kv_tokens == num_tokens


GROUP = GpuGroup(gpu=Gpu(), model=ModelShape(), size=2)


def worker(group=GROUP, **changes):
    return GpuWorker(group, **{"max_num_seqs": 8, "max_num_tokens": 2048, **changes})


def job(num_prompt=3000, num_output=3, **changes):
    return Job(num_prompt=num_prompt, num_output=num_output, **changes)


def finish(worker):
    """All that it does until it is idle: (time, done)."""
    done = []
    while worker.next_time < math.inf:
        now = worker.next_time
        done.append((now, worker.advance(now)))
    return done


def prompt_s(start, end, *, num_decoding=0, num_read=0):
    return GROUP.iteration_s(
        prompts_s=GROUP.prompt_s(start, end),
        num_prompt_tokens=end - start,
        num_decoding=num_decoding,
        num_read=num_read,
    )


def test_prompt_is_computed_in_chunks_and_then_decoded():
    alone, one = worker(), job()
    alone.submit(one, 0.0)
    finish(alone)

    first = prompt_s(0, 2048) + prompt_s(2048, 3000)
    steps = [prompt_s(0, 0, num_decoding=1, num_read=3000 + written) for written in (1, 2)]
    assert one.first_token_at == pytest.approx(first)
    assert one.ended_at == pytest.approx(first + sum(steps))


def test_decode_waits_for_a_prompt_in_the_same_iteration():
    shared, early, late = worker(), job(num_prompt=100), job(num_prompt=2000)
    shared.submit(early, 0.0)
    shared.submit(late, 0.0)
    times = [now for now, _ in finish(shared)]

    assert times[1] - times[0] == pytest.approx(
        GROUP.iteration_s(
            prompts_s=GROUP.prompt_s(0, 2000),
            num_prompt_tokens=2000,
            num_decoding=1,
            num_read=101,
        )
    )


def test_prefill_worker_releases_a_job_with_its_first_token():
    prefill = worker(is_prefill_only=True)
    prefill.submit(job(num_prompt=2000), 0.0)
    ((now, done),) = finish(prefill)

    assert now == pytest.approx(prompt_s(0, 2000))
    assert ([one.num_written for one in done.prefilled], done.ended) == ([1], [])
    assert prefill.num_open == 0


def test_job_with_a_computed_prompt_is_only_decoded():
    decode, one = worker(), job(num_computed=3000, num_written=1)
    decode.submit(one, 5.0)
    finish(decode)

    assert one.ended_at == pytest.approx(
        5.0 + sum(prompt_s(0, 0, num_decoding=1, num_read=3000 + n) for n in (1, 2))
    )


@pytest.mark.parametrize("limit", ["sequences", "memory"])
def test_job_without_room_waits_until_another_ends(limit):
    memory = replace(GROUP.gpu, memory_bytes=(70e9 + 4000 * 327_680) / 2)
    full = worker(replace(GROUP, gpu=memory)) if limit == "memory" else worker(max_num_seqs=1)
    first, second = job(), job()
    for one in (first, second):
        full.submit(one, 0.0)
    waiting = full.num_waiting
    finish(full)

    assert waiting == 1
    assert second.first_token_at > first.ended_at
    assert second.ended_at == pytest.approx(2 * first.ended_at)
