"""Updates of workers by generations: what serves stays until its successors serve, whatever happens in between."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.operator import graph as graphs
from dynamo.operator import objects, rollout
from dynamo.operator.rollout import Generation, UpdateLimits, Workers
from operator_cluster import DictCluster, frontend, make_graph, worker

DGD, DCD = "DynamoGraphDeployment", "DynamoComponentDeployment"


def generation(digits, num_admitted=None, **workers):
    return Generation(
        digits=digits,
        num_admitted=num_admitted,
        workers={name: Workers(replicas=r, num_pods=r, num_ready=n) for name, (r, n) in workers.items()},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("generations", "limits", "expected"),
    [
        ([], (0, 1), {"new": {"d": 2}}),
        ([generation("old", d=(2, 2))], (0, 1), {"old": {"d": 1}, "new": {"d": 0}}),
        ([generation("old", d=(1, 1))], (0, 1), {"old": {"d": 1}, "new": {"d": 1}}),
        ([generation("old", d=(1, 1)), generation("new", d=(1, 0))], (0, 1), {"old": {"d": 1}, "new": {"d": 1}}),
        ([generation("old", d=(1, 1)), generation("new", d=(1, 1))], (0, 1), {"old": {"d": 0}, "new": {"d": 1}}),
        ([generation("old", d=(1, 1)), generation("new", 0, d=(1, 1))], (0, 1), {"old": {"d": 1}, "new": {"d": 1}}),
        ([generation("old", d=(2, 2))], (1, 0), {"old": {"d": 2}, "new": {"d": 1}}),
        ([generation("old", d=(2, 2))], ("25%", "25%"), {"old": {"d": 2}, "new": {"d": 1}}),
        ([generation("old", d=(2, 2))], (0, 0), {"old": {"d": 1}, "new": {"d": 0}}),
        ([generation("old", d=(2, 0))], (0, 1), {"old": {"d": 0}, "new": {"d": 0}}),
        ([generation("new", d=(5, 5))], (0, 1), {"new": {"d": 2}}),
        ([generation("old", x=(1, 1))], (0, 1), {"old": {"x": 1}, "new": {"d": 1}}),
        ([generation("old", x=(1, 1)), generation("new", d=(1, 1))], (0, 1), {"old": {"x": 0}, "new": {"d": 1}}),
        ([generation("old", x=(2, 2))], (1, 0), {"old": {"x": 2}, "new": {"d": 1}}),
        ([generation("old", x=(2, 2)), generation("new", d=(1, 0))], (1, 0), {"old": {"x": 2}, "new": {"d": 1}}),
        ([generation("old", x=(2, 2)), generation("new", d=(1, 1))], (1, 0), {"old": {"x": 1}, "new": {"d": 1}}),
        ([generation("old", x=(2, 2), d=(2, 2))], (1, 0), {"old": {"x": 0, "d": 2}, "new": {"d": 0}}),
    ],
)  # fmt: skip
def test_update_goes_within_its_limits(generations, limits, expected):
    surge, unavailable = limits

    assert (
        rollout.plan(
            {"d": 2},
            generations,
            "new",
            UpdateLimits(max_surge=surge, max_unavailable=unavailable),
        )
        == expected
    )


def test_prefill_workers_serve_only_beside_decode_workers():
    limits = UpdateLimits(max_surge=1, max_unavailable=0)
    old = generation("old", p=(1, 1), d=(1, 1))
    new = generation("new", p=(1, 1), d=(1, 0))

    planned = rollout.plan({"p": 1, "d": 1}, [old, new], "new", limits, frozenset("p"))

    assert planned["old"] == {"p": 1, "d": 1}


def test_renamed_service_takes_over_before_others_are_updated():
    limits = UpdateLimits(max_surge=1, max_unavailable=0)
    wanted = {"kept": 1, "renamed": 2}
    old = generation("old", kept=(1, 1), former=(2, 2))
    started = rollout.plan(wanted, [old], "new", limits)
    new = generation("new", kept=(0, 0), renamed=(1, 1))

    assert started == {"old": {"former": 2, "kept": 1}, "new": {"renamed": 1, "kept": 0}}
    assert rollout.plan(wanted, [old, new], "new", limits)["old"] == {"former": 1, "kept": 1}


def test_removed_prefill_service_makes_no_room_for_decode_workers():
    limits = UpdateLimits(max_surge=1, max_unavailable=0)
    old = generation("old", p=(2, 2), d=(1, 1))

    planned = rollout.plan({"d": 1}, [old], "new", limits, frozenset("p"))

    assert planned == {"old": {"p": 0, "d": 1}, "new": {"d": 1}}


def spec_of(number, replicas=2):
    return make_graph(services={"Frontend": frontend(), "Decode": worker(f"--seed {number}", replicas)})  # fmt: skip


def generations_of(cluster):
    return {
        c["metadata"]["labels"][objects.HASH_LABEL]: c["spec"]["dynamoNamespace"]
        for c in cluster.of_kind(DCD)
        if objects.HASH_LABEL in c["metadata"]["labels"]
    }


def test_changed_workers_get_a_namespace_of_their_own():
    cluster = DictCluster()
    cluster.put(spec_of(1))
    cluster.settle()
    (first,) = generations_of(cluster).items()
    cluster.put(spec_of(2))
    cluster.settle()
    (second,) = generations_of(cluster).items()

    assert first[1] == "dynamo-g"
    assert second == (second[0], f"dynamo-g-{second[0]}")
    assert [d["metadata"]["name"] for d in cluster.of_kind("Deployment")] == [
        f"g-decode-{second[0]}",
        "g-frontend",
    ]
    status = cluster.get(DGD, "g")["status"]
    assert status["rollingUpdate"]["phase"] == "Completed"
    assert cluster.ready()["status"] == "True"
    template = cluster.get("Deployment", f"g-decode-{second[0]}")["spec"]["template"]
    assert "'secretKeyRef': {'name': 'dynamo-g-cluster-token'" in str(template)  # as frontends have


@pytest.mark.parametrize(
    "change",
    [
        {"replicas": 4},
        {"labels": {"a": "b"}},
        {"modelRef": {"name": "x"}},
        {"envs": []},
        {"pvc": None},
    ],
)
def test_change_that_concerns_no_worker_starts_no_update(change):
    cluster = DictCluster()
    cluster.put(spec_of(1))
    cluster.settle()
    before = generations_of(cluster)
    changed = spec_of(1)
    changed["spec"]["services"]["Decode"] |= change
    cluster.put(changed)
    cluster.settle()

    assert generations_of(cluster) == before


def autoscaled(number, **limits):
    graph = spec_of(number)
    autoscaling = {"enabled": True, "minReplicas": 1, "maxReplicas": 4, **limits}
    graph["spec"]["services"]["Decode"] |= {"autoscaling": autoscaling}
    return graph


def scaled_to_three():
    """Return a cluster whose autoscaler has made three workers of one."""
    cluster = DictCluster()
    cluster.put(autoscaled(1))
    cluster.settle()
    cluster.get("Deployment", "g-decode")["spec"]["replicas"] = 3
    cluster.settle()
    return cluster


def num_ready_workers(cluster):
    return sum(
        entry["deployment"].startswith("g-decode")
        and objects.is_ready(entry["pod"])
        and "deletionTimestamp" not in entry["pod"]["metadata"]
        for entry in cluster.pods.values()
    )


def test_update_of_a_service_with_an_autoscaler_keeps_its_workers_and_ends():
    cluster, counts = scaled_to_three(), []
    cluster.put(autoscaled(2))
    for _ in range(60):
        for kind in (DGD, DCD):
            for resource in cluster.of_kind(kind):
                cluster.reconcile(kind, resource["metadata"]["name"])
        cluster.run_controllers()
        counts.append((num_ready_workers(cluster), len(cluster.pods) - 1))

    assert min(ready for ready, _ in counts) == 3
    assert max(pods for _, pods in counts) == 4  # 25 % more
    assert len(generations_of(cluster)) == 1
    assert counts[-1] == (3, 3)
    assert cluster.ready()["status"] == "True"
    (autoscaler,) = cluster.of_kind("HorizontalPodAutoscaler")
    assert (autoscaler["spec"]["minReplicas"], autoscaler["spec"]["maxReplicas"]) == (1, 4)


@pytest.mark.parametrize(
    "last", [autoscaled(1), autoscaled(3), spec_of(3)], ids=["back", "on", "without"]
)
def test_autoscaled_service_may_change_again_in_the_middle_of_its_update(last):
    cluster = scaled_to_three()
    cluster.put(autoscaled(2))
    for _ in range(4):
        for kind in (DGD, DCD):
            for resource in cluster.of_kind(kind):
                cluster.reconcile(kind, resource["metadata"]["name"])
        cluster.run_controllers()
    assert len(generations_of(cluster)) == 2
    cluster.put(last)
    cluster.settle()

    is_autoscaled = "autoscaling" in last["spec"]["services"]["Decode"]
    assert len(generations_of(cluster)) == 1
    assert num_ready_workers(cluster) == (
        3 if is_autoscaled else last["spec"]["services"]["Decode"]["replicas"]
    )
    assert len(cluster.of_kind("HorizontalPodAutoscaler")) == is_autoscaled


def test_workers_are_not_drained_before_frontends_have_admitted_their_successors():
    cluster = DictCluster()
    cluster.put(spec_of(1))
    cluster.settle()
    cluster.instances = {"dynamo-g": 2}
    cluster.put(spec_of(2))
    cluster.settle()

    assert len(generations_of(cluster)) == 2
    assert cluster.ready()["message"] == "workers of the former specification are being replaced"
    for name in generations_of(cluster).values():
        cluster.instances[name] = 2
    cluster.settle()
    assert len(generations_of(cluster)) == 1


@pytest.mark.parametrize(
    "flags",
    ["--is-prefill-worker", "--disaggregation-mode prefill", "--worker-type=prefill"],
)
def test_update_waits_for_no_frontend_to_list_prefill_workers(flags):
    def graph_of(seed):
        prefill = worker(f"{flags} --seed {seed}")
        return make_graph(services={"Decode": worker(f"--seed {seed}"), "P": prefill})

    cluster = DictCluster()
    cluster.put(graph_of(1))
    cluster.settle()
    cluster.put(graph_of(2))
    cluster.instances = {}
    cluster.settle()
    cluster.instances = dict.fromkeys(generations_of(cluster).values(), 1)  # the decode workers
    cluster.settle()

    assert len(generations_of(cluster)) == 1


def test_renamed_services_serve_until_their_successors_do():
    def graph_of(frontend_name, worker_name):
        return make_graph(services={frontend_name: frontend(), worker_name: worker(replicas=2)})

    cluster, counts, earlier_pods = DictCluster(), [], set()
    cluster.put(graph_of("Frontend", "Decode"))
    cluster.settle()
    cluster.put(graph_of("Door", "Decoder"))
    for _ in range(40):
        for kind in (DGD, DCD):
            for resource in cluster.of_kind(kind):
                cluster.reconcile(kind, resource["metadata"]["name"])
        cluster.run_controllers(becomes_ready=lambda pod: pod["metadata"]["name"] in earlier_pods)
        earlier_pods.update(cluster.pods)
        ready = [e["deployment"] for e in cluster.pods.values() if objects.is_ready(e["pod"])]
        is_worker = ["decode" in name for name in ready]
        counts.append((is_worker.count(True), is_worker.count(False)))

    assert min(workers for workers, _ in counts) == 2
    assert min(frontends for _, frontends in counts) == 1
    assert counts[-1] == (2, 1)
    assert len(cluster.of_kind(DCD)) == 2
    assert cluster.ready()["status"] == "True"


def test_renamed_prefill_service_is_of_the_kind_of_its_former_workers():
    def graph_of(name):
        prefill = worker("--is-prefill-worker")
        return make_graph(services={"Decode": worker(), name: prefill})

    cluster = DictCluster()
    cluster.put(graph_of("Prefill"))
    cluster.settle()
    cluster.put(graph_of("Filler"))
    cluster.reconcile(DGD, "g")
    (entry,) = [item for item in cluster.of_kind(DCD) if "filler" in item["metadata"]["name"]]

    assert cluster.get(DCD, "g-prefill")["spec"]["replicas"] == 1
    assert entry["spec"]["replicas"] == 1


def test_worker_that_becomes_another_kind_of_component_is_changed_in_its_place():
    graph = make_graph(services={"A": worker(), "B": worker()})
    cluster = DictCluster()
    cluster.put(graph)
    cluster.settle()
    del graph["spec"]["services"]["B"]["componentType"]
    changed = cluster.put(graph)
    desired = graphs.decide(changed, cluster.observe(), cluster.settings, "").apply
    (component,) = [item for item in desired if item["metadata"]["name"] == "g-b"]

    assert "componentType" not in component["spec"]


def serving(cluster):
    """Count ready decode pods of all generations."""
    return sum(
        bool(objects.find_condition(entry["pod"], "Ready"))
        for entry in cluster.pods.values()
        if "decode" in entry["deployment"]
    )


def normalized(cluster):
    """Return specs of Deployments without the digits of generations, which depend on the history."""
    text = repr({d["metadata"]["name"]: d["spec"] for d in cluster.of_kind("Deployment")})
    for digits in generations_of(cluster):
        text = text.replace(f"-{digits}", "")
    return sorted(text.split(objects.TEMPLATE_LABEL)[0]), len(generations_of(cluster))


STEPS = st.lists(
    st.sampled_from(["graph", "component", "pods", "pods", "spec", "replace", "lose status"]),
    max_size=60,
)


@settings(max_examples=25, deadline=None)
@given(steps=STEPS, seed=st.integers(0, 2**16), surge=st.integers(0, 1))
def test_chaos_keeps_what_serves_and_ends_as_an_undisturbed_run(steps, seed, surge):
    """Specs and names change and revert, the operator dies between two writes, statuses and annotations are lost."""
    rng = random.Random(seed)
    annotations = {
        "nvidia.com/deployment-rolling-update-max-surge": str(surge),
        "nvidia.com/deployment-rolling-update-max-unavailable": str(1 - surge),
    }

    def graph_of(number):
        resource = spec_of(number)
        if number == 3:
            services = resource["spec"]["services"]
            services["Decoder"] = services.pop("Decode")
        resource["metadata"]["annotations"] = annotations
        return resource

    cluster, number = DictCluster(), 1
    cluster.put(graph_of(number))
    cluster.settle()
    least = 2 - (1 - surge)
    for step in steps:
        match step:
            case "graph" | "component":
                kind = DGD if step == "graph" else DCD
                resource = rng.choice(cluster.of_kind(kind))
                actions = list(cluster.actions(resource))
                for action in actions[: rng.randint(0, len(actions))]:
                    action()
            case "pods":
                cluster.run_controllers(becomes_ready=lambda pod: rng.random() < 0.5)
            case "spec":
                number = rng.randint(1, 3)
                cluster.put(graph_of(number))
            case "replace":
                cluster.objects[DGD, "g"].pop("status", None)
                cluster.put(graph_of(number))
            case "lose status":
                rng.choice(cluster.of_kind(DCD)).pop("status", None)
        assert serving(cluster) >= least
    cluster.settle()
    undisturbed = DictCluster()
    undisturbed.put(graph_of(number))
    undisturbed.settle()

    assert normalized(cluster) == normalized(undisturbed)
    assert cluster.ready()["status"] == "True"
