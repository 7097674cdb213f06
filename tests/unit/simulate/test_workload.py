import pytest

from dynamo.base import errors
from dynamo.simulate import workload

LINE = '{"timestamp": %d, "input_length": 600, "output_length": 5, "hash_ids": [0, %d]}\n'


def written(tmp_path, *lines):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(lines))
    return path


def test_trace_is_read_from_its_file(tmp_path):
    trace = workload.read_trace(written(tmp_path, LINE % (0, 1), "\n", LINE % (3000, 2)))

    assert [(a.at, a.num_tokens, list(a.names)) for a in trace.arrivals] == [
        (0.0, 600, [0, 1]),
        (3.0, 600, [0, 2]),
    ]
    assert (trace.num_tokens, trace.duration_s) == (1200, 3.0)


def test_times_begin_at_the_first_request_of_a_trace(tmp_path):
    noon_ms = 1_700_000_000_000
    path = written(tmp_path, LINE % (noon_ms, 1), LINE % (noon_ms + 2500, 2))

    assert [arrival.at for arrival in workload.read_trace(path).arrivals] == [0.0, 2.5]


def test_trace_is_read_up_to_the_limit(tmp_path):
    path = written(tmp_path, LINE % (0, 1), LINE % (1, 2), "nonsense")

    assert len(workload.read_trace(path, limit=2).arrivals) == 2


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("nonsense", "expected a line of a Mooncake trace"),
        ('{"timestamp": 5}', "missing required field `input_length`"),
        (LINE.replace("600", "1100") % (5, 1), "expected 3 hash_ids for input_length 1100"),
        (LINE.replace("600", "0") % (5, 1), "Expected `int` >= 1 - at `$.input_length`"),
        (LINE.replace(": 5,", ": -3,") % (5, 1), "Expected `int` >= 0 - at `$.output_length`"),
        (LINE % (5, -7), "Expected `int` >= 0 - at `$.hash_ids[1]`"),
        (LINE % (5, 2**32), "Expected `int` <= 4294967295 - at `$.hash_ids[1]`"),
        (LINE % (5, 0), "different hash_ids"),
        (LINE % (-5, 1), "rising order"),
    ],
)
def test_invalid_line_is_named_by_file_and_number(tmp_path, line, complaint):
    path = written(tmp_path, LINE % (0, 1), LINE % (1, 1), line)

    with pytest.raises(errors.ConfigError) as caught:
        workload.read_trace(path)

    assert f"{path}:3: " in str(caught.value)
    assert complaint in str(caught.value)


def test_missing_trace_file_is_named(tmp_path):
    with pytest.raises(errors.ConfigError, match=r"none\.jsonl: cannot be read: No such file"):
        workload.read_trace(tmp_path / "none.jsonl")


def test_trace_of_one_moment_is_refused(tmp_path):
    with pytest.raises(errors.ConfigError, match="two times at least"):
        workload.read_trace(written(tmp_path, LINE % (0, 1), LINE % (0, 2)))


def test_spreading_keeps_the_order_and_fills_the_time_between(tmp_path):
    lines = [LINE % (t, i) for i, t in enumerate((0, 0, 3000, 3000, 3000), 1)]

    spread = workload.spread_arrivals(workload.read_trace(written(tmp_path, *lines)))

    assert [a.at for a in spread.arrivals] == [0.0, 1.5, 3.0, 4.0, 5.0]


def test_synthetic_prompts_share_only_prefixes():
    crowd = workload.SharedPrefixes(
        num_prefixes=2,
        prefix_tokens=32,
        suffix_tokens=20,
        output_tokens=3,
        num_requests=5,
        concurrency=3,
        block_size=16,
        seed=1,
    )

    arrivals = [*crowd.initial_arrivals(), crowd.next_arrival(1.0), crowd.next_arrival(2.0)]

    assert crowd.next_arrival(3.0) is None
    assert [a.at for a in arrivals] == [0, 0, 0, 1.0, 2.0]
    assert {tuple(a.names[:2]) for a in arrivals} == {(0, 1), (2, 3)}
    ends = [name for a in arrivals for name in a.names[2:]]
    assert len(ends) == len(set(ends)) == 10
