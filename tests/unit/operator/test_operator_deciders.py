"""What a graph becomes: names, pods, probes, variables, and the objects of every manifest that users bring."""

import pathlib
import re
import time

import pytest
import yaml

from dynamo.base import errors
from dynamo.operator import component, objects, pod_template
from dynamo.operator.settings import OperatorConfig, parse_address
from operator_cluster import DictCluster, frontend, make_graph, worker

ROOT = pathlib.Path(__file__).parents[3]
SHARED = ROOT.parent / "shared"
EXAMPLES = sorted((ROOT / "deploy" / "examples").glob("*.yaml"))
FOREIGN = sorted((SHARED / "data" / "kube" / "manifests").glob("*.yaml"))


def article_manifests():
    """Return the manifests of the first article, by name."""
    texts = [path.read_text() for path in sorted(SHARED.glob("seeds/000*.txt"))]
    found = re.findall(r"```yaml\n(apiVersion: nvidia.com/v1alpha1.*?)```", "".join(texts), re.S)
    return [yaml.safe_load(text) for text in found]


def settled(resource, *, has_grove=False, **settings):
    config = OperatorConfig(**{"etcd_addr": "etcd:2379", **settings})
    cluster = DictCluster(config, has_grove=has_grove)
    cluster.put({**resource, "metadata": {**resource["metadata"], "namespace": "default"}})
    cluster.settle()
    return cluster


def main_of(cluster, name):
    template = cluster.get("Deployment", name)["spec"]["template"]
    return template["spec"]["containers"][0]


def env_of(container):
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


MANIFESTS = [yaml.safe_load(path.read_text()) for path in [*EXAMPLES, *FOREIGN]]
MANIFESTS = [m for m in MANIFESTS if m["apiVersion"] == "nvidia.com/v1alpha1"] + article_manifests()


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda m: m["metadata"]["name"])
def test_every_manifest_becomes_ready(manifest):
    cluster = DictCluster(OperatorConfig(etcd_addr="etcd:2379"))
    manifest["metadata"]["namespace"] = "default"
    graph_name, services = manifest["metadata"]["name"], manifest["spec"]["services"]
    for claim in manifest["spec"].get("pvcs", ()):
        cluster.put({"kind": "PersistentVolumeClaim", "metadata": {"name": claim["name"]}})
    cluster.put(manifest)
    cluster.settle()
    names = {f"{graph_name}-{service.lower()}" for service in services}
    deployments = {d["metadata"]["name"] for d in cluster.of_kind("Deployment")}

    if any("multinode" in service for service in services.values()):
        assert "LeaderWorkerSet" in cluster.ready(graph_name)["message"]
        return
    assert deployments == names
    assert [s["metadata"]["name"] for s in cluster.of_kind("Service")] == [f"{graph_name}-frontend"]
    assert cluster.ready(graph_name)["status"] == "True"
    for service, given in services.items():
        container = main_of(cluster, f"{graph_name}-{service.lower()}")
        own = given["extraPodSpec"]["mainContainer"]
        own |= pod_template.replace_shell(own)
        assert container["image"].startswith("dynamo-serving/")
        assert {key: container[key] for key in own if key not in ("image", "env")} == {
            key: value for key, value in own.items() if key not in ("image", "env")
        }


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("python3 -m dynamo.frontend --http-port 8000", "exec python3 -m dynamo.frontend --http-port 8000"),
        ("\n python3 -m dynamo.vllm \\\n --model m\n", "\n exec python3 -m dynamo.vllm \\\n --model m\n"),
        ("cd /w && python3 -m m >>log 2>&1", "cd /w && exec python3 -m m >>log 2>&1"),
        ("exec python3 -m m", None),
        ("python3 -m a; echo done", None),
        ("python3 -m a &\npython3 -m b", None),
        ("python3 -m a | tee log", None),
        ("python3 -m a && python3 -m b", "python3 -m a && exec python3 -m b"),
        ("A=1 python3 -m a", None),
        ("trap 'rm -r /w' EXIT; python3 -m a", None),
        ("./start.sh", None),
    ],
)  # fmt: skip
def test_command_of_python_takes_the_place_of_its_shell(line, expected):
    """Debian's shell waits for its command, and as the first process of a container it ignores SIGTERM."""
    together = pod_template.replace_shell({"command": ["/bin/sh", "-c", line]})
    apart = pod_template.replace_shell({"command": ["bash", "-c"], "args": [line, "name"]})

    assert together == ({"command": ["/bin/sh", "-c", expected], "args": []} if expected else {})
    assert apart == ({"command": ["bash", "-c"], "args": [expected, "name"]} if expected else {})


@pytest.mark.parametrize("line", ["python3 " + " " * 50_000 + ";", "python3 " * 8000 + "-m ;"])
def test_long_command_takes_no_time(line):
    """The operator does nothing for other namespaces meanwhile."""
    container, began_s = {"command": ["/bin/sh", "-c", line]}, time.process_time()

    assert pod_template.replace_shell(container) == {}
    assert pod_template.detect_framework(container) is None
    assert time.process_time() - began_s < 1.0


def test_multinode_becomes_groups_where_their_controller_is():
    services = {"Frontend": frontend(), "Decode": worker(multinode={"nodeCount": 2})}
    cluster = settled(make_graph(services=services), enable_lws=True)
    (group,) = cluster.of_kind("LeaderWorkerSet")
    template = group["spec"]["leaderWorkerTemplate"]
    leader, follower = (
        template[f"{kind}Template"]["spec"]["containers"][0] for kind in ("leader", "worker")
    )

    assert template["size"] == 2
    assert leader["args"][0].startswith(
        "ray start --head --port=6379 && exec python3 -m dynamo.vllm"
    )
    assert "ray start --address=$(LWS_LEADER_ADDRESS):6379 --block" in follower["args"][0]
    assert "livenessProbe" in leader
    assert not [key for key in follower if key.endswith("Probe")]


def multinode_graph(module="vllm", **annotations):
    service = worker(replicas=3, multinode={"nodeCount": 4})
    service["extraPodSpec"]["mainContainer"]["args"] = [f"python3 -m dynamo.{module} --model m"]
    graph = make_graph(services={"Frontend": frontend(), "Decode": service})
    graph["metadata"]["annotations"] = {f"nvidia.com/{k}": v for k, v in annotations.items()}
    return graph


def test_multinode_becomes_gangs_where_grove_is():
    cluster = settled(multinode_graph(), has_grove=True, grove_termination_delay="5m")
    (gangs,) = cluster.of_kind("PodCliqueSet")
    template = gangs["spec"]["template"]
    leader, follower = template["cliques"]
    leader_main, follower_main = (
        clique["spec"]["podSpec"]["containers"][0] for clique in template["cliques"]
    )

    assert (gangs["apiVersion"], gangs["metadata"]["name"]) == ("grove.io/v1alpha1", "g-decode")
    assert gangs["spec"]["replicas"] == 3
    assert template["terminationDelay"] == "5m"
    sizes = [
        (clique["name"], clique["spec"]["replicas"], clique["spec"]["minAvailable"])
        for clique in (leader, follower)
    ]
    assert sizes == [("ldr", 1, 1), ("wkr", 3, 3)]
    assert leader["labels"][objects.SELECTOR_LABEL] == "g-decode"
    assert leader_main["args"][0].startswith("ray start --head --port=6379 && exec python3 -m")
    address = "$(GROVE_PCS_NAME)-$(GROVE_PCS_INDEX)-ldr-0.$(GROVE_HEADLESS_SERVICE)"
    assert follower_main["args"] == [f"exec ray start --address={address}:6379 --block"]
    assert not [key for key in follower_main if key.endswith("Probe")]
    assert not cluster.of_kind("LeaderWorkerSet")


def test_gangs_of_sglang_count_their_nodes_from_the_leader():
    cluster = settled(multinode_graph("sglang"), has_grove=True)
    (gangs,) = cluster.of_kind("PodCliqueSet")
    follower = gangs["spec"]["template"]["cliques"][1]["spec"]["podSpec"]["containers"][0]

    assert follower["args"][0].endswith("--nnodes 4 --node-rank $((GROVE_PCLQ_POD_INDEX + 1))")


def test_deployment_on_gangs_is_ready_with_all_of_them():
    cluster = settled(multinode_graph(), has_grove=True)
    assert cluster.ready()["status"] == "False"
    gangs = cluster.get("PodCliqueSet", "g-decode")
    for num_available in (2, 3):
        counts = {"observedGeneration": 1, "updatedReplicas": 3, "availableReplicas": num_available}
        cluster.put({**gangs, "status": counts})
        cluster.settle()

        assert cluster.ready()["status"] == str(num_available == 3)


@pytest.mark.parametrize("refusal", ["false", "False"])
def test_grove_may_be_refused_and_takes_over_nothing_that_serves(refusal):
    refused = settled(multinode_graph(**{"enable-grove": refusal}), has_grove=True, enable_lws=True)
    cluster = settled(multinode_graph(), enable_lws=True)
    cluster.has_grove = True  # installed later
    cluster.settle()

    for settled_cluster in (refused, cluster):
        assert settled_cluster.of_kind("LeaderWorkerSet")
        assert not settled_cluster.of_kind("PodCliqueSet")


def test_names_that_grove_does_not_take_are_said():
    graph = make_graph("g" * 40, services={"Decode": worker(multinode={"nodeCount": 2})})
    cluster = settled(graph, has_grove=True)

    assert "Grove takes at most 42 characters" in cluster.ready("g" * 40)["message"]


@pytest.mark.parametrize(("replicas", "most"), [(1, 50), (10, 50), (11, 49)])
def test_names_whose_groups_could_have_no_pods_are_said(replicas, most):
    """A StatefulSet's name with a dash and ten digits is a label of its pods."""
    services = {"W": worker(multinode={"nodeCount": 2}, replicas=replicas)}
    fitting, long = (
        settled(make_graph(name, services), enable_lws=True)
        for name in ("g" * (most - 2), "g" * (most - 1))
    )

    assert fitting.get("LeaderWorkerSet", f"{'g' * (most - 2)}-w")
    assert f"take at most {most} characters of ggg" in long.ready("g" * (most - 1))["message"]


def test_first_generation_has_the_names_of_the_article():
    cluster = settled(
        make_graph("vllm-agg", {"Frontend": frontend(), "VllmDecodeWorker": worker()})
    )

    assert [c["metadata"]["name"] for c in cluster.of_kind("DynamoComponentDeployment")] == [
        "vllm-agg-frontend",
        "vllm-agg-vllmdecodeworker",
    ]
    service = cluster.get("Service", "vllm-agg-frontend")
    assert service["spec"]["ports"] == [
        {"name": "http", "port": 8000, "targetPort": "http", "protocol": "TCP"}
    ]


def test_pods_are_told_how_to_reach_each_other():
    cluster = settled(make_graph(), nats_addr="nats://nats:4222")
    env = env_of(main_of(cluster, "g-decode"))
    secret = env["DYN_CLUSTER_TOKEN"]["secretKeyRef"]

    assert env["DYN_NAMESPACE"] == "dynamo-g"
    assert env["DYN_SYSTEM_HOST"] == "0.0.0.0"
    assert env["DYN_SYSTEM_PORT"] == "9090"
    assert env["ETCD_ENDPOINTS"] == "etcd:2379"
    assert env["NATS_SERVER"] == "nats://nats:4222"
    assert env["DYN_DISCOVERY_BACKEND"] == "etcd"
    for name in ("DYN_TCP_RPC_HOST", "VLLM_NIXL_SIDE_CHANNEL_HOST"):
        assert env[name] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert cluster.get("Secret", secret["name"])["data"].keys() == {secret["key"]}
    env = env_of(main_of(cluster, "g-frontend"))
    assert env["DYN_HTTP_HOST"] == "0.0.0.0"
    assert env["DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"] == "5"  # proxies learn later that it ends
    assert env["DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS"] == "30"
    assert "g-frontend.default.svc.cluster.local" in env["DYN_ALLOWED_HOSTS"].split(",")


def test_user_settings_go_beyond_defaults_graph_and_service():
    service = worker(
        envs=[{"name": "A", "value": "service"}, {"name": "DYN_SYSTEM_PORT", "value": "9999"}],
        envFromSecret="hf-token-secret",
        extraPodMetadata={"annotations": {"note": "x"}, "labels": {"team": "llm"}},
        readinessProbe={"tcpSocket": {"port": 9090}},
    )
    service["extraPodSpec"]["mainContainer"]["env"] = [{"name": "B", "value": "container"}]
    service["extraPodSpec"] |= {
        "nodeSelector": {"gpu": "h200"},
        "containers": [{"name": "sidecar", "image": "x"}],
        "terminationGracePeriodSeconds": 7,
    }
    envs = [{"name": "A", "value": "graph"}, {"name": "B", "value": "graph"}]
    cluster = settled(make_graph(services={"Decode": service}, envs=envs))
    template = cluster.get("Deployment", "g-decode")["spec"]["template"]
    container, env = template["spec"]["containers"][0], env_of(main_of(cluster, "g-decode"))

    assert (env["A"], env["B"], env["DYN_SYSTEM_PORT"]) == ("service", "container", "9999")
    assert container["envFrom"] == [{"secretRef": {"name": "hf-token-secret", "optional": True}}]
    assert container["readinessProbe"] == {"tcpSocket": {"port": 9090}}
    assert template["spec"]["nodeSelector"] == {"gpu": "h200"}
    assert [c["name"] for c in template["spec"]["containers"]] == ["main", "sidecar"]
    assert template["spec"]["terminationGracePeriodSeconds"] == 7
    assert template["metadata"]["labels"]["team"] == "llm"
    assert template["metadata"]["annotations"] == {"note": "x"}


def test_probe_of_the_main_container_replaces_what_the_default_one_asks():
    service = worker()
    service["extraPodSpec"]["mainContainer"] |= {
        "livenessProbe": {"exec": {"command": ["true"]}, "periodSeconds": 7},
        "readinessProbe": {"httpGet": {"path": "/own"}},
        "startupProbe": {"failureThreshold": 500},
    }
    container = main_of(settled(make_graph(services={"Decode": service})), "g-decode")

    liveness = container["livenessProbe"]
    assert (liveness["exec"], liveness["periodSeconds"]) == ({"command": ["true"]}, 7)
    assert "httpGet" not in liveness
    assert container["readinessProbe"]["httpGet"] == {"path": "/own", "port": "system"}
    assert container["startupProbe"]["httpGet"]["path"] == "/live"
    assert container["startupProbe"]["failureThreshold"] == 500


def test_another_discovery_than_the_two_is_refused():
    graph = make_graph()
    graph["metadata"]["annotations"] = {component.DISCOVERY_ANNOTATION: "kubernets"}

    message = settled(graph).ready()["message"]

    assert "dynamo-discovery-backend: expected etcd or kubernetes, got 'kubernets'" in message


def test_claim_without_a_name_is_refused():
    cluster = settled(make_graph(services={"Decode": worker(pvc={"mountPoint": "/models"})}))

    assert "expected the name of the claim beside mountPoint" in cluster.ready()["message"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "dynamo-c"),
        ({"globalDynamoNamespace": True}, "dynamo"),
        ({"globalDynamoNamespace": True, "dynamoNamespace": "own"}, "own"),
    ],
)
def test_component_that_stands_alone_is_in_the_namespace_that_it_asks_for(fields, expected):
    metadata = {"name": "c", "namespace": "default"}
    resource = {"metadata": metadata, "spec": {**worker(), **fields}}
    read = component.read_component(resource, OperatorConfig())

    assert read.dynamo_namespace == expected
    assert component.find_token_name(resource) == f"{expected}-cluster-token"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"webhook_service": "dynamo"}, "--webhook-service dynamo: expected NAMESPACE/NAME"),
        ({"webhook_certificate_dir": "/c"}, "--webhook-certificate-dir: has no effect without"),
        ({"image_table": ("a",)}, "--image-table a: expected FROM=TO"),
    ],
)
def test_options_of_the_operator_that_could_not_work_are_refused(options, message):
    with pytest.raises(errors.ConfigError, match=message):
        OperatorConfig(**options).check()


def test_options_of_webhooks_that_work_are_taken():
    OperatorConfig(webhook_service="a/b", webhook_bind_address=":9443").check()
    OperatorConfig(webhook_service="a/b", remove_webhooks=True).check()


def test_grace_period_follows_from_the_drain_limit():
    drain = [{"name": "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT", "value": "600"}]
    answers = [{"name": "DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS", "value": "300"}]
    services = {"Decode": worker(envs=drain), "Frontend": frontend(envs=answers)}
    cluster = settled(make_graph(services=services))

    def seconds(name):
        pod = cluster.get("Deployment", name)["spec"]["template"]["spec"]
        return pod["terminationGracePeriodSeconds"]

    assert (seconds("g-decode"), seconds("g-frontend")) == (630, 335)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--graceful-shutdown-timeout", "600"], 630),
        (["--graceful-shutdown-timeout=600", "--graceful-shutdown-grace-period", "5"], 635),
        (["--http-graceful-shutdown-timeout-secs", "300"], 330),
        (["--graceful-shutdown-timeout", "$LIMIT"], 60),
    ],
)
def test_grace_period_follows_from_the_flags_of_the_command(words, expected):
    command = ["python3", "-m", "dynamo.vllm"]
    line = " ".join([*command, *words])
    for container in (
        {"command": command, "args": words},
        {"command": ["sh", "-c"], "args": [line]},
    ):
        assert pod_template.grace_period_s(container) == expected


@pytest.mark.parametrize(
    ("memory", "shared_memory", "expected"),
    [
        (None, None, "512Mi"),
        ("16Gi", None, "4096Mi"),
        ("250Gi", None, "8192Mi"),
        ("1G", None, "512Mi"),
        ("16Gi", {"size": "1Gi"}, "1Gi"),
    ],
)
def test_shared_memory_is_a_quarter_of_the_limit(memory, shared_memory, expected):
    resources = {"limits": {"gpu": "1", **({"memory": memory} if memory else {})}}
    service = worker(resources=resources, sharedMemory=shared_memory)
    cluster = settled(make_graph(services={"Decode": service}))
    pod = cluster.get("Deployment", "g-decode")["spec"]["template"]["spec"]

    assert pod["volumes"] == [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": expected}}
    ]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"


@pytest.mark.parametrize(
    ("resources", "requests", "limits"),
    [
        (
            {"requests": {"custom": {"amd.com/gpu": "2"}}},
            {"amd.com/gpu": "2"},
            {"amd.com/gpu": "2"},
        ),
        (
            {"requests": {"gpu": "1", "cpu": "2"}, "limits": {"gpu": "4", "cpu": "8"}},
            {"nvidia.com/gpu": "4", "cpu": "2"},
            {"nvidia.com/gpu": "4", "cpu": "8"},
        ),
        ({"requests": {"memory": "1Gi"}}, {"memory": "1Gi"}, None),
    ],
)
def test_device_is_limited_to_what_is_requested_and_requested_as_it_is_limited(
    resources, requests, limits
):
    cluster = settled(make_graph(services={"Decode": worker(resources=resources)}))
    pod = cluster.get("Deployment", "g-decode")["spec"]["template"]["spec"]
    rendered = pod["containers"][0]["resources"]

    assert (rendered["requests"], rendered.get("limits")) == (requests, limits)


def test_shared_memory_of_the_user_stays():
    disabled = worker(sharedMemory={"disabled": True})
    own = worker()
    own["extraPodSpec"]["mainContainer"]["volumeMounts"] = [{"name": "x", "mountPath": "/dev/shm"}]
    cluster = settled(make_graph(services={"A": disabled, "B": own}))

    for name in ("g-a", "g-b"):
        assert cluster.get("Deployment", name)["spec"]["template"]["spec"]["volumes"] == []


def test_claims_ingress_and_autoscaler_are_made():
    claim = {"create": True, "name": "models", "size": "50Gi", "mountPoint": "/models"}
    claim["storageClass"] = "fast"
    services = {
        "Frontend": frontend(
            ingress={
                "enabled": True,
                "host": "llm",
                "labels": {"a": "b"},
                "tls": {"secretName": "c"},
            },
            autoscaling={"enabled": True, "minReplicas": 2, "maxReplicas": 5, "behavior": {"x": 1}},
        ),
        "Decode": worker(
            pvc=claim, volumeMounts=[{"name": "cache", "useAsCompilationCache": True}]
        ),
    }
    graph = make_graph(services=services, pvcs=[{"name": "cache", "create": True, "size": 1}])
    cluster = settled(
        graph, ingress_host_suffix="example.com", ingress_controller_class_name="nginx"
    )
    ingress = cluster.get("Ingress", "g-frontend")["spec"]
    claims = {c["metadata"]["name"]: c["spec"] for c in cluster.of_kind("PersistentVolumeClaim")}
    scaler = cluster.get("HorizontalPodAutoscaler", "g-frontend")["spec"]

    assert ingress["rules"][0]["host"] == "llm.example.com"
    assert ingress["tls"] == [{"hosts": ["llm.example.com"], "secretName": "c"}]
    assert ingress["ingressClassName"] == "nginx"
    assert claims["models"]["storageClassName"] == "fast"
    assert claims["cache"]["resources"]["requests"]["storage"] == "1"
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 5)
    cluster.get("Deployment", "g-frontend")["spec"]["replicas"] = 4  # as an autoscaler does
    cluster.settle()
    assert cluster.get("Deployment", "g-frontend")["spec"]["replicas"] == 4
    mounts = {m["mountPath"] for m in main_of(cluster, "g-decode")["volumeMounts"]}
    assert mounts == {"/dev/shm", "/models", "/var/cache/vllm"}
    cluster.delete("DynamoGraphDeployment", "g")
    assert {key[0] for key in cluster.objects} == {"PersistentVolumeClaim"}  # models outlive it


def test_virtual_service_needs_a_gateway():
    services = {
        "Frontend": frontend(ingress={"enabled": True, "host": "llm.x", "useVirtualService": True})
    }
    without = settled(make_graph(services=services))
    cluster = settled(make_graph(services=services), istio_virtual_service_gateway="ns/gw")

    assert "--istio-virtual-service-gateway" in without.ready()["message"]
    assert cluster.get("VirtualService", "g-frontend")["spec"]["hosts"] == ["llm.x"]


def test_what_the_spec_no_longer_asks_for_goes():
    services = {"Frontend": frontend(ingress={"enabled": True, "host": "llm.x"}), "Extra": worker()}
    cluster = settled(make_graph(services=services))
    cluster.put(make_graph(services={"Frontend": frontend()}))
    cluster.settle()

    assert cluster.of_kind("Ingress") == []
    assert [d["metadata"]["name"] for d in cluster.of_kind("Deployment")] == ["g-frontend"]


def test_kubernetes_discovery_brings_accounts_and_headless_services():
    planner = {"componentType": "planner", "extraPodSpec": {"mainContainer": {"image": "own"}}}
    own = {"extraPodSpec": {"mainContainer": {"image": "own", "command": ["serve"]}}}
    services = {"Frontend": frontend(), "Decode": worker(), "Planner": planner, "Own": own}
    cluster = settled(make_graph(services=services), etcd_addr="")
    pod = cluster.get("Deployment", "g-decode")["spec"]["template"]

    assert pod["spec"]["serviceAccountName"] == "g-k8s-service-discovery"
    assert cluster.get("RoleBinding", "g-k8s-service-discovery-binding")["subjects"][0]["name"] == (
        "g-k8s-service-discovery"
    )
    ports = {
        item["metadata"]["name"]: [port["port"] for port in item["spec"].get("ports", ())]
        for item in cluster.of_kind("Service")
        if item["spec"].get("clusterIP") == "None"
    }
    assert ports == {"g-decode": [9090], "g-planner": [9085], "g-own": []}
    assert pod["metadata"]["labels"][objects.DISCOVERY_LABEL] == "kubernetes"
    planner_pod = cluster.get("Deployment", "g-planner")["spec"]["template"]["spec"]
    assert planner_pod["serviceAccountName"] == "planner-serviceaccount"
    assert planner_pod["containers"][0]["command"] == ["python3", "-m", "dynamo.planner"]
    variables = env_of(planner_pod["containers"][0])
    assert variables["DYN_PLANNER_FRONTEND_URL"] == "http://g-frontend:8000"
    assert variables["DYN_PLANNER_HOST"] == "0.0.0.0"


def test_two_graphs_of_one_namespace_share_the_token_and_the_last_one_takes_it():
    cluster = DictCluster()
    for name in ("a", "b"):
        services = {"Frontend": frontend(dynamoNamespace="same_ns")}
        cluster.put(make_graph(name, services))
    cluster.settle()
    token = cluster.get("Secret", "same-ns-cluster-token")["data"]
    cluster.delete("DynamoGraphDeployment", "a")
    cluster.settle()

    assert cluster.get("Secret", "same-ns-cluster-token")["data"] == token
    cluster.delete("DynamoGraphDeployment", "b")
    assert cluster.get("Secret", "same-ns-cluster-token") is None


def test_scaling_adapter_sets_the_replicas():
    services = {"Decode": worker(scalingAdapter={"enabled": True})}
    cluster = settled(make_graph(services=services))
    adapter = cluster.get("DynamoGraphDeploymentScalingAdapter", "g-decode")
    adapter["spec"]["replicas"] = 3
    cluster.settle()

    assert cluster.get("Deployment", "g-decode")["spec"]["replicas"] == 3
    assert cluster.get("DynamoGraphDeployment", "g")["status"]["services"]["Decode"] == {
        "componentNames": ["g-decode"],
        "replicas": 3,
        "readyReplicas": 3,
    }


def test_component_may_stand_alone():
    cluster = DictCluster()
    resource = make_graph("solo")
    cluster.put({**resource, "kind": "DynamoComponentDeployment", "spec": frontend()})
    cluster.settle()

    status = cluster.get("DynamoComponentDeployment", "solo")["status"]
    assert objects.find_condition({"status": status}, "Available")["status"] == "True"
    assert env_of(main_of(cluster, "solo"))["DYN_NAMESPACE"] == "dynamo-solo"


@pytest.mark.parametrize(
    ("services", "message"),
    [
        ({"A": worker(dynamoNamespace="a"), "B": worker(dynamoNamespace="b")}, "got a, b"),
        ({"A" * 60: worker()}, "at most 54 fit"),
        ({"Decode": worker(), "decode": worker()}, "two are g-decode in lower case: rename one"),
        ({}, "at least one service"),
        ({"A": {"componentType": "worker"}}, "needs its command"),
        ({"A": {"componentType": "frontend"}}, "expected an image"),
        ({"A": worker(volumeMounts=[{"name": "x"}])}, "expected a mountPoint"),
        ({"A": worker(resources={"limits": {"memory": "much"}})}, "such as 16Gi"),
        ({"A": worker(multinode={"nodeCount": 2})}, "--enable-lws"),
        ({"A": worker(envs=[{"name": "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT", "value": "x"}])}, "expected seconds"),
        ({"A": {"replicas": "one"}}, "spec.services"),
    ],
)  # fmt: skip
def test_spec_that_cannot_run_is_said_in_the_status(services, message):
    cluster = settled(make_graph(services=services))

    assert message in cluster.ready()["message"]
    assert cluster.ready()["status"] == "False"


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("nvcr.io/nvidia/ai-dynamo/vllm-runtime:0.4.1", "dynamo-serving/vllm-runtime:1.2"),
        ("mirror:5000/nvidia/ai-dynamo/vllm-runtime@sha256:00", "dynamo-serving/vllm-runtime:1.2"),
        ("nvcr.io/nvidia/ai-dynamo/sglang-runtime:0.4.1", "own/sglang:7"),
        ("nvcr.io/nvidia/ai-dynamo/dynamo-frontend:1", "nvcr.io/nvidia/ai-dynamo/dynamo-frontend:1"),
        ("busybox", "busybox"),
    ],
)  # fmt: skip
def test_image_table_replaces_the_images_of_the_vendor(image, expected):
    table = ("nvidia/ai-dynamo/sglang-runtime=own/sglang:7", "nvidia/ai-dynamo/dynamo-frontend=")
    settings = OperatorConfig(image_tag="1.2", image_table=table)

    assert settings.substitute_image(image) == expected


def test_wrong_options_are_refused():
    with pytest.raises(errors.ConfigError, match="FROM=TO"):
        OperatorConfig(image_table=("x",)).substitute_image("y")
    with pytest.raises(errors.ConfigError, match="HOST:PORT"):
        parse_address(":http", "--x")
    assert parse_address(":8081", "--x") == ("0.0.0.0", 8081)


@pytest.mark.parametrize(
    ("quantity", "value"), [("250Gi", 250 * 2**30), ("500m", 0.5), (3, 3), ("1e3", 1000), ("2k", 2000)]
)  # fmt: skip
def test_quantities_have_values(quantity, value):
    assert pod_template.parse_quantity(quantity) == value


def test_amounts_without_a_value_are_refused():
    for quantity in ("..", ".", "1.2.3", "", "Gi"):
        with pytest.raises(errors.ConfigError, match="expected an amount"):
            pod_template.parse_quantity(quantity)
    for value in ("inf", "nan", "soon"):
        name = "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"
        with pytest.raises(errors.ConfigError, match="expected seconds"):
            pod_template.grace_period_s({"env": [{"name": name, "value": value}]})


def test_share_of_an_update_is_a_number_or_percent():
    assert component.read_share({}, component.SURGE_ANNOTATION) == "25%"
    assert component.read_share({component.SURGE_ANNOTATION: "2"}, component.SURGE_ANNOTATION) == 2
    with pytest.raises(errors.ConfigError, match="expected 1 or 25%"):
        component.read_share({"x": "most"}, "x")


def test_restricted_pods_have_no_privileges():
    cluster = settled(make_graph(), restricted_security_context=True)
    pod = cluster.get("Deployment", "g-decode")["spec"]["template"]["spec"]

    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_user_of_the_images_may_write_to_volumes():
    cluster = settled(make_graph())
    security = cluster.get("Deployment", "g-decode")["spec"]["template"]["spec"]["securityContext"]

    assert security == {"fsGroup": 65532, "fsGroupChangePolicy": "OnRootMismatch"}


def test_security_context_of_a_service_replaces_the_group_of_its_volumes():
    service = worker()
    service["extraPodSpec"]["securityContext"] = {"runAsUser": 1000}
    cluster = settled(make_graph(services={"Decode": service}))
    pod = cluster.get("Deployment", "g-decode")["spec"]["template"]["spec"]

    assert pod["securityContext"] == {"runAsUser": 1000}


@pytest.mark.parametrize(("place", "path"), [({}, "/var/cache/vllm"), ({"mountPoint": "/c"}, "/c")])
def test_vllm_is_told_where_its_compilation_cache_is_mounted(place, path):
    mount = {"name": "cache", "useAsCompilationCache": True, **place}
    graph = make_graph(services={"Decode": worker(volumeMounts=[mount])})
    main = main_of(settled(graph), "g-decode")

    assert env_of(main)["VLLM_CACHE_ROOT"] == path
    assert {"name": "cache", "mountPath": path} in main["volumeMounts"]


def test_nodes_of_sglang_join_by_address_and_rank():
    service = worker(multinode={"nodeCount": 2})
    main = service["extraPodSpec"]["mainContainer"]
    main |= {"command": ["python3", "-m", "dynamo.sglang"], "args": ["--model", "m"]}
    cluster = settled(make_graph(services={"Decode": service}), enable_lws=True)
    template = cluster.get("LeaderWorkerSet", "g-decode")["spec"]["leaderWorkerTemplate"]
    lines = [
        template[f"{kind}Template"]["spec"]["containers"][0]["args"][0]
        for kind in ("leader", "worker")
    ]

    flags = "--dist-init-addr $(LWS_LEADER_ADDRESS):29500 --nnodes 2 --node-rank"
    assert lines[0] == f"exec python3 -m dynamo.sglang --model m {flags} 0"
    assert lines[1].endswith(f"{flags} $(LWS_WORKER_INDEX)")


def test_nodes_of_an_engine_that_cannot_join_are_refused():
    service = worker(multinode={"nodeCount": 2})
    service["extraPodSpec"]["mainContainer"]["args"] = ["python3 -m dynamo.trtllm"]
    cluster = settled(make_graph(services={"Decode": service}), enable_lws=True)

    assert "the engine is trtllm" in cluster.ready()["message"]


def test_values_probes_and_names_of_the_user_are_taken():
    secret = {"secretKeyRef": {"name": "s", "key": "k"}}
    service = worker(
        globalDynamoNamespace=True,
        envs=[{"name": "A", "valueFrom": secret}],
        livenessProbe={"tcpSocket": {"port": 1}},
    )
    service["extraPodSpec"]["mainContainer"].pop("command")
    ingress = {"enabled": True, "host": "llm.example.com"}
    cluster = settled(make_graph(services={"Decode": service, "F": frontend(ingress=ingress)}))
    container, env = main_of(cluster, "g-decode"), env_of(main_of(cluster, "g-decode"))

    assert env["A"] == secret
    assert env["DYN_NAMESPACE"] == "dynamo"
    assert container["livenessProbe"] == {"tcpSocket": {"port": 1}}
    assert container["command"] == ["/bin/sh", "-c"]
    assert "llm.example.com" in env_of(main_of(cluster, "g-f"))["DYN_ALLOWED_HOSTS"]
