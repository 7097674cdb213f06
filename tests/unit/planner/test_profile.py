import errno
import math
import zipfile

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.base import errors
from dynamo.planner import profile, profile_files
from dynamo.planner.profile import ProfileCorrection
from dynamo.protocols.load import ForwardPass
from planner_cases import make_profile


@pytest.mark.parametrize("cost", [0.0, 0.25])
def test_cost_of_repeated_tokens_is_in_the_files_and_0_without_them(tmp_path, cost):
    measured = make_profile()
    surface = measured.decode.with_repeated_cost(cost)
    written = profile.WorkerProfile(prefill=measured.prefill, decode=surface)
    profile_files.write_profile(written, tmp_path)

    assert profile_files.read_profile(tmp_path).decode.repeated_cost == cost
    assert read_arrays(tmp_path).decode.repeated_cost == 0.0


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
        case "empty":
            path.write_bytes(b"")
        case "encrypted":
            set_in_directory(path, content, 8, 1)
        case "method":
            set_in_directory(path, content, 10, 99)


def set_in_directory(path, content, place, value):
    """Change a byte of the first entry of a ZIP file's central directory."""
    changed = bytearray(content)
    changed[content.index(b"PK\x01\x02") + place] = value
    path.write_bytes(changed)


@pytest.mark.parametrize("kind", ["cut", "changed", "one array", "empty", "encrypted", "method"])
def test_damaged_file_of_a_profile_is_named(tmp_path, kind):
    profile_files.write_profile(make_profile(), tmp_path)
    path = tmp_path / profile_files.PREFILL_FILE
    damage(kind, path)

    with pytest.raises(errors.ConfigError, match=f"^{path}: (prefill_[a-z]+: )?expected "):
        profile_files.read_profile(tmp_path)


@pytest.mark.parametrize("num_values", [2**27, 2**45])
def test_array_that_is_too_large_for_a_profile_is_not_read(tmp_path, num_values):
    profile_files.write_profile(make_profile(), tmp_path)
    path = tmp_path / profile_files.PREFILL_FILE
    head = {"descr": "<f8", "fortran_order": False, "shape": (num_values,)}
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("prefill_isl.npy", "w") as array,
    ):
        numpy.lib.format.write_array_header_1_0(array, head)
        for _ in range(65 if num_values == 2**27 else 0):
            array.write(bytes(2**20))

    with pytest.raises(errors.ConfigError, match=f"^{path}: "):
        profile_files.read_profile(tmp_path)


DECODE = {
    "x_kv_usage": [0.1, 0.9],
    "y_context_length": [100, 100],
    "z_itl": [5.0, 9.0],
    "z_thpt_per_gpu": [50.0, 300.0],
    "max_kv_tokens": [1000],
}
PREFILL = {
    "prefill_isl": [200, 100],
    "prefill_ttft": [20.0, 10.0],
    "prefill_thpt_per_gpu": [1.0, 1.0],
}


def read_arrays(directory, **changes):
    for file, arrays in (
        (profile_files.PREFILL_FILE, PREFILL),
        (profile_files.DECODE_FILE, DECODE),
    ):
        (directory / file).parent.mkdir(exist_ok=True)
        is_decode = file == profile_files.DECODE_FILE
        names = [*arrays, "repeated_cost"] if is_decode else arrays
        own = {name: value for name, value in changes.items() if name in names}
        numpy.savez(directory / file, **arrays | own)
    return profile_files.read_profile(directory)


@pytest.mark.parametrize("name", [*PREFILL, *DECODE])
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-1.0, "-1"),
        (1j, "complex"),
        ("text", "text"),
        (None, "Object"),
    ],
)
def test_wrong_value_in_a_file_of_a_profile_is_named_with_its_array(tmp_path, name, value, shown):
    file = profile_files.PREFILL_FILE if name in PREFILL else profile_files.DECODE_FILE
    values = numpy.array([*(PREFILL | DECODE)[name][:-1], value], None if value else object)

    with pytest.raises(errors.ConfigError) as caught:
        read_arrays(tmp_path, **{name: values})
    text = str(caught.value)
    assert text.startswith(f"{tmp_path / file}: {name}: expected ")
    assert shown in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"prefill_ttft": [1.0]}, "prefill_ttft: expected 2 values, as many as prefill_isl, got 1"),
        ({"prefill_isl": []}, "prefill_isl: expected a value or more, got none"),
        ({"prefill_isl": [100, 100]}, "prefill_isl: expected each length once, got 100 twice"),
        ({"z_itl": [1.0] * 3}, "z_itl: expected 2 values, as many as x_kv_usage, got 3"),
        ({"x_kv_usage": [10, 90]}, "x_kv_usage: expected shares from 0 to 1, got 10"),
        (
            {"y_context_length": [0, 0]},
            "y_context_length: expected numbers from 1e-06 to 1e[+]12, got 0",
        ),
        ({"max_kv_tokens": []}, "max_kv_tokens: expected a value or more, got none"),
        ({"repeated_cost": [1.5]}, "repeated_cost: expected shares from 0 to 1, got 1.5"),
        ({"repeated_cost": []}, "repeated_cost: expected a value or more, got none"),
        ({"max_kv_tokens": 0.5}, "max_kv_tokens: expected from 1 to 1e[+]12 tokens, got 0.5"),
    ],
)
def test_contradiction_in_a_file_of_a_profile_is_named_with_its_array(tmp_path, changes, text):
    with pytest.raises(errors.ConfigError, match=f"{text}$"):
        read_arrays(tmp_path, **changes)


def test_profile_of_one_point_and_of_unsorted_ones_is_read(tmp_path):
    curve = read_arrays(tmp_path).prefill
    single = read_arrays(tmp_path, **{name: [1.0] for name in (*PREFILL, *DECODE)})

    assert curve.isl == (100, 200)
    assert curve.ttft_s == (0.01, 0.02)
    assert single.decode.best_rate(1.0, 1).throughput == 1


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
