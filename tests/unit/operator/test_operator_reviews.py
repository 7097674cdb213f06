"""The answers of the operator's webhooks."""

import base64
import json

from dynamo.operator import reviews
from dynamo.operator.settings import OperatorConfig
from operator_cluster import frontend, make_graph, worker


def validate(written, old=None):
    request = reviews.AdmissionRequest(uid="u", object=written, oldObject=old)
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


def test_mistake_is_refused_in_the_words_of_the_status():
    graph = make_graph(
        services={"A": {**frontend(), "ingress": {"enabled": True, "useVirtualService": True}}}
    )
    refusal = validate(graph)

    assert not refusal["allowed"]
    assert refusal["status"]["code"] == 422
    assert "service A: ingress.useVirtualService" in refusal["status"]["message"]


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
