import errno

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.base import errors
from dynamo.planner import profile, profile_files
from dynamo.planner.profile import ProfileCorrection
from dynamo.protocols.load import ForwardPass
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


@pytest.mark.parametrize(("context", "usage"), [(500, 0.32), (1500, 0.96), (2000, 1.0)])
def test_best_rate_has_no_more_sequences_than_were_measured_at_once(context, usage):
    points = [profile.DecodePoint(0.01 * n, 1000.0, 0.01, 1e2 * n) for n in (1, 64)]
    points += [profile.DecodePoint(0.02 * n, 2000.0, 0.01, 1e2 * n) for n in (1, 50)]
    surface = profile.DecodeSurface(points, max_kv_tokens=100_000)

    assert surface.best_rate(0.05, context).kv_usage == pytest.approx(usage)


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


def test_profile_stays_if_the_disk_is_full(tmp_path, monkeypatch):
    profile_files.write_profile(make_profile(), tmp_path)

    def fill_the_disk(target, **arrays):
        with target if hasattr(target, "write") else target.open("wb") as file:
            file.write(b"PK")
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(numpy, "savez", fill_the_disk)
    with pytest.raises(OSError, match="No space left"):
        profile_files.write_profile(make_profile(), tmp_path)

    assert profile_files.read_profile(tmp_path).prefill == make_profile().prefill


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


def passes(factor, *, num_prompt_tokens=0, kv_share=0.0, number=8):
    """Passes that take `factor` times as long as `make_profile` says."""
    wall_s = num_prompt_tokens / 1e4 + (0.01 + 0.1 * kv_share if kv_share else 0.0)
    num_kv_tokens = round(kv_share * 100_000)
    one = ForwardPass(
        num_prompt_tokens=num_prompt_tokens, num_kv_tokens=num_kv_tokens, wall_s=factor * wall_s
    )
    return [one] * number


def corrected(*intervals):
    correction = ProfileCorrection(make_profile())
    for each in intervals:
        correction.learn(each, isl=1000, context=1000)
    return correction


def damage(kind, path):
    content = path.read_bytes()
    match kind:
        case "cut":
            path.write_bytes(content[:200])
        case "changed":
            path.write_bytes(content.replace(b"prefill_ttft.npy", b"prefill_ttfs.npy", 1))
        case "one array":
            with path.open("wb") as file:
                numpy.save(file, numpy.array([1.0]))
        case "unequal lengths":
            numpy.savez(path, prefill_isl=[1.0, 2.0], prefill_ttft=[1.0], prefill_thpt_per_gpu=[1])


@pytest.mark.parametrize("kind", ["cut", "changed", "one array", "unequal lengths"])
def test_damaged_file_of_a_profile_is_named(tmp_path, kind):
    profile_files.write_profile(make_profile(), tmp_path)
    damage(kind, tmp_path / profile_files.PREFILL_FILE)

    with pytest.raises(errors.ConfigError, match=str(tmp_path)):
        profile_files.read_profile(tmp_path)


def test_profile_takes_the_times_of_service():
    interval = passes(1.5, num_prompt_tokens=1000) + passes(0.8, kv_share=0.4)
    correction = corrected(*[interval] * 20)

    assert correction.factors == pytest.approx((1.5, 0.8))
    assert correction.profile.prefill.prompt_s(1000) == pytest.approx(0.15)
    assert correction.profile.prefill.tokens_per_s(1000) == pytest.approx(1e4 / 1.5)
    assert correction.profile.decode.itl_s(0.4, 1000) == pytest.approx(0.8 * 0.05)
    assert correction.profile.decode.throughput(0.4, 1000) == pytest.approx(
        make_profile().decode.throughput(0.4, 1000) / 0.8
    )
    assert correction.describe() == ", prompts take 1.50 and answers 0.80 of the profile's times"


def test_profile_that_is_right_stays_as_it_was_measured():
    correction = corrected(*[passes(1.04, num_prompt_tokens=1000)] * 20)

    assert correction.factors == (1.0, 1.0)
    assert correction.describe() == ""


@pytest.mark.parametrize(
    "interval",
    [
        passes(3, num_prompt_tokens=1000, number=2),  # too few
        passes(3, num_prompt_tokens=100),  # too short to say much of prompts of 1,000 tokens
        passes(3, num_prompt_tokens=1000, kv_share=0.4),  # of both kinds
        [],
    ],
)
def test_passes_that_say_little_correct_nothing(interval):
    assert corrected(*[interval] * 20).factors == (1.0, 1.0)


def test_correction_is_bounded_and_follows_by_and_by():
    absurd = passes(1e6, num_prompt_tokens=1000)

    assert corrected(absurd).factors[0] == pytest.approx(1.9)
    assert corrected(*[absurd] * 50).factors[0] == pytest.approx(4.0)


def test_one_slow_pass_among_many_changes_nothing():
    interval = passes(1, num_prompt_tokens=1000) + passes(50, num_prompt_tokens=1000, number=3)

    assert corrected(*[interval] * 20).factors == (1.0, 1.0)
