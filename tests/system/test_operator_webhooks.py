"""The webhooks of `python -m dynamo.operator`: v1beta1 through the API server, refusals at apply, and dead webhooks."""

import contextlib
import json
import pathlib
import signal
import subprocess
import sys

import pytest
import yaml

from kube_cluster import running_cluster
from waiting import PATIENT_S, eventually

ROOT = pathlib.Path(__file__).parents[2]
FLAGS = (
    *("--etcdAddr=etcd:2379", "--metrics-bind-address=0", "--health-probe-bind-address=0"),
    "--webhook-bind-address=127.0.0.1:0",
)
MAIN = {
    "name": "main",
    "image": "i",
    "command": ["python3", "-m", "dynamo.mocker"],
    "envFrom": [{"secretRef": {"name": "hf-token-secret"}}],
}
FRONTEND = {"spec": {"containers": [{"name": "main", "image": "i"}]}}
BETA = {
    "apiVersion": "nvidia.com/v1beta1",
    "kind": "DynamoGraphDeployment",
    "metadata": {"name": "later"},
    "spec": {
        "components": [
            {"name": "Frontend", "type": "frontend", "replicas": 0, "podTemplate": FRONTEND},
            {
                "name": "Decode",
                "type": "decode",
                "replicas": 0,
                "podTemplate": {"spec": {"containers": [MAIN, {"name": "side", "image": "s"}]}},
            },
        ]
    },
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        kubectl(running, "apply", "--server-side", "-f", str(ROOT / "deploy" / "crds"))
        yield running


def kubectl(cluster, *arguments, **options):
    """Run kubectl and return what it prints; a failure fails the test."""
    result = cluster.kubectl(*arguments, **options)
    assert result.returncode == 0, result.stderr
    return result.stdout


def is_served(cluster):
    return cluster.kubectl("get", "--raw", "/apis/nvidia.com/v1beta1").returncode == 0


@contextlib.contextmanager
def operator(cluster, log):
    """Run an operator until its webhooks are registered, and end it as Kubernetes does."""
    with log.open("a") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "dynamo.operator", *FLAGS],
            env=cluster.environ,
            stdout=output,
            stderr=output,
        )
    try:
        eventually(lambda: is_served(cluster), what="v1beta1 is served")
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(timeout=PATIENT_S)


def test_later_version_is_served_converted_and_kept(cluster, tmp_path):
    manifest = json.dumps(BETA)
    with operator(cluster, tmp_path / "operator.log"):
        kubectl(cluster, "apply", "-f", "-", stdin=manifest)
        eventually(
            lambda: cluster.kubectl("get", "deployment/later-decode").returncode == 0,
            what="the operator makes the workers",
        )
        shown = yaml.safe_load(kubectl(cluster, "get", "dgd", "later", "-o", "yaml"))
        path = "/apis/nvidia.com/{}/namespaces/default/dynamographdeployments/later"
        stored = json.loads(kubectl(cluster, "get", "--raw", path.format("v1alpha1")))

        assert shown["apiVersion"] == BETA["apiVersion"]
        assert shown["spec"] == BETA["spec"]
        service = stored["spec"]["services"]["Decode"]
        assert (service["componentType"], service["envFromSecret"]) == ("worker", "hf-token-secret")
        assert "unchanged" in kubectl(cluster, "apply", "-f", "-", stdin=manifest)
        assert kubectl(cluster, "diff", "-f", "-", stdin=manifest) == ""
        kubectl(cluster, "annotate", "dgd", "later", "a=b")
        kubectl(cluster, "wait", "dgd/later", "--for=jsonpath={.metadata.annotations.a}=b")

    assert not is_served(cluster)
    kubectl(cluster, "api-resources")  # kubectl keeps for hours what is served
    shown = json.loads(kubectl(cluster, "get", "dgd", "later", "-o", "json"))
    assert shown["apiVersion"] == "nvidia.com/v1alpha1"


def graph(name, **service):
    """Return a deployment of v1alpha1 without pods."""
    main = {"image": "x", "command": ["python3", "-m", "dynamo.trtllm"]}
    worker = {"componentType": "worker", "extraPodSpec": {"mainContainer": main}, **service}
    return json.dumps(
        {
            "apiVersion": "nvidia.com/v1alpha1",
            "kind": "DynamoGraphDeployment",
            "metadata": {"name": name},
            "spec": {"services": {"Decode": worker}},
        }
    )


def test_mistake_that_no_schema_knows_is_refused_at_apply(cluster, tmp_path):
    with operator(cluster, tmp_path / "operator.log"):
        mistaken = graph("mistaken", multinode={"nodeCount": 2})
        result = cluster.kubectl("apply", "-f", "-", stdin=mistaken)

        assert result.returncode != 0
        assert "denied the request: service Decode" in result.stderr
        kubectl(cluster, "apply", "-f", "-", stdin=graph("plain"))
        path = "jsonpath={.spec.services.Decode.replicas}"
        assert (
            kubectl(
                cluster, "get", "dynamographdeployments.v1alpha1.nvidia.com", "plain", "-o", path
            )
            == "1"
        )


def test_dead_webhook_holds_up_nothing_that_is_stored(cluster, tmp_path):
    log = tmp_path / "operator.log"
    with operator(cluster, log) as process:
        kubectl(cluster, "apply", "-f", "-", stdin=json.dumps(BETA))
        process.kill()
        process.wait(timeout=PATIENT_S)

        kubectl(cluster, "apply", "-f", "-", stdin=graph("unchecked"))
        failed = cluster.kubectl("get", "dynamographdeployments.v1beta1.nvidia.com", "later")
        assert "conversion webhook for nvidia.com/v1alpha1" in failed.stderr
        kubectl(cluster, "get", "dynamographdeployments.v1alpha1.nvidia.com", "later")
        kubectl(cluster, "delete", "dynamographdeployments.v1alpha1.nvidia.com", "unchecked")

    with operator(cluster, log):  # at another port, with the certificate of the first
        eventually(
            lambda: (
                cluster.kubectl(
                    "get", "dynamographdeployments.v1beta1.nvidia.com", "later"
                ).returncode
                == 0
            ),
            what="v1beta1 is converted again",
        )
        path = ROOT / "deploy" / "crds" / "dynamographdeployments.yaml"
        kubectl(cluster, "apply", "--server-side", "--force-conflicts", "-f", str(path))
        eventually(lambda: is_served(cluster), what="v1beta1 is served after an upgrade")
    assert log.read_text().count("new certificate") == 0


LEASE = "lease/dynamo-operator"


def take_lease(cluster, holder):
    """Write another holder into the Lease, as an operator does that has waited for its end."""
    kubectl(
        cluster,
        *("patch", LEASE, "--type=merge", "-p", json.dumps({"spec": {"holderIdentity": holder}})),
    )


def reads_as_later_version(cluster):
    names = "dynamographdeployments.v1beta1.nvidia.com", "later"
    return cluster.kubectl("get", *names).returncode == 0


def test_operator_that_loses_its_lease_converts_on_and_acts_again_with_it(cluster, tmp_path):
    log = tmp_path / "operator.log"
    with operator(cluster, log) as process:
        kubectl(cluster, "apply", "-f", "-", stdin=json.dumps(BETA))
        take_lease(cluster, "another")
        eventually(lambda: "was taken by another operator" in log.read_text(), what="it is noticed")
        assert reads_as_later_version(cluster)
        refused = cluster.kubectl("apply", "-f", "-", stdin=graph("no", multinode={"nodeCount": 2}))
        assert "denied the request: service Decode" in refused.stderr
        take_lease(cluster, "")
        eventually(lambda: log.read_text().count("has the lease") == 2, what="its second term")
    assert process.returncode == 0


def test_operator_goes_on_after_its_api_server_was_silent_for_longer_than_a_lease(
    cluster, tmp_path
):
    log = tmp_path / "operator.log"
    with operator(cluster, log):
        cluster.process.send_signal(signal.SIGSTOP)
        eventually(lambda: log.read_text().count("is to be renewed") >= 4, what="a lease's time")
        cluster.process.send_signal(signal.SIGCONT)
        kubectl(cluster, "apply", "-f", "-", stdin=graph("after"))
        eventually(
            lambda: cluster.kubectl("get", "deployment/after-decode").returncode == 0,
            what="the operator makes the workers",
        )
    assert log.read_text().count("has the lease") == 1


def test_second_operator_converts_when_the_first_is_gone(cluster, tmp_path):
    first_log, second_log = tmp_path / "first.log", tmp_path / "second.log"
    with operator(cluster, first_log) as first, operator(cluster, second_log):
        kubectl(cluster, "apply", "-f", "-", stdin=json.dumps(BETA))
        assert "has the lease" not in second_log.read_text()
        assert reads_as_later_version(cluster)
        first.kill()
        first.wait(timeout=PATIENT_S)
        take_lease(cluster, "")  # rather than wait for its end
        eventually(lambda: reads_as_later_version(cluster), what="the second converts")
        assert second_log.read_text().count("new certificate") == 0
    assert not is_served(cluster)
