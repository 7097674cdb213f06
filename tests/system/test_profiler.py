"""The profiler measures a real worker process, and goes on where it was interrupted."""

import json
import signal
import subprocess
import sys

import pytest
import yaml

import processes
from dynamo.planner import profile_files
from waiting import PATIENT_S, eventually

pytestmark = pytest.mark.system
FLAGS = (
    *("--isl", "64", "--osl", "16", "--workers", "3", "--backend", "mocker", "--measurements", "1"),
    *("--worker-flags", "--max-num-seqs 2 --num-gpu-blocks-override 64 --speedup-ratio 20"),
)


SLOW = ("--worker-flags", "--max-num-seqs 2 --num-gpu-blocks-override 64 --speedup-ratio 0.5")
AT_MOST_ONE_RESTART = """
import sys
from dynamo.launch import supervisor
from dynamo.planner import profiling
supervisor.MAX_RESTARTS = 1
sys.exit(profiling.main())
"""


def profile(directory, *flags):
    command = [sys.executable, "-m", "dynamo.profiler", "--output", str(directory), *FLAGS, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENT_S, check=False)


def start(directory, *flags, program=("-m", "dynamo.profiler")):
    command = [sys.executable, *program, "--output", str(directory), *FLAGS, *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def kill_worker(sweep):
    below = processes.descendants(sweep.pid)
    processes.kill({pid for pid in below if "dynamo.mocker" in processes.command_line(pid)})


def read_cells(file):
    return [json.loads(line)[1] for line in file.read_bytes().splitlines()]


def is_measuring(file, *, num_lost):
    """Whether the worker has measured the last cell, after as many in which it was killed: so it runs."""
    lost = [result["is_worker_lost"] for result in read_cells(file)] if file.exists() else []
    return lost.count(True) == num_lost and lost[-1:] == [False]


def count_cells(file):
    return len(file.read_bytes().splitlines()) if file.exists() else 0


def test_sweep_measures_what_an_interrupted_one_left_and_recommends(tmp_path):
    first = profile(tmp_path, "--budget-minutes", "2")
    file = tmp_path / "cells.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:3]) + lines[3][:20] + b"\n")
    second = profile(tmp_path, "--budget-minutes", "2")

    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "3 of them made before" in second.stderr
    assert len(file.read_bytes().splitlines()) == len(lines) + 1
    assert "dynamo serve --engine mocker" in second.stdout
    graph = yaml.safe_load((tmp_path / "deployment.yaml").read_text())
    workers = [s for s in graph["spec"]["services"].values() if s["componentType"] == "worker"]
    assert sum(worker["replicas"] for worker in workers) == 3
    assert f"kubectl apply -f {tmp_path}/deployment.yaml" in second.stderr
    assert profile_files.read_profile(tmp_path).prefill.prompt_s(64) > 0


def test_each_cell_is_measured_as_often_as_asked_after_all_others(tmp_path):
    first = profile(tmp_path)
    cells = [result["cell"] for result in read_cells(tmp_path / "cells.jsonl")]
    second = profile(tmp_path, "--measurements", "3")
    measured = [result["cell"] for result in read_cells(tmp_path / "cells.jsonl")]

    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert measured == 3 * cells
    said = f"{3 * len(cells)} measurements of {len(cells)} cells, {len(cells)} of them made before"
    assert said in second.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_sweep_and_keeps_what_was_measured(tmp_path, number):
    slower = ("--worker-flags", "--num-gpu-blocks-override 999 --speedup-ratio 0.02")
    file = tmp_path / "cells.jsonl"
    with start(tmp_path, *slower) as sweep:
        eventually(file.exists, what="a cell is measured")
        sweep.send_signal(number)
        _, printed = sweep.communicate(timeout=PATIENT_S)

    assert sweep.returncode == 128 + number
    assert f"interrupted by {number.name}: 1 measured cells are kept" in printed
    assert count_cells(file) == 1


def test_killed_worker_costs_one_cell_which_the_next_run_measures(tmp_path):
    file = tmp_path / "cells.jsonl"
    with start(tmp_path, *SLOW) as sweep:
        eventually(file.exists, what="a cell is measured")
        kill_worker(sweep)
        recommendation, printed = sweep.communicate(timeout=PATIENT_S)
    failures = [result["failure"] for result in read_cells(file) if result["failure"]]
    num_cells = count_cells(file)
    second = profile(tmp_path, *SLOW)

    assert sweep.returncode == second.returncode == 0, printed + second.stderr
    assert "dynamo serve" in recommendation
    assert ["worker was killed by SIGKILL" in failure for failure in failures] == [True]
    assert f"{num_cells} cells, {num_cells - 1} of them made before" in second.stderr
    assert not read_cells(file)[-1]["failure"]


def test_worker_that_dies_again_and_again_ends_the_sweep_without_a_recommendation(tmp_path):
    file = tmp_path / "cells.jsonl"
    with start(tmp_path, *SLOW, program=("-c", AT_MOST_ONE_RESTART)) as sweep:
        for num_lost in (0, 1):
            eventually(
                lambda: is_measuring(file, num_lost=num_lost),  # noqa: B023
                what="a cell is measured",
            )
            kill_worker(sweep)
        recommendation, printed = sweep.communicate(timeout=PATIENT_S)

    assert (sweep.returncode, recommendation) == (1, "")
    assert "the worker was lost 2 times, so the other cells were not measured" in printed
    assert [result["is_worker_lost"] for result in read_cells(file)].count(True) == 2


def test_no_recommendation_from_a_profile_with_too_few_cells(tmp_path):
    sweep = profile(tmp_path, "--budget-minutes", "0.01", *SLOW)

    assert (sweep.returncode, sweep.stdout) == (1, "")
    assert "there is no recommendation, since the profile lacks" in sweep.stderr
    assert not (tmp_path / profile_files.PREFILL_FILE).exists()
