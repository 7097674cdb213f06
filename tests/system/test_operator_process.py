"""`python -m dynamo.operator` against an API server over HTTP, with the real kubectl."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from kube_cluster import running_cluster
from waiting import PATIENT_S, eventually

ROOT = pathlib.Path(__file__).parents[2]
FLAGS = ("--etcdAddr=etcd:2379", "--metrics-bind-address=0", "--health-probe-bind-address=0")
LONG_NAME = "a-name-that-is-much-too-long-for-anything-that-follows-from-it"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        kubectl(running, "apply", "-f", str(ROOT / "deploy" / "crds"))
        yield running


def kubectl(cluster, *arguments, **options):
    """Run kubectl and return what it prints; a failure fails the test."""
    result = cluster.kubectl(*arguments, **options)
    assert result.returncode == 0, result.stderr
    return result.stdout


@contextlib.contextmanager
def operator(cluster, log, *flags):
    """Run an operator, and end it as Kubernetes does."""
    with log.open("a") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "dynamo.operator", *FLAGS, *flags],
            env=cluster.environ,
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=PATIENT_S)


def exists(cluster, *names):
    return cluster.kubectl("get", *names).returncode == 0


def graph(name, **service):
    """Return a deployment without pods: this cluster is for objects."""
    main = {"image": "x", "command": ["python3", "-m", "dynamo.mocker"]}
    worker = {"componentType": "worker", "replicas": 0, "extraPodSpec": {"mainContainer": main}}
    frontend = {
        "componentType": "frontend",
        "replicas": 0,
        "extraPodSpec": {"mainContainer": {"image": "x"}},
    }
    return json.dumps(
        {
            "apiVersion": "nvidia.com/v1alpha1",
            "kind": "DynamoGraphDeployment",
            "metadata": {"name": name},
            "spec": {"services": {"Frontend": frontend, "Decode": {**worker, **service}}},
        }
    )


def test_killed_operator_goes_on_where_it_was(cluster, tmp_path):
    log = tmp_path / "operator.log"
    with operator(cluster, log) as process:
        kubectl(cluster, "apply", "-f", "-", stdin=graph("g"))
        eventually(lambda: exists(cluster, "deployment/g-decode", "service/g-frontend"), what="g")
        process.kill()
        process.wait(timeout=PATIENT_S)
    kubectl(cluster, "delete", "service/g-frontend")
    kubectl(cluster, "delete", "lease/dynamo-operator")  # else the next one waits for its end
    with operator(cluster, log) as process:
        eventually(lambda: exists(cluster, "service/g-frontend"), what="the service again")
        assert cluster.kubectl("diff", "-f", "-", stdin=graph("g")).returncode == 0
        columns = kubectl(cluster, "get", "dgd,dcd").splitlines()
        assert columns[0].split() == ["NAME", "READY", "STATE", "MESSAGE", "AGE"]
        assert any(row.split()[1] == "Decode" for row in columns if "/g-decode" in row)
    assert process.returncode == 0
    lease = json.loads(kubectl(cluster, "get", "lease/dynamo-operator", "-o", "json"))
    assert lease["spec"]["holderIdentity"] == ""
    kubectl(cluster, "delete", "dgd/g")
    eventually(lambda: not exists(cluster, "deployment/g-decode"), what="garbage collection")


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (graph(LONG_NAME), "the name of the deployment and that of each service"),
        (graph("g", dynamoNamespace="Ö"), "should match"),
        (graph("g", replicas=-1), "greater than or equal to 0"),
        (graph("g", multinode={"nodeCount": 1}), "greater than or equal to 2"),
        (graph("g", pvc={"create": True}), "needs a name and a size"),
        (graph("g", autoscaling={"minReplicas": 3, "maxReplicas": 1}), "must not be greater"),
        (graph("g", extraPodSpec={"imagePullSecret": "x"}), "imagePullSecret"),
    ],
)
def test_wrong_manifest_is_refused_with_the_field(cluster, manifest, message):
    result = cluster.kubectl("apply", "-f", "-", stdin=manifest)

    assert result.returncode != 0
    assert message in result.stderr


def cpu_s(process):
    """Return the processor seconds of a process so far."""
    fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_reconciled(item):
    status = item.get("status") or {}
    return status.get("observedGeneration") == item["metadata"]["generation"]


@pytest.mark.skipif(
    "DYN_TEST_KUBERNETES" not in os.environ, reason="takes minutes: make test-operator-chaos"
)
def test_five_hundred_deployments_need_a_minute_of_processor_time_and_then_no_writes(
    cluster, tmp_path, pytestconfig
):
    def listed(kind):
        return json.loads(kubectl(cluster, "get", kind, "-o", "json", "-n", "many"))

    def num_reconciled():
        return sum(map(is_reconciled, listed("dgd")["items"]))

    kubectl(cluster, "create", "namespace", "many")
    manifests = "\n---\n".join(graph(f"g{number}") for number in range(500))
    with operator(cluster, tmp_path / "log", "--no-leader-elect", "--resync-s=5") as process:
        command = ("apply", "--server-side", "-n", "many", "-f", "-")
        kubectl(cluster, *command, stdin=manifests, timeout_s=5 * PATIENT_S)
        eventually(
            lambda: num_reconciled() == 500,
            what="500 deployments",
            every_s=1,
            within_s=5 * PATIENT_S,
        )
        eventually(
            lambda: len(listed("deployments")["items"]) == 1000,
            what="1,000 Deployments",
            every_s=1,
            within_s=5 * PATIENT_S,
        )
        used_s = cpu_s(process)
        revision, idle_from_s = "", used_s
        while revision != (now := listed("dgd")["metadata"]["resourceVersion"]):
            revision = now  # of the whole cluster: the last writes come to rest
            time.sleep(1)
        time.sleep(10)  # promised: two resyncs of all objects, which must write nothing
        last = listed("dgd")["metadata"]["resourceVersion"]
        idle_s = cpu_s(process) - idle_from_s
        text = f"operator: {used_s:.1f} s of processor time, then {idle_s:.1f} s idle"
        pytestconfig.get_terminal_writer().line(text)
    kubectl(cluster, "delete", "namespace", "many", timeout_s=5 * PATIENT_S)

    assert used_s <= 60
    assert last == revision
