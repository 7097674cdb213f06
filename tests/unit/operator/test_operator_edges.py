"""What a cluster does that manifests do not say: evicted and refused pods, names that do not fit, autoscalers."""

import base64
import json

import msgspec
import pytest

from dynamo.operator import (
    api_types,
    causes,
    component,
    models,
    objects,
    profiling_requests,
    reviews,
)
from dynamo.operator.settings import OperatorConfig
from operator_cluster import NOW, DictCluster, frontend, make_graph, worker

DGD, DCD = "DynamoGraphDeployment", "DynamoComponentDeployment"
ADAPTER = "DynamoGraphDeploymentScalingAdapter"


def settled(resource, **settings):
    cluster = DictCluster(OperatorConfig(**{"etcd_addr": "etcd:2379", **settings}))
    cluster.put(resource)
    cluster.settle()
    return cluster


def available(cluster, name):
    return objects.find_condition(cluster.get(DCD, name), "Available")


def with_image(image):
    changed = frontend()
    changed["extraPodSpec"] = {"mainContainer": {"image": image}}
    return changed


@pytest.mark.parametrize("changed", [with_image("other"), frontend(replicas=3)])
def test_pods_of_the_former_form_do_not_make_a_changed_service_ready(changed):
    cluster = settled(make_graph(services={"Frontend": frontend()}))
    cluster.put(make_graph(services={"Frontend": changed}))
    cluster.reconcile(DGD, "g")
    cluster.reconcile(DCD, "g-frontend")
    cluster.reconcile(DGD, "g")

    assert available(cluster, "g-frontend")["status"] == "False"
    assert cluster.ready()["status"] == "False"
    cluster.settle()
    assert cluster.ready()["status"] == "True"


def test_pod_that_does_not_start_beside_one_of_the_former_form_is_not_ready():
    cluster = settled(make_graph(services={"Frontend": frontend()}))
    cluster.put(make_graph(services={"Frontend": with_image("broken")}))
    for kind, name in ((DGD, "g"), (DCD, "g-frontend")):
        cluster.reconcile(kind, name)
    cluster.run_controllers(becomes_ready=lambda pod: False)
    for kind, name in ((DCD, "g-frontend"), (DGD, "g")):
        cluster.reconcile(kind, name)

    assert available(cluster, "g-frontend")["status"] == "False"
    assert cluster.ready()["status"] == "False"


def test_pods_that_the_cluster_refuses_are_the_cause():
    cluster = DictCluster()
    cluster.put(make_graph(services={"Decode": worker()}))
    for kind, name in ((DGD, "g"), (DCD, "g-decode")):
        cluster.reconcile(kind, name)
    text = 'pods "g-decode-" is forbidden: exceeded quota: gpus'
    refusal = {"type": "ReplicaFailure", "status": "True", "message": text}
    cluster.get("Deployment", "g-decode")["status"] = {"conditions": [refusal]}
    cluster.reconcile(DCD, "g-decode")

    found = available(cluster, "g-decode")
    assert (found["reason"], found["message"]) == (
        "PodsRefused",
        f"the cluster refuses pods: {text}",
    )


def test_groups_of_nodes_whose_controller_says_no_generation_become_ready():
    """As LeaderWorkerSets had none in their status in releases that are in use."""
    spec = worker(multinode={"nodeCount": 2})
    cluster = settled(make_graph(services={"Decode": spec}), enable_lws=True)
    assert available(cluster, "g-decode")["status"] == "False"
    groups = cluster.get("LeaderWorkerSet", "g-decode")
    groups["status"] = {"replicas": 1, "readyReplicas": 1, "updatedReplicas": 1}
    cluster.settle()

    assert cluster.ready()["status"] == "True"


def test_renamed_service_of_several_nodes_serves_until_its_successor_does():
    def graph_of(name):
        return make_graph(services={name: worker(multinode={"nodeCount": 2})})

    def make_ready(name):
        status = {"replicas": 1, "readyReplicas": 1, "updatedReplicas": 1}
        cluster.get("LeaderWorkerSet", name)["status"] = status
        cluster.settle()

    cluster = settled(graph_of("Decode"), enable_lws=True)
    make_ready("g-decode")
    cluster.put(graph_of("Decoder"))
    cluster.settle()

    assert cluster.get("LeaderWorkerSet", "g-decode")
    assert cluster.get("LeaderWorkerSet", "g-decoder")
    assert cluster.ready()["status"] == "False"
    make_ready("g-decoder")
    assert cluster.get("LeaderWorkerSet", "g-decode") is None
    assert cluster.ready()["status"] == "True"


def test_workers_of_an_update_serve_until_those_of_several_nodes_in_their_place_do():
    cluster = settled(make_graph(services={"Decode": worker("--seed 1")}), enable_lws=True)
    cluster.put(make_graph(services={"Decode": worker("--seed 2")}))
    cluster.settle()
    (former,) = [item["metadata"]["name"] for item in cluster.of_kind("Deployment")]
    cluster.put(make_graph(services={"Decode": worker("--seed 2", multinode={"nodeCount": 2})}))
    cluster.settle()

    assert former.startswith("g-decode-")
    assert cluster.get("Deployment", former)


def evicted(name, labels):
    status = {"phase": "Failed", "reason": "Evicted", "message": "low on disk", "podIP": "10.0.0.1"}
    return {"metadata": {"name": name, "labels": labels}, "status": status}


def test_update_ends_beside_an_evicted_pod_of_the_former_workers():
    cluster = settled(make_graph(services={"Decode": worker("--seed 1")}))
    labels = cluster.get("Deployment", "g-decode")["spec"]["template"]["metadata"]["labels"]
    cluster.pods["gone"] = {"pod": evicted("gone", labels), "deployment": "", "digits": ""}
    cluster.put(make_graph(services={"Decode": worker("--seed 2")}))
    cluster.settle()

    assert len(cluster.of_kind(DCD)) == 1
    assert cluster.ready()["status"] == "True"
    assert cluster.get(DGD, "g")["status"]["services"]["Decode"]["replicas"] == 1


def test_evicted_pod_that_was_replaced_explains_nothing():
    labels = {objects.TEMPLATE_LABEL: "h"}
    ended = {"terminated": {"exitCode": 1, "reason": "Error"}}
    states = [{"name": "main", "state": {"waiting": {}}, "lastState": ended, "restartCount": 2}]
    crashing = {
        "metadata": {"name": "p", "labels": labels},
        "status": {"containerStatuses": states},
    }
    pods = [evicted("gone", labels), crashing]
    replaced, lacking = (
        causes.first_cause(pods, template_hash="h", num_wanted=number) for number in (1, 2)
    )

    assert (replaced.reason, lacking.reason) == ("CrashLoop", "Evicted")


def test_evicted_worker_is_not_waited_for_by_a_model():
    labels = {objects.SELECTOR_LABEL: "g-decode", objects.TYPE_LABEL: "worker"}
    served = {"kind": DCD, "metadata": {"name": "g-decode"}, "spec": {"modelRef": {"name": "m"}}}
    pod = {**evicted("gone", labels), "spec": {"containers": []}}
    observed = objects.Observed(now=NOW, objects={(DCD, "g-decode"): served}, pods=[pod])

    assert models.find_endpoints("m", observed) == []


GROUPS = [
    {"leaderworkerset.sigs.k8s.io/worker-index": "0"},
    {"leaderworkerset.sigs.k8s.io/worker-index": "1"},
    {"grove.io/podclique": "g-decode-0-ldr"},
    {"grove.io/podclique": "g-decode-0-wkr"},
]


def test_nodes_of_a_group_are_one_replica():
    pods = [
        {"metadata": {"name": f"p{n}", "labels": {objects.SELECTOR_LABEL: "g-decode", **labels}}}
        for n, labels in enumerate(GROUPS)
    ]
    observed = objects.Observed(now=NOW, pods=pods)

    assert [pod["metadata"]["name"] for pod in observed.pods_of("g-decode")] == ["p0", "p2"]
    assert len(observed.pods_of("g-decode", is_each=True)) == 4


def test_model_is_asked_of_the_leaders_alone():
    served = {"kind": DCD, "metadata": {"name": "g-decode"}, "spec": {"modelRef": {"name": "m"}}}
    own = {objects.SELECTOR_LABEL: "g-decode", objects.TYPE_LABEL: "worker"}
    pods = [
        {
            "metadata": {"name": f"p{n}", "labels": {**own, **labels}},
            "spec": {"containers": []},
            "status": {"podIP": "10.0.0.1"},
        }
        for n, labels in enumerate(GROUPS)
    ]
    observed = objects.Observed(now=NOW, objects={(DCD, "g-decode"): served}, pods=pods)

    assert [endpoint.pod for endpoint in models.find_endpoints("m", observed)] == ["p0", "p2"]


def test_status_of_a_model_has_any_number_of_workers():
    resource = {"metadata": {"name": "m"}, "spec": {"baseModelName": "base"}}
    workers = [
        models.ModelEndpoint(pod=f"p{n}", address="10.0.0.1", port=n, is_ready=True)
        for n in range(300)
    ]
    status = models.make_status(resource, dict.fromkeys(workers, ""), NOW)

    assert msgspec.convert(status, api_types.ModelStatus).total_endpoints == 300


def test_secret_of_a_service_stays_beside_sources_of_the_container():
    """The chart dynamo-vllm gives workers both: its ConfigMap, and the Secret with HF_TOKEN."""
    source = {"configMapRef": {"name": "c"}}
    service = worker(envFromSecret="hf")
    service["extraPodSpec"]["mainContainer"]["envFrom"] = [source]
    cluster = settled(make_graph(services={"Decode": service}))
    template = cluster.get("Deployment", "g-decode")["spec"]["template"]

    secret = {"secretRef": {"name": "hf", "optional": True}}
    assert template["spec"]["containers"][0]["envFrom"] == [secret, source]


def validate(written, old=None):
    request = reviews.AdmissionRequest(uid="u", object=written, oldObject=old)
    return reviews.answer_validation(reviews.AdmissionReview(request), OperatorConfig())["response"]


@pytest.mark.parametrize("name", ["qwen2.5", "7b"])
def test_name_that_no_service_can_have_is_refused(name):
    graph = make_graph(name, {"Frontend": frontend(dynamoNamespace="team")})

    assert "rename the deployment" in validate(graph)["status"]["message"]
    assert "rename the deployment" in settled(graph).ready(name)["message"]


def test_name_that_is_no_dynamo_namespace_is_called_so():
    refusal = validate(make_graph("qwen2.5"))["status"]["message"]

    assert "dynamoNamespace dynamo-qwen2.5, by default dynamo- and the name of the" in refusal


def in_namespace(namespace, flags=""):
    return make_graph(services={"Decode": worker(flags, dynamoNamespace=namespace)})


def test_namespace_that_is_no_label_or_leaves_no_room_for_an_update_is_refused():
    longest, too_long = "n" * 54, "n" * 55
    ended_by_dash = settled(in_namespace("team-"))

    assert "dynamoNamespace team-, by default" in ended_by_dash.ready()["message"]
    assert validate(in_namespace(longest))["allowed"]
    assert "an update of workers adds nine" in validate(in_namespace(too_long))["status"]["message"]
    assert validate(in_namespace(too_long, "--seed 2"), in_namespace(too_long))["allowed"]


def test_update_in_a_namespace_without_room_says_so_and_keeps_what_serves():
    cluster = settled(in_namespace("n" * 55))
    cluster.put(in_namespace("n" * 55, "--seed 2"))
    cluster.settle()

    assert "expected at most 63 lower-case letters" in cluster.ready()["message"]
    assert [item["metadata"]["name"] for item in cluster.of_kind("Deployment")] == ["g-decode"]


def test_adapter_goes_with_the_wish_for_it():
    cluster = settled(make_graph(services={"Decode": worker(scalingAdapter={"enabled": True})}))
    assert cluster.get(ADAPTER, "g-decode")
    cluster.put(make_graph(services={"Decode": worker(scalingAdapter={"enabled": False})}))
    cluster.settle()

    assert cluster.of_kind(ADAPTER) == []
    assert cluster.ready()["status"] == "True"


def test_component_that_stands_alone_has_its_token_and_account():
    cluster = DictCluster(OperatorConfig())
    cluster.put({**make_graph("solo"), "kind": DCD, "spec": frontend()})
    cluster.settle()
    pod = cluster.get("Deployment", "solo")["spec"]["template"]["spec"]
    first = cluster.get("Secret", "dynamo-solo-cluster-token")
    cluster.settle()

    assert cluster.get("ServiceAccount", pod["serviceAccountName"])
    assert first["data"]["token"]
    assert cluster.get("Secret", "dynamo-solo-cluster-token") == first
    cluster.delete(DCD, "solo")
    assert cluster.of_kind("Secret") == []


def test_components_of_a_graph_leave_the_token_to_it():
    cluster = settled(make_graph(services={"Decode": worker()}))

    assert [item["metadata"]["name"] for item in cluster.of_kind("Secret")] == [
        "dynamo-g-cluster-token"
    ]
    assert component.find_token_name(cluster.get(DCD, "g-decode")) is None


def templates(cluster):
    return {
        item["metadata"]["name"]: item["spec"]["template"] for item in cluster.of_kind("Deployment")
    }


@pytest.mark.parametrize("stands_alone", [False, True])
def test_pods_with_a_lost_token_are_replaced_once(stands_alone):
    resource = make_graph()
    if stands_alone:
        resource = {**resource, "kind": DCD, "spec": frontend()}
    cluster = settled(resource)
    before = templates(cluster)
    cluster.delete("Secret", "dynamo-g-cluster-token")
    cluster.settle()
    after = templates(cluster)

    assert before.keys() == after.keys()
    assert all(before[name] != after[name] for name in before)
    cluster.settle()
    assert templates(cluster) == after


def test_pods_keep_running_when_their_namespace_and_with_it_their_token_changes():
    cluster = settled(make_graph())
    template = templates(cluster)["g-decode"]
    other = {"dynamoNamespace": "other"}
    services = {"Frontend": frontend(**other), "Decode": worker(**other)}
    cluster.put(make_graph(services=services))
    cluster.reconcile("DynamoGraphDeployment", "g")
    cluster.reconcile(DCD, "g-decode")

    assert templates(cluster)["g-decode"] == template


@pytest.mark.parametrize("shares", [("0", "0%"), ("0", "0")])
def test_update_that_could_replace_no_pod_is_refused(shares):
    graph = make_graph()
    names = (component.SURGE_ANNOTATION, component.UNAVAILABLE_ANNOTATION)
    graph["metadata"]["annotations"] = dict(zip(names, shares, strict=True))

    assert "one of them must be above 0" in validate(graph)["status"]["message"]


def applied_replicas(managers):
    """Return the replicas that are applied to a Deployment of five when its service gets an autoscaler."""
    cluster = settled(make_graph(services={"Decode": worker(replicas=5)}))
    resource = cluster.get(DCD, "g-decode")
    resource["spec"]["autoscaling"] = {"enabled": True, "minReplicas": 2, "maxReplicas": 9}
    metadata = cluster.get("Deployment", "g-decode")["metadata"]
    fields = {"f:spec": {"f:replicas": {}}}
    metadata["managedFields"] = [{"manager": name, "fieldsV1": fields} for name in managers]
    decision = component.decide(resource, cluster.observe(), cluster.settings, "")
    deployment = next(item for item in decision.apply if item["kind"] == "Deployment")
    return deployment["spec"].get("replicas")


def test_workers_stay_until_their_new_autoscaler_sets_their_number():
    assert applied_replicas([objects.FIELD_MANAGER]) == 5
    assert applied_replicas(["kube-controller-manager"]) is None
    assert applied_replicas([]) is None


def test_default_of_a_service_whose_name_the_schema_will_refuse_is_a_valid_patch():
    graph = make_graph(services={"a/b~c": {"componentType": "worker"}})
    request = reviews.AdmissionRequest(uid="u", object=graph)
    response = reviews.answer_defaulting(reviews.AdmissionReview(request))["response"]

    assert json.loads(base64.b64decode(response["patch"])) == [
        {"op": "add", "path": "/spec/services/a~1b~0c/replicas", "value": 1}
    ]


def test_deployment_of_another_with_the_name_of_a_recommendation_is_not_called_its_own():
    request = {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeploymentRequest",
        "metadata": {"name": "r", "namespace": "default", "uid": "u", "generation": 1},
        "spec": {"model": "m", "autoApply": True},
    }
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    log = '{"mode":"agg","num_prefill":0,"num_decode":2}'

    def decide(labels, status):
        foreign = {"kind": DGD, "metadata": {"name": "r", "labels": labels}, "status": ready}
        observed = objects.Observed(now=NOW, objects={(DGD, "r"): foreign})
        resource = {**request, "status": status}
        return profiling_requests.decide(resource, observed, OperatorConfig(), log).status

    refused = decide({}, {})
    assert (refused["state"], refused["conditions"][-1]["reason"]) == ("Failed", "NameTaken")
    assert decide({objects.REQUEST_LABEL: "r"}, {})["state"] == "Ready"
    assert decide({}, {"state": "Deploying"})["state"] == "Ready"


def test_page_of_an_ingress_without_a_host_of_its_own_is_allowed():
    services = {"Frontend": frontend(ingress={"enabled": True})}
    cluster = settled(make_graph(services=services), ingress_host_suffix="example.com")
    (rule,) = cluster.get("Ingress", "g-frontend")["spec"]["rules"]
    (main,) = pod_of(cluster, "g-frontend")["containers"]
    allowed_hosts = {entry["name"]: entry.get("value") for entry in main["env"]}[
        "DYN_ALLOWED_HOSTS"
    ]

    assert rule["host"] == "g-frontend.example.com"
    assert rule["host"] in allowed_hosts.split(",")


def pod_of(cluster, name):
    return cluster.get("Deployment", name)["spec"]["template"]["spec"]


def test_main_container_of_another_name_is_spread_over_nodes():
    service = worker(multinode={"nodeCount": 2})
    service["extraPodSpec"]["mainContainer"]["name"] = "engine"
    cluster = settled(make_graph(services={"Decode": service}), enable_lws=True)
    template = cluster.get("LeaderWorkerSet", "g-decode")["spec"]["leaderWorkerTemplate"]
    (main,) = template["leaderTemplate"]["spec"]["containers"]

    assert (main["name"], "ray start --head" in main["args"][0]) == ("engine", True)


def test_empty_number_of_devices_is_left_to_the_cluster_to_refuse():
    cluster = settled(make_graph(services={"Decode": worker(resources={"limits": {"gpu": ""}})}))

    assert pod_of(cluster, "g-decode")["containers"][0]["resources"] == {
        "limits": {"nvidia.com/gpu": ""}
    }


def test_port_that_the_user_names_again_stands_there_once():
    service = frontend()
    ports = [{"containerPort": 8000}, {"containerPort": 7000}]
    service["extraPodSpec"] = {"mainContainer": {"image": "i", "ports": ports}}
    (main,) = pod_of(settled(make_graph(services={"F": service})), "g-f")["containers"]

    assert main["ports"] == [{"name": "http", "containerPort": 8000}, {"containerPort": 7000}]


def test_frontend_whose_pod_is_being_prepared_does_not_wait_for_workers():
    cluster = DictCluster()
    cluster.put(make_graph(services={"Frontend": frontend()}))
    cluster.settle(becomes_ready=lambda pod: False)
    (entry,) = cluster.pods.values()
    fetching = {"name": "fetch", "started": True, "state": {"running": {}}}
    entry["pod"]["status"] = {"initContainerStatuses": [fetching]}
    cluster.settle(becomes_ready=lambda pod: False)

    message = available(cluster, "g-frontend")["message"]
    assert message.endswith("(container fetch) runs and is not ready yet")


def test_frontend_whose_main_container_has_another_name_waits_for_workers():
    service = frontend()
    service["extraPodSpec"] = {"mainContainer": {"image": "i", "name": "server"}}
    cluster = DictCluster()
    cluster.put(make_graph(services={"Frontend": service}))
    cluster.settle(becomes_ready=lambda pod: False)
    (entry,) = cluster.pods.values()
    serving = {"name": "server", "started": True, "state": {"running": {}}}
    entry["pod"]["status"] = {"containerStatuses": [serving]}
    cluster.settle(becomes_ready=lambda pod: False)

    message = available(cluster, "g-frontend")["message"]
    assert message == "the frontend waits for the first worker of a model"


def test_names_in_lists_of_a_wrong_type_are_left_to_the_cluster_to_refuse():
    service = worker()
    wrong = [{"name": {"a": 1}}, {"name": ["b"], "containerPort": ["c"], "mountPath": {}}]
    service["extraPodSpec"]["mainContainer"] |= {"env": wrong, "ports": wrong}
    service["extraPodSpec"]["volumes"] = wrong
    pod = pod_of(settled(make_graph(services={"Decode": service})), "g-decode")

    for given in (pod["volumes"], pod["containers"][0]["env"], pod["containers"][0]["ports"]):
        assert given[-2:] == wrong
    variable = {"name": "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT", "value": ["30"]}
    service["extraPodSpec"]["mainContainer"]["env"] = [variable]
    message = settled(make_graph(services={"Decode": service})).ready()["message"]
    assert "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT, " in message
    assert message.endswith("expected seconds, got ['30']")
