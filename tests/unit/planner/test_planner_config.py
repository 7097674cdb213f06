import pytest

from dynamo.base import config, errors
from dynamo.planner.config import PlannerConfig, ScalingConfig, parse_duration_s

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
