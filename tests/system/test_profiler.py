"""The profiler measures a real worker process, and goes on where it was interrupted."""

import signal
import subprocess
import sys

import pytest

from dynamo.planner import profile_files
from waiting import PATIENT_S, eventually

pytestmark = pytest.mark.system
FLAGS = (
    *("--isl", "64", "--osl", "16", "--workers", "3", "--backend", "mocker"),
    *("--worker-flags", "--max-num-seqs 2 --num-gpu-blocks-override 64 --speedup-ratio 20"),
)


def profile(directory, *flags):
    command = [sys.executable, "-m", "dynamo.profiler", "--output", str(directory), *FLAGS, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENT_S, check=False)


def test_sweep_measures_what_an_interrupted_one_left_and_recommends(tmp_path):
    first = profile(tmp_path, "--budget-minutes", "2")
    file = tmp_path / "cells.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:3]) + lines[3][:20] + b"\n")
    second = profile(tmp_path, "--budget-minutes", "2")

    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "3 of them measured before" in second.stderr
    assert len(file.read_bytes().splitlines()) == len(lines) + 1
    assert "dynamo serve --engine mocker" in second.stdout
    assert profile_files.read_profile(tmp_path).prefill.prompt_s(64) > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_sweep_and_keeps_what_was_measured(tmp_path, number):
    command = [sys.executable, "-m", "dynamo.profiler", "--output", str(tmp_path), *FLAGS]
    command += ["--worker-flags", "--num-gpu-blocks-override 999 --speedup-ratio 0.02"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as sweep:
        file = tmp_path / "cells.jsonl"
        eventually(file.exists, what="a cell is measured")
        sweep.send_signal(number)
        _, printed = sweep.communicate(timeout=PATIENT_S)

    assert sweep.returncode == 128 + number
    assert f"interrupted by {number.name}: 1 measured cells are kept" in printed
    assert file.read_bytes().count(b"\n") == 1
