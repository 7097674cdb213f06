"""What the laptop's API server takes, refuses and lists, and what its controllers make of it, as on a real cluster."""

import httpx2
import pytest

import memory_cluster
from dynamo.testing.kube import (
    api,
    builtin_rules,
    failures,
    garbage,
    protobuf,
    resources,
    rights,
    services,
    store,
    tables,
    workloads,
)

NAMESPACE = "default"
PLAIN = api.WriteOptions(manager="m", user=rights.ADMIN)
CONTAINER = {"name": "main", "image": "x:1"}


@pytest.fixture
async def served():
    objects, registry = store.Store(), resources.ResourceRegistry()
    made = api.Api(registry, objects, rights.Authority(objects, "token"))
    await made.create(registry.require("", "namespaces"), "", garbage.new_namespace(NAMESPACE))
    return made


def test_objects_are_listed_in_the_order_of_their_keys():
    """By which the pages of a list go on: an object that comes before those of the first page would be lost."""
    objects, names = store.Store(), [("a", "x"), ("a", "z"), ("a-b", "y"), ("a0", "y")]
    for namespace, name in names:
        objects.put(("", "pods"), {"metadata": {"namespace": namespace, "name": name}})
    before = objects.revision
    objects.delete(("", "pods"), ("a", "z"))

    def keys(items):
        return ["/".join((i["metadata"]["namespace"], i["metadata"]["name"])) for i in items]

    assert keys(objects.list_items(("", "pods"))) == ["a-b/y", "a/x", "a0/y"]
    assert keys(objects.list_at(("", "pods"), "", before)) == ["a-b/y", "a/x", "a/z", "a0/y"]
    assert keys(objects.list_at(("", "pods"), "a", before)) == ["a/x", "a/z"]


@pytest.mark.parametrize(
    ("kind", "field", "value", "says"),
    [
        ("Secret", "data", "not base64!", "illegal base64 data at input byte 3"),
        ("Secret", "data", "YWJjZA", "illegal base64 data at input byte 6"),
        ("Secret", "data", 5, "number into Go struct field Secret.data of type []uint8"),
        ("ConfigMap", "binaryData", "?", "illegal base64 data at input byte 0"),
    ],
)
async def test_bytes_that_are_no_base64_are_refused(served, kind, field, value, says):
    resource = served.registry.find_kind("v1", kind)
    body = {"metadata": {"name": "x"}, field: {"a": value}}
    with pytest.raises(failures.ApiError) as refusal:
        await served.create(resource, NAMESPACE, body, PLAIN)

    assert refusal.value.code == 400
    assert says in str(refusal.value)


async def test_bytes_may_be_wrapped_and_null_is_empty(served):
    secrets, maps = (served.registry.find_kind("v1", kind) for kind in ("Secret", "ConfigMap"))
    for resource, data in (
        (secrets, {"a": "YWJj\nZA==\n", "b": "", "c": None}),
        (maps, {"a": "not base64!", "c": None}),
    ):
        head = {"name": "x", "annotations": {"a": None}, "labels": {"a": None}}
        body = {"metadata": head, "data": data}
        made = await served.create(resource, NAMESPACE, body, PLAIN)
        made["metadata"]["annotations"]["b"] = None
        written = await served.update(resource, NAMESPACE, "x", made, PLAIN)
        assert written["data"] == {**data, "c": ""}
        assert written["metadata"]["annotations"] == {"a": "", "b": ""}
        assert written["metadata"]["labels"] == {"a": ""}


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"labels": ["a=b"]}, "array into Go struct field ObjectMeta.labels of type map[string]string"),
        ({"annotations": {"a": 1}}, "number into Go struct field ObjectMeta.annotations of type string"),
        ({"ownerReferences": ["x"]}, "string into Go struct field ObjectMeta.ownerReferences of type"),
        ({"finalizers": "x"}, "string into Go struct field ObjectMeta.finalizers of type []string"),
        ({"name": 5}, "number into Go struct field ObjectMeta.name of type string"),
    ],
)  # fmt: skip
async def test_metadata_of_another_type_are_refused(served, metadata, says):
    maps = served.registry.require("", "configmaps")
    await served.create(maps, NAMESPACE, {"metadata": {"name": "there"}}, PLAIN)
    with pytest.raises(failures.ApiError) as created:
        await served.create(maps, NAMESPACE, {"metadata": {"name": "x", **metadata}}, PLAIN)
    change = {"metadata": metadata}
    with pytest.raises(failures.ApiError) as patched:
        await served.patch(maps, NAMESPACE, "there", api.MERGE_PATCH, change, PLAIN)

    for refusal in (created.value, patched.value):
        assert refusal.code == 400
        assert f"cannot be handled as a ConfigMap: json: cannot unmarshal {says}" in str(refusal)


@pytest.mark.parametrize(("restarts", "is_over"), [(1, False), (2, True)])
async def test_job_whose_containers_are_started_again_too_often_has_failed(
    served, restarts, is_over
):
    template = {"spec": {"restartPolicy": "OnFailure", "containers": [CONTAINER]}}
    body = {"metadata": {"name": "j"}, "spec": {"backoffLimit": 2, "template": template}}
    jobs, controller = served.registry.require("batch", "jobs"), workloads.Jobs(served)
    await served.create(jobs, NAMESPACE, body, PLAIN)
    await controller.reconcile((NAMESPACE, "j"))
    (pod,) = served.store.list_items(("", "pods"))
    counts = [{"name": "main", "restartCount": restarts, "state": {}}]
    status = {"phase": "Running", "containerStatuses": counts}
    served.store.put(("", "pods"), {**pod, "status": status})
    await controller.reconcile((NAMESPACE, "j"))
    job = served.store.get(jobs.key, (NAMESPACE, "j"))
    failed = [c["reason"] for c in job["status"].get("conditions", ()) if c["type"] == "Failed"]

    assert failed == (["BackoffLimitExceeded"] if is_over else [])
    assert len(served.store.list_items(("", "pods"))) == (0 if is_over else 1)


@pytest.mark.parametrize("is_published", [False, True])
async def test_service_may_lead_to_pods_that_are_not_ready(served, is_published):
    services_of, controller = (
        served.registry.require("", "services"),
        services.EndpointSlices(served),
    )
    spec = {"clusterIP": "None", "selector": {"app": "s"}, "publishNotReadyAddresses": is_published}
    await served.create(services_of, NAMESPACE, {"metadata": {"name": "s"}, "spec": spec}, PLAIN)
    pod = {"metadata": {"name": "p", "labels": {"app": "s"}}, "spec": {"containers": [CONTAINER]}}
    pod = await served.create(served.registry.require("", "pods"), NAMESPACE, pod, PLAIN)
    status = {"phase": "Running", "podIP": "10.0.0.1"}
    served.store.put(("", "pods"), {**pod, "status": status})
    await controller.reconcile((NAMESPACE, "s"))
    (made,) = served.store.list_items(("discovery.k8s.io", "endpointslices"))
    (endpoint,) = made["endpoints"]

    assert endpoint["conditions"]["ready"] is is_published
    assert endpoint["conditions"]["serving"] is False


async def make_job(served, **fields):
    template = {"spec": {"restartPolicy": "Never", "containers": [CONTAINER]}}
    body = {"metadata": {"name": "j"}, "spec": {"template": template, **fields}}
    jobs, controller = served.registry.require("batch", "jobs"), workloads.Jobs(served)
    await served.create(jobs, NAMESPACE, body, PLAIN)
    await controller.reconcile((NAMESPACE, "j"))
    return controller


def change_job_status(served, **fields):
    """Change the status of the job, as if time had gone by."""
    key = ("batch", "jobs")
    job = served.store.get(key, (NAMESPACE, "j"))
    served.store.put(key, {**job, "status": {**job["status"], **fields}})


async def test_job_that_runs_longer_than_its_deadline_fails(served):
    controller = await make_job(served, activeDeadlineSeconds=30)
    remaining_s = await controller.reconcile((NAMESPACE, "j"))
    change_job_status(served, startTime=builtin_rules.timestamp_after(-31))
    await controller.reconcile((NAMESPACE, "j"))
    status = served.store.get(("batch", "jobs"), (NAMESPACE, "j"))["status"]

    assert 0 < remaining_s <= 30
    (failure,) = status["conditions"]
    assert (failure["type"], failure["reason"]) == ("Failed", "DeadlineExceeded")
    assert "active" not in status
    assert served.store.list_items(("", "pods")) == []


async def test_job_that_is_suspended_has_time_left_when_it_goes_on(served):
    controller = await make_job(served, activeDeadlineSeconds=30, suspend=True)
    change_job_status(served, startTime=builtin_rules.timestamp_after(-31))

    assert await controller.reconcile((NAMESPACE, "j")) is None
    assert "startTime" not in served.store.get(("batch", "jobs"), (NAMESPACE, "j"))["status"]


async def test_job_that_has_ended_is_deleted_after_as_long_as_it_asks_for(served):
    controller = await make_job(served, ttlSecondsAfterFinished=60)
    times = [builtin_rules.timestamp_after(-seconds) for seconds in (0, 61)]
    waits, kept = [], []
    for ended_at in times:
        complete = {"type": "Complete", "status": "True", "lastTransitionTime": ended_at}
        change_job_status(served, conditions=[complete])
        waits.append(await controller.reconcile((NAMESPACE, "j")))
        job = served.store.get(("batch", "jobs"), (NAMESPACE, "j"))
        kept.append(job is not None and "deletionTimestamp" not in job["metadata"])

    assert 0 < waits[0] <= 60
    assert (waits[1], kept) == (None, [True, False])


@pytest.mark.parametrize(
    ("strategy", "num_updated"),
    [
        ({}, 1),
        ({"rollingUpdate": {"partition": 1}}, 1),
        ({"rollingUpdate": {"partition": 2}}, 0),
        ({"type": "OnDelete"}, 0),
    ],
)
async def test_pods_of_a_parallel_stateful_set_are_updated_as_their_strategy_says(
    served, strategy, num_updated
):
    """One after the other, too: the next is ended when the one before is ready."""
    labels = {"app": "s"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [CONTAINER]}}
    spec = {
        "replicas": 2,
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "RollingUpdate", **strategy},
        "selector": {"matchLabels": labels},
        "template": template,
    }
    sets, controller = (
        served.registry.require("apps", "statefulsets"),
        workloads.StatefulSets(served),
    )
    await served.create(sets, NAMESPACE, {"metadata": {"name": "s"}, "spec": spec}, PLAIN)
    await controller.reconcile((NAMESPACE, "s"))
    ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    before = {pod["metadata"]["uid"] for pod in served.store.list_items(("", "pods"))}
    for pod in served.store.list_items(("", "pods")):
        served.store.put(("", "pods"), {**pod, "status": ready})
    change = {"spec": {"template": {"metadata": {"annotations": {"changed": "yes"}}}}}
    await served.patch(sets, NAMESPACE, "s", api.MERGE_PATCH, change, PLAIN)
    for _ in range(4):
        await controller.reconcile((NAMESPACE, "s"))
    after = {pod["metadata"]["uid"] for pod in served.store.list_items(("", "pods"))}

    assert (len(before), len(after), len(after - before)) == (2, 2, num_updated)


async def test_pod_is_available_when_it_has_been_ready_for_as_long_as_its_deployment_asks(served):
    labels = {"app": "d"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [CONTAINER]}}
    spec = {"minReadySeconds": 60, "selector": {"matchLabels": labels}, "template": template}
    plurals = ("deployments", "replicasets")
    deployments, sets = (served.registry.require("apps", plural) for plural in plurals)
    controllers = workloads.Deployments(served), workloads.ReplicaSets(served)
    await served.create(deployments, NAMESPACE, {"metadata": {"name": "d"}, "spec": spec}, PLAIN)
    for _ in range(2):
        await controllers[0].reconcile((NAMESPACE, "d"))
    (name,) = [item["metadata"]["name"] for item in served.store.list_items(sets.key)]
    await controllers[1].reconcile((NAMESPACE, name))
    (pod,) = served.store.list_items(("", "pods"))
    waits, counts = [], []
    for age_s in (10, 61):
        ready = {"type": "Ready", "status": "True"}
        ready["lastTransitionTime"] = builtin_rules.timestamp_after(-age_s)
        served.store.put(("", "pods"), {**pod, "status": {"conditions": [ready]}})
        waits.append(await controllers[1].reconcile((NAMESPACE, name)))
        status = served.store.get(sets.key, (NAMESPACE, name))["status"]
        counts.append((status["readyReplicas"], status.get("availableReplicas", 0)))

    assert 0 < waits[0] <= 50
    assert (waits[1], counts) == (None, [(1, 0), (1, 1)])


async def test_event_is_kept_for_an_hour_after_its_last_write(served):
    events, controller = served.registry.require("", "events"), garbage.Events(served)
    about = {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {"name": "p", "namespace": NAMESPACE, "uid": "u"},
    }
    kept = {}
    for name, created_s, written_s in (
        ("new", -10, -10),
        ("old", -3601, -3601),
        ("again", -9999, -600),
    ):
        body = builtin_rules.new_event(about, "Pulled", "x", "kubelet", "Normal")
        body["metadata"] = {"name": name}
        event = await served.create(events, NAMESPACE, body, PLAIN)
        times = {"creationTimestamp": builtin_rules.timestamp_after(created_s)}
        (entry,) = event["metadata"]["managedFields"]
        times["managedFields"] = [{**entry, "time": builtin_rules.timestamp_after(written_s)}]
        served.store.put(events.key, {**event, "metadata": {**event["metadata"], **times}})
        kept[name] = await controller.reconcile((NAMESPACE, name))

    assert [item["metadata"]["name"] for item in served.store.list_items(events.key)] == [
        "again",
        "new",
    ]
    assert kept["old"] is None
    assert 2900 < kept["again"] <= 3000 < kept["new"] <= 3590


@pytest.fixture
async def http():
    """A client of an API server, with a pod and three config maps."""
    async with memory_cluster.MemoryCluster() as cluster, cluster.connect(NAMESPACE) as connected:
        await connected.create(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [CONTAINER]}}
        )  # fmt: skip
        for name in "abc":
            await connected.create(
                {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}}
            )
        headers = {"Authorization": f"Bearer {memory_cluster._TOKEN}"}
        async with httpx2.AsyncClient(
            transport=cluster, base_url="http://cluster", headers=headers
        ) as client:
            yield client


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("pods/p/binding", {"metadata": {"name": "p"}}, 422),
        ("pods/p/binding", [], 400),
        ("pods/p/eviction", [], 400),
        ("pods", {"metadata": {"name": "x"}, "spec": {"containers": [None]}}, 422),
        ("pods", {"metadata": {"name": "x"}, "spec": None}, 422),
        ("services", {"metadata": {"name": "x"}, "spec": {"ports": [None, None]}}, 422),
        ("services", {"metadata": {"name": "x"}, "spec": {"ports": [{"targetPort": 8000}]}}, 422),
    ],
)
async def test_body_without_what_is_needed_is_refused_in_a_sentence(http, path, body, code):
    answer = await http.post(f"/api/v1/namespaces/{NAMESPACE}/{path}", json=body)

    assert answer.status_code == code, answer.text
    assert answer.json()["message"]


@pytest.mark.parametrize("group", ["apps/v1/%s/deployments", "batch/v1/%s/jobs"])
async def test_workload_with_an_empty_template_is_refused_in_a_sentence(http, group):
    path = f"/apis/{group % f'namespaces/{NAMESPACE}'}"
    body = {"metadata": {"name": "x"}, "spec": {"selector": None, "template": None}}
    answer = await http.post(path, json=body)

    assert answer.status_code == 422, answer.text
    assert "template.spec.containers: Required value" in answer.json()["message"]


async def test_stateful_set_may_have_claims_without_a_name(served):
    """As on a real cluster, where it makes no pod then."""
    labels, sets = {"app": "s"}, served.registry.require("apps", "statefulsets")
    template = {"metadata": {"labels": labels}, "spec": {"containers": [CONTAINER]}}
    selector = {"matchLabels": labels}
    spec = {"selector": selector, "template": template, "volumeClaimTemplates": [{"spec": {}}]}
    await served.create(sets, NAMESPACE, {"metadata": {"name": "s"}, "spec": spec}, PLAIN)
    with pytest.raises(failures.ApiError, match='"-s-0" is invalid'):
        await workloads.StatefulSets(served).reconcile((NAMESPACE, "s"))


async def test_limit_below_zero_is_none(http):
    answer = await http.get(f"/api/v1/namespaces/{NAMESPACE}/configmaps?limit=-1")

    assert [item["metadata"]["name"] for item in answer.json()["items"]][:3] == ["a", "b", "c"]
    assert "continue" not in answer.json()["metadata"]


async def test_half_a_service_account_is_impersonated_as_a_plain_user(http):
    answer = await http.get("/api/v1/pods", headers={"Impersonate-User": "system:serviceaccount:x"})

    assert answer.status_code == 403
    assert 'User "system:serviceaccount:x" cannot list' in answer.json()["message"]


async def test_counts_that_a_status_lacks_are_shown_as_none(served):
    resource = served.registry.require("apps", "replicasets")
    item = {
        "metadata": {"name": "r", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"replicas": 2},
    }
    table = tables.present(resource, [item], "application/json;as=Table", "None", None)

    assert table["rows"][0]["cells"][1:4] == [2, 0, 0]
    assert [column["type"] for column in table["columnDefinitions"][1:4]] == ["integer"] * 3


async def test_one_odd_object_leaves_the_table_of_the_others(http):
    """`kubectl get` shows all objects of a kind or none."""
    metadata, form = {"name": "odd"}, {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}
    home = f"/api/v1/namespaces/{NAMESPACE}/events"
    made = await http.post(home, json={"metadata": metadata, "involvedObject": None})
    shown = await http.get(home, headers=form)

    assert made.status_code == 201, made.text
    assert [row["cells"][-1] for row in shown.json()["rows"]] == ["odd"]
    assert tables.age("2026-01-01") == "<invalid>"


def encode(*fields):
    """Return a protobuf message of numbered fields: numbers, texts or messages of fewer than 128 bytes."""
    encoded = b""
    for number, value in fields:
        if isinstance(value, int):
            encoded += bytes([number << 3, value])
        else:
            content = value if isinstance(value, bytes) else value.encode()
            encoded += bytes([number << 3 | 2, len(content)]) + content
    return encoded


NUMBERED_PORT = encode((1, 0), (2, 90), (3, ""))
NAMED_PORT = encode((1, 1), (2, 0), (3, "http"))
RULE = encode((1, "get"), (2, ""), (3, "pods"))
BACKEND = encode((4, encode((1, "s"), (2, encode((1, "http"), (2, 0))))))
BACKEND_PORT = {"service": {"name": "s", "port": {"name": "http"}}}
EXPRESSION = encode((1, "a"), (2, "In"), (3, "b"))


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        (
            "Service",
            [(2, encode((1, encode((3, 80), (4, NUMBERED_PORT)))))],
            {"spec": {"ports": [{"port": 80, "targetPort": 90}]}},
        ),
        (
            "Service",
            [(2, encode((1, encode((3, 80), (4, NAMED_PORT)))))],
            {"spec": {"ports": [{"port": 80, "targetPort": "http"}]}},
        ),
        (
            "Role",
            [(2, RULE)],
            {"rules": [{"verbs": ["get"], "apiGroups": [""], "resources": ["pods"]}]},
        ),
        (
            "RoleBinding",
            [
                (2, encode((1, "ServiceAccount"), (2, ""), (3, "a"), (4, "ns"))),
                (3, encode((1, "rbac.authorization.k8s.io"), (2, "Role"), (3, "r"))),
            ],
            {
                "subjects": [{"kind": "ServiceAccount", "name": "a", "namespace": "ns"}],
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "r"},
            },
        ),
        (
            "Ingress",
            [
                (
                    2,
                    encode(
                        (3, encode((1, "h"), (2, encode((1, encode((1, encode((2, BACKEND)))))))))
                    ),
                )
            ],
            {"spec": {"rules": [{"host": "h", "http": {"paths": [{"backend": BACKEND_PORT}]}}]}},
        ),
        (
            "ResourceQuota",
            [(2, encode((1, encode((1, "cpu"), (2, encode((1, "2")))))))],
            {"spec": {"hard": {"cpu": "2"}}},
        ),
        (
            "PodDisruptionBudget",
            [(2, encode((2, encode((2, EXPRESSION))), (3, NUMBERED_PORT)))],
            {
                "spec": {
                    "maxUnavailable": 90,
                    "selector": {
                        "matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}]
                    },
                }
            },
        ),
        (
            "PriorityClass",
            [(3, 1), (4, "low")],
            {"globalDefault": True, "description": "low"},
        ),
        (
            "CronJob",
            [(2, encode((1, "* * * * *"), (5, encode((2, encode((6, b"")))))))],
            {"spec": {"schedule": "* * * * *", "jobTemplate": {"spec": {"template": {}}}}},
        ),
    ],
)
def test_objects_that_kubectl_create_makes_are_read(kind, fields, expected):
    item = encode((1, encode((1, "x"))), *fields)
    body = protobuf.MAGIC + encode((2, item))

    assert protobuf.decode(body, "v1", kind) == {
        "apiVersion": "v1",
        "kind": kind,
        "metadata": {"name": "x"},
        **expected,
    }


def test_negative_number_of_a_body_is_read():
    body = protobuf.MAGIC + encode((2, bytes([2 << 3]) + b"\xff" * 9 + b"\x01"))

    assert protobuf.decode(body, "scheduling.k8s.io/v1", "PriorityClass")["value"] == -1
