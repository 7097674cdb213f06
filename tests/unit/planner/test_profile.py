import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.base import errors
from dynamo.planner import profile, profile_files
from planner_cases import make_profile


def test_prompt_time_is_linear_between_measured_points():
    assert make_profile().prefill.prompt_s(550) == pytest.approx(0.055)


def test_prompt_longer_than_measured_takes_longer_in_proportion():
    assert make_profile().prefill.prompt_s(20_000) == pytest.approx(2.0)


def test_prompt_without_new_tokens_takes_no_time():
    assert make_profile().prefill.prompt_s(0) == 0.0


def test_itl_is_interpolated_over_usage():
    assert make_profile().decode.itl_s(0.3, 500) == pytest.approx(0.04)


def test_best_rate_is_the_fullest_point_that_holds_the_itl():
    rate = make_profile().decode.best_rate(0.05, 500)

    assert rate.kv_usage == pytest.approx(0.4, abs=0.011)
    assert rate.itl_s <= 0.05


def test_best_rate_of_an_unreachable_itl_is_the_emptiest_point():
    assert make_profile().decode.best_rate(0.001, 500).kv_usage == 0.0


@given(st.floats(0.012, 0.1), st.floats(0.012, 0.1), st.floats(100, 5000))
def test_looser_itl_never_lowers_the_rate(a, b, context):
    surface = make_profile().decode
    low, high = sorted((a, b))

    assert (
        surface.best_rate(low, context).throughput
        <= surface.best_rate(high, context).throughput + 1e-9
    )


def test_files_keep_the_profile(tmp_path):
    profile_files.write_profile(make_profile(), tmp_path)
    copy = profile_files.read_profile(tmp_path)

    assert copy.prefill.isl == make_profile().prefill.isl
    assert copy.prefill.ttft_s == pytest.approx(make_profile().prefill.ttft_s)
    assert copy.decode.itl_s(0.3, 700) == pytest.approx(make_profile().decode.itl_s(0.3, 700))
    assert copy.decode.max_kv_tokens == 100_000


def test_missing_file_is_named(tmp_path):
    with pytest.raises(errors.ConfigError, match="raw_data"):
        profile_files.read_profile(tmp_path)


def test_unsorted_prompt_lengths_are_refused():
    with pytest.raises(errors.ConfigError, match="rising"):
        profile.PrefillCurve(isl=(2.0, 1.0), ttft_s=(1.0, 1.0), throughput=(1.0, 1.0))


def test_times_that_are_not_above_zero_are_refused():
    with pytest.raises(errors.ConfigError, match="above 0"):
        profile.PrefillCurve(isl=(1.0,), ttft_s=(0.0,), throughput=(1.0,))
    with pytest.raises(errors.ConfigError, match="above 0"):
        profile.DecodeSurface([profile.DecodePoint(0.5, 100, 0.0, 1.0)], max_kv_tokens=10)


def test_decode_profile_without_points_is_refused():
    with pytest.raises(errors.ConfigError, match="points"):
        profile.DecodeSurface([], max_kv_tokens=10)


@pytest.mark.parametrize("wrong", [(0.5, 100, 0.01, 0.0), (0.5, 100, 0.01, -5.0)])
def test_throughput_that_is_not_above_zero_is_refused(wrong):
    with pytest.raises(errors.ConfigError, match=r"throughputs above 0.*kv_usage=0\.5"):
        profile.DecodeSurface([profile.DecodePoint(*wrong)], max_kv_tokens=10)


@pytest.mark.parametrize("position", range(4))
def test_decode_point_with_a_value_that_is_no_number_is_refused(position):
    values = [0.5, 100.0, 0.01, 1.0]
    values[position] = float("nan")

    with pytest.raises(errors.ConfigError, match="got DecodePoint"):
        profile.DecodeSurface([profile.DecodePoint(*values)], max_kv_tokens=10)


def test_prompt_length_that_is_no_number_is_refused():
    with pytest.raises(errors.ConfigError, match="isl=nan"):
        profile.PrefillCurve(isl=(float("nan"),), ttft_s=(1.0,), throughput=(1.0,))
