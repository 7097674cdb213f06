"""The traffic that a frontend recorded, over simulated workers."""

import dataclasses
import gzip
import json

import pytest

from dynamo.planner import profile, profile_files
from dynamo.simulate import __main__ as command
from dynamo.simulate import plan_policies, plan_worker, recorded
from planner_cases import make_profile

QUANTILES = ("mean", "p50", "p90", "p99")


def row(at_ms, *, hashes=(1, 2), length=40, model="m", error=None, **fields):
    request = {
        "request_id": "r",
        "model": model,
        "request_received_ms": at_ms,
        "input_tokens": length,
        "cached_tokens": 16,
        "output_tokens": 11,
        "ttft_ms": 50.0,
        "total_time_ms": 250.0,
        "error_type": error,
        "replay": {
            "trace_block_size": 16,
            "input_length": length,
            "input_sequence_hashes": list(hashes),
        },
    }
    return {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "event_time_unix_ms": at_ms + 250,
        "request": request | fields,
    }


def write(path, rows):
    text = "".join(json.dumps(each) + "\n" for each in rows).encode()
    path.write_bytes(gzip.compress(text) if path.name.endswith(".gz") else text)
    return path


@pytest.fixture
def day(tmp_path):
    rows = [row(1_000_000 + 100 * i, hashes=(1, 2 + i % 3)) for i in range(60)]
    return write(tmp_path / "trace.jsonl", rows)


def replay(*argv):
    return command.main(["replay", *map(str, argv)])


def test_rows_are_in_the_order_of_arrival_over_all_files_of_a_directory(tmp_path):
    write(tmp_path / "t-7-000000.jsonl.gz", [row(3000), row(1000, output_tokens=0)])
    write(tmp_path / "t-8-000000.jsonl", [row(2000)])
    traffic = recorded.read_traffic([tmp_path])

    assert [arrival.at for arrival in traffic.trace.arrivals] == [0.0, 1.0, 2.0]
    assert [arrival.num_output for arrival in traffic.trace.arrivals] == [1, 11, 11]


def test_equal_full_blocks_have_equal_names_and_the_rest_of_a_prompt_its_own(tmp_path):
    rows = [row(0), row(1), row(2, hashes=(1, 9), length=32)]
    traffic = recorded.read_traffic([write(tmp_path / "t.jsonl", rows)])
    first, second, third = (arrival.names for arrival in traffic.trace.arrivals)

    assert traffic.trace.block_size == 16
    assert (first[:2], first[0]) == (second[:2], third[0])
    assert len({first[2], second[2], third[1]}) == 3
    assert len(third) == 2


def test_prompt_with_an_image_has_blocks_of_its_own_from_there_on(tmp_path):
    rows = [row(0), row(1, hashes=(1,), length=70), row(2, hashes=(), length=20)]
    traffic = recorded.read_traffic([write(tmp_path / "t.jsonl", rows)])
    first, with_image, image_alone = (arrival.names for arrival in traffic.trace.arrivals)

    assert first[0] == with_image[0]
    assert [len(names) for names in (with_image, image_alone)] == [5, 2]
    assert len({*first, *with_image, *image_alone}) == 3 + 4 + 2


def test_audit_log_in_the_directory_of_a_trace_is_left_out(tmp_path):
    write(tmp_path / "load.jsonl", [row(1), row(9)])
    audited = b'{"schema_version":1,"request_id":"r","model":"m","request":{},"response":{}}'
    (tmp_path / "audit.jsonl").write_bytes(audited + b"\n")

    assert len(recorded.read_traffic([tmp_path]).requests) == 2


def test_rows_without_block_hashes_and_other_events_are_left_out(tmp_path):
    other = {"schema": "dynamo.request.trace.v1", "event_type": "tool_end", "tool": {}}
    rows = [row(0), row(1, replay=None), other, row(2)]

    assert len(recorded.read_traffic([write(tmp_path / "t.jsonl", rows)]).requests) == 2


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_row_that_a_killed_frontend_left_unfinished_is_left_out(tmp_path, suffix):
    path = write(tmp_path / f"t{suffix}", [row(i, hashes=(i, i + 7)) for i in range(500)])
    path.write_bytes(path.read_bytes()[:-20])

    assert 0 < len(recorded.read_traffic([path]).requests) < 500


def test_recorded_figures_stand_above_those_of_each_policy(day, tmp_path, capsys):
    file = tmp_path / "figures.json"
    code = replay("--trace", day, "--policy", "round-robin,dynamo", "--report-json", file)
    rows = json.loads(file.read_text())
    first = rows[0]

    assert code == 0
    assert [each["policy"] for each in rows] == ["recorded", "round-robin", "dynamo"]
    assert first["ttft_s"] == pytest.approx(dict.fromkeys(QUANTILES, 0.05))
    assert first["itl_s"] == pytest.approx(dict.fromkeys(QUANTILES, 0.02))
    assert first["hit_rate"] == pytest.approx(0.4)
    assert rows[2]["hit_rate"] > rows[1]["hit_rate"] > 0
    assert 0 < rows[1]["ttft_s"]["mean"] < 0.1
    assert "60 requests in 6 s; 4 workers (h100-8b)" in " ".join(capsys.readouterr().out.split())


def test_faster_arrivals_wait_longer(day, tmp_path):
    means = []
    for speed in ("1", "500"):
        file = tmp_path / speed
        replay("--trace", day, "--policy", "random", "--workers", "1", "--speed", speed,
               "--report-json", file)  # fmt: skip
        means.append(json.loads(file.read_text())[1]["ttft_s"]["mean"])

    assert means[1] > 2 * means[0]


def test_requests_that_failed_are_counted_and_not_in_the_recorded_times(tmp_path, capsys):
    rows = [row(0), row(1000, error="overload", ttft_ms=9000.0), row(2000)]
    file = tmp_path / "figures.json"
    replay("--trace", write(tmp_path / "t.jsonl", rows), "--policy", "random",
           "--report-json", file)  # fmt: skip

    assert json.loads(file.read_text())[0]["ttft_s"]["mean"] == pytest.approx(0.05)
    assert "3 requests (1 ended in an error)" in " ".join(capsys.readouterr().out.split())


def test_several_models_have_to_be_told_apart(tmp_path, capsys):
    rows = [row(i, model="ab"[i % 2], output_tokens=i + 1) for i in range(8)]
    path = write(tmp_path / "t.jsonl", rows)

    assert replay("--trace", path) == 2
    assert "--model: expected one of a, b" in capsys.readouterr().err
    assert [r.output_tokens for r in recorded.read_traffic([path], model="b").requests] == [2, 4, 6, 8]  # fmt: skip


def test_mooncakes_traces_are_replayed_too(tmp_path, capsys):
    rows = [
        {"timestamp": 500 * i, "input_length": 600, "output_length": 2, "hash_ids": [0, i]}
        for i in range(1, 20)
    ]

    assert replay("--trace", write(tmp_path / "t.jsonl", rows), "--policy", "random") == 0
    assert "recorded" not in capsys.readouterr().out


def test_second_trace_of_mooncakes_format_and_a_model_are_refused(tmp_path, capsys):
    rows = [
        {"timestamp": 500 * i, "input_length": 600, "output_length": 2, "hash_ids": [0, i]}
        for i in range(1, 3)
    ]
    path = write(tmp_path / "t.jsonl", rows)

    assert replay("--trace", path, path, "--policy", "random") == 2
    assert "expected one file in Mooncake's format" in capsys.readouterr().err
    assert replay("--trace", path, "--model", "m", "--policy", "random") == 2
    assert f"--model m: expected a frontend's trace, {path} names none" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["replay", "routing"])
def test_trace_of_mooncakes_format_may_have_other_blocks(tmp_path, capsys, name):
    rows = [
        {"timestamp": 50 * i, "input_length": 130, "output_length": 2, "hash_ids": [0, 1, 9 + i]}
        for i in range(1, 20)
    ]
    argv = [name, "--trace", str(write(tmp_path / "t.jsonl", rows)), "--policy", "random"]

    assert command.main([*argv, "--trace-block-size", "64"]) == 0
    assert command.main(argv) == 2
    assert "expected 1 hash_ids for input_length 130 (one for each 512" in capsys.readouterr().err


def test_plots_are_written(day, tmp_path, capsys):
    assert replay("--trace", day, "--policy", "random", "--output", tmp_path / "out") == 0
    assert (tmp_path / "out" / "ttft.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out" / "itl.png").read_bytes().startswith(b"\x89PNG")


def test_plan_takes_recorded_traffic_at_its_own_times(day, capsys):
    argv = ["plan", "--trace", str(day), "--policy", "fixed", "--fixed-workers", "2"]

    assert command.main(argv) == 0
    assert "trace.jsonl: 60 requests in 6 s" in " ".join(capsys.readouterr().out.split())


def test_step_times_are_those_of_a_profile_at_the_length_of_the_recorded_sequences(
    day, tmp_path, capsys
):
    surface = profile.DecodeSurface(
        [
            profile.DecodePoint(usage, context, itl_s, 100.0)
            for usage in (0.01, 0.9)
            for context, itl_s in ((64.0, 0.001), (3000.0, 0.1))
        ],
        max_kv_tokens=10_000,
    )
    curve = profile.PrefillCurve(isl=(64.0, 4096.0), ttft_s=(0.01, 0.2), throughput=(6400.0, 2e4))
    profile_files.write_profile(profile.WorkerProfile(prefill=curve, decode=surface), tmp_path)
    flags = ["--trace", str(day), "--profile", str(tmp_path), "--policy"]
    figures, planned = tmp_path / "figures", tmp_path / "planned"
    replay(*flags, "random", "--report-json", figures)
    command.main(["plan", *flags, "fixed", "--fixed-workers", "2", "--report-json", str(planned)])

    assert json.loads(figures.read_text())[1]["itl_s"]["p50"] < 0.01
    assert json.loads(planned.read_text())[0]["mean_latency"] < 0.1


@pytest.mark.parametrize(
    ("rows", "flags", "complaint"),
    [
        ([], ["--trace", "/none"], "--trace /none: cannot be read: No such file"),
        ([], [], "expected --trace FILE"),
        ([row(0)], ["--trace", "{}"], "expected requests at two times at least, got 1"),
        ([row(0), row(1)], ["--trace", "{}", "--model", "x"], "requests of x at two times at least, got 0; recorded"),
        ([row(0), row(1, hashes=(1, 2, 3))], ["--trace", "{}"], ": expected a hash for each full block"),
        ([row(0), {"schema": "x"}], ["--trace", "{}"], ":2: expected a row of a frontend's request trace, with"),
        ([row(0), {"request": 1}], ["--trace", "{}"], ":2: expected a row of a frontend's request trace: "),
        ([row(0), row(1)], ["--trace", "{}", "--cache-tokens", "48"], "room for the longest request, 51 tokens"),
        ([row(0), row(1)], ["--trace", "{}", "--policy", "best"], "expected some of estimated-ttft"),
        ([row(0), row(1)], ["--trace", "{}", "--trace-block-size", "16"], "--trace-block-size 16: has no effect on "),
    ],
)  # fmt: skip
def test_what_cannot_be_replayed_is_said_in_one_sentence(tmp_path, capsys, rows, flags, complaint):
    path = write(tmp_path / "t.jsonl", rows)

    assert replay(*(flag.format(path) for flag in flags)) == 2
    assert complaint in capsys.readouterr().err


def read_rows(tmp_path, *argv):
    file = tmp_path / "rows.json"

    assert replay(*argv, "--policy", "random", "--report-json", file) == 0
    return json.loads(file.read_text())[1:]


@pytest.mark.parametrize(
    "wrong",
    [row(2000, length=10**12), row(2000, output_tokens=10**12), row(2000, output_tokens=-5)],
)
def test_length_that_no_model_has_is_refused_before_its_blocks_are_made(tmp_path, capsys, wrong):
    path = write(tmp_path / "trace.jsonl", [row(1000), wrong])

    assert replay("--trace", path) == 2
    assert (
        f"{path}:2: expected a row of a frontend's request trace: Expected"
        in capsys.readouterr().err
    )


def test_common_prompts_cost_a_decode_step_what_the_profile_says(tmp_path):
    rows = [row(i, length=3000, hashes=tuple(range(187))) for i in range(8)]
    trace = write(tmp_path / "trace.jsonl", rows)
    itls = []
    for cost in (0.0, 0.5, 1.0):
        measured = make_profile()
        surface = measured.decode.with_repeated_cost(cost)
        directory, file = tmp_path / str(cost), tmp_path / f"{cost}.json"
        profile_files.write_profile(dataclasses.replace(measured, decode=surface), directory)
        replay("--trace", trace, "--profile", directory, "--policy", "random", "--workers", "1",
               "--report-json", file)  # fmt: skip
        itls.append(json.loads(file.read_text())[1]["itl_s"]["p90"])

    assert itls[0] < itls[1] < itls[2]


def test_no_more_sequences_run_at_once_than_the_profile_measured(day, tmp_path, capsys):
    times = dataclasses.replace(plan_worker.h100_8b(), max_num_seqs=2)
    profile_files.write_profile(plan_policies.sample_profile(times), tmp_path)
    argv = ("--trace", day, "--profile", tmp_path, "--speed", 100, "--workers", 1)

    assert read_rows(tmp_path, *argv) == read_rows(tmp_path, *argv, "--max-num-seqs", 2)


def test_size_of_the_cache_does_not_change_the_time_of_a_step(day, tmp_path, capsys):
    whole, tenth = (
        read_rows(tmp_path, "--trace", day, "--cache-tokens", size) for size in (448_000, 44_800)
    )

    assert tenth[0]["itl_s"] == pytest.approx(whole[0]["itl_s"])
