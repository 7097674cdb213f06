import random

import pytest

from dynamo.planner.observation import Replicas
from dynamo.simulate import plan_arrivals, plan_cluster, plan_worker
from dynamo.simulate.plan_cluster import PlanCluster, WorkerDeath, WorkerOrder
from dynamo.simulate.plan_run import PlanScenario, feed, run, run_fixed
from dynamo.simulate.plan_worker import Request, h100_8b

TIMES = h100_8b()


def make_cluster(*replicas, startup_s=60.0):
    cluster = PlanCluster(TIMES, startup_s=startup_s, role_change_s=2.0)
    cluster.add_ready(Replicas(*replicas))
    return cluster


def test_worker_serves_one_startup_time_after_its_order():
    cluster = make_cluster(1, 1)
    cluster.scale(Replicas(2, 1))
    cluster.run_until(59)
    early = cluster.observe(10).prefill
    cluster.run_until(60)

    assert (early.num_ready, early.num_starting) == (1, 1)
    assert cluster.observe(10).prefill.num_ready == 2


def test_worker_is_billed_from_its_order():
    cluster = make_cluster(0, 1)
    cluster.scale(Replicas(1, 1))
    cluster.run_until(100)
    cluster.stop()

    assert cluster.gpu_seconds == 200


def test_start_that_is_given_up_is_billed_until_then():
    cluster = make_cluster(0, 1)
    cluster.scale(Replicas(1, 1))
    cluster.run_until(20)
    cluster.scale(Replicas(0, 1))

    assert cluster.gpu_seconds == 20


def test_draining_worker_ends_its_requests_and_is_billed_until_then():
    cluster = make_cluster(1, 2)
    request = Request(at=0.0, num_prompt=3000, num_output=150)
    cluster.submit(request)
    cluster.run_until(0.5)
    cluster.scale(Replicas(1, 1))  # the idle one
    cluster.scale(Replicas(1, 0))
    cluster.run_until(10)

    assert request.ended_at < 2
    assert cluster.gpu_seconds == pytest.approx(0.5 + request.ended_at)


def test_request_waits_for_the_first_worker():
    cluster = make_cluster(0, 1, startup_s=5.0)
    request = Request(at=0.0, num_prompt=3000, num_output=2)
    cluster.submit(request)
    cluster.scale(Replicas(1, 1))
    cluster.run_until(20)

    assert request.ttft_s == pytest.approx(5.155)


def test_observation_counts_the_interval_only():
    cluster = make_cluster(1, 1)
    feed(cluster, plan_arrivals.sinusoidal(seed=1), 0, 10.0)
    cluster.run_until(10)
    first, second = cluster.observe(10), cluster.observe(10)

    assert first.traffic.value.num_requests > 100
    assert first.traffic.value.isl == 3000
    assert second.traffic.value.num_requests == 0


def test_scaling_up_and_down_loses_no_request():
    requests = plan_arrivals.sinusoidal(seed=2, duration_s=100)
    scenario = PlanScenario(requests=requests, times=TIMES, startup_s=3.0)
    turns = iter(range(10_000))

    def swing(_):
        return WorkerOrder(Replicas(1 + next(turns) % 3, 1 + next(turns) % 2))

    result = run(scenario, "swing", swing)

    assert result.num_lost == 0
    assert result.num_scalings > 5


def test_worker_changes_its_role_once_it_has_drained_and_is_billed_once():
    cluster = make_cluster(2, 1)
    requests = [Request(at=0.0, num_prompt=3000, num_output=2) for _ in range(4)]
    for request in requests:
        cluster.submit(request)
    cluster.run_until(0.1)
    cluster.scale(Replicas(1, 2), 1)
    changing = cluster.observe(10)
    # its two prompts, which came at once, are computed and copied
    drained_at = TIMES.prefill_s(6000) + TIMES.transfer_s(3000)
    cluster.run_until(drained_at + 1.999)
    early = cluster.observe(10)
    cluster.run_until(drained_at + 2.001)
    cluster.stop()

    assert [changing.prefill.num_billed, changing.decode.starting_since] == [1, (0.1,)]
    assert [early.decode.num_ready, cluster.observe(10).decode.num_ready] == [1, 2]
    assert max(request.ended_at for request in requests) < 1
    assert cluster.gpu_seconds == pytest.approx(3 * cluster.now)


def test_change_of_a_role_that_is_given_up_ends_the_worker_after_its_requests():
    cluster = make_cluster(2, 1)
    requests = [Request(at=0.0, num_prompt=3000, num_output=2) for _ in range(2)]
    for request in requests:
        cluster.submit(request)
    cluster.run_until(0.1)
    cluster.scale(Replicas(1, 2), 1)
    cluster.scale(Replicas(1, 1))
    draining = cluster.observe(10)
    cluster.run_until(5)

    assert [draining.prefill.num_draining, draining.decode.num_ordered] == [1, 1]
    assert cluster.observe(10).num_ordered == (1, 1)
    assert max(request.ended_at for request in requests) < 1


def test_changes_of_roles_at_random_lose_no_request():
    rng = random.Random(3)
    requests = plan_arrivals.sinusoidal(seed=2, duration_s=100)
    scenario = PlanScenario(
        requests=requests, times=TIMES, startup_s=3.0, role_change_s=0.5, interval_s=1.0
    )

    def change(observed):
        present = observed.num_ordered
        most = observed.prefill.num_ready - 1
        least = 1 - observed.decode.num_ready
        changes = rng.randint(min(0, least), max(0, most))
        target = Replicas(present.prefill - changes, present.decode + changes)
        return WorkerOrder(
            Replicas(max(1, target.prefill + rng.randint(-1, 1)), max(1, target.decode)), changes
        )

    result = run(scenario, "changes", change, Replicas(3, 3))

    assert result.num_lost == 0
    assert result.num_scalings > 20


def test_three_prefill_workers_beat_two_of_the_published_split():
    scenario = PlanScenario(requests=plan_arrivals.sinusoidal(seed=1), times=TIMES)
    published = run_fixed(scenario, Replicas(2, 2))
    better = run_fixed(scenario, Replicas(3, 1))

    assert published.mean_latency > 3 * better.mean_latency
    assert better.gpu_seconds == pytest.approx(published.gpu_seconds, rel=0.01)


def test_answer_of_a_worker_that_dies_goes_on_elsewhere_from_the_same_token():
    cluster = make_cluster(1, 2)
    request = Request(at=0.0, num_prompt=3000, num_output=150)
    cluster.submit(request)
    cluster.schedule_death(WorkerDeath(0.5, "decode"))
    cluster.run_until(0.6)
    num_earlier = request.num_earlier
    cluster.run_until(30)
    undisturbed = Request(at=30.0, num_prompt=3000, num_output=150)
    cluster.submit(undisturbed)
    cluster.run_until(60)
    cluster.stop()
    lost_s = request.ended_at - (undisturbed.ended_at - 30.0)

    assert 10 < num_earlier < 100
    assert (request.answer_len, cluster.num_migrated) == (150, 1)
    assert request.ttft_s == pytest.approx(undisturbed.ttft_s)
    assert lost_s == pytest.approx(TIMES.prefill_s(3000 + num_earlier), rel=0.2)
    assert cluster.gpu_seconds == pytest.approx(2 * 60 + 0.5)
    assert [event.text for event in cluster.events] == [
        "a decode worker died, requests that migrate: 1"
    ]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_death_loses_no_request_and_counts_each_arrival_and_first_token_once(role):
    requests = plan_arrivals.sinusoidal(seed=1, duration_s=60)
    scenario = PlanScenario(
        requests=requests, times=TIMES, startup_s=5.0, deaths=[WorkerDeath(31.3, role)]
    )
    observed = []

    def keep(observation):
        observed.append(observation)
        return WorkerOrder(Replicas(3, 1))

    result = run(scenario, "fixed", keep, Replicas(3, 1))

    assert (result.num_lost, result.num_migrated > 0) == (0, True)
    assert sum(o.traffic.value.num_requests for o in observed) == len(requests)
    assert [e.kind for e in result.events] == ["death"]
    assert min(getattr(o, role).num_ready for o in observed) == (2 if role == "prefill" else 0)
    assert getattr(observed[-1], role).num_ready == (3 if role == "prefill" else 1)


def test_aggregated_worker_that_dies_hands_over_what_it_computes_and_what_waits():
    cluster = PlanCluster(TIMES, is_aggregated=True)
    cluster.add_ready(Replicas(0, 2))
    requests = [Request(at=0.0, num_prompt=6000, num_output=40) for _ in range(12)]
    for request in requests:
        cluster.submit(request)
    cluster.schedule_death(WorkerDeath(0.7, "decode"))
    cluster.run_until(60)

    assert cluster.num_migrated == 6
    assert cluster.num_ended == 12
    assert {request.answer_len for request in requests} == {40}


def test_failing_start_is_billed_reported_once_and_then_replaced():
    cluster = make_cluster(1, 1, startup_s=60.0)
    cluster.num_failing_starts = 1
    cluster.scale(Replicas(2, 1))
    cluster.run_until(70)
    failed, after = cluster.observe(10).prefill, cluster.observe(10).prefill
    cluster.scale(Replicas(2, 1))
    cluster.run_until(140)
    cluster.stop()

    assert (failed.num_ordered, failed.num_failed, failed.failure) == (1, 1, "injected")
    assert after.num_failed == 0
    assert cluster.observe(10).prefill.num_ready == 2
    assert cluster.gpu_seconds == 2 * 140 + 60 + 70


@pytest.mark.parametrize("num_blocks", [0, 3])
def test_each_prompt_goes_to_the_worker_that_will_have_computed_it_first(monkeypatch, num_blocks):
    rng = random.Random(7)
    workers, chosen, best = [], [], []

    class RecordedWorker(plan_worker.PlanWorker):
        def __init__(self, role, times):
            super().__init__(role, times)
            workers.append(self)

        def load_after(self, request):
            num_new = request.num_prompt - self.cached_tokens(request)
            return self.num_queued_tokens + num_new, self.num_active_tokens

        def submit(self, request, now):
            if self.role == "prefill":
                chosen.append(self.load_after(request))
                others = [worker for worker in workers if worker.role == "prefill"]
                best.append(min(worker.load_after(request) for worker in others))
            super().submit(request, now)

    monkeypatch.setattr(plan_cluster, "PlanWorker", RecordedWorker)
    cluster = make_cluster(6, 3)
    for number in range(400):
        names = tuple(rng.choice(((1, 2, 3), (4, 5, 6), (7, 8, 9)))[:num_blocks])
        cluster.run_until(number / 40)
        cluster.submit(
            Request(at=number / 40, num_prompt=rng.randint(600, 6000), num_output=9, names=names)
        )

    assert chosen == best
    assert len(chosen) == 400
    assert len(set(chosen)) > 100
