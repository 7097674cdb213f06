"""The time of a step of the mock engine: the polynomials, and measured profiles."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.base import errors
from dynamo.engine.mock import timing


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(0, 0), (100, 18.02), (1000, 32.11), (2048, 49.36), (8000, 164.91), (32000, 933.47)],
)
def test_prefill_time_equals_dynamos_mocker(num_tokens, expected):
    assert timing.prefill_ms(num_tokens) == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0, 5.74), (0.25, 17.63), (0.5, 26.31), (0.75, 31.77), (1, 34.01), (2, 34.01)],
)
def test_decode_time_equals_dynamos_mocker(share, expected):
    assert timing.decode_ms(share) == pytest.approx(expected, abs=0.006)


def step_s(num_prompt_tokens=100, num_decoding=1, **settings):
    return timing.Timing(**settings).step_s(
        num_prompt_tokens=num_prompt_tokens, num_decoding=num_decoding, active_share=0.0
    )


def test_step_time_is_prefill_plus_decode():
    assert step_s() == pytest.approx((18.024 + 5.74) / 1000, abs=1e-6)


def test_step_without_decode_takes_only_its_prefill():
    assert step_s(num_decoding=0) == pytest.approx(0.018024, abs=1e-6)


def test_speedup_ratios_divide_the_time():
    both = step_s(speedup_ratio=10, decode_speedup_ratio=2)

    assert both == pytest.approx((18.024 + 5.74 / 2) / 10_000, abs=1e-6)


@pytest.mark.parametrize("ratio", [0, 1e6])
def test_step_takes_no_time_at_instant_speed(ratio):
    assert step_s(speedup_ratio=ratio) == 0


def test_decode_takes_no_time_at_instant_speed():
    assert step_s(decode_speedup_ratio=0) == pytest.approx(0.018024, abs=1e-6)


def test_tick_is_independent_of_the_work():
    assert step_s(tick_ms=20, speedup_ratio=0) == 0.02


POINTS = {
    "prefill_isl": [100, 1000, 2000],
    "prefill_ttft_ms": [10, 28, 68],
    "decode_active_kv_tokens": [0, 1000],
    "decode_context_length": [100, 500],
    "decode_itl": [[4, 4], [20, 12]],
}


def read(**changes):
    return timing.read_profile(json.dumps(POINTS | changes).encode(), "p.json")


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(0, 0), (50, 10), (100, 10), (550, 19), (1000, 28), (1500, 48), (2000, 68), (3000, 108)],
)
def test_prefill_is_interpolated_and_extrapolated(num_tokens, expected):
    assert read().prefill_ms(num_tokens) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("active_tokens", "num_decoding", "expected"),
    [
        (0, 1, 4),
        (1000, 10, 20),  # 100 tokens each
        (1000, 2, 12),  # 500 each
        (500, 5, 12),  # half way to the row of 1000, context 100
        (600, 2, 4 + 0.6 * (16 - 4)),  # context 300, half way between the columns
        (5000, 10, 12),  # beyond both borders
    ],
)
def test_decode_is_looked_up_by_tokens_and_context(active_tokens, num_decoding, expected):
    assert read().decode_ms(active_tokens, num_decoding) == pytest.approx(expected)


def test_profile_may_have_one_point():
    one = read(prefill_isl=[10], prefill_ttft_ms=[5])

    assert {one.prefill_ms(n) for n in (1, 10, 10_000)} == {5}


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_prefill_time_rises_with_rising_points(a, b):
    short, long = sorted((a, b))

    assert read().prefill_ms(short) <= read().prefill_ms(long)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefill_isl": [100, 100, 200]}, "expected prefill_isl to rise"),
        ({"decode_context_length": []}, "expected decode_context_length to rise"),
        ({"prefill_ttft_ms": [1, 2]}, "expected prefill_ttft_ms to have 3 entries"),
        ({"decode_itl": [[1, 2]]}, "expected decode_itl to have 2 entries"),
        ({"decode_itl": [[1, 2], [1]]}, "expected each row of decode_itl to have 2 entries"),
        ({"decode_itl": [[1, 2], [1, -3]]}, "expected times of 0 or more, got -3"),
        ({"prefill_isl": "many"}, "expected a JSON object of measured times"),
        ({"itl": []}, "unknown field `itl`"),
    ],
)
def test_invalid_profile_is_refused_by_name(changes, message):
    with pytest.raises(errors.ConfigError, match=f"p.json: .*{message}"):
        read(**changes)


def test_step_time_comes_from_the_profile():
    timed = timing.Timing(profile=read(), num_cache_tokens=2000, speedup_ratio=2.0)

    step_s = timed.step_s(num_prompt_tokens=1000, num_decoding=10, active_share=0.5)

    assert step_s == pytest.approx((28 + 20) / 2 / 1000)
