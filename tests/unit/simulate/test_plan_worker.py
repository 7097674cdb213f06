import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.engine.mock import timing
from dynamo.planner import profile
from dynamo.router.worker_load import Capacity
from dynamo.simulate import plan_policies
from dynamo.simulate.plan_worker import PlanWorker, Request, ReservedTokens, StepTimes, h100_8b
from dynamo.simulate.workers import BatchWorker
from dynamo.simulate.workload import SimulatedRequest

TIMES = h100_8b()


def serve(worker, requests):
    """Submit each request at its time, and run until all have left; return the order of ends."""
    left, ended = sorted(requests, key=lambda r: r.at), []
    while left or worker.next_time < math.inf:
        if left and left[0].at < worker.next_time:
            worker.submit(left[0], left.pop(0).at)
        else:
            result = worker.advance(worker.next_time)
            ended += result.prefilled if worker.role == "prefill" else result.ended
    return ended


def request(at=0.0, num_prompt=3000, num_output=150, **more):
    return Request(at=at, num_prompt=num_prompt, num_output=num_output, **more)


def test_prompt_takes_the_time_of_the_profile():
    prompt = request()
    serve(PlanWorker("prefill", TIMES), [prompt])

    assert prompt.ttft_s == pytest.approx(0.155)


def test_prompts_queue_one_behind_the_other():
    prompts = [request(num_prompt=8192), request(num_prompt=8192)]
    serve(PlanWorker("prefill", TIMES), prompts)

    assert prompts[1].ttft_s == pytest.approx(2 * TIMES.prefill_s(8192))


def test_tokens_of_a_lone_sequence_take_a_decode_step_each():
    alone = request(num_prompt=64, num_output=3)
    serve(PlanWorker("agg", TIMES), [alone])

    steps = TIMES.decode_s(64 / TIMES.num_kv_tokens) + TIMES.decode_s(65 / TIMES.num_kv_tokens)
    assert alone.ended_at - alone.first_token_at == pytest.approx(steps)


def test_request_joins_at_the_end_of_the_step_that_runs():
    worker = PlanWorker("decode", TIMES)
    first, second = request(num_prompt=10), request(at=0.0061, num_prompt=10, num_output=2)
    first.first_token_at = second.first_token_at = 0.0
    first.is_prefilled = second.is_prefilled = True
    serve(worker, [first, second])

    step = TIMES.decode_s(0)
    assert second.ended_at == pytest.approx(3 * step, rel=0.01)


def test_cached_prefix_is_not_computed_again():
    worker = PlanWorker("prefill", TIMES)
    prompts = [request(at=at, num_prompt=1024, names=(1, 2), block_size=512) for at in (0.0, 5.0)]
    serve(worker, prompts)

    assert prompts[1].num_cached == 1023
    assert prompts[1].ttft_s == pytest.approx(TIMES.prefill_s(1))


def test_prompt_that_waited_finds_what_was_computed_meanwhile():
    worker = PlanWorker("prefill", replace(TIMES, max_num_batched_tokens=1024))
    prompts = [request(num_prompt=1024, names=(1, 2), block_size=512) for _ in range(3)]
    serve(worker, prompts)

    assert [each.num_cached for each in prompts] == [0, 1023, 1023]
    assert prompts[2].ttft_s == pytest.approx(TIMES.prefill_s(1024) + TIMES.prefill_s(2))
    assert worker.num_queued_tokens == 0


def test_full_cache_makes_requests_wait():
    worker = PlanWorker("agg", TIMES)
    requests = [request(num_prompt=300_000, num_output=10) for _ in range(2)]
    serve(worker, requests)

    assert requests[1].first_token_at > requests[0].ended_at


@given(
    st.lists(
        st.tuples(st.floats(0, 3), st.integers(1, 9000), st.integers(1, 60)),
        min_size=1,
        max_size=30,
    )
)
def test_every_request_ends_and_nothing_is_left(rows):
    worker = PlanWorker("agg", TIMES)
    requests = [request(at, prompt, output) for at, prompt, output in rows]

    assert len(serve(worker, requests)) == len(requests)
    assert worker.num_active_tokens == worker.num_queued_tokens == worker.num_open == 0
    assert all(r.at < r.first_token_at <= r.ended_at for r in requests)


def test_computed_prompt_goes_ahead_of_prompts_that_wait():
    worker = PlanWorker("agg", TIMES)
    prompts = [request(num_prompt=8192) for _ in range(4)]
    computed = request(num_output=2)
    computed.first_token_at = 0.0
    computed.is_prefilled = True
    serve(worker, [*prompts, computed])

    assert computed.ended_at < prompts[1].first_token_at + TIMES.decode_s(1)


def computed(**more):
    """Return a request whose prompt of two blocks and a token a prefill worker has computed."""
    fields = {"num_prompt": 1025, "names": (1, 2, 3), "is_prefilled": True, "first_token_at": 0.0}
    return request(**fields | more)


def test_shared_blocks_are_counted_once_in_the_time_of_a_decode_step():
    worker = PlanWorker("decode", TIMES)
    worker.submit(computed(num_output=9), 0.0)
    worker.advance(0.0)
    worker.submit(computed(num_output=2), 0.001)
    began_at = worker.next_time
    worker.advance(began_at)

    num_active = 1025 + 1 + 1  # the first prompt, a token of its answer, the second prompt's last
    assert worker.num_active_tokens == num_active
    step_s = TIMES.decode_s(num_active / TIMES.num_kv_tokens)
    assert worker.next_time - began_at == pytest.approx(step_s, rel=1e-6)


def test_shared_blocks_cost_each_further_request_what_the_profile_says():
    worker = PlanWorker("decode", replace(TIMES, repeated_cost=0.25))
    first, second = computed(num_output=9), computed(num_output=2)
    worker.submit(first, 0.0)
    worker.advance(0.0)
    worker.submit(second, 0.001)
    began_at = worker.next_time
    worker.advance(began_at)

    num_read = 1025 + 1 + 1 + 0.25 * 1024  # the second request reads two blocks of 512 again
    step_s = TIMES.decode_s(num_read / TIMES.num_kv_tokens)
    assert worker.next_time - began_at == pytest.approx(step_s, rel=1e-6)

    began_at = worker.next_time
    worker.advance(began_at)  # the second has ended
    step_s = sum(TIMES.decode_s((1025 + n) / TIMES.num_kv_tokens) for n in range(2, 8))
    assert worker.next_time - began_at == pytest.approx(step_s, rel=1e-6)


def test_blocks_that_two_requests_copy_in_one_step_are_there_twice():
    worker = PlanWorker("decode", TIMES)
    for _ in range(2):
        worker.submit(computed(), 0.0)
    worker.advance(0.0)
    num_copied = worker.num_active_tokens
    worker.submit(computed(), 0.001)
    worker.advance(worker.next_time)

    assert (num_copied, worker.num_active_tokens) == (2 * 1025, 2 * 1025 + 2 + 1)


def test_prompts_of_one_step_share_the_blocks_that_it_computes():
    worker = PlanWorker("agg", TIMES)
    for _ in range(2):
        worker.submit(request(num_prompt=1025, names=(1, 2, 3)), 0.0)
    worker.advance(0.0)

    assert worker.num_active_tokens == 1025 + 1


def test_requests_that_share_blocks_run_together_where_they_would_not_fit_apart():
    worker = PlanWorker("decode", replace(TIMES, num_kv_tokens=1200))
    requests = [computed(at=at, num_output=9) for at in (0.0, 0.001)]
    serve(worker, requests)

    assert requests[1].ended_at == pytest.approx(requests[0].ended_at, rel=0.3)


def test_prefill_worker_keeps_the_blocks_of_a_prompt_until_their_release():
    worker = PlanWorker("prefill", replace(TIMES, num_kv_tokens=4000))
    first, second = request(), request()
    serve(worker, [first, second])
    assert (worker.num_waiting, worker.num_active_tokens) == (1, 3000)

    worker.release_lease(first, 9.0)
    worker.release_lease(first, 9.0)
    serve(worker, [])
    assert second.first_token_at == pytest.approx(9.0 + TIMES.prefill_s(3000))
    assert not worker.is_drained

    worker.release_lease(second, 10.0)
    assert worker.is_drained
    assert worker.num_active_tokens == 0


CHAINS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 70), st.booleans()), max_size=40)


@given(CHAINS)
def test_tokens_in_use_are_those_of_different_blocks_and_of_tails(rows):
    """Blocks have 16 tokens. Prompts of the same number begin alike; `is_release` ends the oldest request."""
    reserved, running, num_active = ReservedTokens(10**6), [], 0
    for number, num_prompt, is_release in rows:
        if is_release and running:
            num_active -= reserved.release(running.pop(0))
            continue
        names = range(100 * number, 100 * number + -(-num_prompt // 16))
        running.append(request(num_prompt=num_prompt, names=names, block_size=16))
        num_active += reserved.reserve(running[-1], 7)

        full = {name for r in running for name in r.names[: (r.num_prompt - 1) // 16]}
        num_tails = sum((r.num_prompt - 1) % 16 + 1 for r in running)
        assert num_active == 16 * len(full) + num_tails


def make_profiled_times():
    """A step takes 2 ms, 1 ms more for 100 new tokens, 0.1 ms for a sequence and 1 ms for 1,000 tokens in use."""
    points = [
        profile.DecodePoint(n * context / 1e5, context, (2 + 0.1 * n + n * context / 1e3) / 1e3, 1)
        for context in (1.0, 100.0, 1000.0)
        for n in (0, 100)
    ]
    lengths = (1.0, 1000.0)
    curve = profile.PrefillCurve(
        isl=lengths, ttft_s=tuple((2 + n / 100) / 1e3 for n in lengths), throughput=(1.0, 1.0)
    )
    surface = profile.DecodeSurface(points, max_kv_tokens=100_000)
    measured = profile.WorkerProfile(prefill=curve, decode=surface)
    return plan_policies.step_times(measured, context=100.0)


def test_sequences_that_share_their_tokens_take_time_for_each_of_them():
    times = make_profiled_times()

    assert times.step_s((), 10, 10_000) == pytest.approx(0.013)
    assert times.step_s((), 100, 10_000) == pytest.approx(0.022)
    assert times.decode_steps_s(2, 100, 10_000) == pytest.approx([0.022, 0.0221])


def test_prompts_of_a_step_take_their_time_beside_its_answers_and_what_each_step_costs_once():
    times = make_profiled_times()

    assert times.step_s([(0, 500)], 0, 500) == pytest.approx(0.007)
    assert times.step_s([(0, 100)], 9, 1000) == pytest.approx(0.003 + 0.0038 - 0.002)


def test_worker_takes_about_as_long_as_the_simulated_engine():
    """They plan batches apart: the engine makes each step, and the worker of the planner skips over decode steps."""
    times = StepTimes(
        prefill_s=lambda num_tokens: timing.prefill_ms(round(num_tokens)) / 1e3,
        decode_s=lambda share: timing.decode_ms(share) / 1e3,
        num_kv_tokens=24_576,
        max_num_seqs=64,
    )
    planned = PlanWorker("agg", times)
    capacity = Capacity(total_blocks=1536, max_num_seqs=64, max_num_batched_tokens=8192)
    engine = BatchWorker(capacity, block_size=16)
    requests = [request(num_prompt=2000, num_output=100 + 20 * n) for n in range(8)]
    first_at, ended_at = {}, {}
    serve(planned, requests)
    for number, asked in enumerate(requests):
        names = range(1000 * number, 1000 * number + 125)
        arrival = SimulatedRequest(
            at=0.0, num_tokens=2000, num_output=asked.num_output, names=names
        )
        engine.submit(str(number), arrival, 0.0)
    while (now := engine.next_time) < math.inf:
        result = engine.advance(now)
        first_at |= {int(request_id): now for request_id, _ in result.first_outputs}
        ended_at |= {int(request_id): now for request_id in result.ended}

    for number, asked in enumerate(requests):
        assert asked.first_token_at == pytest.approx(first_at[number], rel=0.1)
        assert asked.ended_at == pytest.approx(ended_at[number], rel=0.1)
