"""The `dynamo` command: a mistake is one sentence."""

import asyncio
import importlib.metadata
import os
import pathlib
import pwd
import re
import signal
import subprocess
import sys
from unittest import mock

import pytest

from dynamo.base import errors
from dynamo.cli import kube, main, serve
from waiting import PATIENT_S

ROOT = pathlib.Path(__file__).parents[3]


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["dynamo", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main.main()
    captured = capsys.readouterr()
    return exit_.value.code or 0, captured.out, captured.err


@pytest.mark.parametrize("flag", ["--version", "-v"])
def test_the_version_is_printed(monkeypatch, capsys, flag):
    code, out, _ = run(monkeypatch, capsys, flag)

    assert (code, out.strip()) == (0, importlib.metadata.version("dynamo-serving"))


def test_version_needs_no_module_of_a_subcommand():
    """Their options take a second to load."""
    program = """
import sys
from dynamo.cli import main
sys.argv = ["dynamo", "--version"]
try:
    main.main()
finally:
    print(*sys.modules)
"""
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENT_S, check=True)
    modules = {command.module for command in main.COMMANDS.values()}

    assert not {f"dynamo.cli.{name}" for name in modules} & {*done.stdout.split()}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--no-such-flag",), "--no-such-flag"),
        (("srve",), "srve (did you mean serve?)"),
        (("planner",), "no such command: planner (see python -m dynamo.planner)"),
        (("serve", "--workers", "0"), "workers"),
        (("serve", "--http-port", "many"), "http-port"),
        (("serve", "--engine", "warp", "--dry-run"), "native, mocker"),
        (("serve", "--unknown"), "(see --help. Flags of the processes"),
        (("semantic",), "usage: dynamo semantic check|explain|replay"),
        (("kvbm",), "usage: dynamo kvbm ls|verify|clear DIRECTORY"),
        (("kube",), "usage: dynamo kube up|convert|apply"),
        (("kube", "--port", "9001"), "expected up|convert|apply (up: run the cluster until"),
        (("kube", "up", "agg.yaml"), "up: expected no file, got 'agg.yaml'; `dynamo kube apply"),
    ],
)
def test_error_for_an_invalid_argument_is_one_sentence(monkeypatch, capsys, arguments, expected):
    code, _, err = run(monkeypatch, capsys, *arguments)

    assert code == 2
    assert expected in err
    assert err.count("\n") == 1


def test_model_whose_name_looks_like_a_graph_is_served_as_a_model(monkeypatch, capsys):
    names = []
    monkeypatch.setattr(serve, "serve", lambda options: names.append(options.model_name))
    code, _, err = run(monkeypatch, capsys, "serve", "--model-name", "llama:latest")

    assert (code, err, names) == (0, "", ["llama:latest"])


@pytest.mark.parametrize("arguments", [["--help"], ["run", "in=stdin", "out=echo_full"]])
def test_reader_that_has_gone_ends_the_command_without_a_word(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing) as output:
        argv = [sys.executable, "-m", "dynamo.cli", *arguments]
        done = subprocess.run(
            argv, input="hi", stdout=output, stderr=subprocess.PIPE, text=True, timeout=PATIENT_S
        )

    # on a slow machine it says how long the model has been loading
    lines = [line for line in done.stderr.splitlines() if "Ctrl-C gives up" not in line]
    assert (done.returncode, lines) == (1, [])


@pytest.mark.parametrize("command", ["", " serve"])
@pytest.mark.parametrize(
    ("redirection", "code", "words"),
    [(">/dev/full", 1, "dynamo{}: No space left on device\n"), (">&-", 0, "")],
)
def test_output_that_cannot_be_written_is_no_trace(command, redirection, code, words):
    script = f'"$0" -m dynamo.cli{command} --help {redirection}'
    argv = ["bash", "-c", script, sys.executable]
    done = subprocess.run(argv, stderr=subprocess.PIPE, text=True, timeout=PATIENT_S)

    assert (done.returncode, done.stderr) == (code, words.format(command))


def test_mistake_is_not_told_on_standard_output_if_standard_error_is_closed():
    argv = ["bash", "-c", '"$0" -m dynamo.cli srve 2>&-', sys.executable]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=PATIENT_S)

    assert (done.returncode, done.stdout) == (2, "")


def test_page_fits_a_terminal_of_forty_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    _, page, _ = run(monkeypatch, capsys, "--help")

    assert max(map(len, page.splitlines()[2:])) == 40  # behind the line of the usage


@pytest.mark.parametrize("content", [b"a: b: c", b"a: \xff", b"[" * 100_000])
def test_manifests_that_cannot_be_read_are_one_sentence(monkeypatch, capsys, tmp_path, content):
    path = tmp_path / "a.yaml"
    path.write_bytes(content)
    code, _, err = run(monkeypatch, capsys, "kube", "convert", str(path))

    assert code == 2
    assert err.startswith(f"dynamo: {path}: expected manifests in YAML: ")
    assert err.count("\n") == 1


def test_interrupt_while_the_command_is_loaded_leaves_no_trace():
    program = """
import os, runpy, signal, sys
class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == "dynamo.base.config":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupter())
sys.argv = ["dynamo", "ps"]
runpy.run_module("dynamo.cli", run_name="__main__")
"""
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENT_S)

    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_user_without_a_home_is_told_so(monkeypatch, capsys):
    """As in a container that runs under a number without a name."""

    def find_no_user(number):
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", find_no_user)
    monkeypatch.delenv("HOME")
    code, _, err = run(monkeypatch, capsys, "--install-completion", "bash")

    assert (code, err) == (2, "dynamo: Could not determine home directory. Set HOME to one\n")


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "No usable temporary directory found in ['/tmp']"),
        PermissionError(13, "Permission denied", "/tmp/dynamo-serve-1"),
        OSError(30, "Read-only file system", "/tmp/dynamo-serve-1"),
    ],
)
def test_missing_place_for_temporary_files_is_one_sentence(monkeypatch, capsys, error):
    """As in a pod whose root is read-only and that has no volume at /tmp."""
    monkeypatch.setattr(serve, "check_port", mock.Mock(side_effect=error))
    code, _, err = run(monkeypatch, capsys, "serve")

    assert code == 2
    assert err.startswith(f"dynamo: {error}; expected ")
    assert "TMPDIR" in err


def test_terminal_without_a_character_shows_another_one():
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    argv = [sys.executable, "-m", "dynamo.cli", "--help"]
    done = subprocess.run(argv, env=environ, capture_output=True, timeout=PATIENT_S)

    assert (done.returncode, done.stderr) == (0, b"")
    assert b"? serve " in done.stdout


@pytest.mark.parametrize(
    ("error", "expected"),
    [(errors.ConfigError("no such directory: x"), 2), (errors.EngineFailed("out of memory"), 1)],
)
def test_dynamo_errors_are_printed_as_one_sentence(monkeypatch, capsys, error, expected):
    def fail(options):
        raise error

    monkeypatch.setattr(serve, "serve", fail)
    code, _, err = run(monkeypatch, capsys, "serve")

    assert code == expected
    assert err == f"dynamo: {error}\n"


def test_dynamo_run_is_a_command_of_its_own(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dynamo-run", "in=telepathy"])
    with pytest.raises(SystemExit):
        main.run_main()

    assert "text, stdin, batch:FILE, http" in capsys.readouterr().err


def test_env_command_hides_secrets(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hush")
    monkeypatch.setenv("DYN_LOG", "debug")
    code, out, _ = run(monkeypatch, capsys, "env")

    assert code == 0
    assert "hush" not in out
    assert "DYN_LOG" in out


def test_env_command_hides_users_and_passwords_of_addresses(monkeypatch, capsys):
    monkeypatch.setenv("NATS_SERVER", "nats://me:qu/iet@10.0.0.5:4222,me:quiet@10.0.0.6:4222")
    monkeypatch.setenv("ETCD_ENDPOINTS", "http://10.0.0.5:2379")
    monkeypatch.setattr("sys.argv", ["dynamo", "env"])
    with pytest.raises(SystemExit):
        main.main()
    report = capsys.readouterr().out

    assert "nats://…@10.0.0.5:4222,…@10.0.0.6:4222\n" in report
    assert "http://10.0.0.5:2379\n" in report


def test_interrupt_exits_with_code_130(monkeypatch, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    def leave(code):
        raise SystemExit(f"left by {code}")

    monkeypatch.setattr(serve, "serve", interrupted)
    monkeypatch.setattr(main.os, "_exit", leave)  # the real one would end the tests
    code, _, err = run(monkeypatch, capsys, "serve")

    assert (code, err) == ("left by 130", "")


@pytest.mark.parametrize("name", main.COMMANDS)
def test_summary_of_a_command_is_that_of_its_options(name):
    command = main.COMMANDS[name]

    assert command.options.__doc__.partition("\n")[0] == command.summary
    assert callable(getattr(command._imported, command.function_name))


@pytest.mark.parametrize(
    ("process", "unneeded"),
    [
        (
            "dynamo.cli.main",
            {"dynamo.frontend.service", "dynamo.worker.main", "torch", "tokenizers"},
        ),
        ("dynamo.worker.main", {"huggingface_hub", "torch", "tokenizers"}),
    ],
)
def test_process_starts_without_what_only_some_calls_need(process, unneeded):
    modules = subprocess.run(
        [sys.executable, "-c", f"import sys, {process}; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENT_S,
    ).stdout.split()

    assert not unneeded & {*modules}


async def test_started_cluster_names_a_deployment_that_needs_no_model(
    monkeypatch, tmp_path, capsys
):
    running = mock.MagicMock(url="https://127.0.0.1:1", has_pod_networks=True)
    opened = mock.MagicMock()
    opened.__aenter__ = mock.AsyncMock(return_value=running)
    opened.__aexit__ = mock.AsyncMock(return_value=None)
    monkeypatch.setattr(kube, "_run_operator", mock.AsyncMock(return_value=0))
    monkeypatch.setattr(kube.process_setup, "stop_on_signals", asyncio.Event)

    assert await kube._serve(tmp_path / "config", opened, has_operator=True, has_node=True) == 0

    (file,) = re.findall(r"kubectl apply -f (\S+)", capsys.readouterr().out)
    commands = re.findall(r"-m, (dynamo\.\w+)", (ROOT / file).read_text())
    assert commands == ["dynamo.mocker"]


def test_folders_of_pods_are_found_from_the_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()

    assert kube.find_folders(f"bin::{tmp_path}") == f"{tmp_path}/bin:{tmp_path}"
    assert kube.find_folders("") == ""
    with pytest.raises(errors.ConfigError, match=f"--pod-path: expected folders, got {tmp_path}/b"):
        kube.find_folders("bin:bim")
