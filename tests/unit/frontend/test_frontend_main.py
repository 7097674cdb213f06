"""`python -m dynamo.frontend`, as a process."""

import os
import signal
import subprocess
import sys
import urllib.request

import pytest

from waiting import PATIENT_S

pytestmark = pytest.mark.system
COMMAND = [sys.executable, "-m", "dynamo.frontend"]


def run(*flags, **environ):
    return subprocess.run(
        [*COMMAND, *flags],
        capture_output=True, text=True, timeout=PATIENT_S, env=os.environ | environ, check=False,
    )  # fmt: skip


def test_help_shows_flags_with_their_variables():
    done = run("--help", DYN_DISCOVERY_BACKEND="nonsense")

    assert done.returncode == 0
    assert "--http-port" in done.stdout
    assert "[DYN_HTTP_PORT]" in done.stdout


def test_version():
    assert run("--version").stdout.startswith("Dynamo Frontend ")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--http-port", "x"], "--http-port: expected a whole number"),
        (["--nope"], "--nope"),
        (["--router-mode", "psychic"], "round-robin"),
    ],
)
def test_unknown_flag_is_one_sentence_and_exit_code_2(flags, words):
    done = run(*flags)

    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_frontend_process_listens_answers_and_stops(tmp_path, number):
    environ = os.environ | {"DYN_FILE_KV": str(tmp_path)}
    process = subprocess.Popen(
        [*COMMAND, "--http-port", "0"], stderr=subprocess.PIPE, text=True, env=environ
    )
    try:
        url = next(
            line.rpartition(" ")[2].strip() for line in process.stderr if "listening on" in line
        )
        with urllib.request.urlopen(url + "/live", timeout=PATIENT_S) as answer:
            assert answer.status == 200
        process.send_signal(number)

        assert process.wait(PATIENT_S) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
