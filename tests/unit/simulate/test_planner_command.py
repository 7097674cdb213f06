import json
import sys

import pytest

from dynamo.planner import profile_files
from dynamo.planner.observation import Replicas
from dynamo.simulate import __main__ as command
from dynamo.simulate import plan_arrivals, plan_cluster, plan_oracle, plan_policies, plan_run
from dynamo.simulate.plan_cluster import WorkerOrder
from dynamo.simulate.plan_run import PlanScenario
from dynamo.simulate.plan_worker import Request, h100_8b

TIMES = h100_8b()


def test_table_has_a_row_for_each_policy(capsys):
    argv = ["plan", "--seeds", "1", "--policy", "fixed,predictive", "--fixed-workers", "3"]

    assert command.main(argv) == 0
    out = capsys.readouterr().out
    assert "fixed 2p1d" in out
    assert "predictive" in out


def test_figures_are_written_as_json(tmp_path, capsys):
    file = tmp_path / "plan.json"
    command.main(["plan", "--seeds", "1", "--policy", "load", "--report-json", str(file)])
    rows = json.loads(file.read_text())

    assert [row["policy"] for row in rows] == ["load"]
    assert rows[0]["num_lost"] == 0


def test_load_workers_and_service_level_are_drawn_over_time(tmp_path, capsys):
    argv = ["plan", "--trace", "idle", "--seeds", "1", "--policy", "predictive,fixed"]
    code = command.main([*argv, "--fixed-workers", "2", "--output", str(tmp_path)])
    names = sorted(path.name for path in tmp_path.iterdir())
    page = (tmp_path / "report.html").read_text()

    assert code == 0
    assert names == ["cost.png", "fixed-1p1d.png", "predictive.png", "report.html"]
    assert (page.count("data:image/png;base64,"), "<td>fixed 1p1d</td>" in page) == (3, True)
    assert f"wrote {tmp_path / 'report.html'}" in capsys.readouterr().out


def test_samples_have_the_arrivals_and_the_workers_of_each_interval():
    requests = [Request(at=5.0 * i, num_prompt=3000, num_output=2) for i in range(1, 6)]
    scenario = PlanScenario(requests=requests, times=TIMES, startup_s=15.0, ttft_s=0.2)
    samples = plan_run.run(scenario, "late", lambda _: WorkerOrder(Replicas(2, 1))).samples

    assert [s.at for s in samples] == [10.0, 20.0]
    assert [s.num_requests for s in samples] == [1, 2]
    assert [(s.num_prefill, s.num_decode, s.num_billed) for s in samples] == [(1, 1, 2), (1, 1, 3)]
    assert [s.attainment for s in samples] == [1.0, 1.0]


def test_run_keeps_no_observation_after_its_decision():
    """Those of a week would take gigabytes: each has the forward passes of all workers."""
    observations, numbers = [], []

    def decide(observed):
        if observations:
            numbers.append(sys.getrefcount(observations[-1]))
        observations.append(observed)
        return WorkerOrder(Replicas(1, 1))

    requests = [Request(at=20.0 * i, num_prompt=300, num_output=2) for i in range(3)]
    plan_run.run(PlanScenario(requests=requests, times=TIMES), "kept", decide)

    assert set(numbers) == {2}  # `observations` and the argument


def test_injected_failures_are_answered_and_written_with_the_decisions(tmp_path, capsys):
    file = tmp_path / "plan.json"
    argv = ["plan", "--seeds", "1", "--policy", "predictive", "--kill", "100:prefill,200:decode"]
    code = command.main([*argv, "--failing-starts", "1", "--report-json", str(file)])
    (row,) = json.loads(file.read_text())
    kinds = [event["kind"] for event in row["events"]]
    texts = [event["text"] for event in row["events"]]
    out = " ".join(capsys.readouterr().out.split())

    assert (code, row["num_lost"], row["num_migrated"] > 0) == (0, 0, True)
    assert (kinds.count("death"), kinds.count("failed start")) == (2, 1)
    assert any("ended before serving (injected)" in text for text in texts)
    assert "killed at 100:prefill, 200:decode, first starts that fail: 1" in out
    assert "lost migr." in out


def test_start_that_hangs_is_withdrawn_and_the_load_is_carried_by_another():
    requests = plan_arrivals.steady(seed=1, rate=10, duration_s=600, isl=3000, osl=50)
    scenario = PlanScenario(requests=requests, times=TIMES, startup_s=20.0, num_hanging_starts=1)
    profile = plan_policies.sample_profile(TIMES)
    decide = plan_policies.make_decide("predictive", scenario, profile, "constant")
    result = plan_run.run(scenario, "predictive", decide)
    (withdrawn,) = [event for event in result.events if event.kind == "withdrawn start"]
    reasons = " ".join(event.text for event in result.events if event.at == withdrawn.at)

    assert 60 < withdrawn.at <= 90
    assert "prefill not ready after 60 s: withdrawn, again in 60 s" in reasons
    assert (result.num_lost, result.samples[-1].attainment) == (0, 1.0)


def test_profile_is_written_in_the_originals_format(tmp_path, capsys):
    assert command.main(["plan", "--write-profile", str(tmp_path)]) == 0
    profile = profile_files.read_profile(tmp_path)

    assert profile.prefill.prompt_s(2048) == pytest.approx(TIMES.prefill_s(2048))
    assert profile.decode.itl_s(0.5, 3072) == pytest.approx(TIMES.decode_s(0.5), rel=0.01)


@pytest.mark.parametrize(
    "flags",
    [
        ["--policy", "magic"],
        ["--initial", "four"],
        ["--trace", "/nowhere.csv"],
        ["--kill", "soon"],
        ["--kill", "5:router"],
        ["--kill", "5:prefill", "--mode", "agg"],
        ["--max-gpu-budget", "1"],
        ["--initial", "5p4d"],
        ["--fixed-workers", "1"],
        ["--interval", "inf"],
    ],
)
def test_wrong_flags_end_with_status_2(flags, capsys):
    assert command.main(["plan", *flags]) == 2


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--ttft", "0.5"], "--ttft 0.5: 500, not 0.5: milliseconds"),
        (["--itl", "0.05"], "--itl 0.05: 50, not 0.05: milliseconds"),
        (["--itl", "soon"], "--itl soon: expected milliseconds"),
    ],
)
def test_targets_that_look_like_seconds_are_refused_as_by_the_planner(flags, complaint, capsys):
    assert command.main(["plan", *flags]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("trace", "flag", "complaint"),
    [
        ("sin", "--limit=100", "--limit 100: expected --trace FILE, sin has no requests"),
        ("idle", "--model=one", "--model one: expected --trace FILE, idle has no requests"),
        ("azure.csv", "--model=one", "--model one: expected a frontend's trace, azure.csv names"),
    ],
)
def test_flags_that_choose_nothing_are_refused(trace, flag, complaint, capsys):
    assert command.main(["plan", "--trace", trace, flag]) == 2
    assert complaint in capsys.readouterr().err


def test_targets_may_have_units(capsys):
    argv = ["plan", "--seeds", "1", "--policy", "fixed", "--fixed-workers", "2"]

    assert command.main([*argv, "--ttft", "0.5s", "--itl", "60ms"]) == 0
    assert "TTFT 500 ms, ITL 60 ms" in " ".join(capsys.readouterr().out.split())


ROW = "2023-11-16 18:17:0{}.9799600,100,5\n"


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ("", "expected requests at two times at least"),
        (ROW.format(1) * 2, "expected requests at two times at least"),
        (ROW.format(2) + ROW.format(1), "azure.csv:3: expected times in rising order"),
        ("2023-11-16 18:17:01.9799600,100\n", "expected a CSV file with TIMESTAMP"),
        (ROW.format(1) + ROW.format(2).replace(",5", ",five"), "azure.csv:3: expected a CSV file"),
        (ROW.format(1).replace(",5", ",-5"), "azure.csv:2: expected a CSV file"),
        (ROW.format(1).replace("100", f"{10**22}"), f"{10**22} is no number of tokens"),
        (ROW.format(1).replace("100", "1" * 200_000), "field larger than field limit"),
    ],
)
def test_trace_of_azure_that_cannot_be_used_is_refused(tmp_path, capsys, rows, complaint):
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)

    assert command.main(["plan", "--trace", str(path), "--policy", "fixed"]) == 2
    assert complaint in capsys.readouterr().err


def test_times_of_azures_traces_may_have_a_zone_and_whole_seconds(tmp_path):
    path = tmp_path / "azure.csv"
    times = (
        "2024-05-10 00:00:00.5099306+00:00",
        "2024-05-10 00:00:01+00:00",
        "2024-05-10 02:00:02+02:00",
    )
    rows = "".join(f"{time},100,5\n" for time in times)
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)

    requests = plan_arrivals.read_trace(path, limit=None).requests
    assert [request.at for request in requests] == pytest.approx([0.0, 0.49007, 1.49007])


def test_autoscaler_of_aggregated_workers_orders_no_prefill_workers():
    scenario = PlanScenario(
        requests=[Request(at=0.0, num_prompt=100, num_output=2)],
        times=TIMES,
        initial=Replicas(0, 2),
        is_aggregated=True,
    )
    profile = plan_policies.sample_profile(TIMES)
    decide = plan_policies.make_decide("hpa", scenario, profile, "constant")
    cluster = scenario.cluster()
    cluster.add_ready(scenario.initial)

    assert decide(cluster.observe(10.0)).replicas == Replicas(0, 1)


def test_workers_of_lost_requests_are_billed_as_long_as_they_were_held():
    scenario = PlanScenario(
        requests=[Request(at=1.0 + 19 * i, num_prompt=100, num_output=2) for i in range(2)],
        times=TIMES,
        initial=Replicas(0, 1),
        is_aggregated=True,
        deaths=[plan_cluster.WorkerDeath(at=5.0, role="decode")],
        num_hanging_starts=1,
    )
    result = plan_run.run_fixed(scenario, Replicas(0, 1))

    assert result.num_lost == 1
    assert result.gpu_seconds > 36_000  # the start that hangs is waited for to the end


def test_sinusoidal_rate_swings_between_5_and_20():
    requests = plan_arrivals.sinusoidal(seed=1)
    peak = sum(30 <= r.at % 150 < 45 for r in requests) / 60
    trough = sum(105 <= r.at % 150 < 120 for r in requests) / 60

    assert len(requests) == pytest.approx(7500, rel=0.05)
    assert peak > 18
    assert trough < 7


def test_step_triples_the_rate():
    steady = plan_arrivals.steady(seed=1, rate=10, duration_s=3000, isl=100, osl=10)
    stepped = plan_arrivals.add_step(steady)

    assert sum(1050 < r.at < 1250 for r in stepped) == pytest.approx(6000, rel=0.1)
    assert stepped[-1].at == pytest.approx(2400, rel=0.01)


def test_trace_is_scaled_to_half_of_eight_workers():
    requests = [Request(at=float(i), num_prompt=3000, num_output=1) for i in range(100)]
    scaled = plan_arrivals.scale_to_load(requests, TIMES)

    assert 100 / scaled[-1].at == pytest.approx(4 / TIMES.prefill_s(3000), rel=0.05)


def test_prompt_that_takes_longer_than_the_target_is_not_servable():
    requests = [
        Request(at=float(i), num_prompt=n, num_output=1) for i, n in enumerate((100, 20_000))
    ]
    plan_arrivals.mark_servable(requests, TIMES, 0.5)

    assert [r.is_servable for r in requests] == [True, False]


def test_known_prefix_makes_a_long_prompt_servable():
    names = tuple(range(40))
    requests = [
        Request(at=float(i), num_prompt=20_480, num_output=1, names=names) for i in range(2)
    ]
    plan_arrivals.mark_servable(requests, TIMES, 0.5)

    assert [r.is_servable for r in requests] == [False, True]


def test_oracle_holds_the_target_of_steady_arrivals_with_the_least_workers():
    requests = plan_arrivals.steady(seed=1, rate=10, duration_s=120, isl=3000, osl=50)
    scenario = PlanScenario(requests=requests, times=TIMES, startup_s=20.0)
    result = plan_oracle.run_oracle(scenario)

    assert result.attainment >= 0.95
    assert max(plan_oracle.find_needs(scenario)) <= Replicas(4, 1)


def test_oracle_keeps_within_the_budget_where_one_pool_grows_and_then_the_other(monkeypatch):
    needs = [Replicas(5, 1), Replicas(1, 5), Replicas(5, 1), Replicas(1, 5)]
    monkeypatch.setattr(plan_oracle, "find_needs", lambda scenario: needs)
    requests = [Request(at=9.0 * i, num_prompt=100, num_output=2) for i in range(5)]
    scenario = PlanScenario(requests=requests, times=TIMES, startup_s=10.0, max_gpus=6)

    assert max(sample.num_billed for sample in plan_oracle.run_oracle(scenario).samples) == 6


def test_oracle_orders_no_worker_that_brings_no_request_in_time():
    requests = plan_arrivals.steady(seed=1, rate=4, duration_s=20, isl=200, osl=50)
    scenario = PlanScenario(requests=requests, times=TIMES, itl_s=1e-6, max_gpus=6)

    assert set(plan_oracle.find_needs(scenario)) == {Replicas(1, 1)}


def test_best_fixed_split_may_have_most_of_its_workers_for_decode():
    requests = plan_arrivals.steady(seed=1, rate=4, duration_s=20, isl=200, osl=1500)
    scenario = PlanScenario(requests=requests, times=TIMES, itl_s=0.0065, max_gpus=7)

    assert plan_policies.find_best_fixed(scenario) == Replicas(1, 6)
