"""A laptop's cluster under the real kubectl."""

import json

import pytest

import kube_cluster

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

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
            "wait", "--for=condition=Established", "crd/widgets.example.com", "--timeout=30s"
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
    cluster.kubectl("delete", "namespace", "short", timeout_s=90)

    assert "not found" in cluster.kubectl("get", "namespace", "short").stderr
    assert cluster.kubectl("get", "configmaps", "-n", "short", "-o", "name").stdout == ""
