"""A Kubernetes cluster for tests: the API server of `dynamo.testing.kube` in a child process, and the real kubectl.

`with running_cluster(folder) as cluster:` starts it on a port that the system chooses, and stops it.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

import processes
from waiting import PATIENT_S

_MINIMUM = (1, 28)
_SOURCE = "kubernetes.io/docs/tasks/tools"
WAIT = f"--timeout={PATIENT_S - 20:g}s"  # of kubectl's own, so that it says what it waited for


@dataclass(frozen=True)
class RunningCluster:
    """A cluster that is up: its address, and the KUBECONFIG of its clients."""

    url: str
    kubeconfig: pathlib.Path
    process: subprocess.Popen[str]

    @property
    def environ(self) -> dict[str, str]:
        """The environment of kubectl and of client libraries."""
        return {
            **os.environ,
            "KUBECONFIG": str(self.kubeconfig),
            "HOME": str(self.kubeconfig.parent),
        }

    def kubectl(
        self, *arguments: str, stdin: str | None = None, timeout_s: float = PATIENT_S
    ) -> subprocess.CompletedProcess[str]:
        """Run the real kubectl against the cluster."""
        return subprocess.run(
            [find_kubectl(), *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            env=self.environ,
            timeout=timeout_s,
        )

    @contextlib.contextmanager
    def port_forward(self, target: str, port: int, *flags: str) -> Iterator[str]:
        """Run `kubectl port-forward` to a port of a pod or service; yield the URL at which this machine reaches it."""
        process = subprocess.Popen(
            [find_kubectl(), "port-forward", target, f":{port}", *flags],
            stdout=subprocess.PIPE,
            text=True,
            env=self.environ,
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.fullmatch(rf"Forwarding from (127.0.0.1:\d+) -> {port}\n", line)
            assert found, f"kubectl port-forward said {line!r}"
            yield f"http://{found[1]}"
        finally:
            process.terminate()
            process.communicate(timeout=PATIENT_S)


def find_kubectl() -> str:
    """Return the path of a kubectl that is new enough, or skip the test by name."""
    path = shutil.which("kubectl")
    if path is None:
        pytest.skip(
            f"kubectl 1.28 or newer is not installed ({_SOURCE}; Debian 12 has an older one)"
        )
    version = subprocess.run(
        [path, "version", "--client", "-o", "json"], capture_output=True, text=True
    )
    git_version = json.loads(version.stdout)["clientVersion"]["gitVersion"]
    numbers = re.match(r"v(\d+)\.(\d+)", git_version)
    if numbers is None or tuple(map(int, numbers.groups())) < _MINIMUM:
        pytest.skip(f"kubectl 1.28 or newer is needed ({_SOURCE}), {git_version} is installed")
    return path


@contextlib.contextmanager
def running_cluster(folder: pathlib.Path, *flags: str) -> Iterator[RunningCluster]:
    """Run `dynamo kube up` with these flags; by default without operator and node, so that pods stay pending."""
    kubeconfig = folder / "kubeconfig"
    command = [
        sys.executable,
        "-m",
        "dynamo.cli",
        "kube",
        "up",
        "--kubeconfig",
        str(kubeconfig),
        "--port",
        "0",
    ]
    process = subprocess.Popen(
        processes.bind([*command, *(flags or ("--no-node", "--no-operator"))], "TERM"),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("export KUBECONFIG="), f"the cluster did not start: {line!r}"
        url = json.loads(kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
        yield RunningCluster(url, kubeconfig, process)
    finally:
        process.terminate()
        try:
            process.wait(PATIENT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            process.stdout.close()


def pod_processes(cluster: RunningCluster) -> list[str]:
    """Return the ids of the processes below the cluster's own, which are those of its pods."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True)
    parents = dict(line.split() for line in listed.stdout.splitlines())
    found = [str(cluster.process.pid)]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]
