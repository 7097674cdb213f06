"""The time of a step, against arithmetic done by hand, and the order in which a worker with these times works."""

import math
from dataclasses import replace

import pytest

from dynamo.simulate.disagg import Gpu, GpuGroup, ModelShape
from dynamo.simulate.plan_worker import PlanWorker, Request

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
    took = group().step_s((), num_decoding=1, num_active=499)

    assert took == pytest.approx(0.001 + 2e9 / 1e10 + 500 * 1e4 / 1e10)


def test_long_prompt_hides_the_weight_reads():
    took = group().step_s([(0, 3000)], num_decoding=10, num_active=3490, num_prefilling=3000)

    prompt_s = group().prompt_s(0, 3000)
    assert took == pytest.approx(0.001 + prompt_s + 10 * 2e9 / 1e12 + 500 * 1e4 / 1e10)


def test_gpu_groups_pay_two_all_reduces_a_layer():
    took = group(4).step_s([(0, 1000)], num_decoding=0, num_active=1000, num_prefilling=1000)

    over_links = 2 * 3 / 4 * 1000 * 100 * 2 / 1e9
    prompt_s = group(4).prompt_s(0, 1000)
    assert took == pytest.approx(0.001 + prompt_s + 2 * 10 * (1e-5 + over_links))
    assert group(4).prompt_s(0, 100) == pytest.approx(group(1).prompt_s(0, 100) / 4)


@pytest.mark.parametrize(("size", "num_tokens"), [(1, 100_000), (2, 400_000)])
def test_kv_cache_fills_the_memory_beside_the_weights(size, num_tokens):
    assert group(size).num_kv_tokens == num_tokens


GROUP = GpuGroup(gpu=Gpu(), model=ModelShape(), size=2)


def worker(role="agg", **changes):
    return PlanWorker(role, replace(GROUP, **{"max_num_seqs": 8, **changes}))


def request(num_prompt=3000, num_output=3, **changes):
    return Request(at=0.0, num_prompt=num_prompt, num_output=num_output, **changes)


def begin(worker, now=0.0):
    """Begin the first step, with all requests that have come by now."""
    assert worker.next_time == now
    worker.advance(now)


def finish(worker):
    """All that it does until it is idle: (time, done)."""
    done = []
    while worker.next_time < math.inf:
        now = worker.next_time
        done.append((now, worker.advance(now)))
    return done


def decode_s(*numbers_read):
    return sum(GROUP.step_s((), num_decoding=1, num_active=n - 1) for n in numbers_read)


def test_prompt_is_computed_in_chunks_and_then_decoded():
    alone, one = worker(), request()
    alone.submit(one, 0.0)
    finish(alone)

    first = sum(GROUP.step_s([part], 0, 0) for part in ((0, 2048), (2048, 3000)))
    assert one.first_token_at == pytest.approx(first)
    assert one.ended_at == pytest.approx(first + decode_s(3001, 3002))


def test_prompts_that_come_at_the_same_time_are_computed_in_one_step():
    both, requests = worker("prefill"), [request(num_prompt=1000), request(num_prompt=500)]
    for one in requests:
        both.submit(one, 0.0)
    begin(both)
    ((now, done),) = finish(both)

    assert done.prefilled == requests
    assert now == pytest.approx(GROUP.step_s([(0, 1000), (0, 500)], 0, 0))


def test_decode_waits_for_a_prompt_in_the_same_step():
    shared, early, late = worker(), request(num_prompt=100), request(num_prompt=2000)
    shared.submit(early, 0.0)
    begin(shared)
    shared.submit(late, 0.0)
    times = [now for now, _ in finish(shared)]

    assert times[1] - times[0] == pytest.approx(
        GROUP.step_s([(0, 2000)], num_decoding=1, num_active=2100, num_prefilling=2000)
    )


def test_prefill_worker_releases_a_request_with_its_first_token():
    prefill = worker("prefill")
    one = request(num_prompt=2000)
    prefill.submit(one, 0.0)
    begin(prefill)
    ((now, done),) = finish(prefill)

    assert now == pytest.approx(GROUP.step_s([(0, 2000)], 0, 0))
    assert (done.prefilled, done.ended) == ([one], [])
    assert prefill.num_open == 0


@pytest.mark.parametrize("role", ["decode", "agg"])
def test_request_with_a_computed_prompt_is_only_decoded(role):
    decode, one = worker(role), request(first_token_at=4.0, is_prefilled=True)
    decode.submit(one, 5.0)
    finish(decode)

    assert one.ended_at == pytest.approx(5.0 + decode_s(3001, 3002))


@pytest.mark.parametrize("limit", ["sequences", "memory"])
def test_request_without_room_waits_until_another_ends(limit):
    memory = replace(GROUP.gpu, memory_bytes=(70e9 + 4000 * 327_680) / 2)
    full = worker(gpu=memory) if limit == "memory" else worker(max_num_seqs=1)
    first, second = request(), request()
    for one in (first, second):
        full.submit(one, 0.0)
    begin(full)
    waiting = full.num_waiting
    finish(full)

    assert waiting == 1
    assert second.first_token_at > first.ended_at
    assert second.ended_at == pytest.approx(2 * first.ended_at)
