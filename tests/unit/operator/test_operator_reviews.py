"""The answers of the operator's webhooks."""

import base64
import json

import pytest

from dynamo.operator import reviews
from dynamo.operator.settings import OperatorConfig
from operator_cluster import frontend, make_graph, worker


def validate(written, old=None, version="v1alpha1"):
    request = reviews.AdmissionRequest(
        uid="u", requestKind={"version": version}, object=written, oldObject=old
    )
    return reviews.answer_validation(reviews.AdmissionReview(request), OperatorConfig())["response"]


def test_deployment_that_the_operator_can_make_is_allowed():
    graph = make_graph()
    del graph["metadata"]["name"]
    graph["metadata"]["generateName"] = "g-"

    assert validate(graph) == {"uid": "u", "allowed": True}


def test_component_type_with_a_typing_error_gets_a_warning():
    services = {"A": {**frontend(), "componentType": "frontent"}, "B": worker(componentType="Main")}
    answer = validate(make_graph(services=services))

    assert answer["allowed"]
    assert answer["warnings"] == [
        "spec.services.A.componentType: frontent is none of frontend, worker, planner;"
        " did you mean frontend?"
    ]


def test_autoscaler_of_a_multinode_service_gets_a_warning():
    scaled = {"autoscaling": {"enabled": True, "maxReplicas": 3}}
    services = {"A": worker(multinode={"nodeCount": 2}, **scaled), "B": worker(**scaled)}
    graph = make_graph(services=services)
    (warning,), (beta,) = (
        validate(graph, version=version)["warnings"] for version in ("v1alpha1", "v1beta1")
    )

    assert warning.startswith("spec.services.A.autoscaling: has no effect on a multinode service")
    assert beta.startswith("spec.components[name=A].autoscaling: has no effect")


def test_mistake_is_refused_in_the_words_of_the_status():
    graph = make_graph(
        services={"A": {**frontend(), "ingress": {"enabled": True, "useVirtualService": True}}}
    )
    refusal = validate(graph)

    assert not refusal["allowed"]
    assert refusal["status"]["code"] == 422
    assert "service A: ingress.useVirtualService" in refusal["status"]["message"]


def test_sidecar_that_a_later_version_would_take_for_the_main_container_is_refused():
    containers = {
        "mainContainer": {"image": "i", "name": "engine"},
        "containers": [{"name": "main"}],
    }
    refusal = validate(make_graph(services={"A": {**frontend(), "extraPodSpec": containers}}))

    assert refusal["status"]["message"] == (
        "service A: extraPodSpec.containers: main is the main container of v1beta1; call this one otherwise"
    )


def test_change_that_leaves_a_mistaken_spec_as_it_is_passes():
    graph = make_graph("a-name-that-is-much-too-long-for-anything-that-follows-from-it")

    assert "at most 54 fit" in validate(graph)["status"]["message"]
    assert validate({**graph, "metadata": {**graph["metadata"], "labels": {}}}, graph)["allowed"]
    assert validate(None, graph)["allowed"]


def test_replicas_are_filled_in_where_nothing_scales():
    services = {
        "Frontend": frontend(),
        "Plain": {"componentType": "worker"},
        "Scaled": {"autoscaling": {"enabled": True}},
        "Adapted": {"scalingAdapter": {"enabled": True}},
    }
    request = reviews.AdmissionRequest(uid="u", object=make_graph(services=services))
    response = reviews.answer_defaulting(reviews.AdmissionReview(request))["response"]

    assert json.loads(base64.b64decode(response["patch"])) == [
        {"op": "add", "path": "/spec/services/Plain/replicas", "value": 1}
    ]
    request = reviews.AdmissionRequest(uid="u", object=make_graph(services={"A": worker()}))
    assert "patch" not in reviews.answer_defaulting(reviews.AdmissionReview(request))["response"]


def test_conversion_to_a_version_that_there_is_not_fails_with_a_message():
    request = reviews.ConversionRequest(
        uid="u", desiredAPIVersion="nvidia.com/v2", objects=[make_graph()]
    )
    response = reviews.answer_conversion(reviews.ConversionReview(request))["response"]

    assert response["result"]["status"] == "Failed"
    assert "got nvidia.com/v1alpha1 and nvidia.com/v2" in response["result"]["message"]


def test_refusal_names_the_fields_of_the_version_that_was_written():
    graph = make_graph(services={"A": {"componentType": "worker"}})
    alpha, beta = (
        validate(graph, version=version)["status"]["message"] for version in ("v1alpha1", "v1beta1")
    )
    doubtful = make_graph(services={"A": {**frontend(), "componentType": "frontent"}})

    assert "its command in extraPodSpec.mainContainer, such" in alpha
    assert "its command in podTemplate.spec.containers[name=main], such" in beta
    assert validate(doubtful, version="v1beta1")["warnings"][0].startswith(
        "spec.components[name=A].type: frontent is none of"
    )
    assert (
        "spec.components: expected at least one"
        in (validate(make_graph(services={}), version="v1beta1")["status"]["message"])
    )


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"components": [{"type": "worker"}]}, "field `name` - at `$.spec.components[0]`"),
        ({"components": ["Worker"]}, "got `str` - at `$.spec.components[0]`"),
        ({"components": [None]}, "got `null` - at `$.spec.components[0]`"),
        ("x", "got `str` - at `$.spec`"),
    ],
)
def test_component_of_another_form_is_named_by_the_conversion(spec, says):
    written = {"apiVersion": "nvidia.com/v1beta1", "metadata": {"name": "g"}, "spec": spec}
    request = reviews.ConversionRequest(
        uid="u", desiredAPIVersion="nvidia.com/v1alpha1", objects=[written]
    )
    result = reviews.answer_conversion(reviews.ConversionReview(request))["response"]["result"]

    assert result["status"] == "Failed"
    assert says in result["message"]


@pytest.mark.parametrize(
    "spec",
    ["x", {"services": []}, {"services": {"A": "x"}}, {"services": {"A": {"autoscaling": "yes"}}}],
)
def test_deployment_of_another_form_gets_no_defaults_and_is_left_to_the_schema(spec):
    request = reviews.AdmissionRequest(uid="u", object={"metadata": {}, "spec": spec})
    response = reviews.answer_defaulting(reviews.AdmissionReview(request))["response"]

    assert response == {"uid": "u", "allowed": True}


ADAPTED = {"scalingAdapter": {"enabled": True}}


def test_replicas_that_a_scaling_adapter_sets_cannot_be_changed_beside_it():
    old = make_graph(services={"A": worker(replicas=1, **ADAPTED)})
    changed = make_graph(services={"A": worker(replicas=3, **ADAPTED)})
    messages = [
        validate(changed, old, version)["status"]["message"] for version in ("v1alpha1", "v1beta1")
    ]

    assert messages[0].startswith("spec.services.A.replicas: 3 would have no effect")
    assert messages[1].startswith("spec.components[name=A].replicas: 3 would have no effect")
    assert messages[0].endswith("kubectl scale dgdsa/g-a --replicas=3")


@pytest.mark.parametrize(
    ("former", "fields"),
    [
        ({}, {"replicas": 3, **ADAPTED}),
        (ADAPTED, {"replicas": 3}),
        (ADAPTED, {"replicas": None, **ADAPTED}),
        (ADAPTED, {"flags": "--seed 1", **ADAPTED}),
    ],
)
def test_replicas_may_change_with_the_scaling_adapter_and_may_be_left_out(former, fields):
    old = make_graph(services={"A": worker(**former)})

    assert validate(make_graph(services={"A": worker(**fields)}), old)["allowed"]


SCALED = {"autoscaling": {"enabled": True, "maxReplicas": 3}}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"autoscaling": {"enabled": True, "minReplicas": 2}}, "autoscaling.maxReplicas"),
        ({**SCALED, "scalingAdapter": {"enabled": True}}, "scalingAdapter"),
        ({"globalDynamoNamespace": True, "dynamoNamespace": "own"}, "dynamoNamespace"),
        ({"modelRef": {"name": "m", "revision": "r"}}, "modelRef.revision"),
        ({"ingress": {"enabled": True, "host": "h.example"}}, "ingress"),
    ],
)
def test_field_that_has_no_effect_beside_others_gets_a_warning(fields, field):
    graph = make_graph(services={"A": worker(**fields)})
    (warning,), (beta,) = (
        validate(graph, version=version)["warnings"] for version in ("v1alpha1", "v1beta1")
    )

    assert warning.startswith(f"spec.services.A.{field}: ")
    assert beta.startswith(f"spec.components[name=A].{field}: ")


def test_fields_that_have_an_effect_get_no_warning():
    multinode = {"multinode": {"nodeCount": 2}, "scalingAdapter": {"enabled": True}}
    services = {
        "A": frontend(ingress={"enabled": True}, globalDynamoNamespace=True),
        "B": worker(**SCALED, modelRef={"name": "m"}, dynamoNamespace="dynamo"),
        "C": worker(**multinode),
    }

    assert "warnings" not in validate(make_graph(services=services))
