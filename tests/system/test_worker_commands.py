"""`python -m dynamo.native` and `python -m dynamo.mocker` at the command line."""

import re
import subprocess
import sys

import pytest

from waiting import PATIENT_S

MODULES = ("dynamo.native", "dynamo.mocker")


def run(deployment, *argv):
    return subprocess.run(
        [sys.executable, *argv],
        env=deployment.environ,
        capture_output=True,
        text=True,
        timeout=PATIENT_S,
    )


@pytest.mark.parametrize("module", MODULES)
def test_help_imports_no_torch(deployment, module):
    answer = run(deployment, "-X", "importtime", "-m", module, "--help")

    assert answer.returncode == 0
    assert "--system-port" in answer.stdout
    assert not re.search(r"\|\s+torch$", answer.stderr, re.MULTILINE)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--no-such-flag",), "--no-such-flag"),
        (("--model", "/no/such/model"), "no such directory"),
        (("--model", "nobody/no-such-model"), "not in the local cache"),
        (("--endpoint", "dyn://one.two"), "dyn://namespace.component.endpoint"),
        (("--system-port", "many"), "a whole number"),
    ],
)
def test_wrong_setting_is_one_sentence(deployment, module, arguments, expected):
    answer = run(deployment, "-m", module, *arguments)

    assert answer.returncode == 2
    assert expected in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1


def test_missing_engine_names_its_extra(deployment):
    script = (
        "import sys, runpy\n"
        "sys.modules['torch'] = None\n"
        "sys.argv = ['native']\n"
        "runpy.run_module('dynamo.native', run_name='__main__')\n"
    )
    answer = run(deployment, "-c", script)

    assert answer.returncode == 2
    assert "make setup EXTRAS=native" in answer.stderr
