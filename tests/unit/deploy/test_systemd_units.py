"""The units in deploy/systemd are valid, start modules that exist, and stop no sooner than a drain takes."""

import configparser
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo.base import membership
from dynamo.frontend import config
from dynamo.frontend.model_registry import file_fetcher
from dynamo.preprocess import tokenizer_library
from dynamo.worker import settings

FOLDER = Path(__file__).parents[3] / "deploy" / "systemd"
UNITS = {"pydynamo-frontend.service": "frontend", "pydynamo-worker@.service": "native"}


def service(name):
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    parser.read(FOLDER / name)
    return parser["Service"]


def test_each_unit_file_is_tested_here():
    assert {path.name for path in FOLDER.iterdir()} == set(UNITS)


@pytest.mark.skipif(
    not shutil.which("systemd-analyze"),
    reason="systemd is not installed: as root on Debian, tests/install_services.sh",
)
@pytest.mark.parametrize("name", UNITS)
def test_systemd_accepts_the_unit(name, tmp_path):
    path = tmp_path / name.replace("@", "@native")
    text = (FOLDER / name).read_text()
    path.write_text(text.replace("/opt/pydynamo/bin/python", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", path], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("name", "module"), UNITS.items())
def test_unit_starts_a_module_that_exists(name, module):
    command = service(name)["ExecStart"].replace("${ENGINE}", "native")

    assert command == f"/opt/pydynamo/bin/python -m dynamo.{module}"
    assert importlib.util.find_spec(f"dynamo.{module}") is not None


def test_stop_timeout_is_longer_than_draining():
    frontend, worker = (float(service(name)["TimeoutStopSec"]) for name in UNITS)
    drains = settings.WorkerConfig()

    assert frontend > config.FrontendConfig().http_graceful_shutdown_timeout_secs
    assert worker > drains.graceful_shutdown_timeout_s + drains.grace_period_s


@pytest.mark.parametrize("name", UNITS)
def test_unit_is_not_restarted_after_a_wrong_setting(name):
    assert service(name)["RestartPreventExitStatus"] == "2"


@pytest.mark.parametrize("name", UNITS)
def test_stop_reaches_the_first_process_alone(name):
    """`mixed`: what an engine started gets no SIGTERM while it drains, nor those of --http-workers a second one."""
    assert service(name)["KillMode"] == "mixed"


@pytest.mark.parametrize("name", UNITS)
def test_unit_may_write_where_its_process_keeps_files(name, monkeypatch):
    """`ProtectSystem=strict` leaves nothing of the file system writable, not even /tmp, but what the unit names."""
    unit = service(name)
    environ = dict(each.split("=", 1) for each in unit["Environment"].split())
    monkeypatch.setattr("os.environ", {"HOME": "/home/pydynamo"} | environ)
    writable = (f"/var/lib/{unit['StateDirectory']}/", f"/run/{unit['RuntimeDirectory']}/")

    assert unit["ProtectSystem"] == "strict"
    assert unit["PrivateTmp"] == "yes"
    for directory in (
        config.FrontendConfig().files_folder,
        file_fetcher.cache_directory(None),
        tokenizer_library.FindingsDirectory.of_user()._path,
        membership.discovery_directory(None, environ),
        environ["HF_HOME"],
    ):
        assert str(directory).startswith(writable)
