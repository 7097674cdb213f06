import json
import re

import pytest

from dynamo.simulate import __main__ as command

STYLES = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "small.jsonl"
    rows = [
        {"timestamp": 500 * i, "input_length": 1024, "output_length": 2, "hash_ids": [0, 1 + i % 5]}
        for i in range(1, 40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_routing_prints_a_row_for_each_policy(trace, capsys):
    code = command.main(
        ["routing", "--trace", trace, "--policy", "dynamo,random", "--policy", "lmetric"]
    )

    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines if " x " in line + " "][:3] == [
        "dynamo",
        "random",
        "lmetric",
    ]
    assert any("small.jsonl; 8 workers (fcfs)" in line for line in lines)


def test_routing_writes_plots_and_a_self_contained_page(trace, tmp_path, capsys):
    code = command.main(
        ["routing", "--trace", trace, "--policy", "dynamo", "--output", str(tmp_path / "out")]
    )

    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    page = (tmp_path / "out" / "report.html").read_text()
    assert code == 0
    assert names == ["balance.png", "hit_rate.png", "report.html", "ttft.png"]
    assert page.count("data:image/png;base64,") == 3
    assert 'src="http' not in page
    assert str(tmp_path / "out" / "report.html") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["routing", "--policy", "best"], "expected --trace FILE, or --engine batch"),
        (["routing", "--engine", "batch", "--policy", "best"], "expected some of estimated-ttft"),
        (["routing", "--engine", "batch", "--cache-tokens", "0"], "expected a limited cache"),
        (["routing", "--trace", "/none"], "--trace /none: cannot be read"),
        (["--engine", "batch", "--cache-tokens", "2000"], "longest request, 2,114 tokens with"),
        (["routing", "--trace", "t", "--host-tokens", "9"], "--host-tokens 9: expected --engine b"),
        (["--engine", "batch", "--limit", "9"], "--limit 9: expected --trace FILE"),
        (["--engine", "batch", "--spread"], "--spread: expected --trace FILE"),
        (["plan", "--sweep", "--policy", "best"], "--policy best: expected one of fixed"),
        (["plan", "--policy", "load", "--load-predictor", "x"], "--load-predictor x: expected one"),
        (["planning"], "expected one of routing, disagg, plan, replay, tiers, claims, got"),
    ],
)
def test_invalid_settings_print_one_sentence_and_exit_with_two(argv, complaint, capsys):
    assert command.main(argv) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["plan", "--output"],
        ["plan", "--report-json"],
        ["plan", "--write-profile"],
        ["replay", "--report-json"],
        ["replay", "--output"],
        ["routing", "--engine", "batch", "--output"],
        ["routing", "--engine", "batch", "--report-json"],
        ["disagg", "--output"],
        ["disagg", "--report-json"],
        ["tiers", "--report-json"],
        ["tiers", "--output"],
        ["claims", "--report-json"],
    ],
)
def test_output_that_cannot_be_written_is_refused_before_anything_is_simulated(
    argv, tmp_path, capsys
):
    (tmp_path / "file").touch()

    assert command.main([*argv, str(tmp_path / "file" / "below")]) == 2
    assert f"{argv[-1]} {tmp_path}/file/below: cannot be written" in capsys.readouterr().err


SMALL = {
    "routing": ["--engine", "batch", "--requests", "40", "--policy", "random", "--cache-tokens", "9000"],
    "disagg": ["--concurrency", "2"],
    "tiers": ["--users", "2", "--rounds", "2", "--host-gb-per-s", "25"],
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_figures_are_written_as_json_where_no_plots_are(name, tmp_path, capsys):
    file = tmp_path / "new" / "figures.json"
    code = command.main([name, *SMALL[name], "--report-json", str(file)])
    figures = json.loads(file.read_text())
    keys = {
        "routing": lambda: figures[0]["itl_s"]["p99"],
        "disagg": lambda: figures[1]["points"]["conditional"][1]["per_gpu"],
        "tiers": lambda: figures["25 GB/s"][1],
    }

    assert code == 0
    assert keys[name]() > 0


@pytest.mark.parametrize("name", SMALL)
def test_full_disk_is_said_below_the_table(name, capsys):
    assert command.main([name, *SMALL[name], "--report-json", "/dev/full"]) == 2

    printed = capsys.readouterr()
    assert printed.out.count("\n") > 3
    said = "dynamo.simulate: /dev/full: cannot be written: No space left on device"
    assert printed.err.strip() == said  # after the progress bar


@pytest.mark.parametrize("name", ["plan", "replay", "routing"])
def test_no_policy_at_all_is_refused(name, capsys):
    assert command.main([name, "--policy", "", "--trace", "/none"]) == 2
    assert "--policy: expected" in capsys.readouterr().err


def test_synthetic_workload_needs_no_trace(capsys):
    code = command.main(
        ["--engine", "batch", "--requests", "20", "--concurrency", "4", "--workers", "2",
         "--cache-tokens", "100000", "--policy", "estimated-ttft"]
    )  # fmt: skip

    assert code == 0
    assert "32 prefixes of 2048 tokens, 4 clients" in capsys.readouterr().out


def test_table_on_a_narrow_terminal_shows_each_figure_whole(trace, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    command.main(["routing", "--trace", trace, "--policy", "estimated-ttft"])
    printed = STYLES.sub("", capsys.readouterr().out)

    assert "…" not in printed
    assert "cached balance queue" in printed


def test_routing_table_fits_into_80_columns(trace, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    command.main(["routing", "--trace", trace, "--policy", "consistent-hash,estimated-ttft"])

    assert max(map(len, STYLES.sub("", capsys.readouterr().out).splitlines())) <= 80


def test_nothing_but_the_table_is_printed_where_no_terminal_is(trace, capsys):
    command.main(["routing", "--trace", trace, "--policy", "random"])

    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["routing", "disagg", "plan", "replay", "tiers", "claims"])
def test_help_of_a_simulation_names_its_command(name, capsys):
    with pytest.raises(SystemExit):
        command.main([name, "--help"])

    usage = capsys.readouterr().out.partition("\n")[0]
    assert usage == f"usage: python -m dynamo.simulate {name} [flags]"


def test_disagg_prints_a_table_and_writes_a_plot(tmp_path, capsys):
    code = command.main(["disagg", "--concurrency", "4", "--output", str(tmp_path)])

    out = capsys.readouterr().out
    assert code == 0
    assert [line.split()[:2] for line in out.splitlines() if "disaggregated " in line] == [
        ["1", "disaggregated"],
        ["2", "disaggregated"],
    ]
    assert (tmp_path / "disagg.png").read_bytes().startswith(b"\x89PNG")


def test_requests_that_fit_nowhere_print_one_sentence(capsys):
    assert command.main(["disagg", "--prompt-tokens", "20000", "--concurrency", "1"]) == 2
    assert "a group of 1 GPUs has room for" in capsys.readouterr().err
