"""A laptop's cluster under the real kubectl."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import socket
import stat
import subprocess
import sys
import termios

import httpx
import pytest

import kube_cluster
from dynamo.base import errors
from dynamo.cli import kube
from waiting import PATIENT_S, eventually

pytestmark = pytest.mark.system

DEFINITION = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "widgets.example.com"},
    "spec": {
        "group": "example.com",
        "scope": "Namespaced",
        "names": {"kind": "Widget", "plural": "widgets", "shortNames": ["wd"]},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "subresources": {
                    "status": {},
                    "scale": {
                        "specReplicasPath": ".spec.replicas",
                        "statusReplicasPath": ".status.replicas",
                    },
                },
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": {
                                "type": "object",
                                "properties": {
                                    "colour": {"type": "string", "enum": ["red", "blue"]},
                                    "replicas": {"type": "integer", "default": 1},
                                },
                                "x-kubernetes-validations": [
                                    {
                                        "rule": "self.replicas < 10",
                                        "message": "fewer than 10, please",
                                    }
                                ],
                            }
                        },
                    }
                },
            }
        ],
    },
}
WIDGET = {
    "apiVersion": "example.com/v1",
    "kind": "Widget",
    "metadata": {"name": "w1"},
    "spec": {"colour": "red"},
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    kube_cluster.find_kubectl()
    with kube_cluster.running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        done = running.kubectl("apply", "-f", "-", stdin=json.dumps(DEFINITION))
        assert done.returncode == 0, done.stderr
        done = running.kubectl(
            "wait", "--for=condition=Established", "crd/widgets.example.com", kube_cluster.WAIT
        )
        assert done.returncode == 0, done.stderr
        yield running


def test_kubectl_applies_scales_and_deletes_a_custom_resource(cluster):
    outputs = [
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(WIDGET)).stdout,
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(WIDGET)).stdout,
        cluster.kubectl("scale", "wd/w1", "--replicas=3").stdout,
        cluster.kubectl(
            "get", "wd", "w1", "-o", "jsonpath={.spec.replicas} {.metadata.generation}"
        ).stdout,
        cluster.kubectl("delete", "wd", "w1").stdout,
    ]

    assert outputs == [
        "widget.example.com/w1 created\n",
        "widget.example.com/w1 unchanged\n",
        "widget.example.com/w1 scaled\n",
        "3 2",
        'widget.example.com "w1" deleted\n',
    ]


def test_kubectl_applies_a_list_whose_items_the_server_checks(cluster):
    def apply(*names, **fields):
        head = {"apiVersion": "v1", "kind": "ConfigMap"}
        items = [{**head, "metadata": {"name": name}, **fields} for name in names]
        listed = {"apiVersion": "v1", "kind": "List", "items": items}
        return cluster.kubectl("apply", "-f", "-", stdin=json.dumps(listed))

    assert apply("one", "two").stdout == "configmap/one created\nconfigmap/two created\n"
    assert 'unknown field "dta"' in apply("three", dta={}).stderr


def test_only_who_has_the_token_is_answered(cluster):
    assert stat.S_IMODE(cluster.kubeconfig.stat().st_mode) == 0o600
    with httpx.Client(base_url=cluster.url, verify=False, timeout=PATIENT_S) as http:
        of_strangers = [
            http.get("/api/v1/pods", headers=headers)
            for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": "Basic eDp4"})
        ]
        opened = [
            http.get(path).status_code for path in ("/healthz", "/livez", "/readyz", "/version")
        ]

    assert [answer.status_code for answer in of_strangers] == [403, 401, 403]  # as recorded
    assert of_strangers[1].json()["reason"] == "Unauthorized"
    assert 'User "system:anonymous" cannot list' in of_strangers[0].json()["message"]
    assert opened == [200, 200, 200, 200]


RULES = [
    {"apiGroups": [""], "resources": ["pods", "pods/log"], "verbs": ["get", "list"]},
    {"apiGroups": ["rbac.authorization.k8s.io"], "resources": ["roles"], "verbs": ["get", "create", "patch"]},
]  # fmt: skip


def role(name, rules):
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": name},
        "rules": rules,
    }


_NAMESPACE = """
import asyncio, concurrent.futures.thread, ctypes, os
from dynamo.testing.kube import pod_network
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1)  # its files in /proc are its own again
listener = pod_network.enter_user_namespace(0)
async def serve():
    async with pod_network.open_network() as network:
        print(listener.getsockname()[1], network.is_isolated, flush=True)
        listener.accept()
asyncio.run(serve()) if listener else print("refused")
"""


def test_user_without_root_makes_networks_for_pods_and_is_reached_from_outside():
    argv = [sys.executable, "-c", _NAMESPACE]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline().split()
        if line == ["refused"]:
            pytest.skip("the kernel does not let users make namespaces")
        port, is_isolated = line
        with socket.create_connection(("127.0.0.1", int(port)), PATIENT_S):
            pass

        assert process.wait(PATIENT_S) == 0
        assert is_isolated == "True"


def test_service_account_may_do_what_its_roles_allow_and_grant_no_more(cluster):
    account = "system:serviceaccount:default:reader"
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "reader"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"},
        "subjects": [{"kind": "ServiceAccount", "name": "reader"}],
    }

    def as_reader(*arguments, stdin=None):
        done = cluster.kubectl(*arguments, "--as", account, stdin=stdin)
        return done.stdout or done.stderr

    before = as_reader("get", "pods")
    for item in (role("reader", RULES), binding):
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(item))
    may = {
        verb: as_reader("auth", "can-i", verb, "pods").strip()
        for verb in ("get", "list", "watch", "delete")
    }
    given = as_reader("apply", "--server-side", "-f", "-", stdin=json.dumps(role("r", RULES[:1])))
    refused = as_reader(
        "apply", "-f", "-", stdin=json.dumps(role("x", [{**RULES[0], "verbs": ["*"]}]))
    )
    who = as_reader("auth", "whoami")

    assert before == (
        f'Error from server (Forbidden): pods is forbidden: User "{account}" cannot list resource "pods" in API group'
        ' "" in the namespace "default"\n'
    )
    assert may == {"get": "yes", "list": "yes", "watch": "no", "delete": "no"}
    assert given == "role.rbac.authorization.k8s.io/r serverside-applied\n"
    assert "is attempting to grant RBAC permissions not currently held" in refused
    assert account in who
    assert as_reader("get", "pods") == "No resources found in default namespace.\n"
    assert "cannot list" in as_reader("get", "pods", "-A")


def test_kubeconfig_of_another_cluster_is_kept(tmp_path):
    file = tmp_path / "config"
    file.write_text("current-context: production\n")
    options = kube.KubeCommandConfig(action="up", kubeconfig=str(file), node=False, operator=False)

    with pytest.raises(errors.ConfigError, match="name a new file"):
        kube.run(options)
    assert file.read_text() == "current-context: production\n"


def test_kubectl_shows_why_a_custom_resource_is_refused(cluster):
    wrong = {**WIDGET, "spec": {"colour": "green"}}
    unknown = {**WIDGET, "spec": {"color": "red"}}
    too_many = {**WIDGET, "spec": {"replicas": 12}}
    errors = [
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(body)).stderr
        for body in (wrong, unknown, too_many)
    ]

    assert 'spec.colour: Unsupported value: "green": supported values: "red", "blue"' in errors[0]
    assert 'strict decoding error: unknown field "spec.color"' in errors[1]
    assert "spec: Invalid value: fewer than 10, please" in errors[2]


@pytest.mark.parametrize(
    ("container", "message"),
    [
        ({"imagee": "x"}, 'unknown field "spec.template.spec.containers[0].imagee"'),
        ({"env": [{"name": "A", "value": 1}]}, "cannot unmarshal number into Go struct field"),
    ],
)
def test_kubectl_shows_a_typing_error_in_a_built_in_object(cluster, container, message):
    labels = {"app": "typo"}
    template = {
        "metadata": {"labels": labels},
        "spec": {"containers": [{"name": "a", "image": "x", **container}]},
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "typo"},
        "spec": {"replicas": 0, "selector": {"matchLabels": labels}, "template": template},
    }
    refused = cluster.kubectl("apply", "-f", "-", stdin=json.dumps(deployment))

    assert refused.returncode == 1
    assert message in refused.stderr


def test_kubectl_apply_of_two_managers_conflicts(cluster):
    first = cluster.kubectl(
        "apply",
        "--server-side",
        "--field-manager=a",
        "-f",
        "-",
        stdin=json.dumps({**WIDGET, "metadata": {"name": "w2"}}),
    )
    other = {**WIDGET, "metadata": {"name": "w2"}, "spec": {"colour": "blue"}}
    second = cluster.kubectl(
        "apply", "--server-side", "--field-manager=b", "-f", "-", stdin=json.dumps(other)
    )

    assert first.stdout == "widget.example.com/w2 serverside-applied\n"
    assert 'conflict with "a": .spec.colour' in second.stderr


def test_a_namespace_goes_with_its_content(cluster):
    cluster.kubectl("create", "namespace", "short")
    cluster.kubectl("create", "configmap", "-n", "short", "data", "--from-literal=a=b")
    cluster.kubectl("delete", "namespace", "short")

    assert "not found" in cluster.kubectl("get", "namespace", "short").stderr
    assert cluster.kubectl("get", "configmaps", "-n", "short", "-o", "name").stdout == ""


WEB = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: main
        image: python:3.11
        command: [sh, -c, 'echo "I am $NAME, $GREETING"; exec python3 -u -m http.server 8000']
        env:
        - {name: NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
        - {name: GREETING, valueFrom: {configMapKeyRef: {name: words, key: greeting}}}
        readinessProbe:
          exec: {command: [python3, -c, 'import urllib.request as u; u.urlopen("http://127.0.0.1:8000")']}
          periodSeconds: 1
          timeoutSeconds: 20
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {selector: {app: web}, ports: [{port: 80, targetPort: 8000}]}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: words}
data: {greeting: hello}
"""
CRASHING = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "crashing"},
    "spec": {
        "containers": [
            {
                "name": "main",
                "image": "python:3.11",
                "command": ["sh", "-c", "echo bye; exit 3"],
                "terminationMessagePolicy": "FallbackToLogsOnError",
            }
        ]
    },
}
IDLE = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "idle"},
    "spec": {
        "containers": [{"name": "main", "image": "python:3.11", "command": ["sleep", "infinity"]}]
    },
}
TOO_LARGE = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "large"},
    "spec": {
        "containers": [
            {
                "name": "main",
                "image": "python:3.11",
                "resources": {"limits": {"nvidia.com/gpu": "999"}},
            }
        ]
    },
}


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """A cluster that runs pods; when it has ended, no process of them may be left."""
    kube_cluster.find_kubectl()
    if os.geteuid() != 0:
        pytest.skip("two pods on the same port need network namespaces, and those root")
    with kube_cluster.running_cluster(
        tmp_path_factory.mktemp("node"), "--backoff-s", "1", "--no-operator"
    ) as running:
        yield running
        with_kubeconfig = kube_cluster.pod_processes(running)
    assert not [pid for pid in with_kubeconfig if pathlib.Path(f"/proc/{pid}/exe").exists()]


def test_a_deployment_runs_as_processes_and_leaves_nothing(node):
    node.kubectl("apply", "-f", "-", stdin=WEB)
    rollout = node.kubectl("rollout", "status", "deployment/web", kube_cluster.WAIT)
    pods = node.kubectl(
        "get", "pods", "-l", "app=web", "-o", "jsonpath={.items[*].status.podIP}"
    ).stdout.split()
    slices = node.kubectl(
        "get", "endpointslices", "-o", "jsonpath={.items[*].endpoints[*].addresses[0]}"
    ).stdout.split()
    log = node.kubectl("logs", "deployment/web").stdout
    node.kubectl("delete", "deployment/web", "service/web")
    gone = node.kubectl("wait", "--for=delete", "pod", "-l", "app=web", kube_cluster.WAIT)

    assert "successfully rolled out" in rollout.stdout
    assert len(set(pods)) == 2
    assert sorted(pods) == sorted(slices)
    assert re.match(r"I am web-\w+-\w+, hello\n", log)
    assert gone.returncode == 0, gone.stderr


def test_the_status_of_a_pod_tells_why_it_does_not_run(node):
    node.kubectl("apply", "-f", "-", stdin=json.dumps(CRASHING))
    node.kubectl("apply", "-f", "-", stdin=json.dumps(TOO_LARGE))
    reason = "jsonpath={.status.containerStatuses[0].state.waiting.reason}"
    crashed = node.kubectl(
        "wait", f"--for={reason}=CrashLoopBackOff", "pod/crashing", kube_cluster.WAIT
    )
    condition = "jsonpath={.status.conditions[0].message}"
    unschedulable = node.kubectl("get", "pod", "large", "-o", condition).stdout
    # on a busy machine it may be started again meanwhile, and has a new log
    eventually(lambda: node.kubectl("logs", "crashing").stdout == "bye\n", what="its log")
    last_state = "jsonpath={.status.containerStatuses[0].lastState.terminated.message}"
    message = node.kubectl("get", "pod", "crashing", "-o", last_state).stdout
    node.kubectl("delete", "pod", "crashing", "large", "--grace-period=1")

    assert crashed.returncode == 0, crashed.stderr
    assert unschedulable == "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
    assert message == "bye\n"


def test_pod_becomes_ready_as_soon_as_its_start_has_succeeded(node):
    """As with a kubelet, which does not wait for the next period of the readiness probe."""
    succeeding = {"exec": {"command": ["true"]}, "timeoutSeconds": 20}
    container = {
        "name": "main",
        "image": "python:3.11",
        "command": ["sleep", "infinity"],
        "startupProbe": {**succeeding, "periodSeconds": 1},
        "readinessProbe": {**succeeding, "periodSeconds": 3600},
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "starting"},
        "spec": {"containers": [container]},
    }
    node.kubectl("apply", "-f", "-", stdin=json.dumps(pod))
    ready = node.kubectl("wait", "--for=condition=Ready", "pod/starting", kube_cluster.WAIT)
    node.kubectl("delete", "pod", "starting", "--grace-period=1")

    assert ready.returncode == 0, ready.stderr


@pytest.fixture
def idle_pod(node):
    node.kubectl("apply", "-f", "-", stdin=json.dumps(IDLE))
    node.kubectl("wait", "--for=condition=Ready", "pod/idle", kube_cluster.WAIT)
    yield "idle"
    node.kubectl("delete", "pod", "idle", "--grace-period=1")


@contextlib.contextmanager
def exec_at_terminal(node, pod, *command):
    """Run `kubectl exec -it`; yield its process and the other end of its terminal, of 31 lines of 97 columns."""
    own_end, other_end = os.openpty()
    termios.tcsetwinsize(own_end, (31, 97))
    arguments = [kube_cluster.find_kubectl(), "exec", "-it", pod, "--", *command]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), other_end)
    process = subprocess.Popen(arguments, env=node.environ, **streams)
    os.close(other_end)
    try:
        yield process, own_end
    finally:
        process.kill()
        process.wait()
        os.close(own_end)


def test_command_at_a_terminal_sees_what_is_typed_and_its_size(node, idle_pod):
    has_size = '[ "$(stty size)" = "31 97" ]'
    command = f"read line; until {has_size}; do sleep 0.1; done; tty; echo got $line; exit 4"
    with exec_at_terminal(node, idle_pod, "sh", "-c", command) as (process, own_end):
        os.write(own_end, b"hello\n")
        code, output = process.wait(PATIENT_S), b""
        with contextlib.suppress(OSError):  # the end of a terminal
            while piece := os.read(own_end, 4096):
                output += piece
    lines = output.decode().splitlines()

    assert code == 4, lines
    assert any(line.startswith("/dev/pts/") for line in lines), lines
    assert "got hello" in lines


def test_command_at_a_terminal_ends_when_its_client_goes(node, idle_pod):
    def is_running():
        listed = subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True)
        return "sleep 987654" in listed.stdout.splitlines()

    with exec_at_terminal(node, idle_pod, "sleep", "987654"):
        eventually(is_running, what="the command", every_s=0.1)
    eventually(lambda: not is_running(), what="the end of the command", every_s=0.1)


BUSY = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: busy}
spec:
  selector: {matchLabels: {app: busy}}
  template:
    metadata: {labels: {app: busy}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: main
        image: python:3.11
        command: [sh, -c, 'while [ ! -e /given/idle ]; do :; done; exec sleep infinity']
        resources: {requests: {cpu: 50m}}
        volumeMounts: [{name: given, mountPath: /given}]
      volumes: [{name: given, hostPath: {path: FOLDER}}]
---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata: {name: busy}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: busy}
  maxReplicas: 2
  metrics: [{type: Resource, resource: {name: cpu, target: {type: Utilization, averageUtilization: 50}}}]
  behavior: {scaleDown: {stabilizationWindowSeconds: 0}}
"""


def test_autoscaler_follows_the_cpu_of_the_pods_processes(node, tmp_path):
    node.kubectl("apply", "-f", "-", stdin=BUSY.replace("FOLDER", str(tmp_path)))
    grown = node.kubectl(
        "wait", "--for=jsonpath={.spec.replicas}=2", "deployment/busy", kube_cluster.WAIT
    )
    usage = node.kubectl("top", "pods", "-l", "app=busy", "--no-headers").stdout.split()
    shown = node.kubectl("get", "hpa", "busy", "--no-headers").stdout
    (tmp_path / "idle").touch()
    shrunk = node.kubectl(
        "wait", "--for=jsonpath={.spec.replicas}=1", "deployment/busy", kube_cluster.WAIT
    )
    events = node.kubectl("get", "events", "--field-selector", "reason=SuccessfulRescale").stdout
    node.kubectl("delete", "hpa/busy", "deployment/busy")

    assert grown.returncode == 0, grown.stderr
    assert shrunk.returncode == 0, shrunk.stderr
    assert re.match(r"busy-\S+", usage[0])
    assert int(usage[1].removesuffix("m")) > 25
    assert re.match(r"busy +Deployment/busy +cpu: [1-9]\d*%/50% +1 +2 ", shown)
    assert "New size: 2; reason: usage of resources is above its target" in events
    assert "New size: 1; reason: usage of resources is below its target" in events


def test_autoscaler_keeps_to_its_limits_without_any_metric_and_shows_what_is_there(node, tmp_path):
    manifest = (
        BUSY.replace("FOLDER", str(tmp_path))
        .replace("busy", "still")
        .replace("resources: {requests: {cpu: 50m}}", "")
    )
    manifest = manifest.replace("maxReplicas: 2", "minReplicas: 2\n  maxReplicas: 3")
    manifest = re.sub(r"command: .*", "command: [sleep, infinity]", manifest)
    node.kubectl("apply", "-f", "-", stdin=manifest)
    shown = "--for=jsonpath={.status.currentReplicas}"
    grown = node.kubectl("wait", f"{shown}=2", "hpa/still", kube_cluster.WAIT)
    node.kubectl("annotate", "hpa/still", "changed=once")  # a user's write removes unknown fields
    node.kubectl("scale", "deployment/still", "--replicas=3")
    followed = node.kubectl("wait", f"{shown}=3", "hpa/still", kube_cluster.WAIT)
    events = node.kubectl("get", "events", "--field-selector", "reason=SuccessfulRescale").stdout
    node.kubectl("delete", "hpa/still", "deployment/still")

    assert grown.returncode == 0, grown.stderr
    assert followed.returncode == 0, followed.stderr
    assert "New size: 2; reason: Current number of replicas below Spec.MinReplicas" in events


def test_pods_have_temporary_folders_and_message_queues_of_their_own(node, idle_pod, tmp_path):
    """What lies there on the host is seen below, so that a model or a program in it can be used."""
    (tmp_path / "given").write_text("by the host\n")
    file = tmp_path / "own"
    container = {"name": "main", "image": "python:3.11", "command": ["sleep", "infinity"]}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 1}
    other = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "other"}, "spec": spec}
    node.kubectl("apply", "-f", "-", stdin=json.dumps(other))
    node.kubectl("wait", "--for=condition=Ready", "pod/other", kube_cluster.WAIT)
    script = f"echo $0 > {file}; cat {file} {tmp_path}/given; readlink /proc/self/ns/ipc"
    shown = [
        node.kubectl("exec", pod, "--", "sh", "-c", script, pod).stdout.splitlines()
        for pod in (idle_pod, "other")
    ]
    again = node.kubectl("exec", idle_pod, "--", "cat", str(file)).stdout
    node.kubectl("delete", "pod", "other")

    assert [lines[:2] for lines in shown] == [[idle_pod, "by the host"], ["other", "by the host"]]
    assert again == f"{idle_pod}\n"
    assert len({os.readlink("/proc/self/ns/ipc"), *(lines[2] for lines in shown)}) == 3
    assert not file.exists()


def test_container_sees_its_own_processes_and_no_others(node, idle_pod):
    script = "cd /proc; ls -d [0-9]*; echo; tr '\\0' ' ' < /proc/2/cmdline"
    shown = node.kubectl("exec", idle_pod, "--", "sh", "-c", script).stdout
    numbers, _, program = shown.partition("\n\n")

    assert program.split()[0] == "sleep"
    assert {"1", "2"} <= set(numbers.split())
    assert str(os.getpid()) not in numbers.split()
    assert len(numbers.split()) < 6


def test_container_gets_the_signal_to_end_and_its_status_is_kept(node):
    script = "trap 'exit 7' TERM; sleep infinity & wait; exit 1"
    container = {"name": "main", "image": "python:3.11", "command": ["sh", "-c", script]}
    spec = {"containers": [container], "restartPolicy": "Never"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ending"}, "spec": spec}
    node.kubectl("apply", "-f", "-", stdin=json.dumps(pod))
    node.kubectl("wait", "--for=condition=Ready", "pod/ending", kube_cluster.WAIT)
    node.kubectl("exec", "ending", "--", "kill", "-TERM", "2")
    path = "jsonpath={.status.containerStatuses[0].state.terminated.exitCode}"
    waited = node.kubectl("wait", f"--for={path}=7", "pod/ending", kube_cluster.WAIT)
    node.kubectl("delete", "pod", "ending", "--grace-period=1")

    assert waited.returncode == 0, waited.stderr


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/dev/termination-log", 3),
        ("/dev/termination-log", 0),
        ("/data/last-words", 0),
        ("/data/sub/last-words", 3),
    ],
)
def test_container_says_in_a_file_why_it_ended(node, path, code):
    container = {
        "name": "main",
        "image": "python:3.11",
        "command": [
            "sh",
            "-c",
            f"test ! -s {path} && echo farewell > {path}; echo bye; exit {code}",
        ],
        "terminationMessagePath": path,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    other = {**container, "name": "other", "command": ["sh", "-c", f"echo other > {path}"]}
    volumes = [{"name": "data", "emptyDir": {}}]
    containers = [container] if path.startswith("/data") else [container, other]
    spec = {"containers": containers, "volumes": volumes, "restartPolicy": "Never"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "speaking"}, "spec": spec}
    node.kubectl("apply", "-f", "-", stdin=json.dumps(pod))
    phase = "Failed" if code else "Succeeded"
    ended = f"--for=jsonpath={{.status.phase}}={phase}"
    waited = node.kubectl("wait", ended, "pod/speaking", kube_cluster.WAIT)
    messages = "jsonpath={.status.containerStatuses[*].state.terminated.message}"
    shown = node.kubectl("get", "pod", "speaking", "-o", messages).stdout
    node.kubectl("delete", "pod", "speaking", "--grace-period=1")

    assert waited.returncode == 0, waited.stderr
    assert shown.split() == ["farewell", "other"][: len(containers)]


def test_container_beyond_its_memory_limit_is_killed(node):
    program = "import time; kept = b'x' * 200_000_000; time.sleep(3600)"
    container = {
        "name": "main",
        "image": "python:3.11",
        "command": ["sh", "-c", f'python3 -c "{program}" & wait'],
        "resources": {"limits": {"memory": "100Mi"}},
    }
    spec = {"containers": [container], "restartPolicy": "Never"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "greedy"}, "spec": spec}
    node.kubectl("apply", "-f", "-", stdin=json.dumps(pod))
    ended = "--for=jsonpath={.status.phase}=Failed"
    waited = node.kubectl("wait", ended, "pod/greedy", kube_cluster.WAIT)
    path = "{.status.containerStatuses[0].state.terminated}"
    terminated = json.loads(
        node.kubectl("get", "pod", "greedy", "-o", f"jsonpath={path}").stdout or "{}"
    )
    node.kubectl("delete", "pod", "greedy", "--grace-period=1")

    assert waited.returncode == 0, waited.stderr
    assert (terminated["exitCode"], terminated["reason"]) == (137, "OOMKilled")


def test_event_says_which_fields_of_a_pod_have_no_effect(node):
    container = {"name": "main", "image": "python:3.11", "command": ["true"]}
    own = {**container, "name": "own", "securityContext": {"runAsUser": os.geteuid()}}
    spec = {
        "containers": [{**container, "securityContext": {"privileged": True}}, own],
        "securityContext": {"runAsUser": 12345, "fsGroup": 1000},
        "restartPolicy": "OnFailure",
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "particular"}, "spec": spec}
    applied = node.kubectl("apply", "-f", "-", stdin=json.dumps(pod))
    events = ("get", "events", "--field-selector", "involvedObject.name=particular,type=Warning")
    eventually(lambda: node.kubectl(*events).stdout, what="its event")
    shown = node.kubectl(*events, "-o", "jsonpath={.items[*].message}").stdout
    node.kubectl("delete", "pod", "particular", "--grace-period=1")

    assert shown == (
        "spec.securityContext.runAsUser: has no effect on this cluster;"
        " spec.containers[0].securityContext.privileged: has no effect on this cluster"
    )
    assert "runAsUser: has no effect" in applied.stderr


def test_hooks_of_a_container_run_after_its_start_and_before_its_end(node, tmp_path):
    def say(text):
        return {"exec": {"command": ["sh", "-c", f"sleep 0.2; echo {text} >> /seen/log"]}}

    script = "trap 'echo ended >> /seen/log; exit 0' TERM; sleep infinity & wait"
    container = {
        "name": "main",
        "image": "python:3.11",
        "command": ["sh", "-c", script],
        "lifecycle": {"postStart": say("started"), "preStop": say("ending")},
        "volumeMounts": [{"name": "seen", "mountPath": "/seen"}],
    }
    volume = {"name": "seen", "hostPath": {"path": str(tmp_path)}}
    spec = {"containers": [container], "volumes": [volume]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "hooked"}, "spec": spec}
    node.kubectl("apply", "-f", "-", stdin=json.dumps(pod))
    node.kubectl("wait", "--for=condition=Ready", "pod/hooked", kube_cluster.WAIT)
    before = (tmp_path / "log").read_text()
    node.kubectl("delete", "pod", "hooked")

    assert before == "started\n"
    assert (tmp_path / "log").read_text() == "started\nending\nended\n"


def make_server(name):
    """Return a pod that serves a folder of its own at port 8000 of all addresses, and shows its variables there."""
    script = "echo $HOST_NAME > $FOLDER/index.html; exec python3 -m http.server 8000 --bind 0.0.0.0 --directory $0"
    container = {
        "name": "main",
        "image": "python:3.11",
        "command": ["sh", "-c", script, "/served"],
        "env": [{"name": "HOST_NAME", "value": name}, {"name": "FOLDER", "value": "/served"}],
        "volumeMounts": [{"name": "served", "mountPath": "/served"}],
        "readinessProbe": {"httpGet": {"port": 8000}, "periodSeconds": 1},
    }
    spec = {
        "containers": [container],
        "volumes": [{"name": "served", "emptyDir": {}}],
        "terminationGracePeriodSeconds": 1,
    }
    return json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})


def test_pods_without_namespaces_listen_at_one_port_and_have_their_own_volumes(
    tmp_path, monkeypatch
):
    """As on a machine whose kernel refuses namespaces, here because the commands that make them are missing."""
    kube_cluster.find_kubectl()
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "openssl", "kubectl"):
        (programs / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(programs))
    with kube_cluster.running_cluster(tmp_path, "--no-operator") as cluster:
        cluster.kubectl(
            "apply", "-f", "-", stdin=f"{make_server('one')}\n---\n{make_server('two')}"
        )
        ready = cluster.kubectl("wait", "--for=condition=Ready", "pod", "--all", kube_cluster.WAIT)
        answers = []
        for name in ("one", "two"):
            with cluster.port_forward(f"pod/{name}", 8000) as url:
                answers.append(httpx.get(url, timeout=PATIENT_S).text.strip())

    assert ready.returncode == 0, ready.stderr
    assert answers == ["one", "two"]
