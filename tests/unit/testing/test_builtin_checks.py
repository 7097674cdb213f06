"""The laptop's API server refuses built-in objects as a real one does, in the words of its sources (1.36)."""

import copy

import pytest

from dynamo.testing.kube import builtin_checks, builtin_rules, metadata, resources, store

LABELS = {"app": "x"}
SELECTOR = {"matchLabels": LABELS}
IMMUTABLE = "field is immutable"


def template(**fields):
    containers = [{"name": "main", "image": "x:1"}]
    return {"metadata": {"labels": LABELS}, "spec": {"containers": containers, **fields}}


def findings(group, plural, spec, old_spec=None, version="v1"):
    """Return the mistakes of an object with this spec, after a former one if there is one."""
    resource = resources.ResourceRegistry().require(group, plural, version)
    items = [
        {"metadata": {"name": "x"}, "spec": copy.deepcopy(each)}
        for each in (spec, old_spec)
        if each is not None
    ]
    item, old = [
        *(builtin_rules.complete(resource, item, None, store.Store()) for item in items),
        None,
    ][:2]
    found = builtin_checks.check(resource, item, old)
    return [f"{each.field}: {each.message}" for each in found]


@pytest.mark.parametrize("plural", ["deployments", "replicasets", "statefulsets"])
def test_pods_of_a_workload_are_always_restarted(plural):
    spec = {"selector": SELECTOR, "template": template(restartPolicy="Never")}

    assert findings("apps", plural, spec) == [
        'spec.template.spec.restartPolicy: Unsupported value: "Never": supported values: "Always"'
    ]
    assert findings("apps", plural, {**spec, "template": template()}) == []


def test_labels_of_pods_and_hosts_of_ingresses_are_checked():
    labels = {**LABELS, "team": "a b"}
    spec = {"selector": SELECTOR, "template": {**template(), "metadata": {"labels": labels}}}
    (finding,) = findings("apps", "deployments", spec)
    rules = [{"host": host} for host in ("*.a.example", "My_Host")]
    (host,) = findings("networking.k8s.io", "ingresses", {"rules": rules})

    assert finding.startswith('spec.template.labels: Invalid value: "a b": a valid label must be')
    assert host.startswith('spec.rules[1].host: Invalid value: "My_Host": a lowercase RFC 1123')


def test_pods_of_a_job_are_not_always_restarted():
    spec = {"selector": SELECTOR, "template": template()}

    assert findings("batch", "jobs", spec) == [
        'spec.template.spec.restartPolicy: Required value: valid values: "OnFailure", "Never"'
    ]
    assert findings("batch", "jobs", {**spec, "template": template(restartPolicy="Never")}) == []


def test_template_of_a_job_does_not_change():
    before = {"selector": SELECTOR, "template": template(restartPolicy="Never")}
    after = {"selector": SELECTOR, "template": template(restartPolicy="Never", hostname="y")}
    (found,) = findings("batch", "jobs", after, before)

    assert found.startswith("spec.template: Invalid value: {")
    assert found.endswith(IMMUTABLE)
    assert findings("batch", "jobs", {**before, "completions": 2}, before) == [
        f"spec.completions: Invalid value: 2: {IMMUTABLE}"
    ]
    assert findings("batch", "jobs", {**before, "parallelism": 2, "suspend": True}, before) == []


@pytest.mark.parametrize(
    "change",
    [
        {"serviceName": "y"},
        {"podManagementPolicy": "Parallel"},
        {"selector": {"matchLabels": {**LABELS, "more": "y"}}},
        {"volumeClaimTemplates": [{"metadata": {"name": "c"}}]},
    ],
)
def test_most_of_a_stateful_set_does_not_change(change):
    before = {"selector": SELECTOR, "serviceName": "x", "template": template()}
    before["template"]["metadata"]["labels"] = {**LABELS, "more": "y"}

    assert findings("apps", "statefulsets", {**before, **change}, before) == [
        "spec: Forbidden: updates to statefulset spec for fields other than 'replicas', 'ordinals', 'template',"
        " 'updateStrategy', 'revisionHistoryLimit', 'persistentVolumeClaimRetentionPolicy' and 'minReadySeconds'"
        " are forbidden"
    ]


def test_replicas_and_template_of_a_stateful_set_change():
    before = {"selector": SELECTOR, "serviceName": "x", "template": template()}
    after = {**before, "replicas": 3, "template": template(hostname="y")}

    assert findings("apps", "statefulsets", after, before) == []


def test_claim_says_its_access_and_its_size():
    assert findings("", "persistentvolumeclaims", {}) == [
        "spec.accessModes: Required value: at least 1 access mode is required",
        "spec.resources[storage]: Required value",
    ]
    sizes = {"resources": {"requests": {"storage": "1Gi"}}}
    assert findings("", "persistentvolumeclaims", {"accessModes": ["RWX"], **sizes}) == [
        'spec.accessModes: Unsupported value: "RWX": supported values: "ReadOnlyMany", "ReadWriteMany",'
        ' "ReadWriteOnce", "ReadWriteOncePod"'
    ]
    assert findings("", "persistentvolumeclaims", {"accessModes": ["ReadWriteOnce"], **sizes}) == []


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"maxReplicas": 3}, []),
        (
            {"minReplicas": 4, "maxReplicas": 3},
            ["maxReplicas: Invalid value: 3: must be greater than or equal to `minReplicas`"],
        ),
        (
            {"minReplicas": 0, "maxReplicas": 3},
            ["minReplicas: Invalid value: 0: must be greater than or equal to 1"],
        ),
        (
            {},
            [
                "maxReplicas: Invalid value: 0: must be greater than 0",
                "maxReplicas: Invalid value: 0: must be greater than or equal to `minReplicas`",
            ],
        ),
    ],
)
def test_limits_of_an_autoscaler_agree(limits, expected):
    spec = {"scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "x"}}

    found = findings("autoscaling", "horizontalpodautoscalers", spec | limits, version="v2")
    assert found == [f"spec.{each}" for each in expected]


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ({}, ["type: Required value: must specify a metric source type"]),
        (
            {"type": "Resource"},
            ["resource: Required value: must populate information for the given metric source"],
        ),
        (
            {"type": "Resource", "resource": {}},
            [
                "resource.name: Required value: must specify a resource name",
                "resource.target.type: Required value: must specify a metric target type",
                'resource.target.type: Invalid value: "": must be either Utilization, Value, or AverageValue',
                "resource.target.averageUtilization: Required value: must set either a target raw value or a target"
                " utilization",
            ],
        ),
        ({"type": "Pods"}, []),
    ],
)
def test_metric_of_an_autoscaler_says_what_and_how_much(metric, expected):
    reference = {"kind": "Deployment", "name": "x"}
    spec = {"maxReplicas": 3, "scaleTargetRef": reference, "metrics": [metric]}

    assert findings("autoscaling", "horizontalpodautoscalers", spec, version="v2") == [
        f"spec.metrics[0].{mistake}" for mistake in expected
    ]


def test_pods_beyond_the_replicas_are_a_number_or_a_share():
    def mistakes(**rolling):
        strategy = {"type": "RollingUpdate", "rollingUpdate": rolling}
        spec = {"selector": SELECTOR, "template": template(), "strategy": strategy}
        return findings("apps", "deployments", spec)

    place = "spec.strategy.rollingUpdate.max"
    (of_surge, of_rest) = mistakes(maxSurge="x%", maxUnavailable=-1)
    assert of_surge.startswith(f'{place}Surge: Invalid value: "x%": a valid percent string must be')
    assert of_rest == f"{place}Unavailable: Invalid value: -1: must be greater than or equal to 0"
    assert mistakes(maxSurge="10%", maxUnavailable=0) == []


def test_binding_keeps_its_role():
    resource = resources.ResourceRegistry().require("rbac.authorization.k8s.io", "rolebindings")
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "a"}
    before = {"metadata": {"name": "x"}, "roleRef": role}
    after = {**before, "roleRef": {**role, "name": "b"}}

    assert list(builtin_checks.check(resource, before, before)) == []
    (found,) = builtin_checks.check(resource, after, before)
    assert (found.field, found.message.endswith(": cannot change roleRef")) == ("roleRef", True)


def test_keys_of_a_config_map_are_names_of_files():
    resource = resources.ResourceRegistry().require("", "configmaps")
    item = {"metadata": {"name": "x"}, "data": {"a.b_c-D": "", "a b": "", "a/b": ""}}

    found = [each.field for each in builtin_checks.check(resource, item, None)]
    assert found == ["data[a b]", "data[a/b]"]


def test_keys_of_labels_are_short_and_their_prefixes_names_of_hosts():
    labels = {"a" * 63: "", "example.com/a": "", "b" * 64: "", "Example.com/a": ""}

    long, prefixed = metadata.check_labels(labels, "metadata.labels")
    assert long.message.endswith(": name part must be no more than 63 bytes")
    assert ": prefix part a lowercase RFC 1123 subdomain must" in prefixed.message


def notices(group, plural, spec):
    resource = resources.ResourceRegistry().require(group, plural, "v1")
    return list(builtin_checks.notices(resource, {"spec": spec}))


def test_client_is_told_what_this_cluster_does_not_do():
    volumes = [
        {"name": "a", "emptyDir": {}},
        {"name": "b", "nfs": {"server": "x"}},
        {"name": "c", "projected": {"sources": [{"serviceAccountToken": {}}, {"secret": {}}]}},
    ]
    told = [
        "volumes[1].nfs: is not mounted on this cluster: an empty folder stands for it",
        "volumes[2].projected: serviceAccountToken is left out on this cluster; a pod's token is in KUBECONFIG",
    ]
    workload = {"template": {"spec": {"volumes": volumes}}, "progressDeadlineSeconds": 60}

    pod = {"volumes": volumes, "nodeSelector": {"gpu": "yes"}}
    assert notices("", "pods", pod) == [
        "spec.nodeSelector: has no effect on this cluster",
        *(f"spec.{each}" for each in told),
    ]
    shared = {"hostIPC": True, "hostPID": True, "shareProcessNamespace": True}
    classes = {"priorityClassName": "high", "runtimeClassName": "nvidia"}
    assert notices("", "pods", {**shared, **classes}) == [
        f"spec.{name}: has no effect on this cluster"
        for name in sorted((*shared, *classes), key=str.lower)
    ]
    assert notices("apps", "deployments", workload) == [
        "spec.progressDeadlineSeconds: has no effect on this cluster",
        *(f"spec.template.spec.{each}" for each in told),
    ]
    assert notices("", "services", {"type": "NodePort"}) == [
        "spec.type: no port of the node is opened on this cluster: use kubectl port-forward"
    ]
    assert notices("", "services", {"type": "ClusterIP"}) == []
    assert notices("", "nodes", {"taints": [{"key": "k", "effect": "NoSchedule"}]}) == []
    assert notices("", "nodes", {"taints": [{"key": "k", "effect": "NoExecute"}]}) == [
        "spec.taints: NoExecute ends no pod that runs on this cluster; it only keeps others away"
    ]
    assert notices("apps", "daemonsets", {}) == ["spec: no pods are made of it on this cluster"]
    assert notices("batch", "cronjobs", {}) == ["spec: no pods are made of it on this cluster"]
    assert notices("networking.k8s.io", "networkpolicies", {}) == [
        "spec: is not enforced on this cluster"
    ]
