"""The first cause of a deployment that is not ready, as one sentence of its status."""

import pytest

from dynamo.operator import causes, objects
from operator_cluster import DictCluster, frontend, make_graph, worker


def waiting(reason, message="", **fields):
    state = {"waiting": {"reason": reason, "message": message}}
    return {"containerStatuses": [{"name": "main", "image": "img:1", "state": state, **fields}]}


def ended(**fields):
    terminated = {"exitCode": 1, "reason": "Error", **fields}
    return {
        "containerStatuses": [
            {
                "name": "main",
                "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                "lastState": {"terminated": terminated},
                "restartCount": 3,
            }
        ]
    }


def unplaced(message):
    return {"conditions": [{"type": "PodScheduled", "status": "False", "message": message}]}


STARTING = [{"name": "main", "started": False, "state": {"running": {}}}]
RUNNING = [{"name": "main", "state": {"running": {}}}]
ENDED = [{"name": "main", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}]
FETCH = [{"name": "fetch", "state": {"terminated": {"exitCode": 2, "message": "404"}}}]
CAUSES = [
    (unplaced("3 Insufficient nvidia.com/gpu."), "Unschedulable", "no node has enough nvidia.com"),
    (unplaced("1 node(s) had untolerated taint"), "Unschedulable", "untolerated taint"),
    (unplaced('persistentvolumeclaim "m" not found'), "VolumeMissing", 'claim "m" not found'),
    (waiting("ImagePullBackOff", "no such host"), "ImagePull", "cannot pull img:1: no such host"),
    (
        waiting("CreateContainerConfigError", 'secret "k" not found'),
        "ContainerConfig",
        'secret "k"',
    ),
    (
        ended(message="loading\nValueError: no such model\n"),
        "CrashLoop",
        "exit code 1 and was restarted 3 times: ValueError: no such model",
    ),
    (ended(reason="OOMKilled", exitCode=137), "OutOfMemory", "more memory than its limit"),
    ({"reason": "Evicted", "message": "node was low on disk"}, "Evicted", "node was low on disk"),
    ({"containerStatuses": ENDED}, "Completed", "has ended without an error"),
    ({"containerStatuses": STARTING}, "Starting", "is starting"),
    ({"containerStatuses": RUNNING}, "Starting", "runs and is not ready yet"),
    (
        {"initContainerStatuses": FETCH},
        "CrashLoop",
        "(container fetch) ended with exit code 2: 404",
    ),
    ({}, "Starting", "is starting"),
]


@pytest.mark.parametrize(("status", "reason", "words"), CAUSES)
def test_status_of_the_graph_names_the_first_cause(status, reason, words):
    cluster = DictCluster()
    cluster.put(make_graph(services={"Decode": worker()}))
    cluster.settle(becomes_ready=lambda pod: False)
    (entry,) = cluster.pods.values()
    entry["pod"]["status"] = status
    cluster.settle(becomes_ready=lambda pod: False)
    condition = cluster.ready()

    assert condition["message"].startswith("1 resources not ready: [g-decode]: service Decode: ")
    assert words in condition["message"]
    assert condition["reason"] == "some_resources_are_not_ready"
    component = cluster.get("DynamoComponentDeployment", "g-decode")
    assert component["status"]["conditions"][0]["reason"] == reason


STARTS = [
    (
        objects.Start("download", "org/m", 1_050_000_000, 2_500_000_000),
        "Downloading",
        "downloads org/m: 42 % of 2.5 GB",
    ),
    (objects.Start("download", "org/m", 1_050_000_000), "Downloading", "org/m: 1.1 GB so far"),
    (
        objects.Start("download", "org/m", 1, 1000, 185),
        "Downloading",
        "org/m: 0 % of 0.0 GB, and has not moved for 3 min",
    ),
    (objects.Start("load"), "Loading", "loads its model"),
]


@pytest.mark.parametrize(("start", "reason", "words"), STARTS)
def test_worker_that_starts_says_how_far_it_is_whatever_secret_is_absent(start, reason, words):
    cluster = DictCluster()
    cluster.put(make_graph(services={"Decode": worker(envFromSecret="absent")}))
    cluster.settle(becomes_ready=lambda pod: False)
    ((name, entry),) = cluster.pods.items()
    entry["pod"]["status"] = {"podIP": "10.0.0.1", "containerStatuses": RUNNING}
    cluster.starts = {name: start}
    cluster.settle(becomes_ready=lambda pod: False)

    assert cluster.ready()["message"].endswith(words)
    assert f"service Decode: pod {name} " in cluster.ready()["message"]
    component = cluster.get("DynamoComponentDeployment", "g-decode")
    assert component["status"]["conditions"][0]["reason"] == reason


def test_name_that_is_too_long_is_the_cause_with_what_to_shorten():
    cluster, name = DictCluster(), "g" * 48
    cluster.put(make_graph(name, services={"Decode": worker()}))
    cluster.settle()
    condition = cluster.ready(name)

    assert condition["status"] == "False"
    assert f"the name {name}-decode has 55 characters; at most 54 fit" in condition["message"]
    assert "shorten the name of the deployment or of the service" in condition["message"]
    assert cluster.of_kind("DynamoComponentDeployment") == []


def test_ready_pod_has_no_cause():
    pod = {"metadata": {"name": "p"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}  # fmt: skip

    assert causes.pod_cause(pod) is None


def test_cause_that_explains_others_comes_first():
    cluster = DictCluster()
    cluster.put(make_graph(services={"Frontend": frontend(), "Decode": worker()}))
    cluster.settle(becomes_ready=lambda pod: False)
    for entry in cluster.pods.values():
        status = {"containerStatuses": [{"name": "main", "state": {"running": {}}}]}
        is_worker = entry["deployment"] == "g-decode"
        entry["pod"]["status"] = unplaced("Insufficient memory") if is_worker else status
    cluster.settle(becomes_ready=lambda pod: False)
    frontend_status = cluster.get("DynamoComponentDeployment", "g-frontend")["status"]

    assert "service Decode" in cluster.ready()["message"]
    assert frontend_status["conditions"][0]["message"].startswith("the frontend waits for")


@pytest.mark.parametrize(
    ("service", "message"),
    [
        (worker(envFromSecret="hf-token-secret"), "the Secret hf-token-secret does not exist"),
        (worker(volumeMounts=[{"name": "data", "mountPoint": "/data"}]), "PersistentVolumeClaim data"),
    ],
)  # fmt: skip
def test_absent_secret_or_claim_is_named(service, message):
    cluster = DictCluster()
    cluster.put(make_graph(services={"Decode": service}))
    cluster.settle(becomes_ready=lambda pod: False)

    assert message in cluster.ready()["message"]


def test_only_the_present_generation_counts():
    cluster = DictCluster()
    cluster.put(make_graph(services={"Frontend": frontend()}))
    cluster.settle()
    (entry,) = cluster.pods.values()
    entry["pod"]["status"] = ended(message="of the former image")
    changed = frontend()
    changed["extraPodSpec"]["mainContainer"]["image"] = "other"
    cluster.put(make_graph(services={"Frontend": changed}))
    cluster.reconcile("DynamoGraphDeployment", "g")

    assert cluster.ready()["message"].endswith("service Frontend is being made")
    cluster.reconcile("DynamoComponentDeployment", "g-frontend")
    cluster.reconcile("DynamoGraphDeployment", "g")
    assert "former" not in cluster.ready()["message"]
    cluster.settle()
    assert cluster.ready()["status"] == "True"


def test_ready_comes_back_after_scaling_and_transition_time_stays():
    cluster = DictCluster()
    cluster.put(make_graph(services={"Decode": worker()}))
    cluster.settle()
    first = cluster.ready()
    cluster.put(make_graph(services={"Decode": worker(replicas=3)}))
    cluster.settle()

    assert cluster.ready() == {**first, "observedGeneration": 2}
    assert cluster.get("DynamoGraphDeployment", "g")["status"]["state"] == "successful"


def test_ready_pods_that_the_deployment_has_not_counted_are_not_called_too_few():
    labels = {objects.TEMPLATE_LABEL: "h"}
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    pod = {"metadata": {"name": "p", "labels": labels}, "status": ready}
    counted, uncounted = (
        causes.first_cause([pod], template_hash="h", num_wanted=number) for number in (2, 1)
    )

    assert counted.message == "1 of 2 pods are ready"
    assert uncounted.message == "its pods are ready, and the cluster has not counted them yet"
