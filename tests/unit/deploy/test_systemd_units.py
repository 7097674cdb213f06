"""The units in deploy/systemd are what systemd takes, start what there is, and wait for as long as we drain."""

import configparser
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo.frontend import config
from dynamo.worker import settings

FOLDER = Path(__file__).parents[3] / "deploy" / "systemd"
UNITS = {"pydynamo-frontend.service": "frontend", "pydynamo-worker@.service": "native"}


def service(name):
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    parser.read(FOLDER / name)
    return parser["Service"]


def test_there_is_no_other_unit():
    assert {path.name for path in FOLDER.iterdir()} == set(UNITS)


@pytest.mark.skipif(
    not shutil.which("systemd-analyze"),
    reason="systemd is not installed: as root on Debian, tests/install_services.sh",
)
@pytest.mark.parametrize("name", UNITS)
def test_systemd_takes_it(name, tmp_path):
    path = tmp_path / name.replace("@", "@native")
    text = (FOLDER / name).read_text()
    path.write_text(text.replace("/opt/pydynamo/bin/python", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", path], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("name", "module"), UNITS.items())
def test_it_starts_a_module_of_ours(name, module):
    command = service(name)["ExecStart"].replace("${ENGINE}", "native")

    assert command == f"/opt/pydynamo/bin/python -m dynamo.{module}"
    assert importlib.util.find_spec(f"dynamo.{module}") is not None


def test_systemd_waits_longer_than_we_drain():
    frontend, worker = (float(service(name)["TimeoutStopSec"]) for name in UNITS)
    drains = settings.WorkerConfig()

    assert frontend > config.FrontendConfig().http_graceful_shutdown_timeout_secs
    assert worker > drains.graceful_shutdown_timeout_s + drains.grace_period_s


@pytest.mark.parametrize("name", UNITS)
def test_a_wrong_setting_is_not_tried_again(name):
    assert service(name)["RestartPreventExitStatus"] == "2"
