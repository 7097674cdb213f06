"""Completion of `dynamo` and `python -m dynamo.x`: by the protocol, in a real bash, and installed."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from dynamo.base import errors
from dynamo.cli import completion

IFS = "\013"


def complete(line, argv, skip):
    """What a program offers for a line, by argcomplete's protocol; `skip` words come before its arguments."""
    environ = dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "_ARGCOMPLETE": str(skip),
        "_ARGCOMPLETE_SHELL": "bash",
        "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n\"'><=;|&(:",
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "IFS": IFS,
    }
    script = f"exec {sys.executable} {' '.join(argv)} 8>&1 9>&2 >/dev/null 2>&1"
    result = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True)
    return [word.strip() for word in result.stdout.split(IFS) if word]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dynamo se", ["serve", "semantic"]),
        ("dynamo serve --pre", ["--prefill"]),
        ("dynamo run --max", ["--max-tokens"]),
        ("dynamo --show", ["--show-completion"]),
    ],
)
def test_dynamo_offers_commands_and_flags(line, expected):
    assert complete(line, ["-m", "dynamo.cli"], 1) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("python -m dynamo.mocker --disagg", ["--disaggregation-mode", "--disagg-policy"]),
        ("python -m dynamo.mocker --disagg-policy ", ["lengths", "estimated"]),
        ("python -m dynamo.frontend --http-po", ["--http-port"]),
    ],
)
def test_entry_module_offers_flags_and_choices(line, expected):
    module = line.split()[2]

    assert sorted(complete(line, ["-m", module], 3)) == sorted(expected)


BASH = r"""
PATH="{bin}:$PATH"; export PYTHONPATH
source /dev/stdin <<'SCRIPT'
{script}
SCRIPT
COMP_LINE={line!r}; COMP_POINT=${{#COMP_LINE}}; COMP_TYPE=9; COMP_WORDS=({line} ""); COMP_CWORD={cword}
[[ $COMP_LINE == *" " ]] || unset "COMP_WORDS[-1]"
{function} {command}
printf '%s\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed: apt install bash")
@pytest.mark.parametrize(
    ("line", "function", "expected"),
    [
        ("dynamo ser", "_python_argcomplete", "serve"),
        ("dynamo serve --http-po", "_python_argcomplete", "--http-port"),
        ("python -m dynamo.native --max-num-s", "_dynamo_python_module", "--max-num-seqs"),
    ],
)
def test_script_completes_in_bash(tmp_path, line, function, expected):
    command = tmp_path / "dynamo"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m dynamo.cli "$@"\n')
    command.chmod(0o755)
    (tmp_path / "python").symlink_to(sys.executable)
    words = line.split()
    text = BASH.format(
        bin=tmp_path,
        script=completion.script("bash"),
        line=line,
        cword=len(words) - 1,
        function=function,
        command=words[0] if words[0] == "dynamo" else sys.executable,
    )
    environ = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run(
        ["bash", "--norc"], input=text, env=environ, capture_output=True, text=True, check=False
    )

    assert result.stdout.split() == [expected], result.stderr


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_installing_twice_changes_the_start_file_once(tmp_path, shell):
    (tmp_path / ".bashrc").write_text("alias l=ls")
    paths = {completion.install(shell, tmp_path) for _ in range(2)}
    (path,) = paths

    assert "dynamo" in path.read_text()
    if shell == "bash":
        assert (tmp_path / ".bashrc").read_text() == f"alias l=ls\nsource '{path}'\n"


def test_start_file_may_be_in_any_encoding(tmp_path):
    (tmp_path / ".bashrc").write_bytes(b"# caf\xe9\n")
    path = completion.install("bash", tmp_path)

    assert (tmp_path / ".bashrc").read_bytes() == b"# caf\xe9\n" + f"source '{path}'\n".encode()


def test_unknown_shell_is_refused_in_a_sentence():
    with pytest.raises(errors.ConfigError, match="expected one of the shells bash, zsh, fish, got"):
        completion.detect_shell({"SHELL": "/bin/tcsh"})


def test_shell_is_found_in_the_environment():
    assert completion.detect_shell({"SHELL": "/usr/bin/zsh"}) == "zsh"


def test_home_that_cannot_be_written_is_a_sentence(tmp_path):
    home = tmp_path / "home"
    pathlib.Path(home).write_text("a file")

    with pytest.raises(errors.ConfigError, match="cannot be written"):
        completion.install("bash", home)
