"""What a DynamoGraphDeploymentRequest becomes: the profiler's Job, and the deployment of its recommendation."""

import pytest

from dynamo.operator import objects, profiling_requests
from dynamo.operator.settings import OperatorConfig

LOG = 'x\n{"mode":"agg","num_prefill":0,"num_decode":2}\n'


def make_request(status=None, **spec):
    return {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeploymentRequest",
        "metadata": {"name": "r", "namespace": "default", "uid": "u", "generation": 1},
        "spec": {"model": "m", **spec},
        "status": status or {},
    }


def decide(request, log="", **settings):
    observed = objects.Observed(now="2026-11-23T10:00:00Z")
    return profiling_requests.decide(request, observed, OperatorConfig(**settings), log)


def last_condition(decision):
    return decision.status["conditions"][-1]


def test_profiler_of_a_real_engine_gets_a_gpu_and_no_more_rights_than_it_needs():
    (job,) = decide(make_request(backend="sglang"), restricted_security_context=True).create
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]

    assert container["resources"] == {"limits": {"nvidia.com/gpu": "1"}}
    assert "sglang" in container["args"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False


def test_log_without_a_recommendation_fails_and_makes_nothing():
    decision = decide(make_request(), "starting\n")

    assert decision.status["state"] == "Failed"
    assert last_condition(decision)["reason"] == "Unreadable"
    assert "no recommendation" in last_condition(decision)["message"]
    assert decision.create == ()


def test_recommendation_that_is_not_applied_stands_in_the_status_alone():
    overrides = {"annotations": {"a": "b"}, "workersImage": "mine:1"}
    decision = decide(make_request(deploymentOverrides=overrides), LOG)
    deployment = decision.status["generatedDeployment"]
    worker = deployment["spec"]["services"]["Worker"]

    assert decision.create == ()
    assert (decision.status["state"], last_condition(decision)["reason"]) == ("Ready", "NotApplied")
    assert deployment["metadata"]["annotations"] == {"a": "b"}
    assert (worker["replicas"], worker["extraPodSpec"]["mainContainer"]["image"]) == (2, "mine:1")
    assert worker["resources"] == {"limits": {"gpu": "1"}}


@pytest.mark.parametrize("generated", [None, {"kind": "DynamoGraphDeployment"}])
def test_log_is_read_until_there_is_a_deployment(generated):
    labels = {objects.REQUEST_LABEL: "r"}
    pod = {"metadata": {"name": "p", "labels": labels}, "status": {"phase": "Succeeded"}}
    observed = objects.Observed(now="", pods=[pod])
    request = make_request({"generatedDeployment": generated})

    expected = None if generated else "p"
    assert expected == profiling_requests.find_finished_pod(request, observed)
