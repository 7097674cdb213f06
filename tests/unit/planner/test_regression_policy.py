import pytest

from dynamo.planner.observation import PoolLoad, PoolState, Replicas, ReportedLoad, Traffic
from dynamo.planner.policies import Targets
from dynamo.planner.regression_policy import PassRegression, RegressionLimits, RegressionPolicy
from dynamo.planner.scaling_pipeline import Limits, ScalingPipeline
from dynamo.protocols.load import ForwardPass
from planner_cases import observe

PROMPT_S, TOKEN_S = 0.01, 1e-4  # of a pass, and of each prompt token: 1,000 tokens take 110 ms


def prompts(*sizes):
    return tuple(
        ForwardPass(num_prompt_tokens=n, num_kv_tokens=0, wall_s=PROMPT_S + TOKEN_S * n)
        for n in sizes
    )


def answers(*kv_tokens):
    """10 ms, and 1 ms for each 1,000 tokens in the KV cache."""
    return tuple(
        ForwardPass(num_prompt_tokens=0, num_kv_tokens=n, wall_s=0.01 + 1e-6 * n) for n in kv_tokens
    )


def pool(*workers):
    return PoolLoad(
        num_running=1, workers=workers, waiting_tokens=sum(w.waiting_tokens for w in workers)
    )


def prefill(*queues):
    return pool(
        *(ReportedLoad(waiting_tokens=n, passes=prompts(100, 300, 500, 700, 1000)) for n in queues)
    )


def decode(*kv_tokens):
    return pool(
        *(ReportedLoad(passes=answers(1000, 5000, 9000, *[n] * 40)) for n in kv_tokens)
    )  # the last ones say how full the cache is


def step(prefill_load, decode_load, *, mode="disagg", num_requests=1, **targets):
    """The change of both pools; all workers that report are ready."""
    observation = observe(
        num_requests=num_requests,
        num_prefill=len(prefill_load.workers),
        num_decode=len(decode_load.workers),
        prefill_load=prefill_load,
        decode_load=decode_load,
    )
    policy = RegressionPolicy(Targets(mode=mode, **targets))
    proposed = policy.propose(observation, observation.traffic.value).replicas
    return tuple(
        after - before for after, before in zip(proposed, observation.num_ordered, strict=True)
    )


def test_line_goes_through_the_passes():
    regression = PassRegression(RegressionLimits())
    regression.add((n, PROMPT_S + TOKEN_S * n) for n in (100, 200, 400, 800))

    assert regression.seconds(2000) == pytest.approx(PROMPT_S + TOKEN_S * 2000)


def test_many_passes_of_one_size_leave_those_of_another():
    regression = PassRegression(RegressionLimits())
    regression.add([(4000, 0.41)])
    regression.add([(100, 0.02)] * 1000)

    assert regression.num_samples == 17
    assert regression.seconds(4000) == pytest.approx(0.41)


def test_samples_are_bounded():
    regression = PassRegression(RegressionLimits())
    regression.add((2**k, 0.01) for k in range(1, 20) for _ in range(20))

    assert regression.num_samples == 64


def test_noise_never_makes_a_larger_pass_quicker_nor_a_small_one_free():
    falling, steep = PassRegression(RegressionLimits()), PassRegression(RegressionLimits())
    falling.add([(100, 0.2), (1000, 0.1)])
    steep.add([(100, 0.001), (1000, 1.0)])

    assert falling.seconds(5000) == pytest.approx(0.15)
    assert steep.seconds(0) >= 0


def test_prefill_worker_is_added_when_all_queues_are_too_long():
    assert step(prefill(8000, 9000), decode(30_000))[0] == 1


def test_one_short_queue_is_enough():
    assert step(prefill(0, 90_000), decode(30_000), num_requests=100)[0] == 0


def test_prefill_worker_goes_when_the_others_can_take_its_queue():
    assert step(prefill(500, 500), decode(30_000))[0] == -1


def test_prefill_workers_that_are_busy_stay_without_a_queue():
    """Ten prompts of 110 ms a second keep 1.1 workers busy."""
    assert step(prefill(0, 0), decode(30_000), num_requests=100)[0] == 0


def test_prompt_that_misses_the_target_by_itself_is_said_and_adds_no_worker():
    observation = observe(
        num_requests=1, prefill_load=prefill(500), decode_load=decode(30_000), num_decode=1
    )
    policy = RegressionPolicy(Targets(mode="disagg", ttft_s=0.05))
    proposal = policy.propose(observation, observation.traffic.value)

    assert proposal.replicas.prefill == 1
    assert proposal.unreachable == "a prompt takes 110 ms by itself, the TTFT target is 50"


def test_decode_worker_is_added_when_all_answers_are_too_slow():
    assert step(prefill(0), decode(60_000, 50_000))[1] == 1


def test_one_quick_decode_worker_is_enough():
    assert step(prefill(0), decode(60_000, 35_000))[1] == 0


def test_decode_worker_goes_when_the_others_hold_its_answers():
    assert step(prefill(0), decode(10_000, 12_000))[1] == -1


def test_answers_of_two_workers_that_one_cannot_hold_stay():
    assert step(prefill(0), decode(25_000, 25_000))[1] == 0


@pytest.mark.parametrize(
    ("kv_tokens", "waiting", "change"),
    [(20_000, 9000, 1), (60_000, 0, 1), (1000, 0, -1), (1000, 1500, 0), (30_000, 0, 0)],
)
def test_aggregated_worker_is_added_for_either_target_and_goes_for_both(kv_tokens, waiting, change):
    passes = (*prompts(100, 300, 500, 700, 1000), *answers(1000, 5000, 9000, *[kv_tokens] * 40))
    workers = pool(*[ReportedLoad(waiting_tokens=waiting, passes=passes)] * 2)

    assert step(PoolLoad(), workers, mode="agg") == (0, change)


def test_few_passes_change_nothing_and_say_so():
    load = pool(*[ReportedLoad(waiting_tokens=90_000, passes=prompts(200))] * 2)
    observation = observe(
        num_requests=1, num_prefill=2, prefill_load=load, decode_load=decode(30_000)
    )
    policy = RegressionPolicy(Targets(mode="disagg"))
    proposal = policy.propose(observation, observation.traffic.value)

    assert proposal.replicas == Replicas(2, 1)
    assert proposal.reason == (
        "TTFT unknown: 2 of 5 forward passes reported, ITL of 38 ms foretold"
    )
    assert proposal.estimate is None


def test_prefill_worker_goes_when_no_prompt_comes_to_be_measured():
    load = pool(ReportedLoad(), ReportedLoad())

    assert step(load, decode(30_000))[0] == -1


def test_workers_start_when_requests_come_and_none_is_there():
    observation = observe(num_requests=1, num_prefill=0, num_decode=0)
    policy = RegressionPolicy(Targets(mode="disagg"))

    assert policy.propose(observation, observation.traffic.value).replicas == Replicas(1, 1)


def test_all_may_go_when_there_are_no_requests():
    observation = observe(num_requests=0, num_prefill=2, num_decode=2, decode_load=PoolLoad())
    policy = RegressionPolicy(Targets(mode="disagg"))

    assert policy.propose(observation, observation.traffic.value).replicas == Replicas(0, 0)
    assert policy.survivors_hold(observation, observation.traffic.value, Replicas(1, 1))


def test_answers_that_miss_their_target_keep_no_prefill_worker():
    """10 ms of a pass are within the target of 12 ms, but not a fifth below it, with any number of decode workers."""
    observation = observe(
        num_requests=1, num_prefill=2, prefill_load=prefill(0, 0), decode_load=decode(1000)
    )
    policy, traffic = RegressionPolicy(Targets(mode="disagg", itl_s=0.012)), Traffic(num_requests=1)

    assert policy.propose(observation, traffic).replicas == Replicas(1, 1)
    assert policy.survivors_hold(observation, traffic, Replicas(1, 10**9))
    assert not policy.survivors_hold(observation, traffic, Replicas(1, 0))


def test_pool_does_not_grow_while_a_worker_starts():
    starting = PoolState(num_ready=1, starting_since=(0.0,))
    observation = observe(
        num_requests=1,
        prefill=starting,
        prefill_load=prefill(90_000),
        decode_load=decode(30_000),
    )
    policy = RegressionPolicy(Targets(mode="disagg"))

    assert policy.propose(observation, observation.traffic.value).replicas.prefill == 2


def test_full_budget_gives_prefill_no_decode_worker_whose_answers_another_cannot_hold():
    observation = observe(
        num_requests=100,
        num_decode=2,
        prefill_load=prefill(90_000),
        decode_load=decode(25_000, 25_000),
    )
    targets = Targets(mode="disagg")
    pipeline = ScalingPipeline(RegressionPolicy(targets), targets, Limits(max_gpus=3))

    assert pipeline.decide(observation).replicas == (1, 2)


def test_estimates_are_those_of_the_least_loaded_workers():
    observation = observe(
        num_requests=1,
        num_prefill=2,
        prefill_load=prefill(2000, 500),
        decode_load=decode(30_000),
    )
    policy = RegressionPolicy(Targets(mode="disagg"))
    estimate = policy.propose(observation, observation.traffic.value).estimate

    assert estimate.ttft_s == pytest.approx(0.06 + 0.11)
    assert estimate.itl_s == pytest.approx(0.01 + 0.03, rel=0.1)
    assert estimate.prompts_per_s == pytest.approx(1 / 0.11)


def test_cached_prompt_tokens_cost_nothing():
    half = Traffic(num_requests=1, isl=1000, osl=10, hit_rate=0.5)
    observation = observe(prefill_load=prefill(0), decode_load=decode(30_000))
    policy = RegressionPolicy(Targets(mode="disagg"))

    assert policy.propose(observation, half).estimate.ttft_s == pytest.approx(0.06)
