import json
import runpy
import sys

import pytest

from dynamo.base import config, errors
from dynamo.planner import __main__ as command
from dynamo.planner import service
from dynamo.planner.config import PlannerConfig, ScalingConfig, parse_duration_s, translate
from dynamo.planner.regression_policy import RegressionLimits

ORIGINAL_FLAGS = [
    *("--namespace", "x", "--backend", "mocker", "--environment", "virtual", "--no-operation"),
    *("--log-dir", "d", "--adjustment-interval", "180", "--max-gpu-budget", "8"),
    *("--min-endpoint", "1", "--decode-engine-num-gpu", "1", "--prefill-engine-num-gpu", "1"),
    *("--profile-results-dir", "p", "--isl", "3000", "--osl", "150", "--ttft", "500"),
    *("--itl", "50", "--load-predictor", "arima", "--load-prediction-window-size", "50"),
    "--no-correction",
]


def test_flags_of_the_original_are_accepted():
    _, scaling = config.load_parts(
        (PlannerConfig, ScalingConfig), prog="planner", argv=ORIGINAL_FLAGS, environ={}
    )

    assert not scaling.operation
    assert not scaling.correction
    assert scaling.targets.ttft_s == 0.5
    assert scaling.targets.itl_s == 0.05


def test_delay_of_scaling_down_follows_the_policy_unless_it_is_given():
    assert ScalingConfig(policy="load").stabilization_s == 70.0
    assert ScalingConfig(policy="predictive").stabilization_s < 70.0
    assert ScalingConfig(policy="predictive").settle_s == 70.0
    assert ScalingConfig(policy="predictive", scale_down_delay=90.0).stabilization_s == 90.0


@pytest.mark.parametrize(
    ("text", "seconds"), [("500", 0.5), ("0.5s", 0.5), ("1ms", 0.001), ("12.5", 0.0125)]
)
def test_duration_is_milliseconds_or_has_a_unit(text, seconds):
    assert parse_duration_s(text, "--ttft", 10) == pytest.approx(seconds)


def test_seconds_of_the_original_are_refused_with_the_likely_value():
    with pytest.raises(errors.ConfigError, match=r"500, not 0\.5: milliseconds"):
        parse_duration_s("0.5", "--ttft", 10)


@pytest.mark.parametrize("text", ["", "fast", "-5", "nan", "inf", "0"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(errors.ConfigError, match="expected milliseconds"):
        parse_duration_s(text, "--ttft", 10)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_endpoint": 5, "max_workers": 2}, "--min-endpoint 5: expected at most --max-workers"),
        (
            {"mode": "disagg", "min_endpoint": 0, "max_gpu_budget": 1},
            "--max-gpu-budget 1: expected at least 2, for one worker of each pool in mode disagg",
        ),
        (
            {"mode": "disagg", "min_endpoint": 2, "prefill_engine_num_gpu": 4},
            "needs 10 GPUs in mode disagg, expected at most --max-gpu-budget 8",
        ),
        (
            {"mode": "prefill", "min_endpoint": 0, "prefill_engine_num_gpu": 16},
            "--max-gpu-budget 8: expected at least 16, for one worker of each pool in mode prefill",
        ),
        (
            {"decode_kv_scale_up_threshold": 0.3},
            "--decode-kv-scale-down-threshold 0.5: expected at most --decode-kv-scale-up",
        ),
        (
            {"prefill_queue_scale_down_threshold": 3},
            "--prefill-queue-scale-down-threshold 3: expected at most --prefill-queue-scale-up",
        ),
    ],
)
def test_limits_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(errors.ConfigError, match=message):
        service.make_pipeline(ScalingConfig(**settings))


@pytest.mark.parametrize(
    ("flags", "is_refused"),
    [
        ("--min-endpoint 0", True),
        ("--min-endpoint 0 --mode disagg", True),
        ("--min-endpoint 0 --model-name m", False),
        ("--min-endpoint 0 --mode prefill", False),  # decode workers stay
        ("--min-endpoint 0 --no-operation", False),
        ("", False),
    ],
)
def test_last_worker_may_go_only_where_a_request_can_start_one_again(flags, is_refused):
    parts = config.load_parts(
        (PlannerConfig, ScalingConfig), prog="planner", argv=flags.split(), environ={}
    )
    if not is_refused:
        command.check_wake_up(*parts)
        return
    with pytest.raises(errors.ConfigError, match="--min-endpoint 0: expected --model-name"):
        command.check_wake_up(*parts)


@pytest.mark.parametrize(
    ("flags", "expected"), [([], "kubernetes"), (["--environment", "virtual"], "virtual")]
)
def test_planner_of_a_deployment_scales_the_deployment_unless_told_otherwise(flags, expected):
    environ = {"DYN_PARENT_DGD_K8S_NAME": "graph"}
    settings = config.load(PlannerConfig, prog="planner", argv=flags, environ=environ)

    assert settings.environment == expected


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_minimum_of_one_pool_needs_no_gpus_for_the_other(mode):
    service.make_pipeline(ScalingConfig(mode=mode, min_endpoint=8, max_gpu_budget=8))


def load_both(content):
    return config.load_parts(
        (PlannerConfig, ScalingConfig),
        prog="planner",
        argv=["--config", content if isinstance(content, str) else json.dumps(content)],
        environ={},
        translate=translate,
    )


def load(content):
    _, scaling = load_both(content)
    return scaling


def test_null_is_no_value():
    fields = {"ttft": None, "model_name": None, "optimization_target": None, "advisory": None}

    assert load(fields) == load({})


def test_fields_of_the_original_are_options(tmp_path):
    fields = {
        "mode": "disagg",
        "enable_throughput_scaling": True,
        "throughput_adjustment_interval": 180,
        "ttft": 500.0,
        "itl": 50,
        "advisory": True,
        "no_correction": True,
    }
    (tmp_path / "planner.json").write_text(json.dumps(fields))
    scaling = load(str(tmp_path / "planner.json"))

    assert scaling == load(fields)
    assert (scaling.policy, scaling.mode, scaling.adjustment_interval) == (
        "predictive",
        "disagg",
        180.0,
    )
    assert (scaling.targets.ttft_s, scaling.targets.itl_s) == (0.5, 0.05)
    assert not scaling.operation
    assert not scaling.correction


@pytest.mark.parametrize(
    ("fields", "policy", "interval_s"),
    [
        ({"enable_throughput_scaling": False, "enable_load_scaling": True}, "regression", 5),
        ({"enable_load_scaling": True}, "predictive", 5),
        ({"enable_load_scaling": False}, "predictive", 180),
        ({}, "load", 180),
    ],
)
def test_policy_and_interval_follow_the_ways_to_scale_that_are_enabled(fields, policy, interval_s):
    intervals = {"throughput_adjustment_interval": 180, "load_adjustment_interval": 5}
    scaling = load(fields | intervals)

    assert (scaling.policy, scaling.adjustment_interval) == (policy, interval_s)


@pytest.mark.parametrize(
    ("fields", "policy", "interval_s"),
    [
        ({"optimization_target": "throughput"}, "load", 180),
        ({"optimization_target": "latency", "enable_throughput_scaling": True}, "load", 180),
        ({"optimization_target": "latency", "load_adjustment_interval_seconds": 5}, "load", 5),
        (
            {
                "optimization_target": "sla",
                "enable_throughput_scaling": False,
                "enable_load_scaling": True,
                "load_adjustment_interval_seconds": 5,
                "pre_deployment_sweeping_mode": "none",
            },
            "regression",
            5,
        ),
    ],
)
def test_optimization_target_says_whether_thresholds_or_targets_count(fields, policy, interval_s):
    scaling = load({"throughput_adjustment_interval_seconds": 180} | fields)

    assert (scaling.policy, scaling.adjustment_interval) == (policy, interval_s)


def test_field_without_effect_is_logged(caplog):
    scaling = load({"report_interval_hours": 24, "ttft_ms": 200})

    assert scaling == load({"ttft": 200})
    assert caplog.messages == ["--config: report_interval_hours has no effect in this planner"]


def test_metrics_of_the_original_are_pulled_and_shown_where_it_says():
    fields = {
        "metric_pulling_prometheus_endpoint": "http://p:9090",
        "metric_reporting_prometheus_port": 9000,
    }
    settings, _ = load_both(fields)

    assert (settings.prometheus_url, settings.planner_port) == ("http://p:9090", 9000)


def test_fields_of_the_regression_are_those_of_the_original():
    fields = {
        "policy": "regression",
        "max_num_fpm_samples": 32,
        "fpm_sample_bucket_size": 8,
        "load_min_observations": 3,
        "load_scaling_down_sensitivity": 70,
    }

    assert load(fields).regression == RegressionLimits(
        max_samples=32, samples_of_bucket=8, least_samples=3, sensitivity=0.7
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"optimization_target": "cost"},
            "optimization_target: expected throughput, latency or sla, got 'cost'",
        ),
        ({"ttft": 200, "ttft_ms": 200}, "expected ttft or ttft_ms, got both"),
        ({"advisory": "yes"}, "advisory: expected true or false, got 'yes'"),
        ({"enable_throughput_scaling": False}, "to be true, got neither"),
        (
            {"policy": "load", "enable_load_scaling": True},
            "expected policy or enable_load_scaling, got both",
        ),
        (
            {"adjustment_interval": 5, "load_adjustment_interval": 5},
            "expected adjustment_interval or load_adjustment_interval, got both",
        ),
        ({"ttfs": 3}, "--config: unknown key 'ttfs'"),
        ("{", "expected a readable file of TOML or JSON, or JSON itself"),
    ],
)
def test_wrong_field_of_the_original_is_named(fields, message):
    with pytest.raises(errors.ConfigError, match=message):
        load(fields)


def test_planner_sla_means_a_graph_with_prefill_workers(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["planner_sla", "--isl", "100"])
    monkeypatch.setattr(command, "main", lambda: 0)
    with pytest.raises(SystemExit):
        runpy.run_module("dynamo.planner.planner_sla", run_name="__main__")

    (scaling,) = config.load_parts((ScalingConfig,), prog="planner", argv=sys.argv[1:], environ={})
    assert (scaling.policy, scaling.mode, scaling.isl) == ("sla", "disagg", 100)


def test_log_directory_that_is_a_file_is_named(tmp_path):
    (tmp_path / "taken").write_text("")

    with pytest.raises(errors.ConfigError, match=r"--log-dir .*taken: expected a directory"):
        command._make_writable(tmp_path / "taken" / "decisions.jsonl")


@pytest.mark.parametrize(
    ("worker_flags", "environ", "drain_s"),
    [
        ("", {}, 30),
        ("--max-num-seqs 4 --graceful-shutdown-timeout 90", {}, 90),
        ("", {"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "600"}, 600),
        ("", {"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "7"}, 37),
    ],
)
def test_local_workers_are_not_killed_while_they_may_drain(worker_flags, environ, drain_s):
    settings = PlannerConfig(worker_flags=worker_flags)

    assert command.worker_options(settings, ScalingConfig(), environ).stop_timeout_s > drain_s
