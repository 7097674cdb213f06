import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.base import errors
from dynamo.planner import predictors

PERIOD = 15
# thousands of prompt tokens of each 10 s in the Azure conversations: one long rise and fall
BURST = [
    240, 342, 514, 466, 410, 402, 460, 495, 508, 515, 526, 378, 382, 400, 451, 492, 534, 655, 704, 752, 701,
    871, 851, 794, 892, 800, 531, 480, 465, 361, 386, 350, 355, 527, 532, 537, 555, 346, 304, 340, 327, 318,
]  # fmt: skip


def wave(i):
    return 125 + 75 * math.sin(2 * math.pi * i / PERIOD)


def fed(name, values):
    predictor = predictors.make_predictor(name)
    for value in values:
        predictor.add(value)
    return predictor


@pytest.mark.parametrize("name", predictors.PREDICTORS)
@given(st.lists(st.floats(0, 1e6), max_size=60), st.integers(1, 20))
def test_forecast_is_finite_and_not_negative(name, values, num_steps):
    forecast = fed(name, values).forecast(num_steps)

    assert len(forecast) == num_steps
    assert all(math.isfinite(value) and value >= 0 for value in forecast)


@pytest.mark.parametrize("name", predictors.PREDICTORS)
def test_constant_series_continues(name):
    assert fed(name, [7.0] * 30).forecast(3) == pytest.approx([7.0] * 3, abs=0.01)


def test_moving_average_is_the_mean_of_its_window():
    predictor = predictors.make_predictor("moving-average", 2)
    for value in (100.0, 2.0, 4.0):
        predictor.add(value)

    assert predictor.forecast(1) == [3.0]


def test_arima_returns_the_last_value_before_five_points():
    assert fed("arima", [1, 2, 3, 4]).forecast(2) == [4, 4]


def test_kalman_follows_a_trend():
    assert fed("kalman", range(50)).forecast(5)[-1] == pytest.approx(54, abs=1.5)


def test_seasonal_foretells_a_wave_better_than_the_others():
    draw = random.Random(3)
    series = [wave(i) + draw.gauss(0, 11) for i in range(2 * PERIOD)]
    future = [wave(2 * PERIOD + i) for i in range(6)]

    def error(name):
        forecast = fed(name, series).forecast(6)
        return sum(abs(a - b) for a, b in zip(forecast, future, strict=True)) / 6

    assert error("seasonal") < 25
    assert all(error("seasonal") < error(name) for name in ("constant", "kalman", "arima"))


def test_noise_has_no_period():
    draw = random.Random(5)

    assert predictors.find_period([100 + draw.gauss(0, 10) for _ in range(60)]) is None


def test_steady_rise_has_no_period():
    assert predictors.find_period([float(i) for i in range(60)]) is None


def test_period_of_a_wave_is_recognized():
    assert predictors.find_period([wave(i) for i in range(40)]) == PERIOD


def test_two_rises_at_different_levels_are_no_period():
    first = [10.0, 13, 16, 19, 20, 20, 18, 15, 12, 10, 8]

    assert predictors.find_period([*first, *(value - 8 for value in first[:5])]) is None


def test_period_is_found_once_half_of_it_has_come_again():
    values = [wave(i) for i in range(40)]
    lengths = [n for n in range(len(values)) if predictors.find_period(values[:n])]

    assert 1.5 * PERIOD <= lengths[0] <= 1.5 * PERIOD + 2


@pytest.mark.parametrize(
    ("series", "basis"), [([wave(i) for i in range(27)], "period"), (BURST, "trend")]
)
def test_period_is_taken_only_if_it_would_have_foretold_what_came(series, basis):
    predictor = fed("seasonal", series)
    predictor.forecast(8)

    assert predictors.find_period(series)
    assert predictor.basis == basis


def test_unknown_name_is_refused_with_the_names():
    with pytest.raises(errors.ConfigError, match="seasonal"):
        predictors.make_predictor("prophet")
