"""The first article's lines on a laptop's cluster: charts, manifests, port-forward; with the simulated engine."""

import json
import pathlib
import re
import subprocess
import sys

import httpx
import pytest
import yaml

import kube_articles
import kube_cluster
from dynamo.worker import model_source
from kube_articles import NAMESPACE, ask, connect, run
from waiting import PATIENT_S, eventually

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def charts(tmp_path_factory):
    kube_articles.skip_without_tools()
    kube_cluster.find_kubectl()
    return kube_articles.package_charts(tmp_path_factory.mktemp("charts"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, charts):
    """A cluster with both charts, whose hub cache has the model of the articles (its name; it is the built-in one)."""
    folder = tmp_path_factory.mktemp("cluster")
    home = kube_articles.make_hub_cache(folder, model_source.built_in())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(home))
        patch.setenv("HF_HUB_OFFLINE", "1")
        with kube_cluster.running_cluster(folder, "--backoff-s", "1", "--no-operator") as running:
            kube_articles.install(running, charts)
            yield running
            of_pods = kube_cluster.pod_processes(running)
    assert not [pid for pid in of_pods if pathlib.Path(f"/proc/{pid}/exe").exists()]


def test_pods_of_the_platform_are_those_of_the_article(cluster):
    definitions = run(cluster, "get", "crd", "-o", "name")
    selector = ("--field-selector", "type=helm.sh/release.v1", "-o", "jsonpath={.items[*].data}")
    releases = run(cluster, "get", "secrets", "-A", *selector)
    rows = kube_articles.shown_rows(run(cluster, "get", "pods", "-n", NAMESPACE))

    assert 0 < len(releases) < 1 << 20  # both together: a Secret, so a release, has at most 1 MiB
    assert "dynamographdeployments.nvidia.com" in definitions
    assert "dynamocomponentdeployments.nvidia.com" in definitions
    assert rows == [
        ["dynamo-platform-dynamo-operator-controller-manager-…", "2/2", "Running", "0"],
        ["dynamo-platform-etcd-0", "1/1", "Running", "0"],
        ["dynamo-platform-nats-0", "2/2", "Running", "0"],
        ["dynamo-platform-nats-box-…", "1/1", "Running", "0"],
    ]


def test_operator_runs_as_its_own_account_with_the_rights_of_the_chart(cluster):
    """The API server enforces RBAC, so the tests below show that these rights are enough."""
    operator = "deployment/dynamo-platform-dynamo-operator-controller-manager"
    column = "jsonpath={.spec.template.spec.serviceAccountName}"
    account = run(cluster, "get", "-n", NAMESPACE, operator, "-o", column)
    user = f"system:serviceaccount:{NAMESPACE}:{account}"
    can_do = {
        attempt: cluster.kubectl("auth", "can-i", *attempt.split(), "-A", "--as", user).stdout.strip()
        for attempt in ("patch deployments.apps", "list secrets", "delete pods", "create pods/exec",
                        "create clusterrolebindings", "get nodes", "create leases")
    }  # fmt: skip

    assert can_do == {**dict.fromkeys(can_do, "no"), "patch deployments.apps": "yes"}


def test_webhooks_are_reached_through_their_service(cluster):
    def is_served():
        return cluster.kubectl("get", "--raw", "/apis/nvidia.com/v1beta1").returncode == 0

    eventually(is_served, what="v1beta1 is served")
    container = {"name": "main", "image": "x"}
    template = {"spec": {"containers": [container]}}
    component = {"name": "Frontend", "type": "frontend", "replicas": 0, "podTemplate": template}
    graph = {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "later"},
        "spec": {"components": [component]},
    }
    run(cluster, "apply", "-f", "-", stdin=json.dumps(graph))
    path = "/apis/nvidia.com/v1alpha1/namespaces/default/dynamographdeployments/later"
    stored = json.loads(run(cluster, "get", "--raw", path))
    container["image"] = ""
    refused = cluster.kubectl("apply", "-f", "-", stdin=json.dumps(graph))
    run(cluster, "delete", "dgd", "later")

    assert stored["spec"]["services"]["Frontend"]["componentType"] == "frontend"
    assert "denied the request: service Frontend: expected an image" in refused.stderr


def test_manifests_of_the_article_answer_through_port_forward(cluster):
    workers = ("VllmDecodeWorker", "VllmPrefillWorker")
    texts = [
        kube_articles.manifest("vllm-agg", module="dynamo.mocker"),
        kube_articles.manifest("vllm-disagg", workers=workers, module="dynamo.mocker"),
    ]
    for text in texts:
        run(cluster, "apply", "-f", "-", stdin=text)
    run(cluster, "wait", "--for=condition=Ready", "dgd", "--all", kube_cluster.WAIT)
    rows = kube_articles.shown_rows(run(cluster, "get", "pods"))
    answers = []
    for name in ("vllm-agg", "vllm-disagg"):
        with cluster.port_forward(f"svc/{name}-frontend", 8000) as url:
            answers.append([ask(url), ask(url)])  # over two connections
    log = run(cluster, "logs", "deployment/vllm-disagg-vllmprefillworker")
    run(cluster, "delete", "dgd", "--all")

    assert [row[:3] for row in rows] == [
        ["vllm-agg-frontend-…", "1/1", "Running"],
        ["vllm-agg-vllmdecodeworker-…", "1/1", "Running"],
        ["vllm-disagg-frontend-…", "1/1", "Running"],
        ["vllm-disagg-vllmdecodeworker-…", "1/1", "Running"],
        ["vllm-disagg-vllmprefillworker-…", "1/1", "Running"],
    ]
    for answer in (*answers[0], *answers[1]):
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 30
    assert log


def run_dynamo(cluster, example, home, *arguments):
    """Run the command in the folder of an example, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "dynamo.cli", *arguments],
        cwd=ROOT / "examples" / example,
        env={**cluster.environ, "DYNAMO_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=PATIENT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def await_nothing_of(cluster, name):
    def remains():
        kinds = "dgd,deployments,services,pods,configmaps"
        return [each for each in run(cluster, "get", kinds, "-o", "name").split() if name in each]

    eventually(lambda: not remains(), what=f"nothing of {name}")


def test_packaged_graph_is_deployed_updated_and_deleted_without_a_trace(cluster, tmp_path):
    def dynamo(*arguments):
        return run_dynamo(cluster, "llm", tmp_path, *arguments)

    tag = re.search(r"Successfully built (\S+)\.$", dynamo("build", "graphs.agg:Frontend"), re.M)[1]
    settings = tmp_path / "agg.yaml"
    settings.write_text("Frontend: {port: 8000}\nVllmWorker: {model: Qwen/Qwen3-0.6B}\n")
    module = "--VllmWorker.ServiceArgs.module=dynamo.mocker"
    deployed = dynamo("deploy", tag, "-n", "packaged", "-f", str(settings), module)
    with cluster.port_forward("svc/packaged-frontend", 8000) as url:
        answer = ask(url)
    listed = dynamo("deployment", "list")
    more = (module, "--VllmWorker.ServiceArgs.workers=2")
    updated = dynamo("deployment", "update", tag, "-n", "packaged", "-f", str(settings), *more)
    shown = yaml.safe_load(dynamo("deployment", "get", "packaged"))
    dynamo("deployment", "delete", "packaged")

    await_nothing_of(cluster, "packaged")
    assert "packaged is ready" in deployed
    assert re.search(r"packaged +2 +successful", listed)
    assert answer.json()["usage"]["completion_tokens"] == 30
    assert "packaged is ready" in updated
    assert shown["spec"]["services"]["VllmWorker"]["replicas"] == 2
    assert shown["status"]["services"]["VllmWorker"]["readyReplicas"] == 2


def test_graph_of_own_classes_answers_by_the_sources_that_go_along(cluster, tmp_path):
    def dynamo(*arguments):
        return run_dynamo(cluster, "hello_world", tmp_path, *arguments)

    def ask_graph():
        with cluster.port_forward("svc/hello-frontend", 8000) as url:
            answer = httpx.post(f"{url}/generate", json={"text": "test,again"}, timeout=PATIENT_S)
        return answer.text.splitlines()

    former, renewed = (
        [f"Frontend: Middle: Backend: {word}" for word in ("test", f"again-mid-{end}")]
        for end in ("back", "end")
    )
    graph = ("hello_world:Frontend", "-n", "hello", "--with-sources", "-f", "config.yaml")
    deployed = dynamo("deploy", *graph)
    first = ask_graph()
    dynamo("deployment", "update", *graph, "--Backend.message=end")
    later = []

    def is_renewed():
        later.append(ask_graph())
        return later[-1] == renewed

    eventually(is_renewed, what="an answer of the new backend")
    dynamo("deployment", "delete", "hello")

    await_nothing_of(cluster, "hello")
    assert "kubectl port-forward svc/hello-frontend 8000:8000" in deployed
    assert first == former
    assert all(each in (former, renewed) for each in later)  # whole, by whichever backend


def test_commands_in_a_pod_have_input_output_and_exit_code(cluster):
    pod = ("-n", NAMESPACE, "deployment/dynamo-platform-nats-box", "--")
    sorted_lines = cluster.kubectl("exec", "-i", *pod, "sort", stdin="b\na\n")
    failed = cluster.kubectl("exec", *pod, "sh", "-c", "echo out; echo err >&2; exit 3")

    assert sorted_lines.stdout == "a\nb\n"
    assert (failed.stdout, failed.returncode) == ("out\n", 3)
    assert failed.stderr.startswith("err\n")


def test_names_of_services_lead_to_their_pods(cluster):
    program = (
        "import urllib.request as u; print(u.urlopen('http://{}:2379/health').read().decode())"
    )
    names = ("dynamo-platform-etcd", f"dynamo-platform-etcd.{NAMESPACE}.svc.cluster.local")
    pod = ("-n", NAMESPACE, "deployment/dynamo-platform-nats-box", "--", "python3", "-c")
    answers = [json.loads(run(cluster, "exec", *pod, program.format(name))) for name in names]

    assert [answer["health"] for answer in answers] == ["true", "true"]


def test_port_without_a_program_is_said(cluster):
    target = ("pod/dynamo-platform-etcd-0", 9, "-n", NAMESPACE)
    with cluster.port_forward(*target) as url, pytest.raises(httpx.TransportError):
        ask(url)


def test_upgrade_and_rollback_restart_only_what_changed_and_uninstall_leaves_nothing(
    cluster, charts
):
    def uids():
        """Return the uids of pods that are not being deleted, by name without its generated part."""
        fields = "{.metadata.name} {.metadata.uid} {.metadata.deletionTimestamp}"
        template = f"jsonpath={{range .items[*]}}{fields}{{'\\n'}}{{end}}"
        lines = run(cluster, "get", "pods", "-n", NAMESPACE, "-o", template).splitlines()
        present = [line.split() for line in lines if len(line.split()) == 2]
        return {name.rpartition("-")[0]: uid for name, uid in present}

    def is_operator(name):
        return "controller-manager" in name

    first = uids()
    platform = connect(cluster, NAMESPACE)
    values = {
        "dynamo-operator": {"namespaceRestriction": {"enabled": False}},
        "operator": {"logLevel": "DEBUG"},
    }
    flags = {"namespace": NAMESPACE, "wait": "legacy", "timeout": int(PATIENT_S)}
    platform.upgrade(charts["dynamo-platform"], "dynamo-platform", values, **flags)
    upgraded = uids()
    platform.rollback("dynamo-platform", version=1, wait="legacy", timeout=int(PATIENT_S))
    rolled_back = uids()
    platform.uninstall("dynamo-platform")
    remaining_versions = run(cluster, "get", "--raw", "/apis/nvidia.com")
    connect(cluster, "default").uninstall("dynamo-crds")
    kinds = "all,secrets,configmaps,roles,rolebindings,serviceaccounts,networkpolicies"
    eventually(
        lambda: (
            not run(cluster, "get", "crd", "-o", "name").strip()
            and not run(cluster, "get", "pods", "-A", "-o", "name").strip()
        ),
        what="definitions and pods gone",
        every_s=0.3,
    )
    remaining = run(cluster, "get", kinds, "-n", NAMESPACE, "-o", "name").split()
    cluster_wide = run(cluster, "get", "clusterroles,clusterrolebindings", "-o", "name").split()
    run(cluster, "delete", "namespace", NAMESPACE)

    for before, after in ((first, upgraded), (upgraded, rolled_back)):
        kept = {name for name, uid in before.items() if after.get(name) == uid}
        assert kept == {name for name in before if not is_operator(name)}
        assert sum(map(is_operator, after)) == 1
    assert remaining == [
        "configmap/kube-root-ca.crt",
        "serviceaccount/default",
    ]  # every namespace's
    assert cluster_wide == []
    assert "v1beta1" not in remaining_versions  # nothing converts it any more
